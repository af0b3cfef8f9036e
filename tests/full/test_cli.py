"""The commands on logs that were written by hand: what they print, as text and as JSON, and how they end."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.handmade import ROOT, cli, finished, history, unit, write
from tests.helpers.systems import scripted
from tests.helpers.timed_logs import told
from trinity_es.cli import app, cli_docs
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import StartupError
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.batch import batch_result, fold
from trinity_es.system import lifecycle

COMMANDS = [
    "demo", "up", "down", "status", "why", "restart-runner", "scale", "join", "hosts", "redo", "accept-rewind", "run",
    "resume", "bench", "debug", "serve", "dashboard", "watch", "batches", "show", "events", "replay", "diff", "runners",
    "leases", "weights", "usage", "prompts", "export", "verify", "rebuild", "payloads", "what-if", "regenerate",
    "workflows", "env", "doctor",
]
READ = [
    ["batches"], ["show", "3"], ["show", "3", "--task", "0"], ["events", "3"], ["replay", "3"], ["verify"],
    ["why", "3"], ["watch", "--once"], ["diff", "3", "--at", "20"], ["runners"], ["weights"], ["usage"], ["prompts"],
]
ON_A_LOG = [*READ, ["why"], ["rebuild"], ["status"]]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a-run") / "log.sqlite"
    digest = open_payloads(str(path), durability="process").put(b"four experiences")
    write(path, history(digest))
    return path


# --- the answers ----------------------------------------------------------------------------------------------------
def test_show_is_short_for_a_large_batch_unless_asked_for_all(path: Path) -> None:
    many = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1] * 100, tasks=[{}] * 100)
    write(path, [("batch/1", [many])])
    short, whole = cli("show", "1", "--log", path).stdout, cli("show", "1", "--all", "--log", path).stdout
    assert "60 more tasks" in short
    assert len(re.findall(r"\d+  pending", short)) == 40
    assert len(re.findall(r"\d+  pending", whole)) == 100


def test_replay_of_a_result_that_was_made_up_exits_1_and_says_what_differs(path: Path) -> None:
    open_payloads(str(path))
    events: list[ev.Event] = [
        ev.BatchSubmitted(batch_id=1, batch_type="eval", repeat_times=[2], tasks=[{}]),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0)], model_version=0), finished(0, None),
    ]
    state = fold(events)
    result = batch_result(state)
    result["metrics"]["eval/1/reward/mean@2"] += 2**-50
    write(path, [("batch/1", [*events, ev.BatchFinalized(result=result)])])
    done = cli("replay", "1", "--log", path)
    assert done.exit_code == 1
    assert "eval/1/reward/mean@2: stored" in done.stdout
    assert json.loads(cli("replay", "1", "--json", "--log", path).stdout)["result_equal"] is False
    found = cli("verify", "--log", path)
    assert (found.exit_code, "its stored result differs" in found.stdout) == (1, True), found.stdout
    assert json.loads(cli("verify", "--json", "--log", path).stdout)["problems"]


def test_verify_calls_no_log_sound_that_has_no_event(tmp_path: Path) -> None:
    write(tmp_path / "log.sqlite", [])  # as a copy of a live run's file is, whose events lie in the -wal beside it
    found = cli("verify", "--log", tmp_path / "log.sqlite")
    assert (found.exit_code, found.stdout.startswith("empty: 0 events")) == (1, True), found.stdout
    assert '`sqlite3 FILE ".backup COPY"`' in found.stdout


def test_rebuild_makes_the_tables_again(log: Path) -> None:
    before = told("batches", "--log", log)
    assert told("rebuild", "--log", log)["events"] == 20
    assert told("batches", "--log", log) == before


def test_down_where_nothing_runs_is_fine(log: Path) -> None:
    assert told("down", "--log", log) == told("down", log) == {
        "was_running": False, "killed": 0, "left": [], "run": []}


@pytest.mark.parametrize(("most", "verdict"), [(1024, "note"), (40, "wrong")])
def test_doctor_warns_of_too_few_open_files(most: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, most))
    [found] = [f for f in json.loads(cli("doctor", "--json").output)["findings"] if f["what"] == "open files"]
    assert (found["verdict"], f"{most} at most" in found["told"], "nofile" in found["way_out"]) == (verdict, True, True)


def test_a_system_is_not_started_where_too_few_files_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    with pytest.raises(StartupError, match=r"may open 40 files here, .* need 128 or more: raise the hard limit"):
        lifecycle.start(scripted(tmp_path))


def test_doctor_names_a_way_out_for_each_thing_that_is_missing(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {model_path: ./nowhere}\n")
    done = cli("doctor", config, "--json")
    assert done.exit_code == 1
    findings = json.loads(done.stdout)["findings"]
    missing = [f for f in findings if f["verdict"] == "missing"]
    assert any("nowhere" in f["told"] for f in missing)
    assert all(f["way_out"] for f in missing)
    config.write_text("explorer: {rollout_model: {engine_type: scripted}}\n")
    assert cli("doctor", config).exit_code == 0


# --- wrong use ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ON_A_LOG, ids=lambda c: c[0])
@pytest.mark.parametrize("what", ["missing", "text", "empty", "database", "folder"])
def test_what_is_not_a_log_is_refused_by_every_command(tmp_path: Path, command: list[str], what: str) -> None:
    path = tmp_path / "thing.sqlite"
    if what == "text":
        path.write_text("hello " * 1000)
    elif what == "empty":
        path.touch()
    elif what == "folder":
        path.mkdir()
    elif what == "database":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE cats (name TEXT)")
        connection.close()
    done = cli(*command, "--log", path)
    assert "Traceback" not in done.output
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert "thing.sqlite" in done.stderr
    assert what != "missing" or not path.exists()


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    for args in (["--debug", "batches"], ["batches", "--debug"]):
        done = cli(*args, "--log", tmp_path / "none.sqlite")
        assert done.exit_code == 2
        assert "Traceback" in done.stderr
        assert done.stderr.rstrip().splitlines()[-1].startswith("error: ")


def test_a_config_with_an_unknown_key_is_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("explorer: {max_concurency: 3}\n")
    for command in ("up", "run"):
        done = cli(command, config)
        assert done.exit_code == 2
        assert "did you mean explorer.max_concurrency?" in done.stderr


# --- which log ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("newest", ["runs", "runs/trl", "runs/demo-1/runs/letters/first"])
def test_without_a_name_the_newest_run_is_taken_and_named_on_stderr(tmp_path: Path, newest: str) -> None:
    for age, place in ((100, "runs/p/old"), (50, newest), (200, "runs/p/older")):
        path = tmp_path / place / "log.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [("weights", [ev.WeightsPublished(version=1, path="x")])])
        for file in path.parent.glob("log.sqlite*"):
            os.utime(file, (time.time() - age, time.time() - age))
    done = cli("events", "--json", cwd=tmp_path)
    assert done.exit_code == 0, done.output
    assert f"log: {newest}/log.sqlite (the newest run here" in done.stderr
    assert json.loads(done.stdout)["type"] == "WeightsPublished"


def test_where_there_is_no_run_the_error_says_how_to_name_one(tmp_path: Path) -> None:
    done = cli("batches", cwd=tmp_path)
    assert done.exit_code == 2
    assert "--log" in done.stderr


def test_the_environment_and_a_config_name_a_log_too(log: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["batches", "--json"], env={"TRINITY_ES_LOG": str(log)})
    assert len(json.loads(done.stdout)) == 4
    assert "TRINITY_ES_LOG" in done.stderr
    config = tmp_path / "config.yaml"
    config.write_text(f"store: {{url: 'sqlite:///{log}'}}\n")
    assert len(told("batches", "--config", config)) == 4


# --- help -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_a_sentence_and_an_example(command: str) -> None:
    text = cli(command, "--help").stdout
    assert re.search(r"Examples?:\n", text)
    assert f"trinity-es {command}" in text.split("Example", 1)[1]
    assert "--json" in text


def test_the_list_of_commands_is_the_one_that_is_tested() -> None:
    listed = cli("--help").stdout.split("Commands:")[1]
    assert re.findall(r"^  ([\w-]+)", listed, re.M) == COMMANDS


def test_the_page_of_commands_is_what_help_says() -> None:
    page = (ROOT / "docs" / "CLI.md").read_text()
    assert page == cli_docs.markdown(), "docs/CLI.md is old: make docs"
    assert re.findall(r"^## trinity-es (\S+)", page, re.M) == COMMANDS


@pytest.mark.parametrize(("command", "never"), [
    (["--help"], ["sqlalchemy", "rich", "projections"]),
    (["batches"], ["numpy"]), (["show", "3"], ["numpy"]), (["replay", "3"], ["numpy"]), (["events"], ["numpy"]),
    (["why"], []), (["watch", "--once"], []), (["usage"], ["numpy"]), (["weights"], ["numpy"]),
])
def test_a_command_starts_without_what_it_does_not_need(command: list[str], never: list[str], log: Path) -> None:
    never = [*never, "torch", "vllm", "transformers", "psycopg", "sqlalchemy.dialects.postgresql", "fastapi", "pyarrow"]
    code = (
        "import json, sys; from typer.testing import CliRunner; from trinity_es.cli import app\n"
        "done = CliRunner().invoke(app, json.loads(sys.argv[1])); assert done.stdout, done.exception\n"
        "sys.exit(str([m for m in json.loads(sys.argv[2]) if m in sys.modules]))"
    )
    arguments = [*command, *([] if command == ["--help"] else ["--log", str(log)])]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(arguments), json.dumps(never)], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(("imported", "never", "seconds"), [
    (["events.codec", "events.store.log", "events.store.payloads.payloads"],
     ["torch", "vllm", "thespian", "psycopg", "pydantic", "numpy"], 10),
    (["actors.engines.interface", "actors.engines.vllm.engine", "actors.rollout.model"],
     ["vllm", "torch", "transformers"], 60),
    (["workflows.math_rewards", "workflows.math_workflows"], ["math_verify", "sympy"], 60),  # graders import them
    (["projections.reading.log_reader", "actors.runner.actor", "client.rollout_client"],
     ["fastapi", "starlette", "uvicorn", "openai"], 60),
])
def test_an_import_brings_nothing_that_few_need(imported: list[str], never: list[str], seconds: float) -> None:
    modules = ", ".join(f"trinity_es.{module}" for module in imported)
    code = f"import sys, {modules}; trinity_es.open_log; print([m for m in {never} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
                          timeout=seconds)
    assert done.stdout == "[]\n", done.stderr


def test_after_a_command_that_trained_nothing_is_said_of_what_torch_leaves() -> None:
    """Triton counts at its end what the last look for garbage has not found, in fifty lines."""
    pytest.importorskip("triton")
    code = "import sys, triton; from trinity_es.cli import main; sys.argv = ['trinity-es', '--version']; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_run_where_their_standard_streams_are_closed(log: Path) -> None:
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        for command in (f"batches --log {log}", "doctor"):
            line = f"exec {sys.executable} -m trinity_es {command} {closed}"
            done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
            assert (done.returncode, "Traceback" in done.stderr) == (0, False), (line, done.stderr)


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setenv("PWD", str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    for command in (["batches"], ["run", "c.yaml"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert done.stderr == (f"error: the working directory {tmp_path}/gone was deleted or renamed: cd to an "
                               "existing one\n")


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "vllm", "thespian", "transformers"}:
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
import json
from typer.testing import CliRunner
from trinity_es.cli import app
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and done.stdout, (command, done.output, done.exception)
    print(command[0])
"""


def test_a_log_is_read_where_torch_vllm_and_thespian_are_not_installed(log: Path, tmp_path: Path) -> None:
    exported = ["export", "--events", str(tmp_path / "e.jsonl"), "--trace", str(tmp_path / "t.json")]
    commands = [[*command, "--log", str(log)] for command in [*READ, exported]]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [command[0] for command in commands]


@pytest.mark.parametrize(("free", "engine", "verdict"), [
    (64, "vllm", "wrong"), (64, "scripted", "note"), (512, "vllm", "note"), (4096, "vllm", "ok"),
])
def test_doctor_sees_shm(free: int, engine: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (
        type(usage("/"))(free << 20, 0, free << 20) if str(path) == "/dev/shm" else usage(path)))
    (tmp_path / "c.yaml").write_text(f"explorer: {{rollout_model: {{engine_type: {engine}}}}}")
    found = json.loads(cli("doctor", tmp_path / "c.yaml", "--json").stdout)["findings"]
    [memory] = [f for f in found if f["what"] == "shared memory"]
    assert (memory["verdict"], "--shm-size" in memory["way_out"]) == (verdict, verdict != "ok")

"""What the commands say of logs written by hand to who knows neither the words nor the folders yet."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.sample_log import make
from tests.helpers.handmade import ROOT, cli, history, unit, write
from trinity_es.cli.render import batch_tables, runners_weights_usage
from trinity_es.config.config import Config
from trinity_es.environments import installs
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TasksetError
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import BatchId, batch_stream, local_time
from trinity_es.projections.history import attempts
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.tables.runner_history import natural_key
from trinity_es.run import single_task
from trinity_es.safe_text import batch_named
from trinity_es.system import running_system


@pytest.fixture
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a-run") / "log.sqlite"
    write(path, history(open_payloads(str(path), durability="process").put(b"four experiences")))
    return path


def test_what_was_handed_in_after_the_shown_tasks_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "log.sqlite", list[int]()
    first = ev.BatchSubmitted(batch_id=1, batch_type="collect", repeat_times=[1] * 40, tasks=[{}] * 40)
    write(path, [("batch/1", [first, ev.TasksAdded(repeat_times=[1] * 5, tasks=[{}] * 5)])])
    tasks_of = Log.tasks_of

    def noted(log: Log, event: ev.BatchSubmitted | ev.TasksAdded) -> list[dict[str, Any]]:
        read.append(len(event.repeat_times))
        return tasks_of(log, event)

    monkeypatch.setattr(Log, "tasks_of", noted)
    assert cli("show", "1", "--log", path).exit_code == 0
    assert read == [40]
    assert cli("show", "1", "--all", "--log", path).exit_code == 0
    assert read == [40, 40, 5]


@pytest.mark.parametrize(("total", "trained", "said"), [
    (2, True, "the run is complete, with step 2"),
    (2, False, "the run's last step is 2 of 2, the log's last event was at {end}, the last trained step is 1, and "
               "`trinity-es resume {log}` goes on with it"),
    (9, True, "the run's last step is 2 of 9, the log's last event was at {end}, the last trained step is 2, and "
               "`trinity-es resume {log}` goes on with it"),
    (None, True, "`trinity-es resume {log}` goes on with it, or says that it is complete"),
])
def test_status_tells_how_far_a_run_is(path: Path, total: int | None, trained: bool, said: str) -> None:
    config = {"mode": "both", "total_steps": total, "trainer": {"class": "m:Trainer"}}
    events: list[tuple[str, list[ev.Event]]] = [("system", [ev.SystemConfigured(config=config)])]
    for step in (1, 2):
        batch = ev.BatchSubmitted(batch_id=step, batch_type="train", repeat_times=[1], tasks=[{}])
        ended = [ev.BatchFinalizing(), ev.BatchFinalized(result={"metrics": {}})]
        learned = [ev.BatchTrained(step=step)] if trained or step == 1 else []
        events += [(f"batch/{step}", [batch, *ended, *learned]),
                   ("taskset/sums", [ev.TasksetAdvanced(taskset="sums", batch_id=step, epoch=0, offset=step)])]
        if learned:
            events.append(("weights", [ev.WeightsPublished(version=step, method="checkpoint", path="")]))
    write(path, events)
    done = cli("status", "--log", path)
    assert done.exit_code == 0, done.output
    with open_log(str(path)) as log:
        end = local_time(next(log.read_rare(descending=True)).recorded_at)
    said = said.format(log=path, end=end)
    assert f"no batch is open: {said}\n" in done.stdout or done.stdout.endswith(f"{said}\n")
    assert cli("why", "--log", path).stdout == done.stdout.splitlines()[-1] + "\n", "it says as much as status"


def test_the_only_log_in_the_folder_is_found(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.db").write_bytes(b"no log")
    (tmp_path / "mine.sqlite").write_bytes(log.read_bytes())
    done = cli("status")
    assert "log: mine.sqlite (the one in this folder" in done.stderr
    assert json.loads(cli("batches", "--json").stdout)
    (tmp_path / "other.db").write_bytes(log.read_bytes())
    done = cli("status")
    assert done.exit_code == 2
    assert "2 logs in this folder (mine.sqlite, other.db): name a log with --log" in done.stderr


# --- what engines say -----------------------------------------------------------------------------------------------
LEAVES_SHARED_MEMORY = """
import multiprocessing, os
from multiprocessing.shared_memory import SharedMemory
from trinity_es.cli.run_in_view import silence_libraries

def engine():
    SharedMemory(create=True, size=8)
    os.kill(os.getpid(), 9)

if __name__ == "__main__":
    if QUIET:
        silence_libraries()
    process = multiprocessing.get_context("spawn").Process(target=engine)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("quiet", [True, False])
def test_what_a_killed_engine_left_in_shared_memory_is_removed_without_a_word(tmp_path: Path, quiet: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVES_SHARED_MEMORY.replace("QUIET", str(quiet)))
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert ("leaked shared_memory" in done.stderr) == (not quiet)


def test_a_check_of_an_environment_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    found = installs.Installed(name="sums", distribution="sums", packages=[], versions={}, folder=Path("x"))
    seen: list[str | None] = []

    def choose(*args: object) -> None:
        seen.extend(os.environ.get(name) for name in ("TQDM_DISABLE", "TRANSFORMERS_VERBOSITY"))
        raise TasksetError("far enough")

    monkeypatch.setattr(installs, "find", lambda name: found)
    monkeypatch.setattr(single_task, "choose", choose)
    environment = {k: v for k, v in os.environ.items() if k != "TQDM_DISABLE"}
    monkeypatch.setattr(os, "environ", environment | {"TRANSFORMERS_VERBOSITY": "info"})
    assert "far enough" in cli("env", "check", "sums").stderr
    assert seen == ["1", "info"]


def of_trl(path: Path, *events: ev.Event, log_dir: Path | None = None) -> None:
    """Write the log of a trainer of its own, with one batch; these events end it."""
    system = {} if log_dir is None else {"log_dir": str(log_dir)}
    batch = ev.BatchSubmitted(batch_id="1/trl-train-0", batch_type="train", repeat_times=[2], tasks=[{}])
    write(path, [("system", [ev.SystemConfigured(config={"mode": "explore", "store": {}, "system": system})]),
                 (batch_stream("1/trl-train-0"), [batch, *events])])


FINALIZED: list[ev.Event] = [ev.BatchFinalizing(), ev.BatchFinalized(result={"metrics": {}})]


def test_a_trainer_that_was_killed_is_told_also_where_its_locks_do_not_lie_beside_the_log(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "log.sqlite", tmp_path / "elsewhere"
    elsewhere.mkdir()
    of_trl(path, *FINALIZED, ev.BatchTrained(step=1), log_dir=elsewhere)
    ended = cli("status", "--log", path)
    assert ended.exit_code == 0, ended.output
    assert "no batch is open: batch 1/trl-train-0, the last, was finalized " in ended.stdout
    config = Config.from_dict({"store": {"url": f"sqlite:///{path}"}, "system": {"log_dir": str(elsewhere)}})
    running_system.lock_file(config, "trainer").write_text("7")
    for words in (["--log", path], [path]):
        told = cli("status", *words)
        assert told.exit_code == 1
        assert "its trainer (pid 7) died in the middle of it; start it again" in told.stdout
    why = cli("why", "--log", path)
    assert (why.exit_code, why.stdout) == (0, told.stdout.splitlines()[-1].removeprefix("! ") + "\n")


def test_status_says_where_a_run_has_no_batch_yet(path: Path) -> None:
    write(path, [("system", [ev.SystemConfigured(config={"mode": "both"})])])
    assert "no batch is open: no batch has ended yet" in cli("status", "--log", path).stdout


def test_resume_of_the_log_of_a_trainer_of_its_own_says_to_start_that_again(path: Path) -> None:
    of_trl(path, *FINALIZED, ev.BatchTrained(step=1))
    for words in ([path], ["--log", path]):
        told = cli("resume", *words)
        assert told.exit_code == 2
        assert "belongs to another program, TRL's trainer" in told.stderr
    assert "give only one of them" in cli("resume", path, "--log", "another.sqlite").stderr


def test_of_a_batch_that_failed_whole_the_way_on_is_that_of_who_leads_the_run(path: Path) -> None:
    failed = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0, 1], attempt=1, runner="runner-0", incarnation=1,
                              kind="workflow", message="KeyError: 'stok'", retry=False)
    sent = ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0)], model_version=0)
    of_trl(path, sent, failed, *FINALIZED)
    told = cli("why", "1/trl-train-0", "--log", path).stdout
    assert "what to do: fix what failed, and start its trainer again: TRL's trainer submits the batch again" in told
    assert "restart-runner" not in told, "nothing runs"


# --- names of batches -------------------------------------------------------------------------------------------------
IDS: list[BatchId] = [2, "0002", "2", 7, "-0", "оценка ä€😀"]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("log") / "log.sqlite"
    write(file, [(batch_stream(i), [ev.BatchSubmitted(batch_id=i, batch_type="train", repeat_times=[1])]) for i in IDS])
    return file


@pytest.mark.parametrize(("typed", "meant"), [
    ("2", 2), ("'2'", "2"), ("0002", "0002"), ("'0002'", "0002"), ("7", 7), ("-0", "-0"), ("007", None), ("+7", None),
    ("оценка ä€😀", "оценка ä€😀"),
])
def test_a_number_is_one_as_it_is_written(named: Path, typed: str, meant: BatchId | None) -> None:
    with open_log(str(named)) as log:
        assert batch_named(log, typed) == meant


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_an_output_has_no_letters_for_is_printed_by_number(named: Path, encoding: str) -> None:
    def run(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "trinity_es", *args, "--log", str(named)], capture_output=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding})
        return done.stdout.decode(encoding)

    assert "\\u043e\\u0446\\u0435\\u043d\\u043a\\u0430" in run("batches")
    assert [row["batch_id"] for row in json.loads(run("batches", "--json"))][-1] == IDS[-1]
    assert json.loads(run("events", "--json").splitlines()[-1])["data"]["batch_id"] == IDS[-1]


# --- tables as a terminal, a pipe and a file get them -----------------------------------------------------------------
LONG = "experiment-" + "a-long-name/" * 15 + "end"


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("dead") / "log.sqlite")
    make(path, batches=14, tasks=24, runs=4, seed=3, dead=True, payloads=False)
    return path


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_table_cuts_a_number_or_a_heading_however_narrow_the_terminal(dead: str, width: int) -> None:
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with open_log(dead) as log:
        rows, lives = log.batches(), log.runner_lives()
        batch_tables.print_batches(out, rows)
        runners_weights_usage.print_runners(out, lives)
        runners_weights_usage.print_lives(out, lives)
        runners_weights_usage.print_weights(out, log.weights(), log.deliveries_by_version(), 0)
        batch_tables.print_timeline(out, attempts.fold_timeline(log.events(4)), [], None)
    text = out.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert ("too narrow here for " in text) == (width < 200)
    four = next(line.split() for line in text.splitlines() if line.startswith("4 "))
    assert f"{rows[3].reward:.3f}" in four


def test_in_a_pipe_a_long_id_takes_no_column_away(path: Path) -> None:
    write(path, [(batch_stream(LONG), [
        ev.BatchSubmitted(batch_id=LONG, batch_type="eval", repeat_times=[2], tasks=[{}])])])
    text = cli("batches", "--log", path).stdout
    assert LONG in text
    assert text.split("\n")[1].split()[1:5] == ["eval", "running", "1", "0"]
    assert "too narrow" not in text


def test_runners_of_a_system_that_is_gone_are_not_running(dead: str) -> None:
    *lines, note = cli("runners", "--log", dead).stdout.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["gone"] * 4
    assert note.startswith("gone: the whole system ended unseen")
    assert "gone" in cli("runners", "runner-1", "--log", dead).stdout
    hows = {life["how"] for life in json.loads(cli("runners", "--json", "--log", dead).stdout)}
    assert ("gone" in hows, "running" in hows) == (True, False)


def test_names_are_in_the_order_of_their_numbers() -> None:
    names = ["runner-10", "runner-2", "2", "judge", "runner-1", "runner", "runner-2b"]
    assert sorted(names, key=natural_key) == ["2", "judge", "runner", "runner-1", "runner-2", "runner-2b", "runner-10"]


def test_a_long_list_of_weights_says_how_many_it_leaves_out(path: Path) -> None:
    versions = range(1, runners_weights_usage.MAX_ROWS + 8)
    write(path, [("weights", [ev.WeightsPublished(version=n, path="w") for n in versions])])
    text = cli("weights", "--log", path).stdout
    lines = [line for line in text.splitlines() if line[:7].strip().isdecimal()]
    assert [lines[0].split()[0], lines[-1].split()[0]] == ["8", str(runners_weights_usage.MAX_ROWS + 7)]
    assert "7 before them: --json has all" in text
    assert len(json.loads(cli("weights", "--log", path, "--json").stdout)) == runners_weights_usage.MAX_ROWS + 7

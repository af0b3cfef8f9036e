"""Docs can't rot: pages made from the code are as the code says, and README's code runs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import auditor, parity
from tests.helpers.paths import ROOT
from tests.helpers.systems import name_as_ours
from trinity_es import errors
from trinity_es.actors import commands
from trinity_es.actors.commands import command_docs as command_docs
from trinity_es.events import event_docs
from trinity_es.events import vocabulary as ev
from trinity_es.projections.reading.log_reader import Log, open_log


def test_the_event_catalogue_is_as_the_vocabulary_says() -> None:
    page = (ROOT / "docs" / "EVENTS.md").read_text()
    assert page == event_docs.markdown(), "docs/EVENTS.md is old: make docs"


def test_the_page_of_commands_is_as_their_vocabulary_says() -> None:
    page = (ROOT / "docs" / "COMMANDS.md").read_text()
    assert page == command_docs.markdown(), "docs/COMMANDS.md is old: make docs"
    assert [name for name in commands.COMMANDS if f"(`{name}`)" not in page] == []


@pytest.mark.parametrize(("page", "printed", "outputs"), [
    ("README.md", ["8", "1.0"], 0), ("docs/PIPELINE.md", ["8.0", "2.0", "0"], 2),
])
def test_the_code_in_a_page_runs_beside_modules_named_as_our_rooms(
    tmp_path: Path, page: str, printed: list[str], outputs: int
) -> None:
    name_as_ours(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == printed
    assert len(list((tmp_path / "pipeline-run/outputs/jsonl").glob("*.jsonl"))) == outputs


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_links_to_and_each_module_that_it_names_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:[a-z_]+/)+\w+\.py)`", text)
    modules = [path.as_posix() for path in (p.relative_to(ROOT) for p in ROOT.glob("[a-z]*/**/*.py"))]
    assert [name for name in named if not any(f"/{module}".endswith(f"/{name}") for module in modules)] == []


def test_the_index_has_every_page_and_none_that_is_written_is_long() -> None:
    index = ROOT / "docs" / "README.md"
    written, made = (
        {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", part)}
        for part in index.read_text().split("**Made from the code**")
    )
    assert written | made == {*PAGES} - {ROOT / "README.md", index}
    assert [page for page in written if len(page.read_text().splitlines()) > 300] == []


def test_the_page_of_troubles_has_every_error() -> None:
    page = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+)`", page))
    assert named == set(errors.__all__) - {"TrinityError", "LogError"}


def test_the_glossary_has_its_words_once_each() -> None:
    words = re.findall(r"^\| \*\*(\w+)\*\* \| \S", (ROOT / "docs" / "GLOSSARY.md").read_text(), re.MULTILINE)
    assert len(words) == len(set(words)) == 22
    assert {"unit", "incarnation", "attempt", "keeper", "settled"} <= set(words)


def test_every_test_that_the_promises_name_is_there() -> None:
    page = (ROOT / "docs" / "PROMISES.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::([\w.]+))?`", page)
    assert named
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        if test:
            parts = [p for p in test.split(".") if p]
            assert all(part in path.read_text() for part in parts), f"{file}::{test}"


def test_every_test_that_takes_turns_is_named() -> None:
    page = (ROOT / "docs" / "PROMISES.md").read_text().partition("## What takes turns")[2].partition("\n## ")[0]
    turns = re.compile(r"\bof_the_day\(|\bby_turns\(|mark\.all\b|\bif ALL\b")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "full").rglob("test_*.py")
             if path != Path(__file__) and turns.search(path.read_text())}
    assert files == set(re.findall(r"`(tests/[\w/]+\.py)`", page))


# --- docs/AUDIT.md: each command prints what the page shows, and its answer is what the log says ----------------------
BLOCKS = auditor.blocks(auditor.PAGE.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audited")
    auditor.build(path)
    return path


def opened(folder: Path) -> Log:
    return open_log(str(folder / auditor.SAMPLE))


def answer(folder: Path, *words: str) -> tuple[object, int]:
    """The page's command that contains these words, with --json."""
    [command] = [c for c, _ in BLOCKS if all(word in c for word in words)]
    printed, code = auditor.run(f"{command} --json", folder)
    return json.loads(printed), code


def test_each_question_has_one_command() -> None:
    page = auditor.PAGE.read_text()
    questions = re.findall(r"^## .*\?$", page, re.MULTILINE)
    assert len(questions) >= 9
    assert len(questions) == len(BLOCKS) == page.count("```console")


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_command_of_the_page_prints_what_the_page_shows(folder: Path, command: str, shown: str) -> None:
    printed, _ = auditor.run(command, folder)
    assert auditor.same(shown, printed), f"`python -m tests.auditor` prints the page again; now it is:\n{printed}"


# --- and the answers are true: the same, from the events by another way -----------------------------------------------
def test_the_weights_are_those_that_the_event_names_and_the_publication_gave(folder: Path) -> None:
    found, _ = answer(folder, "show", "4/7/1/0")
    with opened(folder) as log:
        [made] = [r.event for r in log.events(4) if isinstance(r.event, ev.TaskFinished) and r.event.task == 7]
        paths = {r.event.version: r.event.path for r in log.read(stream="weights")
                 if isinstance(r.event, ev.WeightsPublished)}
    assert isinstance(found, dict)
    assert [w["version"] for w in found["weights"]] == [made.model_version, made.model_version_end]
    assert [w["path"] for w in found["weights"]] == [paths[2], paths[3]]
    [experience] = found["experiences"]
    assert experience["uid"] == "4/7/1/0/e51e4b"
    assert len(experience["response_tokens"]) == len(experience["logprobs"]) == 25


def test_the_reason_of_a_drop_is_the_events(folder: Path) -> None:
    found, _ = answer(folder, "--task 65")
    with opened(folder) as log:
        [dropped] = [r for r in log.events(4) if isinstance(r.event, ev.TaskDropped)]
    assert isinstance(found, dict)
    assert isinstance(dropped.event, ev.TaskDropped)
    assert 65 in dropped.event.tasks
    assert (found["state"], found["reason"]) == ("dropped", dropped.event.reason)
    assert dropped.position in [t["position"] for t in found["turns"]]


def test_the_slowest_step_is_the_one_that_took_longest_and_its_cause_is_the_failure(folder: Path) -> None:
    rows, _ = answer(folder, "--slowest")
    assert isinstance(rows, list)
    with opened(folder) as log:
        seconds = sorted(r.ended_at - r.submitted_at for r in log.batches(batch_type="train") if r.ended_at)
    assert [r["seconds"] for r in rows] == seconds[:-4:-1]
    assert "timeout" in rows[0]["held_up_by"]["what"]
    assert rows[0]["held_up_by"]["fault"] is True


# --- C1: docs/PARITY.md -----------------------------------------------------------------------------------------------
def test_c1_a_row_has_a_test_on_the_real_actor_system() -> None:
    for row in parity.rows():
        assert row.tests, f"P{row.number}: no test is named test_p{row.number}_..."
        assert not row.skipped, f"P{row.number}: a test of it is skipped"
        assert row.state == "done", f"P{row.number}: none of its tests is on the real system: {', '.join(row.tests)}"


def test_c1_the_rows_are_p1_to_p38_and_m0_to_m18() -> None:
    numbers = [row.number for row in parity.rows()]
    assert numbers == sorted(numbers)
    assert set(range(1, 39)) <= set(numbers) <= set(range(1, 39 + 19))


def test_c1_the_page_is_what_the_tests_say() -> None:
    page = (parity.ROOT / "docs" / "PARITY.md").read_text()
    assert page == parity.markdown(), "docs/PARITY.md is old: make docs"


@pytest.mark.parametrize(("source", "skipped"), [
    ("@pytest.mark.skip\ndef f(): ...", True), ("@pytest.mark.skip(reason='x')\ndef f(): ...", True),
    ("@pytest.mark.xfail(strict=True)\ndef f(): ...", True), ("@pytest.mark.skipif(True)\ndef f(): ...", False),
    ("@pytest.mark.vllm\nasync def f(): ...", False),
])
def test_c1_a_row_whose_test_is_skipped_is_not_done(source: str, skipped: bool) -> None:
    [node] = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert parity._is_skipped(node) is skipped
    row = parity.Row(1, "x", {"tests/full/system/test_x.py": ["test_p1_x"]}, skipped=int(skipped))
    assert (row.state == "done") is not skipped


@pytest.mark.parametrize(("source", "skipped"), [
    ("pytestmark = pytest.mark.skip", True), ("pytestmark = [pytest.mark.vllm, pytest.mark.skip('x')]", True),
    ("pytestmark = [pytest.mark.vllm, pytest.mark.timeout(9)]", False),
])
def test_c1_a_module_that_is_skipped_shows_nothing(source: str, skipped: bool) -> None:
    assert parity._all_skipped(ast.parse(source)) is skipped


def test_c1_a_row_with_unit_tests_alone_is_not_done() -> None:
    assert parity.Row(1, "x", {"tests/pure/values/test_values.py": ["test_p1_x"]}).state == "open"

"""docs/AUDIT.md: every command of the page is run, prints what the page shows, and its answer is what the log says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import auditor
from trinity_es.events import vocabulary as ev
from trinity_es.projections.reading.log_reader import Log, open_log

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

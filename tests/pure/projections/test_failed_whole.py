"""A batch of which every run failed, then submitted again, and tasks that are run again: what each account makes of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.handmade import cli, finished, unit, write
from tests.helpers.logs import tables
from trinity_es.cli.run_in_view import run_summary
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.values import batch_stream
from trinity_es.projections.batch import batch_result, fold
from trinity_es.projections.history import attempts, task_history
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.projections.reading.resume_point import is_over, resume_point
from trinity_es.projections.tables.read_models import projectors

Events = list[ev.Event]
SUBMITTED = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2, 2], tasks=[{}, {}])
SENT = ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0), unit(1)], model_version=4)
TRAINED = ev.BatchTrained(step=1)


def failed(task: int, *runs: int) -> ev.AttemptFailed:
    return ev.AttemptFailed(task=task, run_id_base=0, failed_runs=list(runs), attempt=1, runner="runner-0",
                            incarnation=1, kind="workflow", message="KeyError: 'stok'", retry=False)


def one_run(task: int) -> ev.RunsFinished:
    run = ev.RunResult(run=0, metrics={}, experiences=1)
    return ev.RunsFinished(task=task, run_id_base=0, attempt=1, runner="runner-0", incarnation=1, runs=[run],
                           payload=None, model_version=4, model_version_end=4, seconds=0.5)


def finalized(*events: ev.Event) -> Events:
    begun = [SUBMITTED, SENT, *events]
    state = fold(begun)
    return [*begun, ev.BatchFinalizing(), ev.BatchFinalized(result=batch_result(state))]


ALL_FAILED = finalized(failed(0, 0, 1), failed(1, 0, 1))
DROPPED = ev.TaskDropped(tasks=[1], reason="enough")
ABORTED = ev.BatchAborted(reason="no longer wanted", result={"batch_id": 1, "batch_type": "train", "metrics": {}})
STALE = ev.RecoveryDecided(decision="drop_stale", reason="old weights")

CASES: dict[str, tuple[Events, bool, bool]] = {
    "every run failed": (ALL_FAILED, True, False),
    "it was trained on all the same": ([*ALL_FAILED, TRAINED], True, True),
    "not finalized yet": (ALL_FAILED[:-1], False, False),
    "one run of a task succeeded": (finalized(one_run(0), failed(0, 1), failed(1, 0, 1)), False, True),
    "a task finished": (finalized(finished(0, None), failed(1, 0, 1)), False, True),
    "the only run that succeeded is of a dropped task": (finalized(failed(0, 0, 1), one_run(1), DROPPED), True, False),
    "nothing was waited for": (finalized(ev.TaskDropped(tasks=[0, 1], reason="enough")), False, True),
    "submitted again": ([*ALL_FAILED, SUBMITTED], False, False),
    "submitted again, and it went well": ([*ALL_FAILED, *finalized(finished(0, None), finished(1, None))], False, True),
    "a person aborted it": ([SUBMITTED, SENT, ABORTED], False, True),
    "dropped as stale": ([SUBMITTED, SENT, STALE, ABORTED], False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_over_unless_it_is_to_be_generated_anew(tmp_path: Path, case: str) -> None:
    events, failed_whole, over = CASES[case]
    state = fold(events)
    assert state.failed_whole is failed_whole
    path = tmp_path / "log.sqlite"
    advanced = ev.TasksetAdvanced(batch_id=1, taskset="letters", epoch=0, offset=2)
    write(path, [("batch/1", events), ("taskset/letters", [advanced])])
    with open_log(str(path)) as log:
        assert is_over(log, log.batch_row(1)) is over
        point = resume_point(log, ["letters"])
    assert point.open == (frozenset() if over else {1})
    assert (point.submitted, point.cursors[1]) == (1, {"letters": (0, 2)})
    assert point.trained == (over and (TRAINED in events or ABORTED in events))


def test_the_run_counts_the_tokens_of_both_tries_and_the_tasks_of_the_last(tmp_path: Path) -> None:
    again = finalized(finished(0, None), finished(1, None))
    path = tmp_path / "log.sqlite"
    write(path, [("batch/1", [*ALL_FAILED, *again, TRAINED])])
    with open_log(str(path)) as log:
        config = Config.from_dict({"store": {"url": f"sqlite:///{path}"}}, folder=tmp_path)
        run, told, row = run_summary(config, log), attempts.fold_timeline(log.events(1)), log.batch_row(1)
        assert log.check_result(1)[0] == log.check_result(1)[1]
    assert (run["batches"], run["failed_attempts"]) == (1, 2)
    assert (row.finished, row.failed, row.failed_attempts, row.trained_step) == (2, 0, 0, 1)
    assert (told.earlier_submissions, told.turns[0][1]) == (1, "submitted again: try 2")
    with EventLog.open(str(path), projectors=projectors()) as opened:
        opened.rebuild()
    with open_log(str(path)) as log:
        assert log.batch_row(1) == row


FAILED = ev.AttemptFailed(task=1, run_id_base=0, failed_runs=[0, 1], attempt=1, runner="runner-0", incarnation=1,
                          kind="data", message="no", retry=False)


def reopened(task: int, attempt: int, **of: object) -> ev.TaskReopened:
    return ev.TaskReopened(task=task, units=[unit(task, attempt)], reason="mended", request=f"r{task}", **of)  # type: ignore[arg-type]  # fields of it


def story(digest: str) -> list[ev.Event]:
    """Task 0 finished, task 1 failed, task 2 was dropped; then all of them are run again, and 0 is finished anew."""
    return [
        ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[2, 2, 2], tasks=[{}, {}, {}]),
        ev.TasksDispatched(runner="runner-0", incarnation=1, units=[unit(0), unit(1)], model_version=4),
        finished(0, "0" * 64, reward=0.9), FAILED, ev.TaskDropped(tasks=[2], reason="enough"),
        ev.BatchFinalizing(), ev.FinalizeFailed(error="lost"),
        reopened(0, 2, finished=True, experiences=2), reopened(1, 2), reopened(2, 1, dropped="enough"),
        ev.TasksDispatched(runner="runner-1", incarnation=1, units=[unit(0, 2)], model_version=5),
        finished(0, digest, attempt=2, reward=0.25),
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    log = tmp_path / "log.sqlite"
    digest = open_payloads(str(log)).put(b"tokens")
    write(log, [(batch_stream(1), story(digest))])
    return log


@pytest.fixture
def log(path: Path) -> Log:
    return open_log(str(path))


def test_state_and_tables_count_what_it_has_now(path: Path, log: Log) -> None:
    state = log.replay(1)
    assert (state.completed_task_count, sorted(state.pending), state.dropped) == (1, [(1, 0), (2, 0)], {})
    row = log.batch_row(1)
    assert (row.finished, row.failed, row.dropped, row.experiences) == (1, 0, 0, 2)
    assert ("task", "enough") not in log.losses(1)
    with EventLog.open(str(path), projectors=projectors()) as opened:
        before = tables(opened)
        opened.rebuild()
        assert tables(opened) == before


def test_each_account_of_the_batch_tells_it(log: Log) -> None:
    told = attempts.fold_timeline(log.events(1))
    assert [(t.state, t.rewards) for t in told.tasks] == [
        ("finished", [0.25, 0.25 + 1 / 3]), ("pending", []), ("pending", [])]
    assert told.tasks[1].reason == "run again: mended"
    assert [what for _, what in told.turns if "again" in what] == [f"task {n} is run again: mended" for n in range(3)]
    assert told.versions == {5: 1}
    found = attempts.fold_timeline(log.events(1))
    assert [(r.task, r.attempt, r.outcome) for r in found.rows] == [(0, 2, "finished")] * 2
    course = task_history.follow_task(log.events(1), 0)
    assert course.state == "finished"
    assert {made.attempt for made in course.made.values()} == {2}
    assert "run again, its earlier outcome is set aside: mended" in [turn.what for turn in course.turns]
    assert task_history.follow_task(log.events(1), 1).state == "pending"


def test_the_payload_that_it_had_is_needed_no_longer(log: Log) -> None:
    assert log.verify() == []


def test_its_result_is_that_of_a_batch_in_which_it_ran_once(log: Log) -> None:
    again = log.replay(1)
    once = fold([story("d" * 64)[0], finished(0, "d" * 64, attempt=2, reward=0.25)])
    assert batch_result(again) == batch_result(once)


def test_show_and_events_tell_it(path: Path) -> None:
    assert "task 0 is run again: mended" in cli("events", "1", "--log", path).stdout
    assert "is run again: mended" in cli("show", "1", "--log", path).stdout

"""A batch run by run, and what one runner did of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.handmade import finished, history, recorded, unit, write
from tests.helpers.story import Story
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.values import FailureKind
from trinity_es.projections.history.attempts import fold_timeline, select_runs
from trinity_es.projections.history.runner_work import work_of
from trinity_es.projections.reading.log_reader import open_log

DIGEST = "d" * 64


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rollouts") / "log.sqlite"
    write(path, history(DIGEST))
    return str(path)


def test_each_run_knows_its_reward_attempt_runner_positions_and_payload(log_path: str) -> None:
    with open_log(log_path) as log:
        found = fold_timeline(log.events(3))
        events = {r.position: r for r in log.events(3)}
    assert [(r.task, r.run) for r in found.rows] == [(1, 0), (1, 1), (0, 0), (0, 1)]  # as they ended
    row = found.row(0, 1)
    assert (row.outcome, row.attempt, row.runner, row.incarnation) == ("finished", 2, "runner-1", 1)
    assert row.reward == pytest.approx(0.1 + 1 / 3)
    assert (row.dispatched_version, row.model_version, row.model_version_end) == (5, 4, 5)
    assert row.payload == ev.PayloadRef(digest=DIGEST, first=1, count=1)  # its own, of the unit's two
    assert row.dispatch_position is not None
    assert events[row.dispatch_position].type == "TasksDispatched"
    assert events[row.finish_position].type == "TaskFinished"
    assert events[row.dispatch_position].event.units == [unit(0, 2)]  # type: ignore[attr-defined]  # its type is asserted above
    assert found.state.experiences == [ev.PayloadRef(digest=DIGEST, first=0, count=4)]
    assert found.state.trained_step == 3
    assert found.row(5, 0) is None


def test_a_run_that_was_given_up_has_its_reason_and_one_that_was_tried_again_is_there_once(tmp_path: Path) -> None:
    def failed(attempt: int, retry: bool) -> ev.AttemptFailed:
        return ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0, 1], attempt=attempt, runner="r", incarnation=1,
                                kind="timeout", message=f"attempt {attempt}", retry=retry, seconds=2.0)

    def sent(attempt: int) -> ev.TasksDispatched:
        return ev.TasksDispatched(runner="r", incarnation=1, units=[unit(0, attempt)], model_version=7)

    submitted = ev.BatchSubmitted(batch_id="a/b", batch_type="train", repeat_times=[2], tasks=[{}], max_attempts=2)
    events = recorded(tmp_path, "a/b", submitted, sent(1), failed(1, True), sent(2), failed(2, False))
    found = fold_timeline(events)
    assert [(r.run, r.outcome, r.message, r.attempt, r.payload) for r in found.rows] == [
        (0, "timeout", "attempt 2", 2, None), (1, "timeout", "attempt 2", 2, None)]
    assert found.rows[0].dispatched_version == 7


def test_what_the_pipeline_took_out_is_found_by_its_id_also_where_the_batch_has_slashes() -> None:
    submitted = ev.BatchSubmitted(batch_id="x/1", batch_type="train", repeat_times=[2], tasks=[{}])
    ended = ev.BatchFinalized(result={"metrics": {}}, dropped_by={"filter": ["x/1/0/1/0/abcdef", "odd"]}, dropped=1)
    sent = ev.TasksDispatched(runner="r", incarnation=1, units=[unit(0)], model_version=1)
    found = fold_timeline(Story().add("batch/x/1", submitted, sent, finished(0, DIGEST), ended).recorded)
    assert [(r.run, r.dropped_by) for r in found.rows] == [(0, []), (1, ["filter"])]


def test_a_list_goes_from_the_best_to_the_worst_and_what_has_no_reward_comes_last(log_path: str) -> None:
    with open_log(log_path) as log:
        rows = fold_timeline(log.events(3)).rows
    rows[1].reward = None
    for descending in (True, False):
        order = select_runs(rows, sort="reward", descending=descending)
        rewards = [r.reward for r in order if r.reward is not None]
        assert rewards == sorted(rewards, reverse=descending)
        assert order[-1].reward is None
    assert {r.task for r in select_runs(rows, task=1)} == {1}
    assert not select_runs(rows, outcome="timeout")


def test_a_batch_without_events_is_not_found() -> None:
    with pytest.raises(BatchNotFound):
        fold_timeline([])


def test_what_a_runner_did_of_a_batch_is_its_own(log_path: str) -> None:
    with open_log(log_path) as log:
        first, second = (work_of(log.events(3), name) for name in ("runner-0", "runner-1"))
        other_life = work_of(log.events(3), "runner-1", incarnation=2)
    assert (first.units, first.runs, dict(first.failures), first.versions) == (2, 0, {"workflow": 1}, {4})
    assert (second.units, second.runs, second.response_tokens, second.seconds) == (1, 4, 28, 2.5)
    assert other_life.runs == 0


def test_an_attempt_that_finished_some_runs_and_failed_at_others_took_its_time_once(tmp_path: Path) -> None:
    runs = [ev.RunResult(run=run, metrics={}) for run in range(2)]
    made = ev.RunsFinished(task=0, run_id_base=0, attempt=1, runner="runner-1", incarnation=1, runs=runs, payload=None,
                           model_version=4, model_version_end=4, seconds=1.25)
    kinds: list[FailureKind] = ["workflow", "data"]
    failed = [ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[run], attempt=1, runner="runner-1", incarnation=1,
                               kind=kind, message="", retry=False, seconds=1.25)
              for run, kind in enumerate(kinds, 2)]
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[4], tasks=[{}])
    sent = ev.TasksDispatched(runner="runner-1", incarnation=1, model_version=4,
                              units=[ev.Unit(task=0, run_id_base=0, runs=4, attempt=1)])
    work = work_of(recorded(tmp_path, 1, submitted, sent, made, *failed), "runner-1")
    assert (work.seconds, work.runs, dict(work.failures)) == (1.25, 2, {"workflow": 1, "data": 1})

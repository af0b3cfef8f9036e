"""Scheduled batches and the pace, decided and folded without any actor (PARITY P17 to P23)."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.decisions import collect_decisions
from trinity_es.actors.coordinator.decisions.batch_decisions import Capacity
from trinity_es.actors.coordinator.fleet.dynamic_timeout import add_measurements, attempt_timeout
from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchAlreadyActive, BatchTypeMismatch, DataError
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.batch import BatchState, evolve, fold
from trinity_es.projections.reading.log_reader import recomputed_result


def schedule(state: BatchState | None, n: int = 2, *, request: str, **changed: Any) -> list[ev.Event]:
    given: dict[str, Any] = {
        "batch_id": 1, "batch_type": "collect", "repeat_times": [2] * n, "tasks": [{}] * n, "max_attempts": 2,
        "runs_per_unit": 1, "submission": request,
    }
    return collect_decisions.schedule(state, ev.BatchSubmitted(**given | changed))


def opened(*requests: str) -> BatchState:
    state: BatchState | None = None
    for request in requests:
        state = fold(schedule(state, request=request), state)
    return state


def run(state: BatchState, task: int, run: int, *, seconds: float = 1.0) -> BatchState:
    unit = state.pending[task, run]
    state = evolve(state, ev.TasksDispatched(runner="r", incarnation=1, units=[unit], model_version=0))
    last = len(state.tasks[task].done) + 1 == state.tasks[task].total_runs
    return evolve(state, (ev.TaskFinished if last else ev.RunsFinished)(
        task=task, run_id_base=run, attempt=1, runner="r", incarnation=1,
        runs=[ev.RunResult(run=run, metrics={"a": 1.0})],
        payload=ev.PayloadRef(digest="d", first=run, count=1), model_version=0, model_version_end=0, seconds=seconds,
    ))


def done(state: BatchState, *tasks: int) -> BatchState:
    for task in tasks:
        state = run(run(state, task, 0), task, 1)
    return state


def test_p17_tasks_that_join_are_numbered_on_and_wait_behind_and_a_repeated_request_changes_nothing() -> None:
    state = opened("one", "two")
    assert list(state.pending) == [(t, r) for t in range(4) for r in range(2)]
    assert (state.expected_task_count, state.submission, state.additions) == (4, "one", {"two": 2})
    assert schedule(state, request="one") == schedule(state, request="two") == []
    [event] = schedule(state, request="three", evals=[1])
    assert isinstance(event, ev.TasksAdded)
    assert event.evals == [5]
    assert [task.is_eval for task in evolve(state, event).tasks] == [False] * 5 + [True]
    assert codec.check(event)[1] == event


def test_p17_what_cant_be_scheduled() -> None:
    train = evolve(None, ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1]))
    with pytest.raises(BatchAlreadyActive):
        schedule(train, request="one")
    with pytest.raises(BatchTypeMismatch, match="finalize_train_batch"):
        collect_decisions.open_collect_batch(train, 1)
    with pytest.raises(DataError, match="task 0"):
        schedule(None, request="one", repeat_times=[0, 1])
    train.state = BatchLifecycleState.FINALIZED
    with pytest.raises(BatchAlreadyActive, match="experiences belong to a trainer"):  # else its run can't resume
        schedule(train, request="one")


def test_p18_results_are_taken_once_and_the_last_ones_end_the_batch() -> None:
    state = done(opened("one", "two"), 0, 2)
    assert (state.open_task_count, state.ready_tasks()) == (2, [0, 2])
    [first] = collect_decisions.take(state, [0, 1, 2], "a")
    assert first == ev.ResultsTaken(tasks=[0, 2], request="a")
    state = evolve(state, first)
    assert collect_decisions.take(state, [0, 2], "b") == []
    assert collect_decisions.end_if_done(state) == []
    state = done(state, 1, 3)
    assert collect_decisions.end_if_done(state) == []  # nobody has taken them
    state = fold(collect_decisions.take(state, [1, 3], "b"), state) or state
    [end] = collect_decisions.end_if_done(state)
    assert (len(end.experiences), end.selected) == (8, 8)
    assert end.result["finished_task_count"] == 4
    assert recomputed_result(state, end) == end.result
    state = evolve(state, end)
    assert state.taken == {0: "a", 2: "a", 1: "b", 3: "b"}
    [again] = schedule(state, request="three")  # the id is free
    assert isinstance(again, ev.BatchSubmitted)
    assert evolve(state, again).taken == {}


@pytest.mark.parametrize("partial", [False, True])
def test_p22_the_rest_is_dropped_with_or_without_what_it_finished(partial: bool) -> None:
    state = run(done(opened("one", "two"), 0), 1, 0)
    [event] = collect_decisions.drop_rest(state, reason="late", return_partial=partial)
    assert event == ev.TaskDropped(tasks=[1, 2, 3], reason="late", kept=[1] if partial else [])
    state = evolve(state, event)
    assert state.ready_tasks() == ([0, 1] if partial else [0])
    assert (state.open_task_count, state.pending, state.flights) == (0, {}, {})
    assert collect_decisions.drop_rest(state, reason="late", return_partial=partial) == []
    state = fold(collect_decisions.take(state, state.ready_tasks(), "a"), state) or state
    [end] = collect_decisions.end_if_done(state)
    assert isinstance(end, ev.BatchFinalized)
    assert end.selected == (3 if partial else 2)


def test_p18_a_batch_of_which_nothing_came_ends_aborted() -> None:
    state = opened("one")
    state = fold(collect_decisions.drop_rest(state, reason="late", return_partial=True), state) or state
    [end] = collect_decisions.end_if_done(state)
    assert isinstance(end, ev.BatchAborted)
    assert end.reason == "late"


def test_p16_nothing_of_a_paused_batch_is_dispatched() -> None:
    state = opened("one")
    capacity = Capacity(name="r", incarnation=1, model_version=0, places=4, load=0, limit=4)
    state = fold(collect_decisions.pause(state, "stopped"), state) or state
    assert collect_decisions.pause(state, "stopped") == []
    assert batches.dispatch([state], [capacity]) == []
    assert type(schedule(state, request="two")[0]) is ev.BatchResumed  # who schedules wants it to run
    state = fold(collect_decisions.resume(state), state) or state
    assert collect_decisions.resume(state) == []
    [(_, event)] = batches.dispatch([state], [capacity], 1.5)
    assert event.timeout == 1.5
    assert {f.timeout for f in evolve(state, event).flights.values()} == {1.5}


LIMITS = {"ratio": 3.0, "warmup_min_steps": 2, "max_timeout": 20.0}


def test_p23_allowed() -> None:
    assert attempt_timeout(1, 100, 100.0, **LIMITS) == 0.0  # too few steps
    assert attempt_timeout(2, 100, 200.0, **LIMITS) == 6.0
    assert attempt_timeout(2, 100, 900.0, **LIMITS) == 0.0  # max_timeout is less
    assert attempt_timeout(2, 0, 0.0, **LIMITS) == 0.0


def test_p23_a_train_step_that_ended_is_measured_with_its_timeouts_and_without_evals() -> None:
    state = opened("one")
    state = run(state, 0, 0, seconds=1.0)
    unit = state.pending[0, 1]
    state = evolve(state, ev.TasksDispatched(runner="r", incarnation=1, units=[unit], model_version=0))
    for kind, counted in (("workflow", 1), ("timeout", 2)):
        state = evolve(state, ev.AttemptFailed(
            task=0, run_id_base=1, failed_runs=[1], attempt=1, runner="r", incarnation=1, kind=kind,  # type: ignore[arg-type]  # mypy widens the literals of a loop
            message="", retry=False, seconds=5.0,
        ))
        assert state.timed_attempts == counted
    assert add_measurements(None, state, **LIMITS) is None  # it has not ended
    state.state = BatchLifecycleState.FINALIZED
    first = add_measurements(None, state, **LIMITS)
    assert first == ev.PaceMeasured(batch_id=1, steps=1, attempts=2, seconds=6.0, timeout=0.0)
    assert add_measurements(first, state, **LIMITS) == ev.PaceMeasured(
        batch_id=1, steps=2, attempts=4, seconds=12.0, timeout=9.0
    )
    state.state = BatchLifecycleState.ABORTED
    assert add_measurements(first, state, **LIMITS) is None
    for evals in ({"batch_type": "eval"}, {"evals": [0, 1]}):
        given = {"batch_id": 2, "batch_type": "train", "repeat_times": [2, 2], "runs_per_unit": 1, **evals}
        state = run(evolve(None, ev.BatchSubmitted(**given)), 0, 0)
        assert state.timed_attempts == 0

"""Decisions about tasks that a batch cuts and a later one goes on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.handmade import write
from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.decisions import cut_tasks
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState, batch_result, evolve, fold
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.reading.untried_prompts import prompts_tried

KEPT = ev.AttemptKept(task=1, run_id_base=0, runs=2, attempt=1, runner="runner-0", incarnation=1, payload="0" * 64,
                      calls=1, open_calls=1, tokens=50, steps=0, seconds=2.5)


def submitted(batch_id: BatchId, *continues: ev.ContinuedTask) -> list[ev.Event]:
    return [ev.BatchSubmitted(
        batch_id=batch_id, batch_type="train", repeat_times=[2, 2, 2], tasks=[{}] * 3, min_wait_num=1, max_attempts=2,
        submission=f"s{batch_id}", continues=list(continues),
    )]


def dispatched(*tasks: int) -> ev.Event:
    units = [ev.Unit(task=task, run_id_base=0, runs=2, attempt=1) for task in tasks]
    return ev.TasksDispatched(runner="runner-0", incarnation=1, units=units, model_version=0)


def ended(state: BatchState | None, *, cut: bool = True) -> BatchState:
    state = fold([dispatched(0, 1, 2), KEPT], state)
    state = fold(batches.start_finalizing(state, cut=cut), state)
    return fold([ev.BatchFinalized(result=batch_result(state))], state)


def test_a_task_goes_on_with_what_was_kept_of_it_and_its_cuts_are_counted() -> None:
    earlier = ended(fold(submitted(1)))
    assert earlier.cut == {0, 1, 2}
    assert earlier.final_result["metrics"]["rollout/cut_task_count"] == 3
    for cuts in (1, 2):
        task = cut_tasks.continued_task(0, earlier, 1 if cuts == 1 else 0)
        assert task == ev.ContinuedTask(task=0, batch_id=cuts, cut_task=1 if cuts == 1 else 0, cuts=cuts)
        state = fold(submitted(cuts + 1, task))
        [event] = cut_tasks.kept_attempts(task, earlier, state) or [None]
        if cuts == 1:
            assert event == replace(KEPT, task=0, attempt=0)
            state = fold([event, dispatched(0)], state)
            assert state.flights[0, 0].kept == event
        else:
            assert event is None, "nothing was kept of it"
        earlier = ended(fold(submitted(cuts + 1, task)))
        assert earlier.final_result["metrics"]["rollout/continued_task_count"] == 1


@pytest.mark.parametrize(("earlier", "number"), [
    (None, 0), (fold(submitted(1)), 0), (ended(fold(submitted(1)), cut=False), 0), (ended(fold(submitted(1))), 3),
], ids=["unknown", "open", "not cut", "no such task"])
def test_only_what_an_ended_batch_cut_goes_on(earlier: BatchState | None, number: int) -> None:
    with pytest.raises(DataError, match=rf"task 2 can't continue task {number} of .*: task {number} was not cut"):
        cut_tasks.continued_task(2, earlier, number)


@pytest.mark.parametrize(("cuts", "bound", "waits"), [(7, None, False), (8, None, True), (1, 2, False), (2, 2, True)])
def test_a_task_is_not_cut_so_often_that_answers_are_lost_or_stale(cuts: int, bound: int | None, waits: bool) -> None:
    state = fold(submitted(9, ev.ContinuedTask(task=2, batch_id=8, cut_task=0, cuts=cuts)))
    assert cut_tasks.has_uncuttable_task(state, bound) is waits
    runs = [ev.RunResult(run=run, metrics={"reward": 1.0}) for run in range(2)]
    done = ev.TaskFinished(task=2, run_id_base=0, attempt=1, runner="runner-0", incarnation=1, runs=runs, payload=None,
                           model_version=0, model_version_end=0, seconds=1.0)
    assert not cut_tasks.has_uncuttable_task(evolve(state, done), bound)


def test_a_task_that_is_run_again_before_its_batch_ends_is_not_cut() -> None:
    state = fold([*submitted(1), dispatched(0, 1, 2)])
    state = fold([*batches.start_finalizing(state, cut=True), ev.FinalizeFailed(error="no operator")], state)
    state = fold(batches.reopen(state, 1, [1], reason="", request="r", runs_per_unit=None), state)
    assert state.cut == {0, 2}


def test_a_task_that_goes_on_in_another_batch_is_one_prompt(tmp_path: Path) -> None:
    cut = ev.TaskDropped(tasks=[0, 1, 2], reason="enough", cut=[0, 1, 2])
    goes_on = [ev.ContinuedTask(task=task, batch_id=1, cut_task=task + 1, cuts=1) for task in (0, 1)]
    write(tmp_path / "log", [
        ("batch/1", [*submitted(1), dispatched(0, 1), cut]),
        ("batch/2", [*submitted(2, *goes_on), dispatched(0, 1, 2)]),
    ])
    with open_log(str(tmp_path / "log")) as log:
        tried = prompts_tried(log)
    assert (tried.tasks, tried.sent) == (4, 4)

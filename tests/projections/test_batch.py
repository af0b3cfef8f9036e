"""The fold of a batch: whatever the order of things, one state; whatever was decided, replay agrees (promise 6)."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_es.actors.coordinator.decisions import batches
from trinity_es.actors.messages import Outcome
from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogCorrupt
from trinity_es.events.values import BatchLifecycleState, batch_stream
from trinity_es.projections.batch import BatchState, batch_result, contiguous, evolve, fold
from trinity_es.projections.reading.log_reader import canonical


def result_of(task: int, run: int) -> ev.RunResult:
    """Metrics with full-length fractions: their sum depends on the order, if it is not fixed."""
    value = random.Random(f"{task}/{run}").random()
    return ev.RunResult(run=run, metrics={"reward": value, "steps:sum": 1.0 + value, "x:last": value}, experiences=1)


def live(seed: int, tasks: int, runs: int, split: int | None, batch_type: str) -> tuple[BatchState, list[ev.Event]]:
    """Play a batch by the decisions, with failures and deaths in an order drawn from `seed`."""
    chance = random.Random(seed)
    events: list[ev.Event] = list(
        batches.submit(
            None, batch_id="5/x", batch_type=batch_type, repeat_times=[runs] * tasks,  # type: ignore[arg-type]
            tasks=[{}] * tasks, tasks_digest=None, min_wait_num=None, max_attempts=3, runs_per_unit=split,
            detailed_stats=False, submission="s",
        )
    )
    state = fold(events)
    assert state is not None
    lives = {"a": 1, "b": 1}

    def record(new: list[ev.Event]) -> None:
        nonlocal state
        for event in new:
            events.append(event)
            state = evolve(state, event)

    while not state.is_complete:
        capacities = [
            batches.Capacity(name=n, incarnation=i, model_version=1, places=3, limit=3,
                               load=batches.loads([state]).get((n, i), 0))
            for n, i in lives.items()
        ]
        for _, event in batches.dispatch([state], capacities):
            record([event])
        flight = chance.choice(list(state.flights.values()))
        fate = chance.random()
        if fate < 0.1:
            record(batches.runner_lost(state, flight.runner, flight.incarnation, "killed"))
            lives[flight.runner] += 1
            continue
        unit = flight.unit
        failed = [r for r in range(unit.run_id_base, unit.run_id_base + unit.runs) if chance.random() < 0.2]
        done = [r for r in range(unit.run_id_base, unit.run_id_base + unit.runs) if r not in failed]
        outcome = Outcome(
            batch_id="5/x", submission="s", unit=unit, results=[result_of(unit.task, r) for r in done],
            failures=[(r, "workflow", "x") for r in failed], seconds=1.0,
        )
        record(batches.outcome(state, flight.runner, flight.incarnation, outcome))
        record(batches.outcome(state, flight.runner, flight.incarnation, outcome))  # a message may come twice
    record(batches.start_finalizing(state))
    if batch_type == "train":
        record(batches.finalized(state, metrics={}, experiences=[], selected=0, dropped=0))
    return state, events


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), tasks=st.integers(1, 6), runs=st.integers(1, 5), split=st.sampled_from([None, 1, 2]),
    batch_type=st.sampled_from(["train", "eval"]),
)
def test_promise_6_live_state_equals_the_state_replayed_from_what_was_written(
    seed: int, tasks: int, runs: int, split: int | None, batch_type: str
) -> None:
    state, events = live(seed, tasks, runs, split, batch_type)
    written = [(type(e).__name__, type(e).schema_version, codec.encode(e)) for e in events]
    assert fold(codec.decode(*row) for row in written) == state
    assert state.state is BatchLifecycleState.FINALIZED
    assert (state.flights, state.pending) == ({}, {})
    for task in state.tasks:
        assert task.settled
        assert not set(task.done) & set(task.failed)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), batch_type=st.sampled_from(["train", "eval"]))
def test_promise_6_the_result_does_not_depend_on_the_order_in_which_runs_finish(seed: int, batch_type: str) -> None:
    first: list[ev.Event] = [
        ev.BatchSubmitted(batch_id="5/x", batch_type=batch_type, repeat_times=[4] * 8)  # type: ignore[arg-type]
    ]
    finished: list[ev.Event] = [
        ev.RunsFinished(
            task=task, run_id_base=run, attempt=1, runner="a", incarnation=1, runs=[result_of(task, run)],
            payload=None, model_version=0, model_version_end=0, seconds=0.5,
        )
        for task in range(8)
        for run in range(4)
    ]
    shuffled = list(finished)
    random.Random(seed).shuffle(shuffled)
    in_order, out_of_order = fold(first + finished), fold(first + shuffled)
    assert in_order is not None
    assert out_of_order is not None
    assert canonical(batch_result(in_order)) == canonical(batch_result(out_of_order))


def test_a_stream_that_does_not_begin_with_a_submission_is_corrupt() -> None:
    with pytest.raises(LogCorrupt, match="before its BatchSubmitted"):
        fold([ev.BatchFinalizing()])


def test_an_event_of_another_stream_is_corrupt() -> None:
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1])
    with pytest.raises(LogCorrupt, match="does not belong"):
        fold([submitted, ev.WeightsPublished(version=1, path="x")])


def test_a_batch_id_that_is_used_again_begins_anew_and_its_versions_count_on() -> None:
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1])
    state = fold([submitted, ev.BatchFinalizing(), ev.BatchFinalized(result={}), submitted])
    assert state is not None
    assert (state.state, state.version, state.statuses) == (BatchLifecycleState.RUNNING, 4, {})


def test_contiguous_stretches() -> None:
    assert list(contiguous([])) == []
    assert list(contiguous([3, 0, 1, 7, 8])) == [(0, 2), (3, 1), (7, 2)]


def test_int_and_string_ids_have_streams_of_their_own() -> None:
    ids: list[Any] = [12, "12", "'12'", -1, "-1", "12/gsm8k", "x"]
    assert len({batch_stream(i) for i in ids}) == len(ids)


def test_a_result_is_plain_json() -> None:
    state, _ = live(1, 3, 2, None, "eval")
    assert orjson.loads(orjson.dumps(state.final_result)) == state.final_result

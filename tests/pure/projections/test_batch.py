"""The fold of a batch: whatever the order of things, one state; whatever was decided, replay agrees (promise 6)."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.batches import live, result_of
from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogCorrupt
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.batch import batch_result, contiguous, fold
from trinity_es.projections.metric_aggregation import mean_reward, missing_runs
from trinity_es.projections.reading.log_reader import canonical, recomputed_result


def ran(task: int, *runs: ev.RunResult, base: int = 0) -> ev.RunsFinished:
    return ev.RunsFinished(task=task, run_id_base=base, attempt=1, runner="a", incarnation=1, runs=list(runs),
                           payload=None, model_version=0, model_version_end=0, seconds=0.5)


def lost(task: int, *runs: int) -> ev.AttemptFailed:
    return ev.AttemptFailed(task=task, run_id_base=runs[0], failed_runs=list(runs), attempt=1, runner="a",
                            incarnation=1, kind="workflow", message="the judge is away", retry=False)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32), tasks=st.integers(1, 6), runs=st.integers(1, 5), split=st.sampled_from([None, 1, 2]),
    batch_type=st.sampled_from(["train", "eval"]),
)
def test_promise_6_live_state_equals_the_state_replayed_from_what_was_written(
    seed: int, tasks: int, runs: int, split: int | None, batch_type: str
) -> None:
    state, events = live(seed, tasks, runs, split, batch_type)
    written = [(type(e).__name__, type(e).schema_version, codec.check(e)[0]) for e in events]
    assert fold(codec.decode(*row) for row in written) == state
    assert state.state is BatchLifecycleState.FINALIZED
    assert (state.flights, state.pending) == ({}, {})
    for task in state.tasks:
        assert task.settled
        assert not set(task.done) & set(task.failed)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), batch_type=st.sampled_from(["train", "eval"]))
def test_promise_6_the_result_does_not_depend_on_the_order_in_which_runs_finish(seed: int, batch_type: str) -> None:
    first: list[ev.Event] = [
        ev.BatchSubmitted(batch_id="5/x", batch_type=batch_type, repeat_times=[4] * 8)  # type: ignore[arg-type]
    ]
    finished = [ran(task, result_of(task, run), base=run) for task in range(8) for run in range(4)]
    shuffled = list(finished)
    random.Random(seed).shuffle(shuffled)
    in_order, out_of_order = fold(first + finished), fold(first + shuffled)
    assert canonical(batch_result(in_order)) == canonical(batch_result(out_of_order))


def test_a_stream_that_does_not_begin_with_a_submission_or_has_an_event_of_another_is_corrupt() -> None:
    with pytest.raises(LogCorrupt, match="comes before BatchSubmitted"):
        fold([ev.BatchFinalizing()])
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1])
    with pytest.raises(LogCorrupt, match="does not belong"):
        fold([submitted, ev.WeightsPublished(version=1, path="x")])


def test_a_batch_id_that_is_used_again_begins_anew_and_its_versions_count_on() -> None:
    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1])
    state = fold([submitted, ev.BatchFinalizing(), ev.BatchFinalized(result={}), submitted])
    assert (state.state, state.version, state.statuses) == (BatchLifecycleState.RUNNING, 4, {})


def test_contiguous_stretches() -> None:
    assert list(contiguous([])) == []
    assert list(contiguous([3, 0, 1, 7, 8])) == [(0, 2), (3, 1), (7, 2)]


def test_a_result_is_plain_json() -> None:
    state, _ = live(1, 3, 2, None, "eval")
    assert orjson.loads(orjson.dumps(state.final_result)) == state.final_result


def test_an_eval_whose_tasks_lost_runs_has_one_mean_over_all_and_says_how_many_are_missing() -> None:
    done = {0: [0, 1, 2, 3], 1: [1, 2, 3], 2: []}
    events: list[ev.Event] = [ev.BatchSubmitted(batch_id="5/check", batch_type="eval", repeat_times=[4] * 3)]
    for task, runs in done.items():
        results = [ev.RunResult(run=run, metrics={"reward": float(task == 0)}, experiences=1) for run in runs]
        if missing := [run for run in range(4) if run not in runs]:
            events.append(lost(task, *missing))
        if results:
            events.append(ran(task, *results))
    state = fold(events)
    result = batch_result(state)
    assert {k: v for k, v in result["metrics"].items() if "reward/mean" in k} == {"eval/check/reward/mean@4": 0.5}
    assert result["metrics"]["eval/check/reward/best@4"] == 0.5
    missing = missing_runs("5/check", "eval", result["metrics"])
    assert result["metrics"]["eval/check/missing_run_count"] == missing == 5
    assert mean_reward(result) == 0.5
    old = batch_result(state, form=1)
    assert (old["metrics"]["eval/check/reward/mean@4"], old["metrics"]["eval/check/reward/mean@3"]) == (1.0, 0.0)
    for stored in (result, old):  # a log of then is sound, too, and another number in neither
        assert recomputed_result(state, ev.BatchFinalized(result=stored)) == stored
        wrong = {**stored, "metrics": {**stored["metrics"], "eval/check/reward/mean@4": 0.75}}
        assert recomputed_result(state, ev.BatchFinalized(result=wrong)) == result


@pytest.mark.parametrize(("batch_id", "prefix", "mean"), [(7, "rollout", "mean"), ("7/check", "eval/check", "mean@2")])
def test_a_mean_without_some_completed_runs_has_their_number_too(batch_id: int | str, prefix: str, mean: str) -> None:
    runs = [{"acc": 1.0, "bonus": 1.0, "reward": 2.0, "turns:sum": 1}, {"acc": 0.0}, {"acc:mean": 0.0, "reward": 0.0},
            {"acc": 0.0, "reward": 0.0}]
    state = fold([
        ev.BatchSubmitted(
            batch_id=batch_id, batch_type="eval" if prefix != "rollout" else "train", repeat_times=[2, 2]),
        *(ran(i // 2, ev.RunResult(run=i % 2, metrics=metrics, experiences=1), base=i % 2)
          for i, metrics in enumerate(runs)),
    ])
    result = batch_result(state)
    found = result["metrics"]
    assert (found[f"{prefix}/acc/{mean}"], found[f"{prefix}/bonus/{mean}"]) == (0.25, 1.0)
    counts = {name: count for name, count in found.items() if name.endswith("missing_run_count")}
    assert counts == {f"{prefix}/bonus/missing_run_count": 3.0, f"{prefix}/reward/missing_run_count": 1.0}
    assert missing_runs(batch_id, result["batch_type"], found) == 1
    older = batch_result(state, form=2)
    assert found.keys() - older["metrics"].keys() == counts.keys()
    for stored in (result, older):
        assert recomputed_result(state, ev.BatchFinalized(result=stored)) == stored
    less = {**result, "metrics": {k: v for k, v in found.items() if k != f"{prefix}/bonus/missing_run_count"}}
    assert recomputed_result(state, ev.BatchFinalized(result=less)) == result


def test_a_batch_that_is_trained_on_counts_the_failed_runs_of_its_tasks() -> None:
    state = fold([
        ev.BatchSubmitted(batch_id=3, batch_type="train", repeat_times=[4, 2]),
        ran(0, ev.RunResult(run=0, metrics={"reward": 1.0}, experiences=1)), lost(0, 1, 2, 3),
        ev.TaskDropped(tasks=[1], reason="the batch has enough"),
    ])
    result = batch_result(state)
    assert missing_runs(3, "train", result["metrics"]) == 3
    before = batch_result(state, form=3)
    assert missing_runs(3, "train", before["metrics"]) == 0
    for stored in (result, before):
        assert recomputed_result(state, ev.BatchFinalized(result=stored)) == stored


def test_a_result_is_over_what_is_delivered_and_counts_the_runs_that_an_eval_gave_up() -> None:
    def result(batch_type: Any, kept: list[int], form: int = 3) -> dict[str, float]:
        state = fold([
            ev.BatchSubmitted(batch_id="2/x", batch_type=batch_type, repeat_times=[1, 2, 2]),
            *(ran(task, ev.RunResult(run=0, metrics={"reward": float(task)}, experiences=1)) for task in (0, 1)),
            ev.TaskDropped(tasks=[1, 2], reason="the batch has enough", kept=kept),
        ])
        assert state.ready_tasks() == [0, *kept]
        return batch_result(state, form=form)["metrics"]

    partly, whole = result("train", [1]), result("train", [])
    assert (partly["rollout/reward/mean"], whole["rollout/reward/mean"]) == (0.5, 0.0)
    assert partly["rollout/finished_task_count"] == whole["rollout/finished_task_count"] == 1.0
    assert result("train", [1], form=2)["rollout/reward/mean"] == 0.0
    partly, whole = result("eval", [1]), result("eval", [])
    assert (partly["eval/x/missing_run_count"], whole["eval/x/missing_run_count"]) == (3.0, 4.0)
    assert "eval/x/missing_run_count" not in result("eval", [], form=2)

"""what-if on records made by hand, where the right answer is known to the second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sample_log import make
from tests.helpers.handmade import cli, write
from trinity_es.audit.whatif import history
from trinity_es.audit.whatif.forecast import Forecast, Settings, replay_history
from trinity_es.audit.whatif.history import Addition, Duration, History, Life, PastBatch, WeightsUpdate
from trinity_es.audit.whatif.recorded_durations import read_history
from trinity_es.events import vocabulary as ev
from trinity_es.projections.batch import batch_result, evolve
from trinity_es.projections.reading.log_reader import open_log

EXPLORER: dict[str, Any] = {
    "max_timeout": 10.0, "max_retry_times": 1, "max_repeat_times_per_runner": None, "max_concurrency": 1,
    "concurrent_mode": "asynchronous", "dynamic_timeout": {"enable": False, "ratio": 3.0, "warmup_min_steps": 1},
    "over_rollout": {"ratio": 0.0, "wait_after_min": 0.0, "return_partial_tasks": False},
}


def batch(number: int, at: float, ended_at: float, *seconds: float, **more: Any) -> PastBatch:
    """Tasks of one run that took so long; the pipeline took none."""
    submitted = ev.BatchSubmitted(batch_id=number, batch_type="train", repeat_times=[1] * len(seconds), max_attempts=2,
                                  min_wait_num=more.pop("wait", None))
    took = {(task, 0, 1): Duration(seconds=s, limit=10.0) for task, s in enumerate(seconds)}
    return PastBatch(submitted=submitted, submitted_at=at, state=evolve(None, submitted), durations=took,
                     finalizing_at=ended_at, due_at=ended_at, ended_at=ended_at, **more)


def life(number: int, ended_at: float | None = None) -> Life:
    return Life(runner=f"runner-{number}", incarnation=1, places=1, ready_at=-5.0, ended_at=ended_at)


def past(*batches: PastBatch, lives: list[Life] | None = None, changes: list[WeightsUpdate] | None = None,
         explorer: dict[str, Any] | None = None) -> History:
    anchors: list[Any] = [(b.ended_at, ("end", b.batch_id)) for b in batches]
    anchors += [(b.trained_at, ("trained", b.batch_id)) for b in batches if b.trained_at is not None]
    anchors += [(c.published_at + max(c.loads.values()), ("weights", c.version)) for c in changes or []]
    return History(
        config={"explorer": {**EXPLORER, **(explorer or {})}}, batches=list(batches), updates=changes or [], pace=None,
        lives=lives or [life(0), life(1)], unit_seconds=None,
        anchors=[(batches[0].submitted_at, ("begin", None)), *sorted(anchors)],
    )


def whole(number: int) -> list[ev.Event]:
    submitted = ev.BatchSubmitted(batch_id=number, batch_type="train", repeat_times=[])
    state = evolve(None, submitted)
    return [submitted, ev.BatchFinalizing(), ev.BatchFinalized(result=batch_result(state))]


def published(version: int) -> list[tuple[str, list[ev.Event]]]:
    life: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}
    return [("weights", [ev.WeightsPublished(version=version, path="w")]),
            ("runner/runner-0", [ev.WeightsLoaded(**life, version=version, seconds=0.5)])]


def paced(steps: int) -> tuple[str, list[ev.Event]]:
    return "pace", [ev.PaceMeasured(batch_id=1, steps=steps, attempts=1, seconds=1.0, timeout=1.0)]


def test_the_record_of_a_batch_holds_what_was_there_with_it_and_nothing_later(tmp_path: Path) -> None:
    life: dict[str, Any] = {"runner": "runner-0", "incarnation": 1}
    second = whole(2)
    write(tmp_path / "log", [
        ("system", [ev.SystemConfigured(config={"explorer": EXPLORER})]),
        ("runner/runner-0", [ev.RunnerStarted(**life, pid=1, host="", engine="vllm"),
                             ev.RunnerReady(**life, places=8, model_version=0, load_seconds=1.0)]),
        *published(1), ("batch/1", whole(1)), paced(1),
        ("batch/2", second[:1]), *published(2), ("batch/2", second[1:]),
        paced(2), *published(3), ("runner/runner-0", [ev.RunnerLost(**life, reason="killed")]), ("batch/3", whole(3)),
    ])
    with open_log(str(tmp_path / "log")) as log:
        rows = log.batches()
        of = {row.batch_id: read_history(log, rows, [row]) for row in rows}
    assert {b: [(c.version, list(c.loads)) for c in record.updates] for b, record in of.items()} == {
        1: [], 2: [(2, ["runner-0"])], 3: []}
    assert {b: [one.ended_at is None for one in record.lives] for b, record in of.items()} == {
        1: [True], 2: [True], 3: []}
    assert {b: record.pace and record.pace.steps for b, record in of.items()} == {1: None, 2: 1, 3: 2}


def played(record: History, **settings: Any) -> list[Forecast]:
    return replay_history(record, Settings(**settings)).batches


def test_units_wait_for_places() -> None:
    record = past(batch(1, 0.0, 5.0, 3.0, 4.0, 1.0, 1.0))
    for runners, seconds in ((1, 9.0), (2, 5.0), (3, 4.0), (9, 4.0)):
        [row] = played(record, runners=runners)
        assert row.predicted.seconds == pytest.approx(seconds, abs=1e-3)
        assert (row.predicted.finished, row.predicted.attempts, row.drawn) == (4, 4, 0)
    assert played(record, runners=1, max_concurrency=4)[0].predicted.seconds == pytest.approx(4.0, abs=1e-3)


def test_tasks_that_were_added_for_missing_groups_are_added_after_the_pipeline_as_recorded() -> None:
    missing, added = ev.GroupsMissing(usable=1, missing=1), ev.TasksAdded(repeat_times=[1], request="r")
    addition = Addition(event=added, added_at=5.5, missing=missing, pipeline_seconds=1.0, pause=0.5)
    refilled = batch(1, 0.0, 8.5, 3.0, 4.0, additions=[addition], pipeline_at=7.5)
    refilled.durations[2, 0, 1] = Duration(seconds=2.0, limit=10.0)
    for runners, seconds in ((1, 7.0 + 1.0 + 0.5 + 2.0 + 1.0), (2, 8.5)):
        [row] = played(past(refilled), runners=runners)
        assert row.predicted.seconds == pytest.approx(seconds, abs=1e-3)
        assert (row.predicted.finished, row.predicted.attempts, row.drawn) == (3, 3, 0)
    [row] = played(past(refilled, lives=[life(0), life(1, ended_at=5.2)]))  # dies before the tasks are added
    assert (row.predicted.seconds, row.predicted.finished) == (pytest.approx(8.5, abs=1e-3), 3)
    refilled.additions = [Addition(event=added, added_at=1.0)]  # while its first tasks run
    assert played(past(refilled), runners=3)[0].predicted.seconds == pytest.approx(4.0 + 1.0, abs=1e-3)


def test_the_rounds_in_which_tasks_were_added_are_read(tmp_path: Path) -> None:
    missing, added = ev.GroupsMissing(usable=0, missing=1), ev.TasksAdded(repeat_times=[], request="r")
    submitted, finalizing, finalized = whole(1)
    more = ev.TasksAdded(repeat_times=[], request="s")
    write(tmp_path / "log", [
        ("system", [ev.SystemConfigured(config={"explorer": EXPLORER})]),
        ("batch/1", [submitted, more, finalizing, missing, added, finalizing, missing, finalizing, finalized]),
    ])
    with open_log(str(tmp_path / "log")) as log:
        times = [r.recorded_at for r in log.events(1)]
        rows = log.batches()
        [record] = read_history(log, rows, rows).batches
    first, second = record.additions
    assert (first.event.request, first.missing) == ("s", None)
    assert (second.event.request, second.missing) == ("r", missing)
    assert second.pipeline_seconds == times[3] - times[2]
    assert second.pause == times[4] - times[3]
    assert record.pipeline_seconds == times[8] - times[5]


def test_short_units_wait_in_the_runner_too() -> None:
    """A runner gets more of them than it has places, and plays as many at a time as it has."""
    [row] = played(past(batch(1, 0.0, 2.0, *[0.05] * 40)), runners=1, max_concurrency=2)
    assert row.predicted.seconds == pytest.approx(1.0, abs=0.01)


def test_a_shorter_timeout_is_tried_again_and_then_fails() -> None:
    record = past(batch(1, 0.0, 5.0, 3.0, 5.0), explorer={"max_retry_times": 0})
    [row] = played(record, timeout=4.0, max_retry=0)
    assert (row.predicted.finished, row.predicted.failed) == (1, 1)
    assert row.predicted.seconds == pytest.approx(4.0, abs=1e-3)
    [row] = played(record, timeout=2.0, max_retry=2)
    assert (row.predicted.failed, row.predicted.attempts, row.drawn) == (2, 6, 4)
    assert row.predicted.seconds == pytest.approx(6.0, abs=1e-3)


def test_over_rollout_drops_who_comes_last() -> None:
    record = past(batch(1, 0.0, 9.0, 1.0, 2.0, 3.0, 9.0))
    [row] = played(record, runners=4, over_rollout_ratio=0.25)
    assert (row.predicted.finished, row.predicted.dropped) == (3, 1)
    assert row.predicted.seconds == pytest.approx(3.0, abs=1e-3)
    grace = past(batch(1, 0.0, 9.0, 1.0, 2.0, 3.0, 9.0), explorer={
        "over_rollout": {"ratio": 0.0, "wait_after_min": 2.0, "return_partial_tasks": False}})
    [row] = played(grace, runners=4, over_rollout_ratio=0.25)
    assert row.predicted.seconds == pytest.approx(5.0, abs=1e-3)


def test_a_runner_that_dies_loses_what_it_had_and_it_is_attempted_again() -> None:
    one = batch(1, 0.0, 6.0, 2.0, 4.0)
    one.durations[1, 0, 1] = Duration(seconds=1.0, limit=10.0, cut=True)  # it died after a second
    one.durations[1, 0, 2] = Duration(seconds=3.0, limit=10.0)
    [row] = played(past(one, lives=[life(0), life(1, ended_at=1.0)]))
    assert (row.predicted.finished, row.predicted.attempts) == (2, 3)
    assert row.predicted.seconds == pytest.approx(5.0, abs=1e-3)  # when runner-0 is free, and three more


def test_who_holds_a_run_up_moves_it() -> None:
    """Two seconds of rollouts, one of training and half of weights, twice: the trainer's time stays."""
    def record(rollout: float) -> History:
        first = batch(1, 0.0, rollout, rollout, trained_at=rollout + 1.0)
        at = rollout + 1.5
        second = batch(2, at, at + rollout, rollout, trained_at=at + rollout + 1.0)
        return past(first, second, changes=[WeightsUpdate(version=1, published_at=rollout + 1.0,
        loads={"runner-0": 0.5})])

    prediction = replay_history(record(2.0), Settings())
    assert prediction.predicted_span == pytest.approx(prediction.recorded_span, abs=1e-3) == 5.5
    slower = replay_history(record(2.0), Settings(timeout=1.0, max_retry=0))
    assert slower.predicted_span == pytest.approx(3.5, abs=1e-3), "two steps of one second, and what lay between"


def test_what_is_drawn_is_the_same_for_the_same_seed() -> None:
    one = batch(1, 0.0, 9.0, *[float(n) for n in range(1, 9)])
    for task in (5, 6, 7):
        del one.durations[task, 0, 1]
    found = [[played(past(one), seed=seed, runners=1)[0].predicted.seconds for seed in range(9)] for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0])) > 1
    assert played(past(one))[0].drawn == 3


def test_a_batch_that_never_ended_is_in_neither_sum(tmp_path: Path) -> None:
    """What the record lacks is no gain of the prediction."""
    make(str(tmp_path / "log.sqlite"), batches=4, tasks=12, seed=3, payloads=False, dead=True)
    done = cli("what-if", "all", "--json", "--log", tmp_path / "log.sqlite")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["batches"][-1]["recorded"]["seconds"] is None
    was, now = told["totals"]["recorded"], told["totals"]["predicted"]
    assert (was["finished"], was["failed"], was["dropped"]) == (now["finished"], now["failed"], now["dropped"])
    assert was["seconds"] == pytest.approx(now["seconds"], abs=0.02)
    assert was["span"] == pytest.approx(now["span"], abs=0.02)


def test_what_units_usually_take_on_top_is_computed_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sorts all of them: for each unit that the record lacks, a batch of 20,000 tasks took 14 s."""
    medians: list[float] = []
    monkeypatch.setattr(history, "median", lambda values: medians.append(0.0) or 0.0)
    batches = [batch(1, 0.0, 5.0, *[1.0] * 40), batch(2, 6.0, 9.0, *[1.0] * 40)]
    for one in batches:
        one.overheads = {(99, 0, 1): (0.5, 0.5)}
    played(past(*batches))
    assert len(medians) == 2 * len(batches)

"""Predictions for recorded batches under other settings, by a simulation.

`recorded_durations` reads all durations, and `simulation` replays them with the coordinator's own decisions. This
module compares the two, batch by batch. Random draws come from a seed, so a prediction can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_es.audit.whatif.history import History, Settings
from trinity_es.audit.whatif.recorded_durations import concurrent_groups, read_history
from trinity_es.audit.whatif.simulation import Simulation
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState
from trinity_es.projections.reading.log_reader import Log

__all__ = [
    "NOT_MODELLED", "Figures", "Forecast", "Prediction", "Settings", "predict", "recorded_settings", "replay_history",
]

NOT_MODELLED = (
    "engines: an attempt takes its recorded time however many run at the same time, so more places or runners on one "
    "GPU look better than they are",
    "rewards, learning and the trainer's time, which depend on the dropped tasks: a train step takes its recorded time",
    "how long runs that timed out or were cut off would have taken",
    "batches of a Scheduler, answers of mode `serve`, auxiliary models and outages of the database",
)
"""Limits of a prediction, one sentence each."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """Figures of one batch, recorded or predicted."""

    seconds: float | None = None
    """Time from submission to end; None if the batch is open."""
    finished: int = 0
    """Number of tasks whose runs all completed."""
    failed: int = 0
    dropped: int = 0
    attempts: int = 0
    """Number of units sent to runners."""


@dataclass(slots=True, kw_only=True)
class Forecast:
    """Recorded and predicted figures of one batch."""

    batch_id: BatchId
    batch_type: str
    tasks: int
    recorded: Figures
    predicted: Figures
    drawn: int
    """Number of attempts at runs without a recorded duration, for which one was drawn."""
    chosen: bool = True
    """True if the caller chose this batch, False if it ran at the same time as a chosen one."""


@dataclass(slots=True, kw_only=True)
class Prediction:
    settings: Settings
    recorded_settings: dict[str, Any]
    batches: list[Forecast]
    begun_at: float
    """Unix seconds of the first submission."""
    recorded_span: float
    """Seconds from the first submission to the last end, over batches that ended in the simulation too."""
    predicted_span: float
    left_out: list[BatchId] = field(default_factory=list)
    """Chosen batches of a Scheduler, which can't be simulated."""


def predict(
    log: Log, chosen: Sequence[BatchId] | None = None, settings: Settings | None = None, *, last: int | None = None
) -> Prediction:
    """Simulate these batches (None: all), or the `last` ones, and those open at the same time. Raises DataError.

    A long log is simulated in parts. Each begins when all earlier batches have ended.
    """
    rows, prediction = log.batches(), None
    if last is not None:
        chosen = [row.batch_id for row in rows if row.batch_type != "collect"][-last:]
    for group in concurrent_groups(rows, chosen):
        part = replay_history(read_history(log, rows, group), settings or Settings(), chosen)
        prediction = part if prediction is None else _join(prediction, part)
    assert prediction is not None
    selected = [r for r in rows if chosen is None or r.batch_id in chosen]
    prediction.left_out = [r.batch_id for r in selected if r.batch_type == "collect"]
    return prediction


def _join(first: Prediction, second: Prediction) -> Prediction:
    """Join the predictions of two consecutive parts. The recorded pause between them counts in both spans."""
    pause_seconds = second.begun_at - (first.begun_at + first.recorded_span)
    return replace(
        first, batches=first.batches + second.batches,
        recorded_span=first.recorded_span + pause_seconds + second.recorded_span,
        predicted_span=first.predicted_span + pause_seconds + second.predicted_span,
    )


def recorded_settings(past: History) -> dict[str, Any]:
    """Return the recorded values of the fields of `Settings`, without the seed."""
    explorer = past.config["explorer"]
    return {
        "timeout": explorer["max_timeout"], "over_rollout_ratio": explorer["over_rollout"]["ratio"],
        "runners": len({life.runner for life in past.lives}),
        "max_concurrency": max((life.places for life in past.lives), default=explorer["max_concurrency"]),
        "max_retry": explorer["max_retry_times"], "runs_per_unit": explorer["max_repeat_times_per_runner"],
    }


def replay_history(past: History, settings: Settings, chosen: Sequence[BatchId] | None = None) -> Prediction:
    """Simulate a history under these settings and compare each batch with its record. `chosen`: see `predict`."""
    replay = Simulation(past, settings)
    replay.run()
    rows = []
    for batch in past.batches:
        assert batch.state is not None
        seconds = None if batch.ended_at is None else batch.ended_at - batch.submitted_at
        end, begin = replay.reached_at.get(("end", batch.batch_id)), replay.reached_at.get(("submit", batch.batch_id))
        rows.append(Forecast(
            batch_id=batch.batch_id, batch_type=batch.submitted.batch_type, tasks=batch.state.expected_task_count,
            recorded=_figures(batch.state, seconds, batch.attempts),
            predicted=_figures(replay.states.get(batch.batch_id), None if end is None or begin is None else end - begin,
                               replay.attempts[batch.batch_id]),
            drawn=replay.drawn_counts[batch.batch_id], chosen=chosen is None or batch.batch_id in chosen,
        ))
    begun_at = past.batches[0].submitted_at
    ends = [(b.ended_at, replay.reached_at[key]) for b in past.batches
            if b.ended_at is not None and (key := ("end", b.batch_id)) in replay.reached_at]
    return Prediction(
        settings=settings, recorded_settings=recorded_settings(past), batches=rows, begun_at=begun_at,
        recorded_span=max((end for end, _ in ends), default=begun_at) - begun_at,
        predicted_span=max((end for _, end in ends), default=0.0),
    )


def _figures(state: BatchState | None, seconds: float | None, attempts: int) -> Figures:
    """Return the forecast of a batch: its seconds, attempts and task counts; empty if it was not submitted."""
    if state is None:
        return Figures()
    finished = sum(status.ok for status in state.statuses.values())
    return Figures(seconds=seconds, finished=finished, failed=len(state.statuses) - finished,
                   dropped=len(state.dropped), attempts=attempts)

"""What if: recorded batches played again under other settings, in virtual time, by the coordinator's own decisions.

`history` reads what everything took, `simulation` plays it again; here the two become a prediction, batch by batch.
Pure but for reading the log: chance is a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trinity_es.audit.whatif.history import History, episodes, read_past
from trinity_es.audit.whatif.simulation import Settings, Simulation
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState
from trinity_es.projections.reading.log_reader import Log

__all__ = ["NOT_MODELLED", "Figures", "Forecast", "Prediction", "Settings", "predict", "recorded_settings", "replayed"]

NOT_MODELLED = (
    "engines: an attempt takes what it took, however many run beside it, so more places or runners on one GPU look "
    "better than they are",
    "rewards, learning and the trainer's time, which change with what is dropped: a train step takes what it took",
    "longer runs of what timed out or was cut off: their ends were never seen",
    "batches of a Scheduler, answers of mode `serve`, auxiliary models and the time that a database is away",
)
"""What a prediction does not know, a sentence each."""


@dataclass(slots=True, kw_only=True)
class Figures:
    seconds: float | None = None
    """From its submission to its end; None: it has not ended."""
    finished: int = 0
    """Tasks of which every run completed."""
    failed: int = 0
    dropped: int = 0
    attempts: int = 0
    """Units that were given to runners."""


@dataclass(slots=True, kw_only=True)
class Forecast:
    """One batch: what is recorded, what is predicted."""

    batch_id: BatchId
    batch_type: str
    tasks: int
    recorded: Figures
    predicted: Figures
    drawn: int
    """Attempts at runs that the record does not have: what they take was drawn."""
    chosen: bool = True
    """It was asked for; false: it ran beside one that was."""


@dataclass(slots=True, kw_only=True)
class Prediction:
    settings: Settings
    was: dict[str, Any]
    """The same settings as they were recorded."""
    batches: list[Forecast]
    begun_at: float
    """The first submission, unix seconds."""
    recorded_span: float
    """Seconds from the first submission to the last end, of batches that ended in the record and in the replay."""
    predicted_span: float
    left_out: list[BatchId] = field(default_factory=list)


def predict(
    log: Log, chosen: Sequence[BatchId] | None = None, settings: Settings | None = None, *, last: int | None = None
) -> Prediction:
    """Play these batches again (None: all, or the `last`); those that ran beside them are played too. Raises DataError.

    A long log is played in parts, each of which begins when all that was submitted before has ended.
    """
    rows, whole = log.batches(), None
    if last is not None:
        chosen = [row.batch_id for row in rows if row.batch_type != "collect"][-last:]
    for group in episodes(rows, chosen):
        part = replayed(read_past(log, rows, group), settings or Settings(), chosen)
        whole = part if whole is None else _joined(whole, part)
    assert whole is not None
    asked = [r for r in rows if chosen is None or r.batch_id in chosen]
    whole.left_out = [r.batch_id for r in asked if r.batch_type == "collect"]
    return whole


def _joined(first: Prediction, second: Prediction) -> Prediction:
    """Join two predictions, one after the other, with the pause between them that there was."""
    pause = second.begun_at - (first.begun_at + first.recorded_span)
    return replace(
        first, batches=first.batches + second.batches, recorded_span=first.recorded_span + pause + second.recorded_span,
        predicted_span=first.predicted_span + pause + second.predicted_span,
    )


def recorded_settings(past: History) -> dict[str, Any]:
    explorer = past.config["explorer"]
    return {
        "timeout": explorer["max_timeout"], "over_rollout_ratio": explorer["over_rollout"]["ratio"],
        "runners": len({life.runner for life in past.lives}),
        "max_concurrency": max((life.places for life in past.lives), default=explorer["max_concurrency"]),
        "max_retry": explorer["max_retry_times"], "runs_per_unit": explorer["max_repeat_times_per_runner"],
    }


def replayed(past: History, settings: Settings, chosen: Sequence[BatchId] | None = None) -> Prediction:
    replay = Simulation(past, settings)
    replay.run()
    rows = []
    for batch in past.batches:
        assert batch.state is not None
        seconds = None if batch.ended_at is None else batch.ended_at - batch.submitted_at
        end, begin = replay.at.get(("end", batch.batch_id)), replay.at.get(("submit", batch.batch_id))
        rows.append(Forecast(
            batch_id=batch.batch_id, batch_type=batch.submitted.batch_type, tasks=batch.state.expected_task_count,
            recorded=_figures(batch.state, seconds, batch.attempts),
            predicted=_figures(replay.states.get(batch.batch_id), None if end is None or begin is None else end - begin,
                               replay.attempts.get(batch.batch_id, 0)),
            drawn=replay.drawn.get(batch.batch_id, 0), chosen=chosen is None or batch.batch_id in chosen,
        ))
    first = past.batches[0].submitted_at
    both = [(b.ended_at, replay.at[key]) for b in past.batches
            if b.ended_at is not None and (key := ("end", b.batch_id)) in replay.at]
    return Prediction(
        settings=settings, was=recorded_settings(past), batches=rows, begun_at=first,
        recorded_span=max((end for end, _ in both), default=first) - first,
        predicted_span=max((end for _, end in both), default=0.0),
    )


def _figures(state: BatchState | None, seconds: float | None, attempts: int) -> Figures:
    if state is None:
        return Figures()
    finished = sum(status.ok for status in state.statuses.values())
    return Figures(seconds=seconds, finished=finished, failed=len(state.statuses) - finished,
                   dropped=len(state.dropped), attempts=attempts)

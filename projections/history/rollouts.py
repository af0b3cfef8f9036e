"""The runs of one batch, one by one: what each was worth, who made it, and where its experiences lie.

A fold of the batch's events, for the rollout browser and everything else that goes from a batch to single rollouts.
Pure: payloads are named, not read. A run that failed for good is in it too, without experiences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId

__all__ = ["Rollouts", "RunRow", "Sort", "chosen", "fold_rollouts"]

Sort = Literal["reward", "tokens", "seconds", "task", "position"]


@dataclass(slots=True, kw_only=True)
class RunRow:
    """One run of a task, as its last attempt left it."""

    batch_id: BatchId
    task: int
    run: int
    outcome: str
    """`finished`, or the kind of the failure after which it was given up."""
    message: str = ""
    """Of that failure."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    experiences: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    run_id_base: int
    """First run of the unit that it was dispatched in."""
    attempt: int
    runner: str
    incarnation: int
    dispatched_version: int | None = None
    """Weights version that the runner had when it got the unit."""
    model_version: int | None = None
    """The oldest version that made any of the unit's tokens."""
    model_version_end: int | None = None
    """The newest."""
    seconds: float = 0.0
    """Of the unit, as the runner measured it."""
    dispatched_at: float | None = None
    """Unix seconds, as `finished_at`."""
    finished_at: float
    dispatch_position: int | None = None
    finish_position: int
    payload: ev.PayloadRef | None = None
    """This run's experiences (or the unit's, where it is not known how many each run has); None for evals and failures,
    whose experiences are not kept."""
    dropped_by: list[str] = field(default_factory=list)
    """Operators of the pipeline that took one of its experiences out."""


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """One batch since it was last submitted, run by run."""

    batch_id: BatchId
    batch_type: str
    runs: list[int]
    """How many runs each of its tasks has."""
    first_position: int
    state: str = "running"
    rows: list[RunRow] = field(default_factory=list)
    """In the order in which they ended."""
    delivered: list[ev.PayloadRef] = field(default_factory=list)
    """What the pipeline delivered."""
    finalized_position: int | None = None
    trained_step: int | None = None
    dispatches: dict[tuple[int, int, int], tuple[int, float, int]] = field(default_factory=dict)
    """(task, first run, attempt) -> (position, unix seconds, weights version) of its dispatch."""

    def row(self, task: int, run: int) -> RunRow | None:
        """Return this run; None where it has not ended."""
        return next((r for r in reversed(self.rows) if (r.task, r.run) == (task, run)), None)


def fold_rollouts(recorded: Iterable[Recorded], found: Rollouts | None = None) -> Rollouts:
    """Return the runs of a batch from all its events, or from what was found so far (it is changed) and the later ones.

    Raises BatchNotFound when there are none.
    """
    for item in recorded:
        event = item.event
        if isinstance(event, ev.BatchSubmitted):
            found = Rollouts(batch_id=event.batch_id, batch_type=event.batch_type,
                             runs=list(event.repeat_times), first_position=item.position)
        elif found is not None:
            _fold_one(found, item, event)
    if found is None:
        raise BatchNotFound("the batch has no events")
    return found


def _fold_one(found: Rollouts, item: Recorded, event: ev.Event) -> None:
    match event:
        case ev.TasksAdded():
            found.runs += event.repeat_times
        case ev.TasksDispatched():
            for unit in event.units:
                key = (unit.task, unit.run_id_base, unit.attempt)
                found.dispatches[key] = (item.position, item.recorded_at, event.model_version)
        case ev.RunsFinished():  # TaskFinished is one
            found.rows += _finished(found, item, event)
        case ev.AttemptFailed() if not event.retry:
            position, at, version = found.dispatches.get(
                (event.task, event.run_id_base, event.attempt), (None, None, None))
            found.rows += [
                RunRow(
                    batch_id=found.batch_id, task=event.task, run=run, outcome=event.kind, message=event.message,
                    run_id_base=event.run_id_base, attempt=event.attempt, runner=event.runner,
                    incarnation=event.incarnation, dispatched_version=version, seconds=event.seconds,
                    dispatched_at=at, finished_at=item.recorded_at, dispatch_position=position,
                    finish_position=item.position,
                )
                for run in event.failed_runs
            ]
        case ev.TaskReopened():
            found.rows = [row for row in found.rows if row.task != event.task]
        case ev.BatchFinalized():
            found.state, found.finalized_position = "finalized", item.position
            found.delivered = list(event.experiences)
            _note_dropped(found, event)
        case ev.BatchAborted():
            found.state = "aborted"
        case ev.BatchTrained():
            found.trained_step = event.step


def _finished(found: Rollouts, item: Recorded, event: ev.RunsFinished) -> list[RunRow]:
    position, at, version = found.dispatches.get((event.task, event.run_id_base, event.attempt), (None, None, None))
    rows, first = [], 0 if event.payload is None else event.payload.first
    apart = event.payload is not None and sum(r.experiences for r in event.runs) == event.payload.count
    for result in event.runs:
        payload = event.payload
        if event.payload is not None and apart:
            payload = ev.PayloadRef(digest=event.payload.digest, first=first, count=result.experiences)
            first += result.experiences
        rows.append(RunRow(
            batch_id=found.batch_id, task=event.task, run=result.run, outcome="finished",
            reward=result.metrics.get("reward"), metrics=result.metrics, experiences=result.experiences,
            prompt_tokens=result.prompt_tokens, response_tokens=result.response_tokens, run_id_base=event.run_id_base,
            attempt=event.attempt, runner=event.runner, incarnation=event.incarnation, dispatched_version=version,
            model_version=event.model_version, model_version_end=event.model_version_end, seconds=event.seconds,
            dispatched_at=at, finished_at=item.recorded_at, dispatch_position=position, finish_position=item.position,
            payload=payload,
        ))
    return rows


def _note_dropped(found: Rollouts, event: ev.BatchFinalized) -> None:
    """Note which experiences were dropped. Ids are `batch/task/run/step/suffix`; a batch's may hold slashes itself."""
    by_run: dict[tuple[str, str], list[str]] = {}
    for operator, uids in event.dropped_by.items():
        for uid in uids:
            parts = uid.rsplit("/", 4)
            if len(parts) == 5:
                by_run.setdefault((parts[1], parts[2]), []).append(operator)
    for row in found.rows:
        row.dropped_by = list(dict.fromkeys(by_run.get((str(row.task), str(row.run)), ())))


def chosen(
    rows: Iterable[RunRow], *, sort: Sort = "reward", descending: bool = True, task: int | None = None,
    outcome: str | None = None,
) -> Sequence[RunRow]:
    """Return the runs of one task or outcome, or all, sorted; what has no value to sort by comes last either way."""
    kept = [r for r in rows if task in (None, r.task) and outcome in (None, r.outcome)]

    def value(row: RunRow) -> float | None:
        match sort:
            case "reward":
                return row.reward
            case "tokens":
                return row.response_tokens
            case "seconds":
                return row.seconds
            case "position":
                return row.finish_position
        return row.task * 1e6 + row.run

    known = sorted((r for r in kept if value(r) is not None), key=lambda r: value(r) or 0.0, reverse=descending)
    return [*known, *(r for r in kept if value(r) is None)]

"""Timeline of one batch: the attempts of each task, the runs, and the events of the batch as a whole.

All views of a batch are made from this pure fold of its events. Times are the `recorded_at` of events, in unix seconds.
Payloads are referenced and not read.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypeVar

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState, evolve
from trinity_es.projections.event_texts import counted, missing_text

__all__ = [
    "Attempt", "BatchTimeline", "RunRow", "Sort", "TaskTimeline", "as_json", "evolve_timeline", "fold_timeline",
    "select_runs", "sort_known_first",
]

T = TypeVar("T")

Sort = Literal["reward", "tokens", "seconds", "task", "position"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    run_id_base: int
    runs: int
    attempt: int
    runner: str
    incarnation: int
    model_version: int
    """Weights version at dispatch or, after runs finished, the newest version that made any of their tokens."""
    dispatched_at: float
    ended_at: float | None = None
    outcome: str = "running"
    """`running`, `finished`, `dropped`, or the kind of the failure."""
    message: str = ""
    completed_runs: int = 0
    seconds: float | None = None
    """Duration that the runner measured."""
    dispatched_version: int
    dispatch_position: int
    kept: ev.AttemptKept | None = None
    """Kept progress of lost attempts, from which this attempt continued."""
    played_until: float | None = None
    """Unix seconds of its last journal record, if the attempt was lost and its progress was kept."""


@dataclass(slots=True, kw_only=True)
class TaskTimeline:
    task: int
    runs: int
    state: str = "pending"
    """`pending` (unfinished runs wait for a runner), `running`, `finished`, `failed` or `dropped`."""
    attempts: list[Attempt] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    response_tokens: int = 0
    version: int | None = None
    """Newest weights version that made any of its tokens."""
    ended_at: float | None = None
    reason: str = ""
    """Why the task was dropped, or the text of its last failure."""

    @property
    def reward(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(slots=True, kw_only=True)
class RunRow:
    """One run of a task, with the outcome of its last attempt."""

    batch_id: BatchId
    task: int
    run: int
    outcome: str
    """`finished`, or the kind of the last failure."""
    message: str = ""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    experiences: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    run_id_base: int
    attempt: int
    runner: str
    incarnation: int
    dispatched_version: int | None = None
    """Weights version that the runner had when it got the unit."""
    model_version: int | None = None
    """Oldest version that made any of the unit's tokens."""
    model_version_end: int | None = None
    """Newest version that made any of the unit's tokens."""
    seconds: float = 0.0
    """Duration of the unit, as measured by the runner."""
    dispatched_at: float | None = None
    finished_at: float
    dispatch_position: int | None = None
    finish_position: int
    unit_payload: ev.PayloadRef | None = None
    payload: ev.PayloadRef | None = None
    """This run's experiences, or the whole unit's if the counts of its runs don't add up to the payload's. None for
    evals and failed runs, whose experiences are not kept."""
    dropped_by: list[str] = field(default_factory=list)
    """Pipeline operators that dropped any of its experiences."""
    kept: ev.AttemptKept | None = None
    """Kept progress of lost attempts, from which the attempt continued."""


@dataclass(slots=True, kw_only=True)
class BatchTimeline:
    """Tasks, runs and events of one batch since its last submission."""

    state: BatchState
    submitted_at: float
    first_position: int
    earlier_submissions: int = 0
    """Number of earlier submissions with the same id."""
    last_position: int = 0
    last_at: float = 0.0
    ended_at: float | None = None
    finalizing_at: float | None = None
    """Time at which finalizing last began."""
    finalized_position: int | None = None
    tasks: list[TaskTimeline] = field(default_factory=list)
    added_at: dict[int, float] = field(default_factory=dict)
    """Task that was added after the submission -> time of the addition."""
    rows: list[RunRow] = field(default_factory=list)
    turns: list[tuple[float, str]] = field(default_factory=list)
    """(time, text) of each event of the batch as a whole."""

    @property
    def batch_id(self) -> BatchId:
        return self.state.batch_id

    @property
    def versions(self) -> dict[int, int]:
        """Newest weights version that made any of a task's tokens -> number of such tasks."""
        return dict(Counter(t.version for t in self.tasks if t.version is not None))

    @property
    def counts(self) -> dict[str, int]:
        return {name: sum(t.state == name for t in self.tasks)
                for name in ("finished", "failed", "dropped", "running", "pending")}

    def row(self, task: int, run: int) -> RunRow | None:
        """Return the last row of this run, or None while the run is open."""
        return next((r for r in reversed(self.rows) if (r.task, r.run) == (task, run)), None)


def fold_timeline(recorded: Iterable[Recorded], timeline: BatchTimeline | None = None) -> BatchTimeline:
    """Fold a batch's events into a new timeline, or into `timeline` in place. Raises BatchNotFound without events."""
    for item in recorded:
        timeline = evolve_timeline(timeline, item)
    if timeline is None:
        raise BatchNotFound("the batch has no events")
    return timeline


def evolve_timeline(timeline: BatchTimeline | None, item: Recorded) -> BatchTimeline:
    """Fold one event of a batch into its timeline, in place, and return it. A submission makes a new timeline."""
    event = item.event
    state = evolve(None if timeline is None else timeline.state, event)
    if isinstance(event, ev.BatchSubmitted):
        timeline = BatchTimeline(
            state=state, submitted_at=item.recorded_at, first_position=item.position,
            earlier_submissions=0 if timeline is None else timeline.earlier_submissions + 1,
            tasks=[TaskTimeline(task=i, runs=n) for i, n in enumerate(event.repeat_times)],
        )
    assert timeline is not None  # evolve raises for any other first event
    timeline.state, timeline.last_position, timeline.last_at = state, item.position, item.recorded_at
    _apply_event(timeline, item, event)
    return timeline


def _apply_event(timeline: BatchTimeline, item: Recorded, event: ev.Event) -> None:
    """Update tasks, rows and turns of a timeline by an event. Its `state` already includes the event."""
    at = item.recorded_at
    text = ""
    match event:
        case ev.BatchSubmitted():
            earlier = timeline.earlier_submissions
            text = f"submitted again: try {earlier + 1}" if earlier else "submitted"
        case ev.TasksAdded():
            first = len(timeline.tasks)
            timeline.tasks += [TaskTimeline(task=i, runs=n) for i, n in enumerate(event.repeat_times, first)]
            timeline.added_at |= dict.fromkeys(range(first, len(timeline.tasks)), at)
            text = f"{counted(len(event.repeat_times), 'task')} added"
        case ev.ResultsTaken():
            text = f"results of {counted(len(event.tasks), 'task')} taken"
        case ev.BatchPaused():
            text = f"paused: {event.reason}"
        case ev.BatchResumed():
            text = "resumed"
        case ev.TasksDispatched():
            for unit in event.units:
                task = timeline.tasks[unit.task]
                task.state = "running"
                task.attempts.append(Attempt(
                    run_id_base=unit.run_id_base, runs=unit.runs, attempt=unit.attempt, runner=event.runner,
                    incarnation=event.incarnation, model_version=event.model_version, dispatched_at=at,
                    dispatched_version=event.model_version, dispatch_position=item.position,
                    kept=timeline.state.flights[unit.task, unit.run_id_base].kept,
                ))
        case ev.RunsFinished():  # or its subclass TaskFinished
            _apply_finished(timeline, item, event)
        case ev.AttemptFailed():
            _apply_failed(timeline, item, event)
        case ev.AttemptKept():
            if (attempt := _find_attempt(timeline.tasks[event.task], event)) is not None:
                earlier_seconds = 0.0 if attempt.kept is None else attempt.kept.seconds
                attempt.played_until = attempt.dispatched_at + event.seconds - earlier_seconds
        case ev.TaskDropped():
            for number in event.tasks:
                task = timeline.tasks[number]
                task.state, task.ended_at, task.reason = "dropped", at, event.reason
                for attempt in task.attempts:
                    if attempt.outcome == "running":
                        attempt.ended_at, attempt.outcome, attempt.message = at, "dropped", event.reason
            text = f"{counted(len(event.tasks), 'task')} dropped: {event.reason}"
        case ev.TaskReopened():
            task = timeline.tasks[event.task]
            task.state, task.ended_at, task.reason = "pending", None, f"run again: {event.reason}"
            task.rewards, task.response_tokens, task.version = [], 0, None
            timeline.rows = [row for row in timeline.rows if row.task != event.task]
            text = f"task {event.task} is run again: {event.reason}"
        case ev.StallDetected():
            text = f"stalled since {at - event.since:.1f} s: waits for {event.waiting_on}"
        case ev.RecoveryDecided():
            text = f"recovery, {event.decision}: {event.reason}"
        case ev.BatchFinalizing():
            timeline.finalizing_at = at
            text = "finalizing"
        case ev.FinalizeFailed():
            text = f"finalize failed: {event.error}"
        case ev.GroupsMissing():
            text = f"not finalized: {missing_text(event)}"
        case ev.BatchFinalized():
            timeline.ended_at, timeline.finalized_position = at, item.position
            _mark_dropped(timeline, event)
            text = f"finalized: {event.selected} experiences delivered, {event.dropped} filtered out"
        case ev.BatchAborted():
            timeline.ended_at = at
            text = f"aborted: {event.reason}"
        case ev.BatchTrained():
            text = f"trained in step {event.step}"
    if text:
        timeline.turns.append((at, text))


def _apply_finished(timeline: BatchTimeline, item: Recorded, event: ev.RunsFinished) -> None:
    task = timeline.tasks[event.task]
    task.rewards += [r.metrics["reward"] for r in event.runs if "reward" in r.metrics]
    task.response_tokens += event.response_tokens
    attempt = _find_attempt(task, event)
    if attempt is not None:
        attempt.ended_at, attempt.seconds, attempt.model_version = (
            item.recorded_at, event.seconds, event.model_version_end)
        attempt.completed_runs += len(event.runs)
        if attempt.completed_runs == attempt.runs:
            attempt.outcome = "finished"
    newest_version = event.model_version_end  # units of a task may finish in any order
    task.version = newest_version if task.version is None else max(newest_version, task.version)
    unit_payload = event.payload
    first = 0 if unit_payload is None else unit_payload.first
    counts_match = unit_payload is not None and sum(r.experiences for r in event.runs) == unit_payload.count
    fields = _unit_fields(timeline, item, event, attempt)
    for result in event.runs:
        payload = unit_payload
        if unit_payload is not None and counts_match:
            payload = ev.PayloadRef(digest=unit_payload.digest, first=first, count=result.experiences)
            first += result.experiences
        timeline.rows.append(RunRow(
            run=result.run, outcome="finished", reward=result.metrics.get("reward"), metrics=result.metrics,
            experiences=result.experiences, prompt_tokens=result.prompt_tokens,
            response_tokens=result.response_tokens, model_version=event.model_version,
            model_version_end=event.model_version_end, unit_payload=event.payload, payload=payload, **fields,
        ))
    if isinstance(event, ev.TaskFinished):
        task.state, task.ended_at, task.reason = "finished", item.recorded_at, ""
    else:
        _update_unfinished(timeline, task, item.recorded_at)


def _apply_failed(timeline: BatchTimeline, item: Recorded, event: ev.AttemptFailed) -> None:
    """Update attempt and task after runs failed. If the runs failed for good, add their rows."""
    task = timeline.tasks[event.task]
    attempt = _find_attempt(task, event)
    if attempt is not None:
        attempt.ended_at, attempt.outcome, attempt.message = item.recorded_at, event.kind, event.message
        attempt.seconds = event.seconds or None
    task.reason = f"{event.kind}: {event.message}"
    if not event.retry:
        fields = _unit_fields(timeline, item, event, attempt)
        timeline.rows += [RunRow(run=run, outcome=event.kind, message=event.message, **fields)
                          for run in event.failed_runs]
    _update_unfinished(timeline, task, item.recorded_at)


def _update_unfinished(timeline: BatchTimeline, task: TaskTimeline, at: float) -> None:
    """Update the state of a task after runs ended: failed if it is settled, pending if no attempt is running."""
    if timeline.state.tasks[task.task].settled:
        task.state, task.ended_at = "failed", at
    elif not any(a.outcome == "running" for a in task.attempts):
        task.state = "pending"


def _unit_fields(
    timeline: BatchTimeline, item: Recorded, event: ev.RunsFinished | ev.AttemptFailed, attempt: Attempt | None
) -> dict[str, Any]:
    """Return the fields of RunRow that are the same for all runs of an event."""
    fields: dict[str, Any] = {
        "batch_id": timeline.state.batch_id, "task": event.task, "run_id_base": event.run_id_base,
        "attempt": event.attempt, "runner": event.runner, "incarnation": event.incarnation, "seconds": event.seconds,
        "finished_at": item.recorded_at, "finish_position": item.position,
    }
    if attempt is not None:
        fields |= {"dispatched_version": attempt.dispatched_version, "dispatched_at": attempt.dispatched_at,
                   "dispatch_position": attempt.dispatch_position, "kept": attempt.kept}
    return fields


def _find_attempt(task: TaskTimeline, event: ev.RunsFinished | ev.AttemptFailed | ev.AttemptKept) -> Attempt | None:
    """Return the task's attempt that the event names, or None if it was not dispatched since the submission."""
    key = attrgetter("run_id_base", "attempt", "runner", "incarnation")
    return next((attempt for attempt in reversed(task.attempts) if key(attempt) == key(event)), None)


def _mark_dropped(timeline: BatchTimeline, event: ev.BatchFinalized) -> None:
    """Set `dropped_by` of each row. In the ids `batch/task/run/step/suffix` the batch may contain slashes."""
    operators_by_run: dict[tuple[str, str], list[str]] = {}
    for operator, uids in event.dropped_by.items():
        for uid in uids:
            parts = uid.rsplit("/", 4)
            if len(parts) == 5:
                operators_by_run.setdefault((parts[1], parts[2]), []).append(operator)
    for row in timeline.rows:
        row.dropped_by = list(dict.fromkeys(operators_by_run.get((str(row.task), str(row.run)), ())))


def as_json(timeline: BatchTimeline) -> dict[str, Any]:
    """Return a timeline as plain JSON, without rows and without position and weights version of dispatches."""
    def shown_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if name not in ("dispatched_version", "dispatch_position")}

    state = timeline.state
    return {
        "batch_id": state.batch_id, "batch_type": state.batch_type, "state": state.state.value,
        "expected_task_count": state.expected_task_count, "completed_task_count": state.completed_task_count,
        "min_wait_num": state.min_wait_num, "failed_attempts": state.failed_attempts,
        "trained_step": state.trained_step, "submitted_at": timeline.submitted_at, "ended_at": timeline.ended_at,
        "first_position": timeline.first_position, "last_position": timeline.last_position,
        "versions": {str(k): v for k, v in sorted(timeline.versions.items())},
        "result": copy.deepcopy(state.final_result),
        "turns": [{"at": at, "what": what} for at, what in timeline.turns],
        "tasks": [asdict(task, dict_factory=shown_fields) | {"reward": task.reward} for task in timeline.tasks],
    }


def select_runs(
    rows: Iterable[RunRow], *, sort: Sort = "reward", descending: bool = True, task: int | None = None,
    outcome: str | None = None,
) -> Sequence[RunRow]:
    """Filter runs by task and outcome, and sort them. Rows without a value come last in both directions."""
    runs = [r for r in rows if task in (None, r.task) and outcome in (None, r.outcome)]
    column = {"tokens": "response_tokens", "position": "finish_position"}.get(sort, sort)
    value = attrgetter(column) if sort != "task" else lambda r: r.task * 1e6 + r.run  # task first, then run
    return sort_known_first(runs, value, descending)


def sort_known_first(rows: Iterable[T], value: Callable[[T], float | None], descending: bool) -> list[T]:
    """Return rows sorted by `value`. Rows for which it is None come last in both directions."""
    pairs = [(row, value(row)) for row in rows]
    valued = sorted(((row, v) for row, v in pairs if v is not None), key=lambda pair: pair[1], reverse=descending)
    return [*(row for row, _ in valued), *(row for row, v in pairs if v is None)]

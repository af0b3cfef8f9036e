"""The course of one batch: its attempts, task by task, its runs, one by one, and what happened when.

A fold of the batch's events, like its state; what is told of a batch to people is a view of it. Pure: times are those
that the log recorded, and payloads are named, not read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState, evolve

__all__ = [
    "Attempt", "BatchTimeline", "RunRow", "Sort", "TaskTimeline", "as_json", "chosen", "known_first", "tell",
    "tell_one",
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
    """The version that it was dispatched with; once it finished, the newest that made any of its tokens."""
    dispatched_at: float
    ended_at: float | None = None
    outcome: str = "running"
    """`running`, `finished`, `dropped`, or the kind of its failure."""
    message: str = ""
    completed_runs: int = 0
    seconds: float | None = None
    """As the runner measured it."""
    dispatched_version: int
    dispatch_position: int


@dataclass(slots=True, kw_only=True)
class TaskTimeline:
    task: int
    runs: int
    state: str = "pending"
    """`pending`: what is left of it waits for a runner; `running`, `finished`, `failed`, `dropped`."""
    attempts: list[Attempt] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    response_tokens: int = 0
    version: int | None = None
    """The newest weights that made any of its tokens."""
    ended_at: float | None = None
    reason: str = ""
    """Why it was dropped, or what its last failure said."""

    @property
    def reward(self) -> float | None:
        """The mean of its runs' rewards."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


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
    unit_payload: ev.PayloadRef | None = None
    """All experiences of the unit."""
    payload: ev.PayloadRef | None = None
    """This run's experiences (or the unit's, where it is not known how many each run has); None for evals and failures,
    whose experiences are not kept."""
    dropped_by: list[str] = field(default_factory=list)
    """Operators of the pipeline that took one of its experiences out."""


@dataclass(slots=True, kw_only=True)
class BatchTimeline:
    state: BatchState
    submitted_at: float
    first_position: int
    earlier: int = 0
    """Submissions of this id before it, which ended, and were begun anew."""
    last_position: int = 0
    last_at: float = 0.0
    ended_at: float | None = None
    finalizing_at: float | None = None
    """When it began to be finalized, the last time."""
    finalized_position: int | None = None
    tasks: list[TaskTimeline] = field(default_factory=list)
    rows: list[RunRow] = field(default_factory=list)
    turns: list[tuple[float, str]] = field(default_factory=list)
    """What happened to the batch as a whole: (when, what)."""
    versions: dict[int, int] = field(default_factory=dict)
    """Weights version -> tasks of which it made the newest tokens."""

    @property
    def batch_id(self) -> BatchId:
        return self.state.batch_id

    @property
    def counts(self) -> dict[str, int]:
        return {name: sum(t.state == name for t in self.tasks)
                for name in ("finished", "failed", "dropped", "running", "pending")}

    def row(self, task: int, run: int) -> RunRow | None:
        return next((r for r in reversed(self.rows) if (r.task, r.run) == (task, run)), None)


def tell(recorded: Iterable[Recorded], story: BatchTimeline | None = None) -> BatchTimeline:
    """Return the story of a batch from all its events, or from the story so far (it is changed) and the later ones.

    Raises BatchNotFound when there are none.
    """
    for item in recorded:
        story = tell_one(story, item)
    if story is None:
        raise BatchNotFound("the batch has no events")
    return story


def tell_one(story: BatchTimeline | None, item: Recorded) -> BatchTimeline:
    """Return the story after one more event; it is changed."""
    event = item.event
    state = evolve(None if story is None else story.state, event)
    if isinstance(event, ev.BatchSubmitted):
        story = BatchTimeline(
            state=state, submitted_at=item.recorded_at, first_position=item.position,
            earlier=0 if story is None else story.earlier + 1,
            tasks=[TaskTimeline(task=i, runs=n) for i, n in enumerate(event.repeat_times)],
        )
    assert story is not None  # evolve refuses any other first event
    story.state, story.last_position, story.last_at = state, item.position, item.recorded_at
    _note(story, item, event)
    return story


def _note(story: BatchTimeline, item: Recorded, event: ev.Event) -> None:
    at = item.recorded_at
    what = ""
    match event:
        case ev.BatchSubmitted():
            what = f"submitted again: try {story.earlier + 1}" if story.earlier else "submitted"
        case ev.TasksAdded():
            story.tasks += [TaskTimeline(task=i, runs=n) for i, n in enumerate(event.repeat_times, len(story.tasks))]
            what = f"{len(event.repeat_times)} tasks added"
        case ev.ResultsTaken():
            what = f"results of {len(event.tasks)} tasks taken"
        case ev.BatchPaused():
            what = f"paused: {event.reason}"
        case ev.BatchResumed():
            what = "resumed"
        case ev.TasksDispatched():
            for unit in event.units:
                task = story.tasks[unit.task]
                task.state = "running"
                task.attempts.append(Attempt(
                    run_id_base=unit.run_id_base, runs=unit.runs, attempt=unit.attempt, runner=event.runner,
                    incarnation=event.incarnation, model_version=event.model_version, dispatched_at=at,
                    dispatched_version=event.model_version, dispatch_position=item.position,
                ))
        case ev.RunsFinished():  # TaskFinished is one
            _finished(story, item, event)
        case ev.AttemptFailed():
            _failed(story, item, event)
        case ev.TaskDropped():
            for number in event.tasks:
                task = story.tasks[number]
                task.state, task.ended_at, task.reason = "dropped", at, event.reason
                for attempt in task.attempts:
                    if attempt.outcome == "running":
                        attempt.ended_at, attempt.outcome, attempt.message = at, "dropped", event.reason
            what = f"{len(event.tasks)} tasks dropped: {event.reason}"
        case ev.TaskReopened():
            task = story.tasks[event.task]
            _forget_version(story, task)
            task.state, task.ended_at, task.reason = "pending", None, f"run again: {event.reason}"
            task.rewards, task.response_tokens = [], 0
            story.rows = [row for row in story.rows if row.task != event.task]
            what = f"task {event.task} is run again: {event.reason}"
        case ev.StallDetected():
            what = f"stalled since {at - event.since:.1f} s: waits for {event.waiting_on}"
        case ev.RecoveryDecided():
            what = f"recovery, {event.decision}: {event.reason}"
        case ev.BatchFinalizing():
            story.finalizing_at = at
            what = "finalizing"
        case ev.FinalizeFailed():
            what = f"finalize failed: {event.error}"
        case ev.BatchFinalized():
            story.ended_at, story.finalized_position = at, item.position
            _note_dropped(story, event)
            what = f"finalized: {event.selected} experiences delivered, {event.dropped} filtered out"
        case ev.BatchAborted():
            story.ended_at = at
            what = f"aborted: {event.reason}"
        case ev.BatchTrained():
            what = f"trained in step {event.step}"
    if what:
        story.turns.append((at, what))


def _finished(story: BatchTimeline, item: Recorded, event: ev.RunsFinished) -> None:
    task = story.tasks[event.task]
    task.rewards += [r.metrics["reward"] for r in event.runs if "reward" in r.metrics]
    task.response_tokens += event.response_tokens
    attempt = _attempt(task, event)
    if attempt is not None:
        attempt.ended_at, attempt.seconds, attempt.model_version = (
            item.recorded_at, event.seconds, event.model_version_end)
        attempt.completed_runs += len(event.runs)
        if attempt.completed_runs == attempt.runs:
            attempt.outcome = "finished"
    _note_version(story, task, event.model_version_end)
    first = 0 if event.payload is None else event.payload.first
    apart = event.payload is not None and sum(r.experiences for r in event.runs) == event.payload.count
    of_unit = _of_unit(story, item, event, attempt)
    for result in event.runs:
        payload = event.payload
        if event.payload is not None and apart:
            payload = ev.PayloadRef(digest=event.payload.digest, first=first, count=result.experiences)
            first += result.experiences
        story.rows.append(RunRow(
            run=result.run, outcome="finished", reward=result.metrics.get("reward"), metrics=result.metrics,
            experiences=result.experiences, prompt_tokens=result.prompt_tokens,
            response_tokens=result.response_tokens, model_version=event.model_version,
            model_version_end=event.model_version_end, unit_payload=event.payload, payload=payload, **of_unit,
        ))
    if isinstance(event, ev.TaskFinished):
        task.state, task.ended_at, task.reason = "finished", item.recorded_at, ""
    else:
        _not_finished(story, task, item.recorded_at)


def _failed(story: BatchTimeline, item: Recorded, event: ev.AttemptFailed) -> None:
    task = story.tasks[event.task]
    attempt = _attempt(task, event)
    if attempt is not None:
        attempt.ended_at, attempt.outcome, attempt.message = item.recorded_at, event.kind, event.message
        attempt.seconds = event.seconds or None
    task.reason = f"{event.kind}: {event.message}"
    if not event.retry:
        of_unit = _of_unit(story, item, event, attempt)
        story.rows += [RunRow(run=run, outcome=event.kind, message=event.message, **of_unit)
                       for run in event.failed_runs]
    _not_finished(story, task, item.recorded_at)


def _not_finished(story: BatchTimeline, task: TaskTimeline, at: float) -> None:
    if story.state.tasks[task.task].settled:
        task.state, task.ended_at = "failed", at
    elif not any(a.outcome == "running" for a in task.attempts):
        task.state = "pending"


def _of_unit(
    story: BatchTimeline, item: Recorded, event: ev.RunsFinished | ev.AttemptFailed, attempt: Attempt | None
) -> dict[str, Any]:
    of = {
        "batch_id": story.state.batch_id, "task": event.task, "run_id_base": event.run_id_base,
        "attempt": event.attempt, "runner": event.runner, "incarnation": event.incarnation, "seconds": event.seconds,
        "finished_at": item.recorded_at, "finish_position": item.position,
    }
    if attempt is not None:
        of |= {"dispatched_version": attempt.dispatched_version, "dispatched_at": attempt.dispatched_at,
               "dispatch_position": attempt.dispatch_position}
    return of


def _note_version(story: BatchTimeline, task: TaskTimeline, version: int) -> None:
    """Note the weights of a unit: those of a task may end in any order, and not the last has the newest."""
    if task.version is not None:
        if version <= task.version:
            return
        _forget_version(story, task)
    task.version = version
    story.versions[version] = story.versions.get(version, 0) + 1


def _forget_version(story: BatchTimeline, task: TaskTimeline) -> None:
    if task.version is not None:
        story.versions[task.version] -= 1
        if story.versions[task.version] == 0:
            del story.versions[task.version]
    task.version = None


def _attempt(task: TaskTimeline, event: ev.RunsFinished | ev.AttemptFailed) -> Attempt | None:
    wanted = (event.run_id_base, event.attempt, event.runner, event.incarnation)
    for attempt in reversed(task.attempts):
        if (attempt.run_id_base, attempt.attempt, attempt.runner, attempt.incarnation) == wanted:
            return attempt
    return None


def _note_dropped(story: BatchTimeline, event: ev.BatchFinalized) -> None:
    """Note which experiences were dropped. Ids are `batch/task/run/step/suffix`; a batch's may hold slashes itself."""
    by_run: dict[tuple[str, str], list[str]] = {}
    for operator, uids in event.dropped_by.items():
        for uid in uids:
            parts = uid.rsplit("/", 4)
            if len(parts) == 5:
                by_run.setdefault((parts[1], parts[2]), []).append(operator)
    for row in story.rows:
        row.dropped_by = list(dict.fromkeys(by_run.get((str(row.task), str(row.run)), ())))


def as_json(story: BatchTimeline) -> dict[str, Any]:
    state = story.state
    return {
        "batch_id": state.batch_id, "batch_type": state.batch_type, "state": state.state.value,
        "expected_task_count": state.expected_task_count, "completed_task_count": state.completed_task_count,
        "min_wait_num": state.min_wait_num, "failed_attempts": state.failed_attempts,
        "trained_step": state.trained_step, "submitted_at": story.submitted_at, "ended_at": story.ended_at,
        "first_position": story.first_position, "last_position": story.last_position,
        "versions": {str(k): v for k, v in sorted(story.versions.items())}, "result": copy.deepcopy(state.final_result),
        "turns": [{"at": at, "what": what} for at, what in story.turns],
        "tasks": [asdict(task, dict_factory=_shown) | {"reward": task.reward} for task in story.tasks],
    }


def _shown(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name not in ("dispatched_version", "dispatch_position")}


def chosen(
    rows: Iterable[RunRow], *, sort: Sort = "reward", descending: bool = True, task: int | None = None,
    outcome: str | None = None,
) -> Sequence[RunRow]:
    """Return the runs of one task or outcome, or all, sorted; what has no value to sort by comes last either way."""
    kept = [r for r in rows if task in (None, r.task) and outcome in (None, r.outcome)]
    column = {"tokens": "response_tokens", "position": "finish_position"}.get(sort, sort)
    return known_first(kept, lambda r: r.task * 1e6 + r.run if sort == "task" else getattr(r, column), descending)


def known_first(rows: Iterable[T], value: Callable[[T], float | None], descending: bool) -> list[T]:
    """Return these sorted; what has no value comes last either way."""
    pairs = [(row, value(row)) for row in rows]
    known = sorted(((row, v) for row, v in pairs if v is not None), key=lambda pair: pair[1], reverse=descending)
    return [*(row for row, _ in known), *(row for row, v in pairs if v is None)]

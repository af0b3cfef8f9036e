"""The course of one batch, task by task: what was dispatched where and when, and what came of it.

A fold of the batch's events, like its state, for `trinity-es show`. Pure; times are those that the log recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.projections.batch import BatchState, evolve

__all__ = ["Attempt", "BatchTimeline", "TaskTimeline", "as_json", "tell"]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One unit on one runner."""

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


@dataclass(slots=True, kw_only=True)
class TaskTimeline:
    """One task: its attempts in the order of dispatch."""

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
class BatchTimeline:
    """One batch, since it was last submitted."""

    state: BatchState
    submitted_at: float
    first_position: int
    last_position: int = 0
    last_at: float = 0.0
    ended_at: float | None = None
    finalizing_at: float | None = None
    """When it began to be finalized, the last time."""
    tasks: list[TaskTimeline] = field(default_factory=list)
    turns: list[tuple[float, str]] = field(default_factory=list)
    """What happened to the batch as a whole: (when, what)."""
    versions: dict[int, int] = field(default_factory=dict)
    """Weights version -> tasks of which it made the newest tokens."""

    @property
    def counts(self) -> dict[str, int]:
        """Tasks by state."""
        return {name: sum(t.state == name for t in self.tasks)
                for name in ("finished", "failed", "dropped", "running", "pending")}


def tell(recorded: Iterable[Recorded], story: BatchTimeline | None = None) -> BatchTimeline:
    """Return the story of a batch from all its events, or from the story so far (it is changed) and the later ones.

    Raises BatchNotFound when there are none.
    """
    state: BatchState | None = None if story is None else story.state
    for item in recorded:
        event = item.event
        state = evolve(state, event)
        if isinstance(event, ev.BatchSubmitted):
            story = BatchTimeline(
                state=state, submitted_at=item.recorded_at, first_position=item.position,
                tasks=[TaskTimeline(task=i, runs=n) for i, n in enumerate(event.repeat_times)],
            )
        assert story is not None  # evolve refuses any other first event
        story.state, story.last_position, story.last_at = state, item.position, item.recorded_at
        _tell_one(story, item.recorded_at, event)
    if story is None:
        raise BatchNotFound("the batch has no events")
    return story


def _tell_one(story: BatchTimeline, at: float, event: ev.Event) -> None:
    match event:
        case ev.BatchSubmitted():
            story.turns.append((at, "submitted"))
        case ev.TasksAdded():
            first = len(story.tasks)
            story.tasks += [TaskTimeline(task=i, runs=n) for i, n in enumerate(event.repeat_times, first)]
            story.turns.append((at, f"{len(event.repeat_times)} tasks added"))
        case ev.ResultsTaken():
            story.turns.append((at, f"results of {len(event.tasks)} tasks taken"))
        case ev.BatchPaused():
            story.turns.append((at, f"paused: {event.reason}"))
        case ev.BatchResumed():
            story.turns.append((at, "resumed"))
        case ev.TasksDispatched():
            for unit in event.units:
                task = story.tasks[unit.task]
                task.state = "running"
                task.attempts.append(Attempt(
                    run_id_base=unit.run_id_base, runs=unit.runs, attempt=unit.attempt, runner=event.runner,
                    incarnation=event.incarnation, model_version=event.model_version, dispatched_at=at,
                ))
        case ev.RunsFinished():  # TaskFinished is one
            _finished(story, at, event)
        case ev.AttemptFailed():
            task = story.tasks[event.task]
            attempt = _attempt(task, event.run_id_base, event.attempt, event.runner, event.incarnation)
            if attempt is not None:
                attempt.ended_at, attempt.outcome, attempt.message = at, event.kind, event.message
                attempt.seconds = event.seconds or None
            task.reason = f"{event.kind}: {event.message}"
            if not event.retry and story.state.tasks[event.task].settled:
                task.state, task.ended_at = "failed", at
            elif not any(a.outcome == "running" for a in task.attempts):
                task.state = "pending"
        case ev.TaskDropped():
            for number in event.tasks:
                task = story.tasks[number]
                task.state, task.ended_at, task.reason = "dropped", at, event.reason
                for attempt in task.attempts:
                    if attempt.outcome == "running":
                        attempt.ended_at, attempt.outcome, attempt.message = at, "dropped", event.reason
            story.turns.append((at, f"{len(event.tasks)} tasks dropped: {event.reason}"))
        case ev.TaskReopened():
            task = story.tasks[event.task]
            _forget_version(story, task)
            task.state, task.ended_at, task.reason = "pending", None, f"run again: {event.reason}"
            task.rewards, task.response_tokens = [], 0
            story.turns.append((at, f"task {event.task} is run again: {event.reason}"))
        case ev.StallDetected():
            story.turns.append((at, f"stalled since {at - event.since:.1f} s: waits for {event.waiting_on}"))
        case ev.RecoveryDecided():
            story.turns.append((at, f"recovery, {event.decision}: {event.reason}"))
        case ev.BatchFinalizing():
            story.finalizing_at = at
            story.turns.append((at, "finalizing"))
        case ev.FinalizeFailed():
            story.turns.append((at, f"finalize failed: {event.error}"))
        case ev.BatchFinalized():
            story.turns.append((at, f"finalized: {event.selected} experiences delivered, {event.dropped} filtered out"))
            story.ended_at = at
        case ev.BatchAborted():
            story.turns.append((at, f"aborted: {event.reason}"))
            story.ended_at = at
        case ev.BatchTrained():
            story.turns.append((at, f"trained in step {event.step}"))


def _finished(story: BatchTimeline, at: float, event: ev.RunsFinished) -> None:
    task = story.tasks[event.task]
    task.rewards += [r.metrics["reward"] for r in event.runs if "reward" in r.metrics]
    task.response_tokens += event.response_tokens
    attempt = _attempt(task, event.run_id_base, event.attempt, event.runner, event.incarnation)
    if attempt is not None:
        attempt.ended_at, attempt.seconds, attempt.model_version = at, event.seconds, event.model_version_end
        attempt.completed_runs += len(event.runs)
        if attempt.completed_runs == attempt.runs:
            attempt.outcome = "finished"
    _note_version(story, task, event.model_version_end)
    if isinstance(event, ev.TaskFinished):
        task.state, task.ended_at, task.reason = "finished", at, ""
    elif story.state.tasks[event.task].settled:
        task.state, task.ended_at = "failed", at
    elif not any(a.outcome == "running" for a in task.attempts):
        task.state = "pending"


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


def _attempt(task: TaskTimeline, base: int, number: int, runner: str, incarnation: int) -> Attempt | None:
    for attempt in reversed(task.attempts):
        found = (attempt.run_id_base, attempt.attempt, attempt.runner, attempt.incarnation)
        if found == (base, number, runner, incarnation):
            return attempt
    return None


def as_json(story: BatchTimeline) -> dict[str, Any]:
    """Return the story as plain JSON, for `show --json`."""
    state = story.state
    return {
        "batch_id": state.batch_id, "batch_type": state.batch_type, "state": state.state.value,
        "expected_task_count": state.expected_task_count, "completed_task_count": state.completed_task_count,
        "min_wait_num": state.min_wait_num, "failed_attempts": state.failed_attempts,
        "trained_step": state.trained_step, "submitted_at": story.submitted_at, "ended_at": story.ended_at,
        "first_position": story.first_position, "last_position": story.last_position,
        "versions": {str(k): v for k, v in sorted(story.versions.items())},
        "result": copy.deepcopy(state.final_result),
        "turns": [{"at": at, "what": what} for at, what in story.turns],
        "tasks": [asdict(task) | {"reward": task.reward} for task in story.tasks],
    }

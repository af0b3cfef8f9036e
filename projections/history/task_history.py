"""Where one task's rollouts come from: what was asked, who played it when with which weights, what became of it.

A view of the batch's story, for `trinity-es show BATCH --task N`. Pure; the text of a rollout is in its payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, task_from_dict
from trinity_es.projections.history.attempts import BatchTimeline, RunRow, tell_one

__all__ = ["TaskEvent", "TaskHistory", "follow_task", "prompt_of"]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Something that happened to the task, or to its batch while it was under way."""

    at: float
    position: int
    what: str


@dataclass(slots=True, kw_only=True)
class TaskHistory:
    """One task of a batch, since the batch was last submitted."""

    batch_id: BatchId
    batch_type: str
    task: int
    runs: int
    state: str = "pending"
    """`pending`: what is left of it waits for a runner; `running`, `finished`, `failed`, `dropped`."""
    reason: str = ""
    submitted_at: float = 0.0
    turns: list[TaskEvent] = field(default_factory=list)
    made: dict[int, RunRow] = field(default_factory=dict)
    other_prompt_tokens: int = 0
    """Read for it beside those of `made`: see `RunsFinished`."""
    other_response_tokens: int = 0
    """Made for it beside those of `made`."""
    delivered: list[ev.PayloadRef] = field(default_factory=list)
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    """Operator of the pipeline -> the ids of this task's experiences that it took out."""
    trained_step: int | None = None


def follow_task(recorded: Iterable[Recorded], task: int) -> TaskHistory:
    """Return the course of a task from its batch's events. Raises BatchNotFound where the batch has no such task."""
    story: BatchTimeline | None = None
    course: TaskHistory | None = None
    for item in recorded:
        story = tell_one(story, item)
        if isinstance(item.event, ev.BatchSubmitted):
            course = None
        if course is not None:
            _note(course, story, item, item.event)
        elif task < len(story.tasks):
            course = TaskHistory(
                batch_id=story.batch_id, batch_type=story.state.batch_type, task=task, runs=story.tasks[task].runs,
                submitted_at=item.recorded_at, turns=[TaskEvent(item.recorded_at, item.position, "submitted")],
            )
    count = 0 if story is None else len(story.tasks)
    if story is None or course is None:
        raise BatchNotFound(f"there is no task {task}: the batch has tasks 0 to {count - 1}" if count
                            else f"there is no task {task}: the batch has none")
    course.made = {row.run: row for row in story.rows if row.task == task and row.outcome == "finished"}
    course.delivered, course.trained_step = story.state.experiences, story.state.trained_step
    return course


def _note(course: TaskHistory, story: BatchTimeline, item: Recorded, event: ev.Event) -> None:
    task, state = course.task, story.state
    open_before = course.state in ("pending", "running")
    course.state, course.reason = story.tasks[task].state, story.tasks[task].reason

    def turn(what: str) -> None:
        course.turns.append(TaskEvent(item.recorded_at, item.position, what))

    match event:
        case ev.TasksDispatched():
            for unit in event.units:
                if unit.task == task:
                    turn(f"attempt {unit.attempt}, {_runs(unit.run_id_base, unit.runs)}, sent to {event.runner} "
                         f"#{event.incarnation} with weights {event.model_version}")
        case ev.RunsFinished() if event.task == task:
            course.other_prompt_tokens += event.other_prompt_tokens
            course.other_response_tokens += event.other_response_tokens
            versions = _span(event.model_version, event.model_version_end)
            turn(f"{len(event.runs)} runs of attempt {event.attempt} finished on {event.runner} after "
                 f"{event.seconds:.2f} s, weights {versions}")
        case ev.AttemptFailed() if event.task == task:
            way = "attempted again" if event.retry else "given up"
            # Who had it may be gone, and nobody measured how long it took.
            after = f" after {event.seconds:.2f} s" if event.seconds else ""
            turn(f"attempt {event.attempt} failed on {event.runner} #{event.incarnation}{after}, {way}, {event.kind}: "
                 f"{event.message}")
        case ev.TaskDropped() if task in event.tasks:
            settled = f"{state.completed_task_count} of {state.expected_task_count} tasks had settled"
            kept = "; its finished runs are delivered" if task in event.kept else ""
            turn(f"dropped: {event.reason} ({settled}){kept}")
        case ev.TaskReopened() if event.task == task:
            turn(f"run again, what it had is set aside: {event.reason}")
        case ev.StallDetected() if open_before:
            turn(f"the batch stalled: waits for {event.waiting_on}")
        case ev.RecoveryDecided() if not event.units or any(u.task == task for u in event.units):
            turn(f"recovery, {event.decision}: {event.reason}")
        case ev.BatchFinalized():
            mine = f"{course.batch_id}/{task}/"
            course.dropped_by = {name: ids for name, uids in event.dropped_by.items()
                                 if (ids := [uid for uid in uids if uid.startswith(mine)])}
            turn(f"the batch was finalized: {event.selected} experiences delivered, {event.dropped} filtered out")
        case ev.BatchAborted():
            turn(f"the batch was aborted: {event.reason}")
        case ev.BatchTrained():
            turn(f"the batch was trained in step {event.step}")


def _runs(base: int, count: int) -> str:
    return f"run {base}" if count == 1 else f"runs {base}-{base + count - 1}"


def _span(oldest: int, newest: int) -> str:
    return str(oldest) if oldest == newest else f"{oldest} to {newest}"


def prompt_of(asked: dict[str, Any] | None) -> str | None:
    """Return the prompt of a task as it was handed in; None where it has none, or is not known."""
    try:
        prompt = task_from_dict(asked).task_desc if asked else None
    except (TypeError, AttributeError):  # of an older or newer release
        return None
    return prompt if prompt is None or isinstance(prompt, str) else orjson.dumps(prompt).decode()

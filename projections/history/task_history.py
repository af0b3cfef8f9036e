"""Where one task's rollouts come from: what was asked, who played it when with which weights, what became of it.

A fold of the batch's events, for `trinity-es show BATCH --task N`. Pure; the text of a rollout is in its payload.
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
from trinity_es.projections.batch import BatchState, evolve

__all__ = ["CompletedRun", "TaskEvent", "TaskHistory", "follow_task", "prompt_of"]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Something that happened to the task, or to its batch while it was under way."""

    at: float
    position: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRun:
    """One completed run."""

    run: int
    runner: str
    incarnation: int
    attempt: int
    oldest_version: int
    """The oldest weights that made any token of its attempt."""
    newest_version: int
    reward: float | None
    prompt_tokens: int
    response_tokens: int
    seconds: float
    at: float
    position: int
    """Of the event that says so."""
    payload: ev.PayloadRef | None


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
    """Why it was dropped or failed."""
    submitted_at: float = 0.0
    turns: list[TaskEvent] = field(default_factory=list)
    made: dict[int, CompletedRun] = field(default_factory=dict)
    """By run."""
    other_prompt_tokens: int = 0
    """Read for it beside those of `made`: see `RunsFinished`."""
    other_response_tokens: int = 0
    """Made for it beside those of `made`."""
    delivered: list[ev.PayloadRef] = field(default_factory=list)
    """What the batch delivered, of all its tasks."""
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    """Operator of the pipeline -> the ids of this task's experiences that it took out."""
    trained_step: int | None = None


def follow_task(recorded: Iterable[Recorded], task: int) -> TaskHistory:
    """Return the course of a task from its batch's events. Raises BatchNotFound where the batch has no such task."""
    state: BatchState | None = None
    course: TaskHistory | None = None
    count = 0
    for item in recorded:
        state = evolve(state, item.event)
        match item.event:
            case ev.BatchSubmitted() as event:
                course, count = None, len(event.repeat_times)
                if task < count:
                    course = _begun(state, item, task)
            case ev.TasksAdded() as event:
                first, count = count, count + len(event.repeat_times)
                if first <= task < count:
                    course = _begun(state, item, task)
            case event if course is not None:
                _note(course, state, item, event)
    if course is None:
        raise BatchNotFound(f"there is no task {task}: the batch has tasks 0 to {count - 1}" if count
                            else f"there is no task {task}: the batch has none")
    return course


def _begun(state: BatchState, item: Recorded, task: int) -> TaskHistory:
    course = TaskHistory(
        batch_id=state.batch_id, batch_type=state.batch_type, task=task, runs=state.tasks[task].total_runs,
        submitted_at=item.recorded_at,
    )
    course.turns.append(TaskEvent(item.recorded_at, item.position, "submitted"))
    return course


def _note(course: TaskHistory, state: BatchState, item: Recorded, event: ev.Event) -> None:
    task = course.task
    open_before = course.state in ("pending", "running")

    def turn(what: str) -> None:
        course.turns.append(TaskEvent(item.recorded_at, item.position, what))

    match event:
        case ev.TasksDispatched():
            for unit in event.units:
                if unit.task == task:
                    course.state = "running"
                    turn(f"attempt {unit.attempt}, {_runs(unit.run_id_base, unit.runs)}, sent to {event.runner} "
                         f"#{event.incarnation} with weights {event.model_version}")
        case ev.RunsFinished() if event.task == task:
            _finished(course, item, event)
            course.state = _with_runner(state, task)
            versions = _span(event.model_version, event.model_version_end)
            turn(f"{len(event.runs)} runs of attempt {event.attempt} finished on {event.runner} after "
                 f"{event.seconds:.2f} s, weights {versions}")
        case ev.AttemptFailed() if event.task == task:
            way = "attempted again" if event.retry else "given up"
            course.state = _with_runner(state, task)
            course.reason = f"{event.kind}: {event.message}"
            turn(f"attempt {event.attempt} failed on {event.runner} #{event.incarnation} after {event.seconds:.2f} s, "
                 f"{way}, {event.kind}: {event.message}")
        case ev.TaskDropped() if task in event.tasks:
            course.state, course.reason = "dropped", event.reason
            settled = f"{state.completed_task_count} of {state.expected_task_count} tasks had settled"
            kept = "; its finished runs are delivered" if task in event.kept else ""
            turn(f"dropped: {event.reason} ({settled}){kept}")
        case ev.TaskReopened() if event.task == task:
            course.state, course.reason = "pending", f"run again: {event.reason}"
            course.made.clear()
            turn(f"run again, what it had is set aside: {event.reason}")
        case ev.StallDetected() if open_before:
            turn(f"the batch stalled: waits for {event.waiting_on}")
        case ev.RecoveryDecided() if not event.units or any(u.task == task for u in event.units):
            turn(f"recovery, {event.decision}: {event.reason}")
        case ev.BatchFinalized():
            course.delivered = list(event.experiences)
            mine = f"{course.batch_id}/{task}/"
            course.dropped_by = {name: ids for name, uids in event.dropped_by.items()
                                 if (ids := [uid for uid in uids if uid.startswith(mine)])}
            turn(f"the batch was finalized: {event.selected} experiences delivered, {event.dropped} filtered out")
        case ev.BatchAborted():
            turn(f"the batch was aborted: {event.reason}")
        case ev.BatchTrained():
            course.trained_step = event.step
            turn(f"the batch was trained in step {event.step}")
    if task in state.statuses and open_before:
        course.state = "finished" if state.statuses[task].ok else "failed"
        course.reason = "" if course.state == "finished" else course.reason


def _finished(course: TaskHistory, item: Recorded, event: ev.RunsFinished) -> None:
    course.other_prompt_tokens += event.other_prompt_tokens
    course.other_response_tokens += event.other_response_tokens
    for run in event.runs:
        course.made[run.run] = CompletedRun(
            run=run.run, runner=event.runner, incarnation=event.incarnation, attempt=event.attempt,
            oldest_version=event.model_version, newest_version=event.model_version_end,
            reward=run.metrics.get("reward"), prompt_tokens=run.prompt_tokens, response_tokens=run.response_tokens,
            seconds=event.seconds, at=item.recorded_at, position=item.position, payload=event.payload,
        )


def _with_runner(state: BatchState, task: int) -> str:
    return "running" if any(number == task for number, _ in state.flights) else "pending"


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

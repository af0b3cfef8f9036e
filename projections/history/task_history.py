"""Fold of one task's history, for `trinity-es show BATCH --task N`: attempts, runners, weights, outcome. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, task_from_dict
from trinity_es.projections.event_texts import kept_text
from trinity_es.projections.history.attempts import Attempt, BatchTimeline, RunRow, evolve_timeline

__all__ = ["TaskEvent", "TaskHistory", "follow_task", "prompt_of"]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Event in the history of a task, described in words."""

    at: float
    position: int
    what: str


@dataclass(slots=True, kw_only=True)
class TaskHistory:
    """History of a task since its batch was last submitted."""

    batch_id: BatchId
    batch_type: str
    task: int
    runs: int
    state: str = "pending"
    """`pending` (unfinished runs wait for a runner), `running`, `finished`, `failed` or `dropped`."""
    reason: str = ""
    submitted_at: float = 0.0
    turns: list[TaskEvent] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    made: dict[int, RunRow] = field(default_factory=dict)
    """Run -> row of each finished run."""
    other_prompt_tokens: int = 0
    """Prompt tokens in addition to those of `made` (see `RunsFinished`)."""
    other_response_tokens: int = 0
    delivered: list[ev.PayloadRef] = field(default_factory=list)
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    """Pipeline operator -> ids of this task's experiences that it dropped."""
    trained_step: int | None = None


def follow_task(recorded: Iterable[Recorded], task: int) -> TaskHistory:
    """Fold a batch's events into the history of one task. Raises BatchNotFound if the batch lacks the task."""
    timeline: BatchTimeline | None = None
    history: TaskHistory | None = None
    for item in recorded:
        timeline = evolve_timeline(timeline, item)
        if isinstance(item.event, ev.BatchSubmitted):
            history = None
        if history is not None:
            _apply_event(history, timeline, item, item.event)
        elif task < len(timeline.tasks):
            submission = _submission_text(timeline.state.continues.get(task))
            history = TaskHistory(
                batch_id=timeline.batch_id, batch_type=timeline.state.batch_type, task=task,
                runs=timeline.tasks[task].runs, submitted_at=item.recorded_at,
                turns=[TaskEvent(item.recorded_at, item.position, submission)],
            )
    count = 0 if timeline is None else len(timeline.tasks)
    if timeline is None or history is None:
        raise BatchNotFound(f"there is no task {task}: the batch has tasks 0 to {count - 1}" if count
                            else f"there is no task {task}: the batch has none")
    history.made = {row.run: row for row in timeline.rows if row.task == task and row.outcome == "finished"}
    history.attempts = timeline.tasks[task].attempts
    history.delivered, history.trained_step = timeline.state.experiences, timeline.state.trained_step
    return history


def _submission_text(continued: ev.ContinuedTask | None) -> str:
    """Describe the submission of a task. `continued`: the cut task that it continues, if any."""
    if continued is None:
        return "submitted"
    times = "once" if continued.cuts == 1 else f"{continued.cuts} times"
    return (f"submitted; goes on with task {continued.cut_task} of batch {continued.batch_id}, cut {times} so far")


def _apply_event(history: TaskHistory, timeline: BatchTimeline, item: Recorded, event: ev.Event) -> None:
    """Add an event to the history if it concerns the task."""
    task, state = history.task, timeline.state
    open_before = history.state in ("pending", "running")
    history.state, history.reason = timeline.tasks[task].state, timeline.tasks[task].reason

    def add(text: str) -> None:
        history.turns.append(TaskEvent(item.recorded_at, item.position, text))

    match event:
        case ev.TasksDispatched():
            for unit in event.units:
                if unit.task == task:
                    last = unit.run_id_base + unit.runs - 1
                    runs = f"run {last}" if unit.runs == 1 else f"runs {unit.run_id_base}-{last}"
                    add(f"attempt {unit.attempt}, {runs}, sent to {event.runner} #{event.incarnation} with weights "
                        f"{event.model_version}")
        case ev.RunsFinished() if event.task == task:
            history.other_prompt_tokens += event.other_prompt_tokens
            history.other_response_tokens += event.other_response_tokens
            oldest, newest = event.model_version, event.model_version_end
            versions = str(oldest) if oldest == newest else f"{oldest} to {newest}"
            add(f"{len(event.runs)} runs of attempt {event.attempt} finished on {event.runner} after "
                f"{event.seconds:.2f} s, weights {versions}")
        case ev.AttemptFailed() if event.task == task:
            decision = "attempted again" if event.retry else "given up"
            # A lost runner measured no time.
            after = f" after {event.seconds:.2f} s" if event.seconds else ""
            add(f"attempt {event.attempt} failed on {event.runner} #{event.incarnation}{after}, {decision}, "
                f"{event.kind}: {event.message}")
        case ev.AttemptKept() if event.task == task:
            add(f"the next attempt goes on from {kept_text(event)}")
        case ev.TaskDropped() if task in event.tasks:
            settled = f"{state.completed_task_count} of {state.expected_task_count} tasks had settled"
            delivery = "; its finished runs are delivered" if task in event.kept else ""
            add(f"dropped: {event.reason} ({settled}){delivery}")
        case ev.TaskReopened() if event.task == task:
            add(f"run again, its earlier outcome is set aside: {event.reason}")
        case ev.StallDetected() if open_before:
            add(f"the batch stalled: waits for {event.waiting_on}")
        case ev.RecoveryDecided() if not event.units or any(u.task == task for u in event.units):
            add(f"recovery, {event.decision}: {event.reason}")
        case ev.BatchFinalized():
            prefix = f"{history.batch_id}/{task}/"
            history.dropped_by = {name: ids for name, uids in event.dropped_by.items()
                                 if (ids := [uid for uid in uids if uid.startswith(prefix)])}
            add(f"the batch was finalized: {event.selected} experiences delivered, {event.dropped} filtered out")
        case ev.BatchAborted():
            add(f"the batch was aborted: {event.reason}")
        case ev.BatchTrained():
            add(f"the batch was trained in step {event.step}")


def prompt_of(task: dict[str, Any] | None) -> str | None:
    """Return the prompt of a submitted task as text; None if there is none or the task can't be decoded."""
    try:
        prompt = task_from_dict(task).task_desc if task else None
    except (TypeError, AttributeError):  # recorded by an older or newer release
        return None
    return prompt if prompt is None or isinstance(prompt, str) else orjson.dumps(prompt).decode()

"""Breakdown of a batch's duration along the task that settled last. Pure.

A batch waits for its last task. So its duration consists of this task's waits for a runner, of this task's attempts,
and of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trinity_es.projections.history.attempts import Attempt, BatchTimeline, TaskTimeline

__all__ = ["Segment", "longest_segment", "seen_until", "segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    seconds: float
    what: str
    fault: bool
    """True if an attempt failed in this segment or the system was down."""


def segments(timeline: BatchTimeline, outages: Sequence[tuple[float, float]] = ()) -> list[Segment]:
    """Split the time of a batch from its submission to its end (or last event) into consecutive segments.

    `outages`: intervals without a coordinator, from `Log.without_coordinator`.
    """
    end = timeline.ended_at or timeline.last_at
    last_task = max((t for t in timeline.tasks if t.state != "dropped"),
                    key=lambda t: (t.ended_at or end, t.state == "running", len(t.attempts)), default=None)
    covered_until = timeline.submitted_at
    parts: list[Segment] = []

    def add_until(moment: float, text: str, fault: bool = False) -> None:
        nonlocal covered_until
        if moment > covered_until:
            parts.append(Segment(moment - covered_until, text, fault))
            covered_until = moment

    if last_task is not None:
        durations = [a.ended_at - a.dispatched_at for t in timeline.tasks for a in t.attempts
                     if a.outcome == "finished" and a.ended_at is not None]
        usual = median(durations) if len(durations) > 2 else None
        waiting_text = f"task {last_task.task} waited for a runner"
        if last_task.task in timeline.added_at:
            add_until(timeline.added_at[last_task.task], f"its earlier tasks, before task {last_task.task} was added")
        for attempt in last_task.attempts:
            add_until(attempt.dispatched_at, waiting_text)
            ended_at = attempt.ended_at or end
            seen_at = seen_until(attempt, end, outages)
            add_until(seen_at, _attempt_text(last_task, attempt, seen_at, usual), fault=_has_failed(attempt))
            add_until(ended_at, "nothing was recorded: in this time the whole system died, and was down", fault=True)
        if last_task.state == "pending":
            add_until(end, waiting_text)
    if timeline.finalizing_at is not None:
        dropped = any(t.state == "dropped" for t in timeline.tasks)
        wait = "enough tasks had settled, and it waited for others, or" if dropped else (
            "all tasks had settled, and it waited")
        add_until(timeline.finalizing_at, f"{wait} to be finalized")
    add_until(end, "nothing more happened to its tasks" if timeline.finalizing_at is None
          else "its pipeline and the commit")
    return parts


def longest_segment(timeline: BatchTimeline, outages: Sequence[tuple[float, float]] = ()) -> Segment | None:
    """Return the longest segment with a fault that takes at least a quarter of the time, else the longest segment."""
    parts = segments(timeline, outages)
    total = sum(p.seconds for p in parts)
    faults = [p for p in parts if p.fault and p.seconds >= total / 4]
    return max(faults or parts, key=lambda p: p.seconds, default=None)


def seen_until(attempt: Attempt, end: float, outages: Sequence[tuple[float, float]]) -> float:
    """Return when an attempt ended: `end` if it is running, the last sign of life if it was lost in an outage.

    The next coordinator records the loss of an attempt when it starts, so `attempt.ended_at` is then the outage's end.
    The last sign of life is the log's last event before the outage, or a later record in the attempt's journal.
    """
    if attempt.outcome == "runner_lost":
        for outage_start, outage_end in outages:
            if outage_end == attempt.ended_at:
                return min(max(outage_start, attempt.played_until or 0.0), outage_end)
    return attempt.ended_at or end


def _has_failed(attempt: Attempt) -> bool:
    return attempt.outcome not in ("finished", "running", "dropped")


def _attempt_text(task: TaskTimeline, attempt: Attempt, ended_at: float, usual_seconds: float | None) -> str:
    text = f"task {task.task} attempt {attempt.attempt} on {attempt.runner} #{attempt.incarnation}"
    if _has_failed(attempt):
        return f"{text} failed, {attempt.outcome}: {attempt.message}"
    seconds = ended_at - attempt.dispatched_at
    if usual_seconds is not None and seconds > 2 * usual_seconds:
        return f"{text} took {seconds / max(usual_seconds, 1e-9):.1f} times the usual {usual_seconds:.2f} s"
    return text

"""Why a batch took as long as it did: where the time went of the task that it waited for last.

Pure. A batch is as slow as the last of its tasks that settled, so its time is cut along that task's course: waiting for
a runner, each attempt, and after it the pipeline. Pieces come with what was said of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trinity_es.projections.history.attempts import Attempt, BatchTimeline, TaskTimeline

__all__ = ["Segment", "held_up", "segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    seconds: float
    what: str
    fault: bool
    """Something went wrong: an attempt failed, or nothing moved."""


def segments(story: BatchTimeline, away: Sequence[tuple[float, float]] = ()) -> list[Segment]:
    """Return the batch's time from submission to its end (or its last event), cut in order; it adds up to all of it.

    `away`: when no coordinator led, which its own events do not say, as `Log.without_coordinator` gives it.
    """
    end = story.ended_at or story.last_at
    last = max((t for t in story.tasks if t.state != "dropped"),
               key=lambda t: (t.ended_at or end, t.state == "running", len(t.attempts)), default=None)
    at, out = story.submitted_at, list[Segment]()

    def until(then: float, what: str, fault: bool = False) -> None:
        nonlocal at
        if then > at:
            out.append(Segment(then - at, what, fault))
            at = then

    if last is not None:
        usual, waited = _usual(story), f"task {last.task} waited for a runner"
        for attempt in last.attempts:
            until(attempt.dispatched_at, waited)
            ended = attempt.ended_at or end
            if (gone := _system_ended(attempt, away)) is not None:
                until(gone, _attempt(last, attempt, gone, usual), True)
                until(ended, "the whole system was down", True)
            else:
                until(ended, _attempt(last, attempt, ended, usual), _failed(attempt))
        if last.state == "pending":
            until(end, waited)
    if story.finalizing_at is not None:
        until(story.finalizing_at, "all tasks had settled, and it waited to be finalized")
    until(end, "nothing more happened to its tasks" if story.finalizing_at is None else "its pipeline and the commit")
    return out


def held_up(story: BatchTimeline, away: Sequence[tuple[float, float]] = ()) -> Segment | None:
    """Return the piece that explains most: the longest that went wrong, if it is a quarter of all, else the longest.

    `away` as of `segments`.
    """
    found = segments(story, away)
    if not found:
        return None
    whole = sum(p.seconds for p in found)
    faults = [p for p in found if p.fault and p.seconds >= whole / 4]
    return max(faults or found, key=lambda p: p.seconds)


def _system_ended(attempt: Attempt, away: Sequence[tuple[float, float]]) -> float | None:
    """Return when the system was last heard under which an attempt was lost; None: none was.

    The next coordinator says so in the append of its start, whose events have one time.
    """
    if attempt.outcome != "runner_lost":
        return None
    return next((gone for gone, back in away if back == attempt.ended_at), None)


def _failed(attempt: Attempt) -> bool:
    return attempt.outcome not in ("finished", "running", "dropped")


def _usual(story: BatchTimeline) -> float | None:
    spans = [a.ended_at - a.dispatched_at for t in story.tasks for a in t.attempts
             if a.outcome == "finished" and a.ended_at is not None]
    return median(spans) if len(spans) > 2 else None


def _attempt(task: TaskTimeline, attempt: Attempt, ended: float, usual: float | None) -> str:
    what = f"task {task.task} attempt {attempt.attempt} on {attempt.runner} #{attempt.incarnation}"
    if _failed(attempt):
        return f"{what} failed, {attempt.outcome}: {attempt.message}"
    if usual is not None and ended - attempt.dispatched_at > 2 * usual:
        return f"{what} took {(ended - attempt.dispatched_at) / max(usual, 1e-9):.1f} times the usual {usual:.2f} s"
    return what

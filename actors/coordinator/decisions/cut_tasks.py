"""Decisions about tasks that a train batch cuts, and a later one goes on with (`synchronizer.in_flight: cut`).

Pure, as in `batch_decisions.py`. The tokens that a cut task has are kept by the event `AttemptKept` in the batch that
cut it. The batch that continues it names the same payload, so its first attempt goes on from there.
"""

from __future__ import annotations

from dataclasses import replace

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError
from trinity_es.events.journal import MOST_SPLICES
from trinity_es.projections.batch import BatchState

__all__ = ["continued", "kept", "must_end"]


def continued(task: int, earlier: BatchState | None, cut_task: int) -> ev.ContinuedTask:
    """Let a task of a new batch go on with a task that an earlier batch cut. Raises DataError if that was not cut."""
    if earlier is None or not earlier.state.ended or cut_task not in earlier.cut:
        where = "an unknown batch" if earlier is None else f"batch {earlier.batch_id!r}"
        raise DataError(f"task {task} can't continue task {cut_task} of {where}: that batch did not cut it")
    before = earlier.continues.get(cut_task)
    cuts = 1 if before is None else before.cuts + 1
    return ev.ContinuedTask(task=task, batch_id=earlier.batch_id, cut_task=cut_task, cuts=cuts)


def kept(task: ev.ContinuedTask, earlier: BatchState | None, batch: BatchState) -> list[ev.AttemptKept]:
    """Record what a continued task of a new batch goes on from; nothing if nothing was kept.

    A task's runs are one unit (`explorer.max_repeat_times_per_runner: null`). If attempts at some of its runs had
    failed, it has several parts, and the largest is kept.
    """
    parts = {} if earlier is None else earlier.kept
    events = [event for (number, _), event in parts.items() if number == task.cut_task]
    largest = max(events, key=lambda event: event.tokens, default=None)
    return [] if largest is None else [
        replace(largest, task=unit.task, run_id_base=unit.run_id_base, runs=unit.runs, attempt=0)
        for unit in batch.pending.values() if unit.task == task.task
    ]


def must_end(batch: BatchState, most_cuts: int | None) -> bool:
    """Return True if the batch has to wait for a task, since it was cut as often as is good for it.

    With further cuts its answers would begin again, or be dropped as stale (`most_cuts`).
    """
    most = MOST_SPLICES if most_cuts is None else min(MOST_SPLICES, most_cuts)
    return any(c.cuts >= most and task not in batch.statuses for task, c in batch.continues.items())

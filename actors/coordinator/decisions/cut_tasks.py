"""Decisions about cut tasks: a train batch leaves them unfinished, and a later one goes on with them.

They exist with `synchronizer.in_flight: cut`. The functions are pure, as in `batch_decisions.py`. The tokens that a cut
task has are kept by the event `AttemptKept` in the batch that cut it. The batch that continues it names the same
payload, so its first attempt goes on from there.
"""

from __future__ import annotations

from dataclasses import replace

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError
from trinity_es.events.journal import MOST_SPLICES
from trinity_es.projections.batch import BatchState

__all__ = ["continued_task", "kept_attempts", "must_end"]


def continued_task(task: int, earlier: BatchState | None, cut_task: int) -> ev.ContinuedTask:
    """Return the record that task `task` of a new batch goes on with task `cut_task` of an earlier one. Raises
    DataError if the earlier batch (None: unknown) did not cut that task."""
    if earlier is None or not earlier.state.ended or cut_task not in earlier.cut:
        where = "an unknown batch" if earlier is None else f"batch {earlier.batch_id!r}"
        raise DataError(f"task {task} can't continue task {cut_task} of {where}: task {cut_task} was not cut off")
    record_before = earlier.continues.get(cut_task)
    cuts = 1 if record_before is None else record_before.cuts + 1
    return ev.ContinuedTask(task=task, batch_id=earlier.batch_id, cut_task=cut_task, cuts=cuts)


def kept_attempts(task: ev.ContinuedTask, earlier: BatchState | None, batch: BatchState) -> list[ev.AttemptKept]:
    """Record which tokens a continued task of the new `batch` goes on from; nothing if none were kept.

    A task's runs are one unit (`explorer.max_repeat_times_per_runner: null`). If attempts at some of its runs had
    failed, it has several parts, and the largest is kept.
    """
    parts = {} if earlier is None else earlier.kept
    task_parts = [event for (number, _), event in parts.items() if number == task.cut_task]
    if not task_parts:
        return []
    largest = max(task_parts, key=lambda event: event.tokens)
    return [
        replace(largest, task=unit.task, run_id_base=unit.run_id_base, runs=unit.runs, attempt=0)
        for unit in batch.pending.values() if unit.task == task.task
    ]


def must_end(batch: BatchState, max_cuts: int | None) -> bool:
    """Return True if the batch has to wait for a task that was cut `max_cuts` times (None: no such limit). With further
    cuts its answers would be dropped as stale, or begin again (after MOST_SPLICES cuts)."""
    limit = MOST_SPLICES if max_cuts is None else min(MOST_SPLICES, max_cuts)
    return any(c.cuts >= limit and task not in batch.statuses for task, c in batch.continues.items())

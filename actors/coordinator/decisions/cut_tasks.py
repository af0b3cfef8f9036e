"""Decisions about cut tasks, which one train batch leaves unfinished and a later one continues. Pure functions.

Tasks are cut with `synchronizer.in_flight: cut`. In the batch that cuts a task, the event `AttemptKept` names the
payload with its tokens. The batch that continues the task names the same payload, from which its first attempt goes on.
"""

from __future__ import annotations

from dataclasses import replace

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError
from trinity_es.events.journal import MOST_SPLICES
from trinity_es.projections.batch import BatchState

__all__ = ["continued_task", "has_uncuttable_task", "kept_attempts"]


def continued_task(task: int, earlier_batch: BatchState | None, cut_task: int) -> ev.ContinuedTask:
    """Return the record that `task` of a new batch continues `cut_task` of an earlier batch. Raises DataError if the
    earlier batch is unknown (None) or did not cut that task."""
    if earlier_batch is None or not earlier_batch.state.ended or cut_task not in earlier_batch.cut:
        where = "an unknown batch" if earlier_batch is None else f"batch {earlier_batch.batch_id!r}"
        raise DataError(f"task {task} can't continue task {cut_task} of {where}: task {cut_task} was not cut. Leave it "
                        "out of `continues`")
    record_before = earlier_batch.continues.get(cut_task)
    cuts = 1 if record_before is None else record_before.cuts + 1
    return ev.ContinuedTask(task=task, batch_id=earlier_batch.batch_id, cut_task=cut_task, cuts=cuts)


def kept_attempts(task: ev.ContinuedTask, earlier_batch: BatchState | None, batch: BatchState) -> list[ev.AttemptKept]:
    """Return the event that names the kept tokens from which `task` of the new `batch` goes on; [] if none were kept.

    A task's runs are one unit (`explorer.max_repeat_times_per_runner: null`). If attempts at some of its runs had
    failed, the earlier batch kept several parts of it, and the one with most tokens is used.
    """
    parts = {} if earlier_batch is None else earlier_batch.kept
    task_parts = [event for (number, _), event in parts.items() if number == task.cut_task]
    if not task_parts:
        return []
    largest = max(task_parts, key=lambda event: event.tokens)
    return [
        replace(largest, task=unit.task, run_id_base=unit.run_id_base, runs=unit.runs, attempt=0)
        for unit in batch.pending.values() if unit.task == task.task
    ]


def has_uncuttable_task(batch: BatchState, max_cuts: int | None) -> bool:
    """Return True if the batch may not end yet, because an unsettled task was cut `max_cuts` times already (None: no
    such limit). After another cut its answers would be dropped as stale, or begin again (after MOST_SPLICES cuts)."""
    limit = MOST_SPLICES if max_cuts is None else min(MOST_SPLICES, max_cuts)
    return any(c.cuts >= limit and task not in batch.statuses for task, c in batch.continues.items())

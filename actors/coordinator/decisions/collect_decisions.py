"""Decisions about scheduled batches, whose type is `collect`. Pure functions, which return events.

Clients add tasks to such a batch while it is open, and take results task by task. It ends without a finalize, when all
its tasks were taken or dropped. Then its id may be scheduled again.
"""

from __future__ import annotations

from collections.abc import Sequence

from trinity_es.actors.coordinator.decisions.batch_decisions import find_open_tasks, require_runs
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchAlreadyActive, BatchTypeMismatch
from trinity_es.events.values import BatchId, BatchLifecycleState, require_batch_id
from trinity_es.projections.batch import BatchState, batch_result

__all__ = ["drop_rest", "end_if_done", "open_collect_batch", "pause", "resume", "schedule", "take"]


def schedule(existing: BatchState | None, new: ev.BatchSubmitted) -> list[ev.Event]:
    """Return the event that begins a batch, or the events that add the tasks of `new` to the open batch `existing`.

    A repeated submission gives no events. Raises BatchAlreadyActive if the id belongs to a batch of `submit_batch`,
    DataError.
    """
    batch_id = require_batch_id(new.batch_id)
    if existing is not None and new.submission in (existing.submission, *existing.additions):
        return []
    require_runs(batch_id, new.repeat_times)
    if existing is not None and existing.batch_type == "train" and existing.state is BatchLifecycleState.FINALIZED:
        raise BatchAlreadyActive(
            f"batch {batch_id!r} is a finalized train batch, and its experiences belong to a trainer: schedule tasks "
            "under another batch id"
        )
    if existing is None or existing.state.ended:
        return [new]
    if existing.batch_type != "collect":
        raise BatchAlreadyActive(
            f"batch {batch_id!r} is already active ({existing.state}), submitted with submit_batch: finalize or abort "
            "it before you use its id again"
        )
    first_number = existing.expected_task_count
    addition = ev.TasksAdded(
        repeat_times=new.repeat_times, tasks=new.tasks, tasks_digest=new.tasks_digest, runs_per_unit=new.runs_per_unit,
        evals=[first_number + i for i in new.evals], request=new.submission,
    )
    return [*resume(existing), addition]


def open_collect_batch(batch: BatchState | None, batch_id: BatchId) -> BatchState | None:
    """Return the batch if it is open, else None. Raises BatchTypeMismatch unless its type is collect (`schedule`)."""
    if batch is None or batch.state.ended:
        return None
    if batch.batch_type != "collect":
        raise BatchTypeMismatch(
            f"batch {batch_id!r} was submitted with submit_batch: call finalize_{batch.batch_type}_batch for its result"
        )
    return batch


def drop_rest(batch: BatchState, *, reason: str, return_partial: bool) -> list[ev.Event]:
    """Return the event that drops the unsettled tasks, if any. With `return_partial` their finished runs are kept."""
    open_tasks = find_open_tasks(batch)
    if not open_tasks:
        return []
    partly_done = [task for task in open_tasks if return_partial and batch.tasks[task].done]
    return [ev.TaskDropped(tasks=open_tasks, reason=reason, kept=partly_done)]


def take(batch: BatchState, tasks: Sequence[int], request: str) -> list[ev.Event]:
    """Return the event that a client takes the results of `tasks`, without those that another client took before."""
    ready_tasks = set(batch.ready_tasks())  # without tasks that were taken
    taken_now = [task for task in tasks if task in ready_tasks]
    return [ev.ResultsTaken(tasks=taken_now, request=request)] if taken_now else []


def end_if_done(batch: BatchState) -> list[ev.Event]:
    """Return the event that ends a batch if all its tasks were taken or dropped: an abort if none was taken."""
    if batch.open_task_count or batch.ready_task_count:
        return []
    if not batch.taken:
        last_reason = next(reversed(batch.dropped.values()))
        return [ev.BatchAborted(reason=last_reason, result=batch_result(batch))]
    refs = [ref for task in sorted(batch.taken) for ref in batch.tasks[task].payloads]
    return [ev.BatchFinalized(result=batch_result(batch), experiences=refs, selected=sum(r.count for r in refs))]


def pause(batch: BatchState, reason: str) -> list[ev.Event]:
    """Return the event that pauses a batch whose scheduler stops. Its waiting units stay in the batch."""
    return [] if batch.paused else [ev.BatchPaused(reason=reason)]


def resume(batch: BatchState) -> list[ev.Event]:
    """Return the event that resumes a batch; no event if it is not paused."""
    return [ev.BatchResumed()] if batch.paused else []

"""Commands about batches, which explorers, schedulers and people send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from trinity_es.actors.commands.base import Command
from trinity_es.actors.commands.fields import (
    FIELDS,
    Batch,
    Count,
    Experiences,
    Finalized,
    Flag,
    Seconds,
    ShortText,
    SourceFound,
    Tasks,
    TasksetName,
    Text,
    Whole,
)
from trinity_es.events.values import BatchId

__all__ = [
    "AbortBatch", "AddTasks", "BatchProgress", "Cursor", "CutTask", "DropOpenTasks", "FinalizeBatch", "GetStatus",
    "PauseBatches", "PollAllBatches", "PollBatch", "ProcessExperiences", "RedoTasks", "ResumeBatches",
    "ScheduleTasks", "StoreProgress", "SubmitBatch", "TakeResults",
]


# --- batches ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position up to which a batch has read a taskset."""

    __pydantic_config__ = FIELDS
    taskset: TasksetName
    epoch: Count
    offset: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTask:
    """Task of a new batch that continues `cut_task`, an unfinished task of the ended batch `batch_id`."""

    __pydantic_config__ = FIELDS
    task: Count
    batch_id: Batch
    cut_task: Count


class SubmitBatch(Command[None], name="submit", writes=True):
    """Begin a batch with these tasks. The answer comes when the batch is durable. Raises BatchAlreadyActive."""

    batch_id: Batch
    """A new id, or that of a batch that has ended."""
    tasks: Tasks
    batch_type: Finalized
    min_wait_num: Whole | None
    """Number of settled tasks at which the batch can be finalized; null: all."""
    cursor: list[Cursor] | None
    """Position in each taskset of the tasks, recorded in the same transaction."""
    sources: list[SourceFound] | None = None
    """Source of each taskset whose source is not recorded yet, recorded in the same transaction."""
    continues: list[CutTask] | None = None
    """One entry for each task that continues a cut task of an earlier batch (`synchronizer.in_flight: cut`)."""


class FinalizeBatch(Command[dict[str, Any]], name="finalize", writes=True, waits=True):
    """Wait until enough tasks of a batch are settled, run the pipeline on a train batch, and end the batch.

    The answer is `batch_id, batch_type, finished_task_count, metrics`, and the same if the command is repeated. Tasks
    that failed after their last attempt are settled too, so `finished_task_count` includes them. Raises BatchNotFound,
    BatchTypeMismatch, FinalizeTimeout, PipelineError, TooFewGroups.
    """

    batch_id: Batch
    batch_type: Finalized
    """Type of the batch, as in `submit`."""
    timeout: Seconds | None
    """Time until the answer FinalizeTimeout, which loses nothing; null: no limit."""
    groups: Whole | None = None
    """Minimum number of tasks with experiences that the pipeline delivers; null: 0. With fewer the answer is
    TooFewGroups, and the batch stays open for `add_tasks`."""


class AddTasks(Command[int], name="add_tasks", writes=True):
    """Add tasks to an open batch from `submit`, and return the number of the first new task. Raises BatchNotFound,
    DataError."""

    batch_id: Batch
    tasks: Tasks
    cursor: list[Cursor] | None
    """Same as in `submit`."""


class AbortBatch(Command[None], name="abort", writes=True):
    """End a batch and stop its running tasks. Does nothing if the batch is unknown or has ended."""

    batch_id: Batch
    reason: Text
    """Recorded in the log."""
    keep_partial_results: Flag
    """Recorded with the batch. Results of finished runs are in the log either way."""


class RedoTasks(Command[None], name="redo", writes=True):
    """Run settled tasks of an open batch again, with all their runs. Raises BatchNotFound, DataError."""

    batch_id: Batch
    tasks: list[Count]
    """Numbers of the tasks in the batch."""
    reason: Text
    """The caller and the reason, recorded in the log."""


class ProcessExperiences(Command[dict[str, float]], name="process_experiences", writes=True):
    """Run experiences that belong to no batch through the pipeline, and return its metrics. Raises PipelineError."""

    refs: list[Experiences]
    """References to experiences in the payload store."""


class GetStatus(Command[dict[str, Any]], name="status", writes=False):
    """Return the state of batches, runners, outputs and the queue as plain JSON, even while the log is unavailable."""


# --- schedulers -------------------------------------------------------------------------------------------------------
class ScheduleTasks(Command[int], name="schedule", writes=True):
    """Begin a batch with these tasks, or add them to it, and return the number of the first new task. Raises
    BatchAlreadyActive."""

    batch_id: Batch
    """Id of a new or a scheduled batch. Not that of an open batch from `submit`, or of a finalized train batch."""
    tasks: Tasks


class BatchProgress(TypedDict):
    """Progress of a scheduled batch: numbers of open tasks, of ready tasks, and of units at runners."""

    open: int
    ready: int
    running: int
    paused: bool
    submission: str
    """Id of this submission of the batch, since a batch id may be used again."""


class PollBatch(Command[BatchProgress], name="poll", writes=True, waits=True):
    """Return the progress of a scheduled batch when `at_least` tasks are ready, no task is open, or `seconds` are over.

    If the batch stays paused, the answer also comes when no runner has a unit of it, since no more tasks become ready.
    Raises BatchTypeMismatch.
    """

    batch_id: Batch
    at_least: Whole
    seconds: Seconds
    resume: Flag
    """Resume the batch if it is paused."""


class StoreProgress(TypedDict):
    """Progress of all scheduled batches together, and the ids of the unfinished ones."""

    open: int
    settled: int
    batches: list[BatchId]


class PollAllBatches(Command[StoreProgress], name="poll_all", writes=False, waits=True):
    """Return the progress of all scheduled batches when no task is open, the number of settled tasks is no longer
    `settled`, or `seconds` are over."""

    settled: Whole
    """Number of settled tasks that the client last saw; -1 before its first answer."""
    seconds: Seconds


class DropOpenTasks(Command[None], name="drop_rest", writes=True):
    """Drop the unsettled tasks of a scheduled batch, and stop their runs. Raises BatchTypeMismatch."""

    batch_id: Batch | None
    """null: all scheduled batches."""
    reason: Text
    """Recorded in the log."""
    return_partial: Flag | None = None
    """Keep the finished runs of dropped tasks; null: `explorer.over_rollout.return_partial_tasks`."""


class TakeResults(Command[list[int]], name="take", writes=True):
    """Record that this client has the results of these tasks, and return the tasks that no other client took before."""

    batch_id: Batch
    tasks: list[Count]
    """Numbers of the tasks in the batch."""
    submission: ShortText
    """`submission` from the answer of `poll`."""


class PauseBatches(Command[None], name="pause", writes=True):
    """Give runners no more units of these scheduled batches until a scheduler resumes them."""

    batches: list[Batch]


class ResumeBatches(Command[None], name="resume", writes=True):
    """Resume all scheduled batches that are paused."""


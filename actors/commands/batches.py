"""Commands about batches: what explorers, schedulers and people ask."""

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
    "AbortBatch", "BatchProgress", "Cursor", "DropOpenTasks", "FinalizeBatch", "GetStatus", "PauseBatches",
    "PollAllBatches", "PollBatch", "ProcessExperiences", "RedoTasks", "ResumeBatches", "ScheduleTasks",
    "StoreProgress", "SubmitBatch", "TakeResults",
]


# --- batches ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a taskset was read for a batch."""

    __pydantic_config__ = FIELDS
    taskset: TasksetName
    epoch: Count
    offset: Count


class SubmitBatch(Command[None], name="submit", writes=True):
    """Begin a batch with these tasks; answered when it is durable. Raises BatchAlreadyActive."""

    batch_id: Batch
    """Of no batch that is open."""
    tasks: Tasks
    batch_type: Finalized
    """It is finalized as this."""
    min_wait_num: Whole | None
    """Tasks that are enough for it to be finalized; null: all."""
    cursor: list[Cursor] | None
    """Of each taskset that its tasks are from; recorded in the same transaction."""
    sources: list[SourceFound] | None = None
    """Of each taskset that was not read before and is no file: what it was found to be; recorded there, too."""


class FinalizeBatch(Command[dict[str, Any]], name="finalize", writes=True, waits=True):
    """Wait until a batch has what it needs, run the pipeline on a train batch, and end it.

    Answered with `batch_id, batch_type, finished_task_count, metrics`; asked again, the same. Tasks that failed for
    good are settled, and so in `finished_task_count`. Raises BatchNotFound, BatchTypeMismatch, FinalizeTimeout,
    PipelineError.
    """

    batch_id: Batch
    batch_type: Finalized
    """As it was submitted."""
    timeout: Seconds | None
    """When to answer with FinalizeTimeout; nothing is lost then. null: never."""


class AbortBatch(Command[None], name="abort", writes=True):
    """Give a batch up: its running tasks are stopped. One that is unknown or has ended is none the worse for it."""

    batch_id: Batch
    reason: Text
    """Why; it is recorded."""
    keep_partial_results: Flag
    """Recorded with the batch; what has finished is in the log either way."""


class RedoTasks(Command[None], name="redo", writes=True):
    """Let tasks of an open batch that have ended run again, all runs of each. Raises BatchNotFound, DataError."""

    batch_id: Batch
    tasks: list[Count]
    """Their numbers in the batch."""
    reason: Text
    """Who asks, and why; it is recorded."""


class ProcessExperiences(Command[dict[str, float]], name="process_experiences", writes=True):
    """Run experiences through the pipeline, outside any batch; answered with its metrics. Raises PipelineError."""

    refs: list[Experiences]
    """Of experiences that are in the payload store."""


class GetStatus(Command[dict[str, Any]], name="status", writes=False):
    """Tell how batches, runners, outputs and the queue are, as plain JSON; it is answered whatever the log does."""



# --- schedulers -------------------------------------------------------------------------------------------------------
class ScheduleTasks(Command[int], name="schedule", writes=True):
    """Begin a batch with these tasks, or have them join it; answered with the number of the first of them.

    Raises BatchAlreadyActive.
    """

    batch_id: Batch
    """Of no batch that is open to be finalized, and no train batch that was."""
    tasks: Tasks


class BatchProgress(TypedDict):
    """How far a scheduled batch is: how many of its tasks are open and ready, of its units with a runner."""

    open: int
    ready: int
    running: int
    paused: bool
    submission: str
    """Which of the batches of this id it is."""


class PollBatch(Command[BatchProgress], name="poll", writes=True, waits=True):
    """Tell how far a scheduled batch is: when `at_least` tasks are ready, or nothing is open, or after `seconds`.

    One that stays paused is answered for when no unit of it is with a runner, since no more will come then. Raises
    BatchTypeMismatch.
    """

    batch_id: Batch
    at_least: Whole
    seconds: Seconds
    resume: Flag
    """If it is paused it goes on."""


class StoreProgress(TypedDict):
    """How far all scheduled batches are together, and which are not over."""

    open: int
    settled: int
    batches: list[BatchId]


class PollAllBatches(Command[StoreProgress], name="poll_all", writes=False, waits=True):
    """Tell how far all scheduled batches are: when nothing is open, or not `settled` tasks are, or after `seconds`."""

    settled: Whole
    """As many as its client knows of; -1: it knows of none."""
    seconds: Seconds


class DropOpenTasks(Command[None], name="drop_rest", writes=True):
    """Give up what is not settled; runners stop it. Raises BatchTypeMismatch."""

    batch_id: Batch | None
    """null: of all scheduled batches."""
    reason: Text
    """Why; it is recorded."""
    return_partial: Flag | None = None
    """Keep the runs that such a task finished; null: as the config says."""


class TakeResults(Command[list[int]], name="take", writes=True):
    """Record that somebody has the results of these tasks; answered with those that nobody else had taken."""

    batch_id: Batch
    tasks: list[Count]
    """Their numbers in the batch."""
    submission: ShortText
    """As `poll` told it."""


class PauseBatches(Command[None], name="pause", writes=True):
    """Give these scheduled batches no runners until somebody wants them."""

    batches: list[Batch]


class ResumeBatches(Command[None], name="resume", writes=True):
    """Let all scheduled batches that were paused go on."""


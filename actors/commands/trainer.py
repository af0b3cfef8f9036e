"""Commands of a trainer about batches, experiences, weights and adapters, and commands about runners."""

from __future__ import annotations

from typing import Any, TypedDict

from trinity_es.actors.commands.base import Command
from trinity_es.actors.commands.fields import (
    AdapterName,
    Batch,
    Count,
    Digest,
    Flag,
    Metrics,
    Name,
    Port,
    Position,
    Positive,
    Seconds,
    ShortText,
    Text,
    Whole,
)
from trinity_es.events.values import BatchId

__all__ = [
    "AcknowledgeBatch", "CheckWeightGroup", "DeliveredBatch", "GetNextBatch", "GetRunnerStates", "JoinWeightGroup",
    "JoinedRunners", "PayloadPart", "RemoveAdapter", "RestartRunner", "RestartedRunner", "ResumeTrainer",
    "ResumedTrainer", "SyncAdapter", "SyncWeights", "SyncedAdapter", "SyncedWeights", "TakeExperiences",
    "TakenExperiences",
]


# --- a trainer --------------------------------------------------------------------------------------------------------
class DeliveredBatch(TypedDict):
    """A finalized train batch, and the log position at which it was finalized."""

    batch_id: BatchId
    position: int


class GetNextBatch(Command[DeliveredBatch], name="next_batch", writes=False, waits=True):
    """Return the first train batch that is finalized after a log position, and wait until there is one."""

    after: Position
    timeout: Seconds | None
    """Time for which the client waits. After it the coordinator sends no answer. null: no limit."""


class AcknowledgeBatch(Command[None], name="acknowledge", writes=True):
    """Record that a trainer's step used a batch. Repeating it changes nothing. Raises BatchNotFound, DataError."""

    batch_id: Batch
    """Id of a finalized train or eval batch."""
    step: Whole
    metrics: Metrics
    """Metrics of the step: loss, ..."""


class ResumedTrainer(TypedDict):
    """Batches that a trainer has to use after a return to a checkpoint: those of later steps, and unused ones."""

    batches: list[BatchId]
    position: int
    """Position of the log up to which `batches` is complete."""


class ResumeTrainer(Command[ResumedTrainer], name="resume_trainer", writes=True, waits=True):
    """Return the batches that a trainer has to use from its checkpoint of `step` on. Raises PayloadNotFound."""

    step: Count
    """Step of the checkpoint; 0: the original model."""


class PayloadPart(TypedDict):
    """Location of experiences in a payload: `count` of them, beginning with number `first`."""

    digest: str
    first: int
    count: int


class TakenExperiences(TypedDict):
    """Experiences that a take got from one batch."""

    batch_id: BatchId
    use_count: int
    """How often these experiences were taken, including this time."""
    refs: list[PayloadPart]


class TakeExperiences(Command[list[TakenExperiences]], name="take_experiences", writes=True, waits=True):
    """Take the next `n` experiences from the queue, and wait until it has that many. Raises TakeTimeout, with nothing
    taken, PipelineError if the priority function fails, and PayloadNotFound."""

    n: Positive
    timeout: Seconds | None
    """Time until the answer TakeTimeout; null: no limit."""
    step: Whole | None
    """The trainer's step that will use the experiences."""


# --- weights ----------------------------------------------------------------------------------------------------------
class SyncedWeights(TypedDict):
    """Runners that serve a version of the weights."""

    version: int
    runners: list[str]
    from_group: bool
    """True if the trainer sent the weights over its process group; false if runners loaded them from their folder."""


class SyncWeights(Command[SyncedWeights], name="sync_weights", writes=True, waits=True):
    """Publish weights and load them into every engine. The answer comes when all have loaded. Raises SyncError."""

    version: Whole
    """At least the current version."""
    path: Text
    """Folder of the weights in Hugging Face format."""
    timeout: Seconds
    """Time until the answer SyncError; slower engines go on with their old version."""
    method: Name = "checkpoint"
    """Method of the transfer: `checkpoint`, `memory` or `nccl`."""
    again: Flag = False
    """True if the folder of the current version was lost and has been written again."""


class CheckWeightGroup(Command[bool], name="weight_group", writes=False):
    """Return whether every serving engine is in the trainer's process group."""


class JoinedRunners(TypedDict):
    """Runners in the trainer's process group."""

    runners: list[str]


class JoinWeightGroup(Command[JoinedRunners], name="join_weight_group", writes=False, waits=True):
    """Add every engine to the process group by which the trainer sends weights from its memory. Raises SyncError."""

    address: Name
    """Address at which the trainer opens the group."""
    port: Port
    workers: Positive
    """Number of processes of one engine."""
    engines: Count
    """Number of engines that must serve."""
    timeout: Seconds
    """Time until the answer SyncError."""


# --- adapters ---------------------------------------------------------------------------------------------------------
class SyncedAdapter(TypedDict):
    """Runners that serve a version of an adapter."""

    adapter: str
    version: int
    runners: list[str]


class SyncAdapter(Command[SyncedAdapter], name="sync_adapter", writes=True, waits=True):
    """Publish a version of a LoRA adapter and load it into every engine. The answer comes when all have loaded it.

    Raises SyncError.
    """

    adapter: AdapterName
    version: Count
    """At least the adapter's current version."""
    path: Text
    """Folder of the adapter in PEFT's format."""
    rank: Positive
    size: Position
    """Size of the adapter's two files together, in bytes."""
    digest: Digest
    """Digest of the two files."""
    timeout: Seconds
    """Time until the answer SyncError; slower engines go on with their old version."""


class RemoveAdapter(Command[None], name="remove_adapter", writes=True):
    """Remove a LoRA adapter, so that requests which name it are refused. Raises SyncError if it is unknown."""

    adapter: AdapterName


# --- runners ----------------------------------------------------------------------------------------------------------
class RestartedRunner(TypedDict):
    """A runner, and the incarnation (number of its process) that has begun."""

    runner: str
    incarnation: int


class RestartRunner(Command[RestartedRunner], name="restart_runner", writes=False, waits=True):
    """End an incarnation of a runner. The answer comes when another one has begun. Raises RunnerNotFound."""

    runner: Name
    incarnation: Whole
    """The incarnation to end, so that a repeated command does not end the next one."""
    reason: Text
    """The caller and the reason, recorded in the log."""


class GetRunnerStates(Command[dict[str, dict[str, Any]]], name="runner_states", writes=False):
    """Return the current activity of runners by name (`actors/runner_activity.py`). Unknown names are left out."""

    names: list[ShortText] | None
    """null: all runners."""

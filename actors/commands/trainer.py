"""Commands of a trainer: what it takes, uses and publishes; and about the runners."""

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
    """A train batch, and the position of its end in the log."""

    batch_id: BatchId
    position: int


class GetNextBatch(Command[DeliveredBatch], name="next_batch", writes=False, waits=True):
    """Wait for the first train batch that is finalized after a position of the log."""

    after: Position
    """Up to here its client knows all."""
    timeout: Seconds | None
    """When its client goes away: it is not answered then. null: never."""


class AcknowledgeBatch(Command[None], name="acknowledge", writes=True):
    """Record that a trainer's step used a batch; said again it changes nothing. Raises BatchNotFound, DataError."""

    batch_id: Batch
    """Of a train or eval batch that is finalized."""
    step: Whole
    metrics: Metrics
    """Of the step: loss, ..."""


class ResumedTrainer(TypedDict):
    """What a trainer that is back at a checkpoint has to use again, and never used."""

    batches: list[BatchId]
    position: int
    """All that was finalized up to here is known with it."""


class ResumeTrainer(Command[ResumedTrainer], name="resume_trainer", writes=True, waits=True):
    """Tell a trainer that is back at its checkpoint of `step` which batches are its again. Raises PayloadNotFound."""

    step: Count
    """0: it begins with the model as it was given."""


class PayloadPart(TypedDict):
    """Where experiences lie: `count` of them from `first` on in the payload with this digest."""

    digest: str
    first: int
    count: int


class TakenExperiences(TypedDict):
    """Experiences of one batch that were taken."""

    batch_id: BatchId
    use_count: int
    """Times that they were taken, with this one."""
    refs: list[PayloadPart]


class TakeExperiences(Command[list[TakenExperiences]], name="take_experiences", writes=True, waits=True):
    """Take the `n` experiences that go next out of the queue; waits until there are so many.

    Raises TakeTimeout, with nothing taken; PipelineError where the priority function fails; PayloadNotFound.
    """

    n: Positive
    timeout: Seconds | None
    """When to answer with TakeTimeout; null: never."""
    step: Whole | None
    """The trainer's step that they are for."""


# --- weights ----------------------------------------------------------------------------------------------------------
class SyncedWeights(TypedDict):
    """Who serves a version."""

    version: int
    runners: list[str]
    from_group: bool
    """The trainer sent it; otherwise runners loaded it from its place."""


class SyncWeights(Command[SyncedWeights], name="sync_weights", writes=True, waits=True):
    """Publish weights, and have every engine load them; answered when all have. Raises SyncError."""

    version: Whole
    """At least that of the current ones."""
    path: Text
    """Where they lie, as a folder in HF format."""
    timeout: Seconds
    """When to answer with SyncError; who has not loaded them then serves what it had."""
    method: Name = "checkpoint"
    """How they get there: `checkpoint`, `memory`, `nccl`."""
    again: Flag = False
    """Their place was lost, and has been written anew."""


class CheckWeightGroup(Command[bool], name="weight_group", writes=False):
    """Tell whether every engine that serves is in the trainer's group."""



class JoinedRunners(TypedDict):
    """Who is in the trainer's group."""

    runners: list[str]


class JoinWeightGroup(Command[JoinedRunners], name="join_weight_group", writes=False, waits=True):
    """Have every engine join the group that the trainer opens, to get weights from its memory. Raises SyncError."""

    address: Name
    """Where the trainer opens it."""
    port: Port
    workers: Positive
    """Processes of one engine."""
    engines: Count
    """Engines that have to serve."""
    timeout: Seconds
    """When to answer with SyncError."""


# --- adapters ---------------------------------------------------------------------------------------------------------
class SyncedAdapter(TypedDict):
    """Who serves a version of an adapter."""

    adapter: str
    version: int
    runners: list[str]


class SyncAdapter(Command[SyncedAdapter], name="sync_adapter", writes=True, waits=True):
    """Publish a version of a LoRA adapter, and have every engine load it; answered when all have. Raises SyncError."""

    adapter: AdapterName
    version: Count
    """At least that of the current one."""
    path: Text
    """Where it lies, as a folder in PEFT's format."""
    rank: Positive
    size: Position
    """Bytes of its two files."""
    digest: Digest
    """Of its two files."""
    timeout: Seconds
    """When to answer with SyncError; who has not loaded it then goes on with the version that it had."""


class RemoveAdapter(Command[None], name="remove_adapter", writes=True):
    """Take a LoRA adapter back: requests that name it are refused from then on. Raises SyncError for an unknown one."""

    adapter: AdapterName


# --- runners ----------------------------------------------------------------------------------------------------------
class RestartedRunner(TypedDict):
    """A runner, and the life that has begun."""

    runner: str
    incarnation: int


class RestartRunner(Command[RestartedRunner], name="restart_runner", writes=False, waits=True):
    """End a life of a runner; answered when another one has begun. Raises RunnerNotFound."""

    runner: Name
    incarnation: Whole
    """The life that is to end: asked again, it ends once."""
    reason: Text
    """Who asks, and why; it is recorded."""


class GetRunnerStates(Command[dict[str, dict[str, Any]]], name="runner_states", writes=False):
    """Tell what runners do right now, by name, as `actors/run_activity.py` says; one that nobody has is left out."""

    names: list[ShortText] | None
    """null: of all."""

"""What clients can ask of the coordinator: every command, on one screen.

Commands are imperative and frozen. A class says what it asks for and what is answered (docs/COMMANDS.md is made from
this file); `Command[A]` is one that is answered with an A, which is plain JSON. A command travels as its name and plain
values (`encode`), and is made and checked anew where it arrives (`decode`): what is no command, or has a field that it
can't have, comes no further. A new command is a class here, and a handler in `coordinator/handlers/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

from trinity_es.actors.command_fields import (
    AnswerGiven,
    Batch,
    Count,
    Experiences,
    Finalized,
    Flag,
    Name,
    Number,
    Port,
    Position,
    Positive,
    Seconds,
    ShortText,
    TableNumber,
    Tasks,
    TasksetName,
    Text,
    Whole,
    read_fields,
    shown,
)
from trinity_es.actors.messages import Parcel
from trinity_es.events.errors import DataError, TrinityError
from trinity_es.events.values import BatchId

__all__ = [
    "COMMANDS",
    "AbortBatch",
    "AcknowledgeBatch",
    "BatchProgress",
    "CheckWeightGroup",
    "Command",
    "CommandRequest",
    "CountAnswers",
    "Cursor",
    "DeliverAnswers",
    "DeliveredAnswers",
    "DeliveredBatch",
    "DropOpenTasks",
    "EngineRoute",
    "FinalizeBatch",
    "GetNextBatch",
    "GetRoutes",
    "GetRunnerStates",
    "GetStatus",
    "JoinWeightGroup",
    "JoinedRunners",
    "PauseBatches",
    "PayloadPart",
    "PollAllBatches",
    "PollBatch",
    "ProcessExperiences",
    "RecordAnswers",
    "RedoTasks",
    "RestartRunner",
    "RestartedRunner",
    "ResumeBatches",
    "ResumeTrainer",
    "ResumedTrainer",
    "RewardAnswers",
    "RouteTable",
    "ScheduleTasks",
    "StoreProgress",
    "SubmitBatch",
    "SyncWeights",
    "SyncedWeights",
    "TakeExperiences",
    "TakeResults",
    "TakenExperiences",
    "decode",
    "encode",
]

A = TypeVar("A")
C_co = TypeVar("C_co", bound="Command[Any]", covariant=True)


class Command(Generic[A]):
    """Base of all commands: a frozen dataclass whose fields are kinds of `command_fields.py`."""

    __slots__ = ()
    name: ClassVar[str]
    """How it is called in messages and errors."""
    writes: ClassVar[bool]
    """True if what it asks for is recorded."""
    waits: ClassVar[bool] = False
    """True if it is answered when runners, or other clients, have got something done. While the log can't be written,
    and that may pass, its client goes on waiting; who asks for another one that writes is told so at once."""


@dataclass(frozen=True, slots=True)
class CommandRequest(Generic[C_co]):
    """A command as a handler gets it, with the id of its request: sent again, it has the same one."""

    id: str
    command: C_co


# --- batches --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a taskset was read for a batch."""

    taskset: TasksetName
    epoch: Count
    offset: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitBatch(Command[None]):
    """Begin a batch with these tasks; answered when it is durable. Raises BatchAlreadyActive."""

    name = "submit"
    writes = True
    batch_id: Batch
    """Of no batch that is open."""
    tasks: Tasks
    batch_type: Finalized
    """It is finalized as this."""
    min_wait_num: Whole | None
    """Tasks that are enough for it to be finalized; null: all."""
    cursor: list[Cursor] | None
    """Of each taskset that its tasks are from; recorded in the same transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizeBatch(Command[dict[str, Any]]):
    """Wait until a batch has what it needs, run the pipeline on a train batch, and end it.

    Answered with `batch_id, batch_type, finished_task_count, metrics`; asked again, the same. Raises BatchNotFound,
    BatchTypeMismatch, FinalizeTimeout, PipelineError.
    """

    name = "finalize"
    writes = True
    waits = True
    batch_id: Batch
    batch_type: Finalized
    """As it was submitted."""
    timeout: Seconds | None
    """When to answer with FinalizeTimeout; nothing is lost then. null: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortBatch(Command[None]):
    """Give a batch up: its running tasks are stopped. One that is unknown or has ended is none the worse for it."""

    name = "abort"
    writes = True
    batch_id: Batch
    reason: Text
    """Why; it is recorded."""
    keep_partial_results: Flag
    """Recorded with the batch; what has finished is in the log either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedoTasks(Command[None]):
    """Let tasks of an open batch that have ended run again, all runs of each. Raises BatchNotFound, DataError."""

    name = "redo"
    writes = True
    batch_id: Batch
    tasks: list[Count]
    """Their numbers in the batch."""
    reason: Text
    """Who asks, and why; it is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExperiences(Command[dict[str, float]]):
    """Run experiences through the pipeline, outside any batch; answered with its metrics. Raises PipelineError."""

    name = "process_experiences"
    writes = True
    refs: list[Experiences]
    """Of experiences that are in the payload store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStatus(Command[dict[str, Any]]):
    """Tell how batches, runners, outputs and the queue are, as plain JSON; it is answered whatever the log does."""

    name = "status"
    writes = False


# --- a trainer ------------------------------------------------------------------------------------------------------
class DeliveredBatch(TypedDict):
    """A train batch, and the position of its end in the log."""

    batch_id: BatchId
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GetNextBatch(Command[DeliveredBatch]):
    """Wait for the first train batch that is finalized after a position of the log."""

    name = "next_batch"
    writes = False
    waits = True
    after: Position
    """Up to here its client knows all."""
    timeout: Seconds | None
    """When its client goes away: it is not answered then. null: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgeBatch(Command[None]):
    """Record that a trainer's step used a batch; said again it changes nothing. Raises BatchNotFound, DataError."""

    name = "acknowledge"
    writes = True
    batch_id: Batch
    """Of a train or eval batch that is finalized."""
    step: Whole
    metrics: dict[str, Number]
    """Of the step: loss, ..."""


class ResumedTrainer(TypedDict):
    """What a trainer that is back at a checkpoint has to use again, and never used."""

    batches: list[BatchId]
    position: int
    """All that was finalized up to here is known with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeTrainer(Command[ResumedTrainer]):
    """Tell a trainer that is back at its checkpoint of `step` which batches are its again. Raises PayloadNotFound."""

    name = "resume_trainer"
    writes = True
    waits = True  # a run that begins has nothing better to do
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeExperiences(Command[list[TakenExperiences]]):
    """Take the `n` experiences that go next out of the queue; waits until there are so many.

    Raises TakeTimeout, with nothing taken; PipelineError where the priority function fails; PayloadNotFound.
    """

    name = "take_experiences"
    writes = True
    waits = True
    n: Positive
    timeout: Seconds | None
    """When to answer with TakeTimeout; null: never."""
    step: Whole | None
    """The trainer's step that they are for."""


# --- weights --------------------------------------------------------------------------------------------------------
class SyncedWeights(TypedDict):
    """Who serves a version."""

    version: int
    runners: list[str]
    from_group: bool
    """The trainer sent it; otherwise runners loaded it from its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights(Command[SyncedWeights]):
    """Publish weights, and have every engine load them; answered when all have. Raises SyncError."""

    name = "sync_weights"
    writes = True
    waits = True
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckWeightGroup(Command[bool]):
    """Tell whether every engine that serves is in the trainer's group."""

    name = "weight_group"
    writes = False


class JoinedRunners(TypedDict):
    """Who is in the trainer's group."""

    runners: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinWeightGroup(Command[JoinedRunners]):
    """Have every engine join the group that the trainer opens, to get weights from its memory. Raises SyncError."""

    name = "join_weight_group"
    writes = False
    waits = True
    address: Name
    """Where the trainer opens it."""
    port: Port
    workers: Positive
    """Processes of one engine."""
    engines: Count
    """Engines that have to serve."""
    timeout: Seconds
    """When to answer with SyncError."""


# --- runners --------------------------------------------------------------------------------------------------------
class RestartedRunner(TypedDict):
    """A runner, and the life that has begun."""

    runner: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRunner(Command[RestartedRunner]):
    """End a life of a runner; answered when another one has begun. Raises RunnerNotFound."""

    name = "restart_runner"
    writes = False
    waits = True
    runner: Name
    incarnation: Whole
    """The life that is to end: asked again, it ends once."""
    reason: Text
    """Who asks, and why; it is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRunnerStates(Command[dict[str, dict[str, Any]]]):
    """Tell what runners do right now, by name, as `actors/activity.py` says; one that nobody has is left out."""

    name = "runner_states"
    writes = False
    names: list[ShortText] | None
    """null: of all."""


# --- schedulers -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTasks(Command[int]):
    """Begin a batch with these tasks, or have them join it; answered with the number of the first of them.

    Raises BatchAlreadyActive.
    """

    name = "schedule"
    writes = True
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PollBatch(Command[BatchProgress]):
    """Tell how far a scheduled batch is: when `at_least` tasks are ready, or nothing is open, or after `seconds`.

    One that stays paused is answered for when no unit of it is with a runner, since no more will come then. Raises
    BatchTypeMismatch.
    """

    name = "poll"
    writes = True
    waits = True
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PollAllBatches(Command[StoreProgress]):
    """Tell how far all scheduled batches are: when nothing is open, or not `settled` tasks are, or after `seconds`."""

    name = "poll_all"
    writes = False
    waits = True
    settled: Whole
    """As many as its client knows of; -1: it knows of none."""
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOpenTasks(Command[None]):
    """Give up what is not settled; runners stop it. Raises BatchTypeMismatch."""

    name = "drop_rest"
    writes = True
    batch_id: Batch | None
    """null: of all scheduled batches."""
    reason: Text
    """Why; it is recorded."""
    return_partial: Flag | None = None
    """Keep the runs that such a task finished; null: as the config says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeResults(Command[list[int]]):
    """Record that somebody has the results of these tasks; answered with those that nobody else had taken."""

    name = "take"
    writes = True
    batch_id: Batch
    tasks: list[Count]
    """Their numbers in the batch."""
    submission: ShortText
    """As `poll` told it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseBatches(Command[None]):
    """Give these scheduled batches no runners until somebody wants them."""

    name = "pause"
    writes = True
    batches: list[Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeBatches(Command[None]):
    """Let all scheduled batches that were paused go on."""

    name = "resume"
    writes = True


# --- the proxy of mode `serve` --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordAnswers(Command[int]):
    """Record what the proxy answers to its clients; answered with how many of them were new."""

    name = "record_answers"
    writes = True
    answers: list[AnswerGiven]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAnswers(Command[int]):
    """Give answers a reward, all of them or none; answered with how many they are.

    Raises AnswerNotFound; AnswerDelivered where one went to the pipeline with another.
    """

    name = "reward_answers"
    writes = True
    messages: list[Name]
    """Ids, as clients got them."""
    reward: Number
    task: ShortText | None
    """Their group in the pipeline; null: each is a task of its own."""
    run: Whole | None
    """Which run of it; null: 0."""


class DeliveredAnswers(TypedDict):
    """How many answers went through the pipeline, and its metrics."""

    count: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverAnswers(Command[DeliveredAnswers]):
    """Take all answers that are rewarded through the pipeline; what has no reward stays. Raises PipelineError."""

    name = "deliver_answers"
    writes = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CountAnswers(Command[dict[str, int]]):
    """Count the answers: `recorded` (without a reward), `rewarded`, `delivered`."""

    name = "answers"
    writes = False


class EngineRoute(TypedDict):
    """One life of a runner, and where its engine is asked."""

    runner: str
    incarnation: int
    endpoint: str
    model_version: int
    serving: bool
    """False while it is taken out to load weights."""


class RouteTable(TypedDict):
    """Where engines are asked; each change has a number of its own."""

    number: int
    engines: list[EngineRoute]


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRoutes(Command[RouteTable]):
    """Tell a proxy which engines serve: when that is not what it knows, or after two seconds."""

    name = "routes"
    writes = False
    waits = True
    proxy: Name
    """Who asks: a name of its own."""
    url: ShortText
    """Where it serves."""
    knows: TableNumber
    """The table that it has."""


COMMANDS: dict[str, type[Command[Any]]] = {
    cls.name: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, Command) and cls is not Command
}
"""Every command by its name in messages."""


# --- as they travel -------------------------------------------------------------------------------------------------
def encode(command: Command[Any]) -> dict[str, Any]:
    """Return a command's fields as plain values. Raises DataError for what only this process knows the class of."""
    try:
        return dict(_plain(command, command.name))
    except RecursionError:
        raise DataError(f"{command.name}: its arguments are nested too deeply") from None


def _plain(value: Any, name: str) -> Any:
    """Return what a coordinator can read, without the user's classes: an enum's member is its text or number there."""
    if isinstance(value, bool | bytes | Parcel) or value is None:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(item, f"{name}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), f"{name}: {f.name}") for f in fields(value)}
    raise DataError(f"{name} is {type(value).__name__}: a text, a number, or a list or mapping of these is expected")


def decode(name: Any, args: Any) -> Command[Any]:
    """Return the command that a client sent. Raises DataError where a field is not what it must be, TrinityError for an
    unknown command.
    """
    cls = COMMANDS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise TrinityError(f"unknown command {shown(name)}: client and system are of different versions")
    command: Command[Any] = read_fields(cls, f"request {name!r}", args)
    return command

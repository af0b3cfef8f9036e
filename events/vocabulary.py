"""What can happen: every event of the log, on one screen.

Events are facts in the past tense, frozen, plain JSON, and never change; a new shape is a new `schema_version` with an
upcaster in `codec.py`. A class's docstring is its line in docs/EVENTS.md, which is made from this file, and the string
under a field is that field's. Streams: `system`, `weights`, `runner/<name>`, `taskset/<name>`, `batch/<id>`,
`experiences`, `queue`, `output/<name>`, `answers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from trinity_es.events.values import BatchId, BatchType, FailureKind

__all__ = [
    "EVENTS",
    "Answer",
    "AnswersDelivered",
    "AnswersRecorded",
    "AnswersRewarded",
    "AttemptFailed",
    "BatchAborted",
    "BatchFinalized",
    "BatchFinalizing",
    "BatchPaused",
    "BatchResumed",
    "BatchSubmitted",
    "BatchTrained",
    "ClockStepped",
    "CoordinatorStarted",
    "Event",
    "ExperiencesProcessed",
    "ExperiencesRedelivered",
    "ExperiencesReturned",
    "ExperiencesTaken",
    "FinalizeFailed",
    "OutputFailed",
    "OutputWritten",
    "PaceMeasured",
    "PayloadRef",
    "PayloadsFreed",
    "RecoveryDecided",
    "ResultsTaken",
    "RunResult",
    "RunnerFailed",
    "RunnerLost",
    "RunnerQuarantined",
    "RunnerReady",
    "RunnerRetired",
    "RunnerStarted",
    "RunsFinished",
    "StallDetected",
    "SystemConfigured",
    "TakenItem",
    "TaskDropped",
    "TaskFinished",
    "TaskReopened",
    "TasksAdded",
    "TasksDispatched",
    "TasksetAdvanced",
    "Unit",
    "WeightsFailed",
    "WeightsLoaded",
    "WeightsPublished",
    "WritingResumed",
]


# --- values inside events -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is dispatched: some consecutive runs of one task, and which attempt at them this is."""

    task: int
    run_id_base: int
    runs: int
    attempt: int
    """1 for the first; counted per task and first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRef:
    """Where experiences lie: `count` of them from `first` on in the payload with this digest."""

    digest: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenItem:
    """Experiences that were taken from the queue: `count` in a row, from `first` on, of what a batch delivered."""

    batch_id: BatchId
    version: int
    """Of the batch's stream at its BatchFinalized: the id may be used again."""
    first: int
    count: int
    use_count: int
    """How often each of them was taken, with this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One completed run: its metrics (aggregated from its experiences), and what it cost."""

    run: int
    metrics: dict[str, float]
    experiences: int = 0
    prompt_tokens: int = 0
    """Read by the model for this run; of a workflow that does all runs itself (`can_repeat`), as those tell."""
    response_tokens: int = 0
    """Made by it, in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the proxy of mode `serve` answered to one request, and where its experiences lie."""

    message: str
    """The message id, as the client got it: `chatcmpl-...` or `cmpl-...`."""
    runner: str
    incarnation: int
    model_version: int
    """The oldest version that made any of the tokens."""
    model_version_end: int
    """The newest."""
    payload: PayloadRef | None
    """One experience for each of its choices; None where not one token was generated."""
    prompt_tokens: int = 0
    response_tokens: int = 0


# --- events ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    schema_version: ClassVar[int] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfigured(Event):
    """The actor system was started with this resolved config (passwords masked)."""

    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEnd:
    """What somebody knew of a log: a position, and the hash of the event there."""

    generation: str
    """Of the log that they knew."""
    position: int
    hash: str
    """In hexadecimal."""
    by: str
    """Who knew it: this host's memory, a client, a runner, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindAccepted(Event):
    """A person said that the log goes on without events that were acknowledged and that it has not any more."""

    lost: list[KnownEnd]
    """What was known, and the log has not."""
    first: int
    """Positions `first` to `last` are given up: at least the last of them was acknowledged. 1: of another log, of which
    nothing is here."""
    last: int
    kept: int
    """The last position before this event: up to it the log is as it was found."""
    generation_before: str
    """Of the log as it was found."""
    generation: str
    """Of the log from here on: what is known of earlier ones counts no more."""
    by: str
    """Who said it: user and host."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStarted(Event):
    """A coordinator took the lease; only writers of this epoch can append from here on."""

    epoch: int
    pid: int
    host: str
    version: str
    open_batches: list[BatchId] = field(default_factory=list)
    """What it took over from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingResumed(Event):
    """The log could not be written for some time, a full disk say, and can be again. In the stream `system`."""

    error: str
    """The last one. Who asked for something meanwhile was told it."""
    seconds: float
    """From the first failed write to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStepped(Event):
    """The clock by which events are recorded was set. Times before it and after it are of two clocks."""

    seconds: float
    """By so much: what the clock says now, less what it would say."""
    before: float
    """What the event before it says that the time was, in unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStarted(Event):
    """A runner actor answered; its engine is loading."""

    runner: str
    incarnation: int
    pid: int
    host: str
    engine: str
    model: str = "rollout"
    """Which model its engine serves: the rollout model, or an auxiliary one by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReady(Event):
    """The runner's engine serves; units may be dispatched to it."""

    runner: str
    incarnation: int
    places: int
    """Units that it runs at the same time."""
    model_version: int
    load_seconds: float
    engine_version: str = ""
    """The engine's own version, and what it runs on; empty where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFailed(Event):
    """The runner could not load its engine, or its engine died; no unit goes to it."""

    runner: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLost(Event):
    """The runner's process is gone; what it was running is attempted again elsewhere."""

    runner: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerQuarantined(Event):
    """The runner ended too often: its slot stays empty until a person restarts the system."""

    runner: str
    incarnation: int
    deaths: int
    """The number of lives that ended within `period_seconds`."""
    period_seconds: float
    reason: str
    """Of the last end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRetired(Event):
    """The runner was stopped on purpose."""

    runner: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event):
    """The trainer published new weights; from here on they are the current version."""

    version: int
    path: str
    method: str = "checkpoint"
    """`checkpoint`; `memory`: `path` is in shared memory, which a restart of the machine empties; `nccl`: the same, and
    engines got them from GPU to GPU. A version may be published twice: from memory, and then as a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(Event):
    """One runner's engine serves this version now."""

    runner: str
    incarnation: int
    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFailed(Event):
    """One runner could not load this version; it goes on serving the version it had."""

    runner: str
    incarnation: int
    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetAdvanced(Event):
    """The taskset was read up to here for this batch; written in the transaction of its BatchSubmitted."""

    taskset: str
    batch_id: BatchId
    epoch: int
    """The pass over the taskset in which the next task to read lies, from 0."""
    offset: int
    """Tasks already read in that pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSubmitted(Event):
    """A trainer handed in a batch; from here on it is never lost. On an id that was used before, it begins anew."""

    batch_id: BatchId
    batch_type: BatchType
    repeat_times: list[int]
    """Runs wanted, one number a task."""
    tasks: list[dict[str, Any]] | None = None
    """The tasks as `task_to_dict` writes them, where they are small; otherwise:"""
    tasks_digest: str | None = None
    """the payload that holds them, as a JSON list."""
    min_wait_num: int | None = None
    max_attempts: int = 1
    """Attempts a unit gets: 1 + max_retry_times."""
    runs_per_unit: int | None = None
    """max_repeat_times_per_runner; None: all runs of a task are one unit."""
    detailed_stats: bool = False
    submission: str = ""
    """The client's id for this request: a resent request is recognised by it."""
    evals: list[int] = field(default_factory=list)
    """Tasks that are evals (`Task.is_eval`): their experiences are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksAdded(Event):
    """More tasks were scheduled under the id of a batch that is open; they are numbered on, and wait behind it."""

    repeat_times: list[int]
    tasks: list[dict[str, Any]] | None = None
    """As in BatchSubmitted, and so are the fields below."""
    tasks_digest: str | None = None
    runs_per_unit: int | None = None
    evals: list[int] = field(default_factory=list)
    """Among all tasks of the batch."""
    request: str = ""
    """The client's id for this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksDispatched(Event):
    """These units were sent to this runner, to be run with (at least) this model version."""

    runner: str
    incarnation: int
    units: list[Unit]
    model_version: int
    timeout: float = 0.0
    """Seconds that each attempt may take (`explorer.dynamic_timeout`); 0: `explorer.max_timeout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFinished(Event):
    """Some runs of a task completed; others of it are still to come, or failed."""

    task: int
    run_id_base: int
    """Of the unit as it was dispatched."""
    attempt: int
    runner: str
    incarnation: int
    runs: list[RunResult]
    payload: PayloadRef | None
    """None for evals, whose experiences are not kept."""
    model_version: int
    """The oldest version that made any of the tokens."""
    model_version_end: int
    """The newest."""
    seconds: float
    other_prompt_tokens: int = 0
    """What the model read beside the prompts of `runs`, for a workflow that does all runs itself: for requests that are
    in no experience, and for runs that failed. Negative where several runs had one prompt, which was read once."""
    other_response_tokens: int = 0
    """What it made beside the responses of `runs`. Negative where experiences hold tokens that it did not make."""

    @property
    def prompt_tokens(self) -> int:
        """All that the model read for these runs."""
        return sum(r.prompt_tokens for r in self.runs) + self.other_prompt_tokens

    @property
    def response_tokens(self) -> int:
        """All that it made for them."""
        return sum(r.response_tokens for r in self.runs) + self.other_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished(RunsFinished):
    """All runs of the task are complete with these: the task is finished, and never run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(Event):
    """Some runs of an attempt failed; they are attempted again, or given up when `retry` is false."""

    task: int
    run_id_base: int
    """Of the unit as it was dispatched."""
    failed_runs: list[int]
    attempt: int
    runner: str
    incarnation: int
    kind: FailureKind
    message: str
    retry: bool
    seconds: float = 0.0
    blamed: bool = True
    """It counts against the attempts that the unit gets; false where the whole system ended under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecided(Event):
    """After a start or a death it was decided what becomes of recovered work. In the batch's stream."""

    decision: str
    """`resume` (the batch goes on; what runs still runs), `redo` (units are attempted again), `finalize` (its pipeline
    is run again, nothing was delivered), `drop_stale` (its weights are older than the staleness bound: aborted)."""
    reason: str
    units: list[Unit] = field(default_factory=list)
    """The units that it is about; empty where it is about the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallDetected(Event):
    """Nothing has moved in this batch for longer than usual; once a stall, again when the cause changes."""

    waiting_on: str
    """What for, in one sentence with runner and attempt; `why` tells more."""
    since: float
    """Unix seconds of the last thing that moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDropped(Event):
    """These tasks were given up without being finished: the batch had enough, or was aborted."""

    tasks: list[int]
    reason: str
    kept: list[int] = field(default_factory=list)
    """Of these, those whose finished runs are delivered all the same (`over_rollout.return_partial_tasks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReopened(Event):
    """Somebody wants a task run again, all its runs, in a batch that is open: what it had is set aside."""

    task: int
    units: list[Unit]
    """What waits for a runner now; their attempts are counted on."""
    reason: str
    request: str = ""
    """The client's id for this request: asked again, it changes nothing."""
    finished: bool = False
    """It was finished."""
    dropped: str = ""
    """Why it had been dropped, where it had."""
    experiences: int = 0
    """Of the runs that are set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsTaken(Event):
    """A scheduler has the results of these tasks; they are not given out again. The last one ends the batch."""

    tasks: list[int]
    request: str
    """The client's id for this request: asked again, it gets the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPaused(Event):
    """Its scheduler was stopped: what is with runners goes on, what waits is not given to any."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResumed(Event):
    """Somebody wants it again: what waits is given to runners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinalizing(Event):
    """The batch has what it needs; its experiences go through the pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizeFailed(Event):
    """The pipeline failed; the batch is RUNNING again and can be finalized again."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinalized(Event):
    """The batch ended well. `result` is what the trainer was told; a replay computes it again and must agree."""

    result: dict[str, Any]
    pipeline_metrics: dict[str, float] = field(default_factory=dict)
    experiences: list[PayloadRef] = field(default_factory=list)
    """What the pipeline delivered, in order."""
    selected: int = 0
    """Experiences delivered."""
    dropped: int = 0
    """Experiences that the pipeline's filters took out."""
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    """Operator -> the ids (`eid.uid`) of the experiences that it took out."""
    model_versions: list[tuple[int, int]] = field(default_factory=list)
    """(count, version): so many experiences in a row, of those delivered, were made by this version of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesProcessed(Event):
    """Experiences that a client handed in, outside any batch, went through the pipeline."""

    pipeline_metrics: dict[str, float]
    experiences: list[PayloadRef]
    selected: int
    dropped: int
    request: str = ""
    """The client's id for this request: a resent request is recognised by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRecorded(Event):
    """The proxy gave these answers; their clients got the end of them only after this."""

    answers: list[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersRewarded(Event):
    """A reward was posted for these answers; one that was posted before is replaced."""

    messages: list[str]
    reward: float
    task: str | None = None
    """The task that they were part of, which is their group in the pipeline; None: each answer is a task of its own."""
    run: int | None = None
    """Which run of it; None: 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersDelivered(Event):
    """These answers went through the pipeline with their rewards: the ExperiencesProcessed of the same transaction."""

    messages: list[str]
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAborted(Event):
    """The batch was given up on purpose; `result` tells what was done of it."""

    reason: str
    result: dict[str, Any]
    kept_partial_results: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrained(Event):
    """The trainer acknowledged the batch as part of its step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """What the trainer says of the step: loss, gradient norm, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceMeasured(Event):
    """A train step ended: what the attempts of all steps so far took, for `explorer.dynamic_timeout`."""

    batch_id: BatchId
    steps: int
    attempts: int
    """Those that finished some runs, and those that timed out; evals don't count."""
    seconds: float
    """All of them together."""
    timeout: float
    """Seconds that an attempt may take from here on; 0: `explorer.max_timeout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesRedelivered(Event):
    """A trainer came back from its checkpoint of `step`: these batches, trained later than that, are its again."""

    step: int
    batches: list[BatchId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesTaken(Event):
    """A trainer took these from the queue (`take_experiences`), in this order."""

    items: list[TakenItem]
    at: float
    """Unix seconds, by the coordinator's clock: `buffer.queue.reuse_cooldown_time` counts from here."""
    step: int | None = None
    """The trainer's step that they are for."""
    request: str = ""
    """The client's id for this request: asked again, it gets the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperiencesReturned(Event):
    """A trainer came back from its checkpoint of `step`: what was taken for later steps counts as not taken."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWritten(Event):
    """An output of the pipeline holds what this batch (or request) delivered, whole."""

    output: str
    key: str
    """The name under which it was written: it is the same, however often it is written."""
    position: int
    """Of the BatchFinalized or ExperiencesProcessed that it holds."""
    experiences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFailed(Event):
    """An output could not be written; the batch is finalized all the same, and its experiences are delivered."""

    output: str
    key: str
    position: int
    error: str
    retry: bool
    """It is tried again, and nothing later is written before; false: given up, its payloads are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadsFreed(Event):
    """Payloads of batches that were trained long enough ago were deleted; their events stay."""

    batches: list[BatchId]
    payloads: int
    bytes: int


EVENTS: dict[str, type[Event]] = {
    name: cls
    for name, cls in list(globals().items())
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
}
"""Every event by its name in the log."""

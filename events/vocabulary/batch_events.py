"""What happens to a batch, from its submission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trinity_es.events.values import BatchId, BatchType, FailureKind
from trinity_es.events.vocabulary.base import Event, PayloadRef, RunResult, Unit

__all__ = [
    "AttemptFailed", "BatchAborted", "BatchFinalized", "BatchFinalizing", "BatchPaused", "BatchResumed",
    "BatchSubmitted", "BatchTrained", "FinalizeFailed", "RecoveryDecided", "ResultsTaken", "RunsFinished",
    "StallDetected", "TaskDropped", "TaskFinished", "TaskReopened", "TasksAdded", "TasksDispatched",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSubmitted(Event, stream="batch/<id>"):
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
class TasksAdded(Event, stream="batch/<id>"):
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
class TasksDispatched(Event, stream="batch/<id>"):
    """These units were sent to this runner, to be run with (at least) this model version."""

    runner: str
    incarnation: int
    units: list[Unit]
    model_version: int
    timeout: float = 0.0
    """Seconds that each attempt may take (`explorer.dynamic_timeout`); 0: `explorer.max_timeout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFinished(Event, stream="batch/<id>"):
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
class AttemptFailed(Event, stream="batch/<id>"):
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
    """It counts against the attempts that the unit gets; false where the whole system ended under it, or its engine,
    a server of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecided(Event, stream="batch/<id>"):
    """After a start or a death it was decided what becomes of recovered work. In the batch's stream."""

    decision: str
    """`resume` (the batch goes on; what runs still runs), `redo` (units are attempted again), `finalize` (its pipeline
    is run again, nothing was delivered), `drop_stale` (its weights are older than the staleness bound: aborted)."""
    reason: str
    units: list[Unit] = field(default_factory=list)
    """The units that it is about; empty where it is about the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallDetected(Event, stream="batch/<id>"):
    """Nothing has moved in this batch for longer than usual; once a stall, again when the cause changes."""

    waiting_on: str
    """What for, in one sentence with runner and attempt; `why` tells more."""
    since: float
    """Unix seconds of the last thing that moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDropped(Event, stream="batch/<id>"):
    """These tasks were given up without being finished: the batch had enough, or was aborted."""

    tasks: list[int]
    reason: str
    kept: list[int] = field(default_factory=list)
    """Of these, those whose finished runs are delivered all the same (`over_rollout.return_partial_tasks`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReopened(Event, stream="batch/<id>"):
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
class ResultsTaken(Event, stream="batch/<id>"):
    """A scheduler has the results of these tasks; they are not given out again. The last one ends the batch."""

    tasks: list[int]
    request: str
    """The client's id for this request: asked again, it gets the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPaused(Event, stream="batch/<id>"):
    """Its scheduler was stopped: what is with runners goes on, what waits is not given to any."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResumed(Event, stream="batch/<id>"):
    """Somebody wants it again: what waits is given to runners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinalizing(Event, stream="batch/<id>"):
    """The batch has what it needs; its experiences go through the pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizeFailed(Event, stream="batch/<id>"):
    """The pipeline failed; the batch is RUNNING again and can be finalized again."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinalized(Event, stream="batch/<id>"):
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
class BatchAborted(Event, stream="batch/<id>"):
    """The batch was given up on purpose; `result` tells what was done of it."""

    reason: str
    result: dict[str, Any]
    kept_partial_results: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrained(Event, stream="batch/<id>"):
    """The trainer acknowledged the batch as part of its step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """What the trainer says of the step: loss, gradient norm, ..."""

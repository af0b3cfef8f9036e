"""Events of a batch, from its submission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trinity_es.events.values import BatchId, BatchType, FailureKind
from trinity_es.events.vocabulary.base import ContinuedTask, Event, PayloadRef, RunResult, Unit

__all__ = [
    "AttemptFailed", "AttemptKept", "BatchAborted", "BatchFinalized", "BatchFinalizing", "BatchPaused", "BatchResumed",
    "BatchSubmitted", "BatchTrained", "FinalizeFailed", "GroupsMissing", "RecoveryDecided", "ResultsTaken",
    "RunsFinished", "StallDetected", "TaskDropped", "TaskFinished", "TaskReopened", "TasksAdded", "TasksDispatched",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSubmitted(Event, stream="batch/<id>"):
    """A trainer submitted a batch, which is never lost from here on. A reused id starts a new batch."""

    batch_id: BatchId
    batch_type: BatchType
    repeat_times: list[int]
    """Number of runs of each task."""
    tasks: list[dict[str, Any]] | None = None
    """The tasks as `task_to_dict` writes them; None if they are large, and `tasks_digest` is set."""
    tasks_digest: str | None = None
    """Digest of the payload that holds the tasks as a JSON list."""
    min_wait_num: int | None = None
    max_attempts: int = 1
    """Attempts per unit: 1 + max_retry_times."""
    runs_per_unit: int | None = None
    """max_repeat_times_per_runner; None: all runs of a task are one unit."""
    detailed_stats: bool = False
    submission: str = ""
    """The client's id for this request. The same request, sent again, has the same id."""
    evals: list[int] = field(default_factory=list)
    """Indexes of the tasks that are evals (`Task.is_eval`): their experiences are not kept."""
    continues: list[ContinuedTask] = field(default_factory=list)
    """Tasks of this batch that continue tasks which an earlier batch cut (`synchronizer.in_flight: cut`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksAdded(Event, stream="batch/<id>"):
    """A client added tasks to an open batch. They are numbered and queued after the batch's earlier tasks."""

    repeat_times: list[int]
    tasks: list[dict[str, Any]] | None = None
    """This field and the next two are as in BatchSubmitted."""
    tasks_digest: str | None = None
    runs_per_unit: int | None = None
    evals: list[int] = field(default_factory=list)
    """Indexes among all tasks of the batch."""
    request: str = ""
    """The client's id for this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksDispatched(Event, stream="batch/<id>"):
    """Units were sent to a runner, which plays them with this model version or a newer one."""

    runner: str
    incarnation: int
    units: list[Unit]
    model_version: int
    timeout: float = 0.0
    """Seconds per attempt (`explorer.dynamic_timeout`); 0: `explorer.max_timeout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFinished(Event, stream="batch/<id>"):
    """Some runs of a task completed; its other runs are still open, or failed."""

    task: int
    run_id_base: int
    """First run of the dispatched unit."""
    attempt: int
    runner: str
    incarnation: int
    runs: list[RunResult]
    payload: PayloadRef | None
    """Experiences of `runs`; None for evals, whose experiences are not kept."""
    model_version: int
    """Oldest version that made any of the tokens."""
    model_version_end: int
    """Newest version that made any of the tokens."""
    seconds: float
    other_prompt_tokens: int = 0
    """Tokens that the model read in addition to the prompts of `runs`: in failed runs, and in requests without an
    experience. 0 unless the workflow plays all runs itself. Negative if runs shared a prompt, which was read once."""
    other_response_tokens: int = 0
    """Tokens that the model generated in addition to the responses of `runs`. Negative if experiences hold tokens that
    it did not generate."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the model read for all these runs."""
        return sum(r.prompt_tokens for r in self.runs) + self.other_prompt_tokens

    @property
    def response_tokens(self) -> int:
        """Tokens that the model generated for all these runs."""
        return sum(r.response_tokens for r in self.runs) + self.other_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished(RunsFinished):
    """The last open runs of a task completed: the task is finished and never runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(Event, stream="batch/<id>"):
    """Some runs of an attempt failed. They are attempted again, or given up if `retry` is false."""

    task: int
    run_id_base: int
    """First run of the dispatched unit."""
    failed_runs: list[int]
    attempt: int
    runner: str
    incarnation: int
    kind: FailureKind
    message: str
    retry: bool
    seconds: float = 0.0
    blamed: bool = True
    """True if this failure counts towards the unit's `max_attempts`. False if the whole system, or an engine on an
    external server, ended during the attempt. It stops counting if a later `AttemptKept` shows that the attempt got
    further than earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKept(Event, stream="batch/<id>"):
    """The journal's records of a lost or cut attempt were stored. The next attempt continues from them."""

    task: int
    run_id_base: int
    runs: int
    """Number of consecutive runs from `run_id_base` on."""
    attempt: int
    """The attempt that was lost or cut; 0 if it belongs to the earlier batch that this task continues."""
    runner: str
    incarnation: int
    payload: str
    """Digest of the payload with the records of the journal."""
    calls: int
    """Number of complete answers of models. A call with `n` answers counts n times."""
    open_calls: int
    """Number of partial answers that the next attempt can continue."""
    tokens: int
    """Tokens of all these answers, which are not generated again."""
    max_tokens: int = 0
    """Maximum number of tokens of the partial answers together; 0 if it is unknown."""
    steps: int
    """Number of workflow steps whose results were stored."""
    seconds: float
    """Seconds that the lost attempts had taken at the last record. They count towards the next attempt's limit."""
    not_kept: dict[str, int] = field(default_factory=dict)
    """Tokens of partial answers that can't be continued, by reason: a sampling field, `8 splices`, or `a gap in the
    journal` (records before them were damaged, or dropped by `explorer.progress.max_bytes`)."""
    possibly_delivered: list[str] = field(default_factory=list)
    """Names of unfinished steps, whose side effect may have happened. Their runs start from the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecided(Event, stream="batch/<id>"):
    """After a restart or the death of a process, the coordinator decided how interrupted work continues."""

    decision: str
    """`resume` (batch and running units continue), `redo` (units are attempted again), `finalize` (the pipeline runs
    again, since nothing was delivered), `drop_stale` (aborted: its weights are older than the staleness bound)."""
    reason: str
    units: list[Unit] = field(default_factory=list)
    """Units that the decision concerns; empty if it concerns the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallDetected(Event, stream="batch/<id>"):
    """The batch made no progress for longer than usual. Recorded once per stall, and again when the cause changes."""

    waiting_on: str
    """The cause in one sentence, with runner and attempt. `trinity-es why` prints more."""
    since: float
    """Unix seconds of the last progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDropped(Event, stream="batch/<id>"):
    """The batch gave up unfinished tasks, because it had enough others or was aborted."""

    tasks: list[int]
    reason: str
    kept: list[int] = field(default_factory=list)
    """The tasks among these whose finished runs are still delivered (`over_rollout.return_partial_tasks`)."""
    cut: list[int] = field(default_factory=list)
    """The tasks among these that can go on in a later batch (`synchronizer.in_flight: cut`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReopened(Event, stream="batch/<id>"):
    """A client asked for all runs of a task to be repeated. The task's earlier outcome no longer counts."""

    task: int
    units: list[Unit]
    """Units that now wait for a runner. Their attempts are numbered after the earlier ones."""
    reason: str
    request: str = ""
    """The client's id for this request; the same request again changes nothing."""
    finished: bool = False
    """True if the task was finished before."""
    dropped: str = ""
    """Why the task was dropped before; "" if it was not."""
    experiences: int = 0
    """Number of experiences that no longer count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsTaken(Event, stream="batch/<id>"):
    """A scheduler took the results of these tasks, so no other one gets them. The batch ends when all are taken."""

    tasks: list[int]
    request: str
    """The client's id for this request; the same request again gets the same results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPaused(Event, stream="batch/<id>"):
    """The batch's scheduler was stopped: units on runners continue, queued units wait."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResumed(Event, stream="batch/<id>"):
    """A scheduler resumed the batch: queued units go to runners again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinalizing(Event, stream="batch/<id>"):
    """The batch has enough settled tasks; its experiences go through the pipeline."""

    groups: int = 0
    """Minimum number of tasks with experiences after the pipeline. With fewer the batch is not finalized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizeFailed(Event, stream="batch/<id>"):
    """The pipeline failed. The batch is RUNNING again and can be finalized again."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsMissing(Event, stream="batch/<id>"):
    """Too few tasks had experiences after the pipeline, so nothing was delivered. The batch is RUNNING again and
    accepts more tasks."""

    usable: int
    """Number of tasks with experiences after the pipeline."""
    missing: int
    """Number of tasks with experiences that are still needed."""
    lost: dict[str, int] = field(default_factory=dict)
    """Number of tasks without experiences, by the cause that removed their last one: an operator's name, `unusable` or
    `max_staleness` as in BatchFinalized, or `failed` if none of their runs succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinalized(Event, stream="batch/<id>"):
    """The batch is complete. `result` is the reply to the trainer; a replay that computes it again gets the same."""

    result: dict[str, Any]
    pipeline_metrics: dict[str, float] = field(default_factory=dict)
    experiences: list[PayloadRef] = field(default_factory=list)
    """Experiences that the pipeline delivered, in order."""
    selected: int = 0
    """Number of experiences delivered."""
    dropped: int = 0
    """Number of experiences that the pipeline's filters removed."""
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    """Operator -> ids (`eid.uid`) of the experiences that it removed. Two more keys are `unusable` (the experience
    holds numbers that are not finite) and `max_staleness` (older than `explorer.max_staleness`)."""
    model_versions: list[tuple[int, int]] = field(default_factory=list)
    """(count, version): this version of the weights made the next `count` delivered experiences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAborted(Event, stream="batch/<id>"):
    """A client or the recovery aborted the batch. `result` says how much of it was done."""

    reason: str
    result: dict[str, Any]
    kept_partial_results: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrained(Event, stream="batch/<id>"):
    """The trainer acknowledged the batch as part of its step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """The trainer's metrics of the step: loss, gradient norm, ..."""

"""Events of the system: its processes, clock, runners, weights and tasksets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trinity_es.events.values import BatchId
from trinity_es.events.vocabulary.base import Event, KnownEnd, TasksetSource

__all__ = [
    "AdapterFailed", "AdapterLoaded", "AdapterPublished", "AdapterRemoved", "ClockStepped", "ConcurrencyChanged",
    "CoordinatorStarted", "PaceMeasured", "RewindAccepted", "RunnerFailed", "RunnerLost", "RunnerQuarantined",
    "RunnerReady", "RunnerRetired", "RunnerStarted", "ServerAdded", "ServerRemoved", "SystemConfigured",
    "TasksetAdvanced", "TasksetResolved", "WeightsFailed", "WeightsLoaded", "WeightsPublished", "WritingResumed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfigured(Event, stream="system"):
    """The actor system was started with this resolved config, in which secrets are masked."""

    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindAccepted(Event, stream="system"):
    """A person accepted that the log lost acknowledged events and continues without them."""

    lost: list[KnownEnd]
    """Known ends that the log does not have."""
    first: int
    """First lost position, with `last` as the last one, which was acknowledged. 1 if the lost events belong to another
    log, which shares nothing with this one."""
    last: int
    kept: int
    """Last position before this event; the log up to it is unchanged."""
    generation_before: str
    """Generation of the log when it was opened."""
    generation: str
    """Generation of the log from this event on. Claims about earlier generations no longer count."""
    by: str
    """The person, as user and host."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStarted(Event, stream="system"):
    """A coordinator took the lease. From this event on, only a writer of this epoch can append."""

    epoch: int
    pid: int
    host: str
    version: str
    open_batches: list[BatchId] = field(default_factory=list)
    """Batches that it took over from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingResumed(Event, stream="system"):
    """The log can be written again, for example after a full disk."""

    error: str
    """Last error of a failed write, which requests got in the meantime."""
    seconds: float
    """Seconds from the first failed write to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStepped(Event, stream="clock"):
    """The clock that dates events was set. Times before and after this event are not comparable."""

    seconds: float
    """Size of the step: the clock's time after it, minus the time that the clock would have without it."""
    before: float
    """Time of the event before this one, in unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunnerEvent(Event, stream="runner/<runner>"):
    """Base of the events in one incarnation of a runner, which is one life of its process."""

    runner: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStarted(_RunnerEvent):
    """A runner actor started and answered the coordinator. Its engine is loading."""

    pid: int
    host: str
    engine: str
    model: str = "rollout"
    """Model that its engine serves: `rollout`, or the name of an auxiliary model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReady(_RunnerEvent):
    """The runner's engine has loaded, so the runner can get units."""

    places: int
    """Number of units that the runner plays at the same time."""
    model_version: int
    load_seconds: float
    engine_version: str = ""
    """Version and platform that the engine reports; empty if it reports none."""
    adapters: dict[str, int] = field(default_factory=dict)
    """LoRA adapters that the engine already serves, and their versions. A new runner has none; one that a new
    coordinator takes over may have some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyChanged(_RunnerEvent):
    """The runner changed how many units it plays at the same time, because its engine has room or is full."""

    places: int
    """Number of units that the runner now plays at the same time."""
    kv_share: float
    """Share of the engine's KV cache in use at that moment, from 0 to 1."""
    waiting: int
    """Number of requests in the engine's queue at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFailed(_RunnerEvent):
    """The runner could not load its engine, or its engine died. The runner gets no more units."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLost(_RunnerEvent):
    """The runner's process is gone. Its units are attempted again on other runners."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerQuarantined(_RunnerEvent):
    """The runner's process died too often. It is not started again until a person restarts the runner or the system."""

    deaths: int
    """Number of deaths within `period_seconds`."""
    period_seconds: float
    reason: str
    """Reason of the last death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRetired(_RunnerEvent):
    """The runner was stopped on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAdded(Event, stream="servers"):
    """An external server became an engine of the system. Its runner waits for the server, and has it load weights."""

    url: str
    runner: str
    """Runner that supervises the server. A server that is removed and added again gets the same one."""
    by: Literal["list", "scale"]
    """`list`: the config's list has the server. `scale`: a person added it, and it stays until a person removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRemoved(Event, stream="servers"):
    """An external server is no longer an engine. Its runner gets no more units, finishes its units, and retires."""

    url: str
    runner: str
    by: Literal["list", "scale"]
    """`list`: the config's list no longer has the server. `scale`: a person removed it, even if the list has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event, stream="weights"):
    """The trainer published new weights, which are now the current version."""

    version: int
    path: str
    method: str = "checkpoint"
    """`checkpoint`: files at `path`. `memory`: `path` is in shared memory, which a restart of the machine empties.
    `nccl`: as `memory`, and engines got the weights from GPU to GPU. A version may be published twice, first from
    memory and then as a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(_RunnerEvent):
    """A runner's engine now serves this version of the weights."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFailed(_RunnerEvent):
    """A runner could not load this version of the weights. It continues with the version it had."""

    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPublished(Event, stream="adapter/<adapter>"):
    """The trainer published a version of a LoRA adapter. New requests that name the adapter use this version."""

    adapter: str
    version: int
    path: str
    """Folder in PEFT's format."""
    rank: int
    size: int
    """Size of the adapter's two files in bytes."""
    digest: str
    """Digest of the two files. An engine refuses files at `path` that have another digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRemoved(Event, stream="adapter/<adapter>"):
    """An adapter was withdrawn. New requests that name it are refused."""

    adapter: str
    version: int
    """Last published version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded(_RunnerEvent):
    """A runner's engine now answers new requests for this adapter with this version."""

    adapter: str
    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailed(_RunnerEvent):
    """A runner could not load this version of an adapter. It continues with the version it had, if any."""

    adapter: str
    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetAdvanced(Event, stream="taskset/<taskset>"):
    """A batch took tasks from the taskset. The next batch continues after them. Written with the BatchSubmitted."""

    taskset: str
    batch_id: BatchId
    epoch: int
    """Number of the pass over the taskset in which the next task lies, from 0."""
    offset: int
    """Number of tasks already read in that pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetResolved(Event, stream="tasksets"):
    """A taskset name in the config was resolved to this source. Written with the first batch from it.

    A resumed run reads this source again, even if the name resolves to another one by then.
    """

    batch_id: BatchId
    source: TasksetSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceMeasured(Event, stream="pace"):
    """A train step ended. The fields sum up all steps of the run so far, for `explorer.dynamic_timeout`."""

    batch_id: BatchId
    steps: int
    attempts: int
    """Number of attempts that finished some runs or timed out, without evals."""
    seconds: float
    """Total duration of these attempts."""
    timeout: float
    """Time limit in seconds of each later attempt; 0 means `explorer.max_timeout`."""

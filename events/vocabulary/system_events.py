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
    """The actor system was started with this resolved config (passwords masked)."""

    config: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindAccepted(Event, stream="system"):
    """A person accepted that the log continues without acknowledged events that it no longer has."""

    lost: list[KnownEnd]
    """Known ends that the log does not have."""
    first: int
    """`first` to `last` are the lost positions; at least `last` was acknowledged. 1 if the lost events belong to
    another log, which shares nothing with this one."""
    last: int
    kept: int
    """Last position before this event; the log up to it is unchanged."""
    generation_before: str
    """Generation of the log as it was opened."""
    generation: str
    """Generation of the log from here on; claims about earlier ones no longer count."""
    by: str
    """The person, as user and host."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStarted(Event, stream="system"):
    """A coordinator took the lease; from here on only writers of this epoch can append."""

    epoch: int
    pid: int
    host: str
    version: str
    open_batches: list[BatchId] = field(default_factory=list)
    """Batches that it took over from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingResumed(Event, stream="system"):
    """The log can be written again, after a full disk for example."""

    error: str
    """Last error, which requests got in the meantime."""
    seconds: float
    """Seconds from the first failed write to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStepped(Event, stream="clock"):
    """The clock that dates events was set. Times before and after this event are not comparable."""

    seconds: float
    """Size of the step: the clock's time now, minus its time without the step."""
    before: float
    """Time of the event before this one, in unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRunner(Event, stream="runner/<runner>"):
    """Base of events in one life of a runner."""

    runner: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStarted(_OfRunner):
    """A runner actor answered; its engine is loading."""

    pid: int
    host: str
    engine: str
    model: str = "rollout"
    """Model that its engine serves: `rollout`, or the name of an auxiliary model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReady(_OfRunner):
    """The runner's engine serves; units may be dispatched to it."""

    places: int
    """Units that it runs at the same time."""
    model_version: int
    load_seconds: float
    engine_version: str = ""
    """The engine's own version and platform; empty if it does not say."""
    adapters: dict[str, int] = field(default_factory=dict)
    """LoRA adapters that it already serves, and their versions; not empty if a coordinator takes over a runner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyChanged(_OfRunner):
    """The runner changed how many units it runs at the same time, because its engine has room or is full."""

    places: int
    """Units that it runs at the same time."""
    kv_share: float
    """Share of its engine's KV cache in use at that moment."""
    waiting: int
    """Requests that waited in its engine at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFailed(_OfRunner):
    """The runner could not load its engine, or its engine died; the runner gets no units."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLost(_OfRunner):
    """The runner's process is gone; its units are attempted again elsewhere."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerQuarantined(_OfRunner):
    """The runner ended too often; its slot stays empty until a person restarts the runner or the system."""

    deaths: int
    """Number of lives that ended within `period_seconds`."""
    period_seconds: float
    reason: str
    """Reason of the last end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRetired(_OfRunner):
    """The runner was stopped on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAdded(Event, stream="servers"):
    """An external server became an engine. Its runner waits for it, and has it load the weights."""

    url: str
    runner: str
    """Runner that supervises it; a server that comes back gets the same one."""
    by: Literal["list", "scale"]
    """`list`: it is in the list of the config; `scale`: a person added it, and it stays until a person removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRemoved(Event, stream="servers"):
    """An external server is no longer an engine: its runner gets no more units, finishes those it has, and retires."""

    url: str
    runner: str
    by: Literal["list", "scale"]
    """`list`: it is no longer in the list; `scale`: a person removed it, even if the list still has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event, stream="weights"):
    """The trainer published new weights; from here on they are the current version."""

    version: int
    path: str
    method: str = "checkpoint"
    """`checkpoint`; `memory`: `path` is in shared memory, which a restart of the machine empties; `nccl`: the same, and
    engines got them from GPU to GPU. A version may be published twice, first from memory and then as a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(_OfRunner):
    """A runner's engine serves this version now."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFailed(_OfRunner):
    """A runner could not load this version; it continues with the version it had."""

    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPublished(Event, stream="adapter/<adapter>"):
    """The trainer published a version of a LoRA adapter; requests that name the adapter get it from here on."""

    adapter: str
    version: int
    path: str
    """Folder in PEFT's format."""
    rank: int
    size: int
    """Bytes of its two files, which an engine reads to load it."""
    digest: str
    """Digest of its two files; an engine that finds others at `path` refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRemoved(Event, stream="adapter/<adapter>"):
    """An adapter was withdrawn: from here on requests that name it are refused."""

    adapter: str
    version: int
    """Last published version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded(_OfRunner):
    """A runner's engine now answers new requests for this adapter with this version."""

    adapter: str
    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailed(_OfRunner):
    """A runner could not load this version of an adapter; it continues with the version it had, if any."""

    adapter: str
    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetAdvanced(Event, stream="taskset/<taskset>"):
    """A batch took its tasks from the taskset, which goes on at this place; written together with BatchSubmitted."""

    taskset: str
    batch_id: BatchId
    epoch: int
    """Pass over the taskset that holds the next task to read, from 0."""
    offset: int
    """Tasks already read in that pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetResolved(Event, stream="tasksets"):
    """A taskset name in the config was resolved to this source; in the transaction of the first batch from it.

    A resumed run reads this source again, whatever the name means by then.
    """

    batch_id: BatchId
    source: TasksetSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceMeasured(Event, stream="pace"):
    """A train step ended. The fields sum up the attempts of all steps so far, for `explorer.dynamic_timeout`."""

    batch_id: BatchId
    steps: int
    attempts: int
    """Attempts that finished some runs or timed out, without evals."""
    seconds: float
    """Total duration of these attempts."""
    timeout: float
    """Seconds per attempt from here on; 0: `explorer.max_timeout`."""

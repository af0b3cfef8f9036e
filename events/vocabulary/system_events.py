"""What happens to a system: its processes, its clock, its runners, weights and tasksets."""

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
class CoordinatorStarted(Event, stream="system"):
    """A coordinator took the lease; only writers of this epoch can append from here on."""

    epoch: int
    pid: int
    host: str
    version: str
    open_batches: list[BatchId] = field(default_factory=list)
    """What it took over from the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingResumed(Event, stream="system"):
    """The log could not be written for some time, a full disk say, and can be again. In the stream `system`."""

    error: str
    """The last one. Who asked for something meanwhile was told it."""
    seconds: float
    """From the first failed write to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStepped(Event, stream="clock"):
    """The clock by which events are recorded was set. Times before it and after it are of two clocks."""

    seconds: float
    """By so much: what the clock says now, less what it would say."""
    before: float
    """What the event before it says that the time was, in unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRunner(Event, stream="runner/<runner>"):
    """What happens in one life of a runner."""

    runner: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStarted(_OfRunner):
    """A runner actor answered; its engine is loading."""

    pid: int
    host: str
    engine: str
    model: str = "rollout"
    """Which model its engine serves: the rollout model, or an auxiliary one by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerReady(_OfRunner):
    """The runner's engine serves; units may be dispatched to it."""

    places: int
    """Units that it runs at the same time."""
    model_version: int
    load_seconds: float
    engine_version: str = ""
    """The engine's own version, and what it runs on; empty where it does not say."""
    adapters: dict[str, int] = field(default_factory=dict)
    """The LoRA adapters that it serves already, and their versions: a coordinator that takes over finds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyChanged(_OfRunner):
    """The runner runs more units at the same time from here on, or fewer, since its engine has room or is full."""

    places: int
    """Units that it runs at the same time."""
    kv_share: float
    """Share of its engine's KV cache that was taken then."""
    waiting: int
    """Requests that waited in its engine then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFailed(_OfRunner):
    """The runner could not load its engine, or its engine died; no unit goes to it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLost(_OfRunner):
    """The runner's process is gone; what it was running is attempted again elsewhere."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerQuarantined(_OfRunner):
    """The runner ended too often: its slot stays empty until a person restarts the system."""

    deaths: int
    """The number of lives that ended within `period_seconds`."""
    period_seconds: float
    reason: str
    """Of the last end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRetired(_OfRunner):
    """The runner was stopped on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAdded(Event, stream="servers"):
    """A server that others run is an engine from here on; its runner waits for it, and has it load the weights."""

    url: str
    runner: str
    """The runner that supervises it: a server that comes back gets the same."""
    by: Literal["list", "scale"]
    """`list`: it is in the list of the config; `scale`: somebody added it, and it stays until somebody removes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRemoved(Event, stream="servers"):
    """A server is to be no engine any more: its runner gets no more units, ends those it has, and retires."""

    url: str
    runner: str
    by: Literal["list", "scale"]
    """`list`: it is not in the list any more; `scale`: somebody took it away, though the list may have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event, stream="weights"):
    """The trainer published new weights; from here on they are the current version."""

    version: int
    path: str
    method: str = "checkpoint"
    """`checkpoint`; `memory`: `path` is in shared memory, which a restart of the machine empties; `nccl`: the same, and
    engines got them from GPU to GPU. A version may be published twice: from memory, and then as a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(_OfRunner):
    """One runner's engine serves this version now."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFailed(_OfRunner):
    """One runner could not load this version; it goes on serving the version it had."""

    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPublished(Event, stream="adapter/<adapter>"):
    """The trainer published a version of a LoRA adapter; requests that name the adapter get it from here on."""

    adapter: str
    version: int
    path: str
    """A folder in PEFT's format."""
    rank: int
    size: int
    """Bytes of its two files: what an engine reads to load it."""
    digest: str
    """Of its two files: an engine that finds others at `path` refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRemoved(Event, stream="adapter/<adapter>"):
    """An adapter was taken back: requests that name it are refused from here on."""

    adapter: str
    version: int
    """The last that was published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoaded(_OfRunner):
    """One runner's engine answers new requests for this adapter with this version now."""

    adapter: str
    version: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailed(_OfRunner):
    """One runner could not load this version of an adapter; it goes on with the version of it that it had, if any."""

    adapter: str
    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetAdvanced(Event, stream="taskset/<taskset>"):
    """The taskset was read up to here for this batch; written in the transaction of its BatchSubmitted."""

    taskset: str
    batch_id: BatchId
    epoch: int
    """The pass over the taskset in which the next task to read lies, from 0."""
    offset: int
    """Tasks already read in that pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksetResolved(Event, stream="tasksets"):
    """A taskset that its config names was found to be this; written in the transaction of the first batch of it.

    Whoever goes on with the run reads this again, not what the name has come to mean.
    """

    batch_id: BatchId
    source: TasksetSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceMeasured(Event, stream="pace"):
    """A train step ended: what the attempts of all steps so far took, for `explorer.dynamic_timeout`."""

    batch_id: BatchId
    steps: int
    attempts: int
    """Those that finished some runs, and those that timed out; evals don't count."""
    seconds: float
    """All of them together."""
    timeout: float
    """Seconds that an attempt may take from here on; 0: `explorer.max_timeout`."""

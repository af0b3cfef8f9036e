"""All messages between the processes of a system.

Messages carry control data and never a token. A unit is some or all runs of one task; one message carries many units or
many outcomes. A task or a unit's results that are too large go into a payload, and the message names its digest.
Thespian's transport is quadratic in the size of a message, so `LIMIT` holds for each.

Thespian pickles messages, and the receiver dispatches on the class name alone. Each process of a runner has a number,
its incarnation. A message that may arrive after a restart names the incarnation that it is for, because an address may
later belong to another actor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.events.quick_pickle import quickly_pickled
from trinity_es.events.store.checks.log_end import Claim, Mark
from trinity_es.events.values import BatchId, FailureKind
from trinity_es.events.vocabulary import AdapterPublished, PayloadRef, RunResult, Unit

__all__ = [
    "AdaptersLoadResult", "CancelUnits", "Configure", "CoordinatorUp", "CoordinatorWaits", "EndedRunners",
    "Endpoints", "GroupJoinResult", "Heartbeat", "HostDrained", "HostLeaves", "JoinGroup", "LeaseChange",
    "LeaseLost", "LeaseReply", "LeaseReport", "LoadAdapters", "LoadWeights", "OutcomeReport", "QueryActivity",
    "ReplaceRunner", "Retire", "Retired", "RunUnits", "RunnerActivity", "RunnerDied", "RunnerStatus", "Servers",
    "StartCoordinator", "StartRunner", "StoreGone", "UnitAssignment", "UnitOutcome", "WeightsLoadResult",
]


# --- guardian -> its children ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Configure:
    """Launcher to guardian: start everything with this config."""

    config: LaunchedConfig = field(repr=False)
    """Left out of `repr`, here and in other messages, because it holds the password of the database."""
    port: int
    """Port of the actor system's admin."""
    first_incarnation: int
    """Number of the first incarnation, higher than that of any runner in the log."""
    known: tuple[Claim, ...] = ()
    """The end of the log when the system started."""


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    config: LaunchedConfig = field(repr=False)
    admin: dict[str, Any]
    """The actor system: `port`, `pid`, `started` of its admin process."""
    alive: dict[str, int]
    """Incarnation of every runner that has a process now."""
    known: tuple[Claim, ...] = ()
    """The end of the log, as the previous coordinator reported it."""
    informed_runners: frozenset[str] = frozenset()
    """Runners to which a previous coordinator may have reported a later end of the log."""
    hosts_heard: dict[str, float] = field(default_factory=dict)
    """Host -> monotonic seconds at which the previous coordinator last heard from it."""


@dataclass(frozen=True, slots=True)
class StartRunner:
    """Guardian to runner: start your engine. The guardian sends CoordinatorUp when a coordinator is up."""

    name: str
    incarnation: int
    config: LaunchedConfig = field(repr=False)
    model: str = "rollout"
    """The model that the runner serves. Runners of the rollout model get units; workflows call the other models."""
    first_place: int = 0
    """The first GPU or core that the runner's engine takes (`actors.engines.devices`)."""
    places: int = 1
    """Number of GPUs or cores that all engines take together."""
    url: str = ""
    """URL of the server that the runner supervises, for engines of type `http`."""
    weights: tuple[int, str] = (0, "")
    """Version and folder of the current weights, as in `Servers`. A server that restarts gets them."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Coordinator to guardian, repeated every few seconds: the external servers that need a runner now."""

    servers: dict[str, str]
    """Runner -> URL. The guardian retires every other runner of the rollout model."""
    retire: dict[str, int]
    """Runner -> incarnation of runners that have to retire and whose end is not in the log yet."""
    weights: tuple[int, str] = (0, "")
    """Version and folder of the current weights; an empty folder stands for the original model."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Guardian to rollout runners and coordinator: URLs of the auxiliary models. Sent on changes, and repeated."""

    models: dict[str, dict[str, str]]
    """Model -> runner -> URL, for the runners whose engines serve."""


@dataclass(frozen=True, slots=True)
class CoordinatorUp:
    """Coordinator to guardian: I have the lease of the log. Guardian to runners: report to this coordinator now."""

    coordinator: Any
    epoch: int


@dataclass(frozen=True, slots=True)
class RunnerDied:
    """Guardian to coordinator: this runner's process has ended. The guardian repeats it to each later coordinator."""

    name: str
    incarnation: int
    reason: str
    deaths: int = 0
    """Number of this runner's processes that ended in the last `period` seconds."""
    period: float = 0.0
    quarantined: bool = False
    """True if the guardian does not start this runner again."""
    model: str = "rollout"
    asked: bool = False
    """True if the end was requested. Then it counts against none of the units that the runner had."""


@dataclass(frozen=True, slots=True)
class ReplaceRunner:
    """Coordinator to guardian: end this incarnation of a runner and start another. Ignored if it has ended already."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndedRunners:
    """Guardian to coordinator, now and then, in case a RunnerDied was lost: which incarnations have ended."""

    ended: dict[str, int]
    """Runner -> the highest incarnation that has ended. All lower ones have ended too."""


@dataclass(frozen=True, slots=True)
class CoordinatorWaits:
    """Coordinator to guardian: I can't take over yet because the log can't be written. I answer clients with that."""

    coordinator: Any


@dataclass(frozen=True, slots=True)
class Retire:
    """Order to finish work and end. A runner confirms with RunnerStatus `retired`, the coordinator with Retired."""


@dataclass(frozen=True, slots=True)
class Retired:
    """Coordinator to guardian: everything is written and the log is closed."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Coordinator to guardian, as its last message: another system owns the store now, so this system has to end."""

    owner: str


@dataclass(frozen=True, slots=True)
class StoreGone:
    """Coordinator to guardian: the log was deleted or its database dropped, so the system has to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """Host to coordinator: give my runners no new units. HostDrained answers it when they are without units."""

    reason: str
    final: bool = False
    """True if the host ends now, even if its runners have units left."""


@dataclass(frozen=True, slots=True)
class HostDrained:
    """Coordinator to host: your runners are without units."""


# --- runner -> coordinator ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of a runner or the coordinator. Its arrival shows that the process lives, its content whether the
    process makes progress."""

    name: str
    incarnation: int
    pid: int
    silent: float = 0.0
    """Seconds since the runner's engine loop last answered a call. Large if the loop is blocked."""
    epoch: int = 0
    """Epoch of the coordinator that sends this, or that the runner reports to."""
    trouble: str = ""
    """Error that prevents the runner from storing finished results. It keeps them and retries."""
    waits_for: str = ""
    """External action that the engine needs before it can start. Meanwhile the runner does not count as late."""
    end: Mark | None = None
    """End of the log; only the coordinator sends it."""
    runs_wait: str = ""
    """How many of the runner's runs wait for something outside of the system, and for what."""
    hosts_heard: dict[str, float] = field(default_factory=dict)
    """Host -> monotonic seconds at which the coordinator last heard from it; only the coordinator sends it."""


@dataclass(frozen=True, slots=True)
class RunnerStatus:
    """A runner's state: `started` (engine loading), `ready`, `failed` (with the reason), `retired`."""

    name: str
    incarnation: int
    state: str
    pid: int
    host: str
    engine: str
    places: int = 0
    model_version: int = 0
    load_seconds: float = 0.0
    reason: str = ""
    loading: int | None = None
    """The version of the weights that the runner is loading now."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Adapter -> version, for the LoRA adapters that the engine serves."""
    endpoint: str = ""
    """URL of the engine's OpenAI-compatible endpoint (`actors/serving/engine_server.py`), once it is ready."""
    running: tuple[tuple[BatchId, str, tuple[tuple[int, int, int], ...]], ...] = ()
    """Units that run, or whose outcomes are not confirmed: (batch, submission, ((task, first run, attempt), ...))."""
    model: str = "rollout"
    engine_version: str = ""
    """Version that the engine reports, once it is ready."""
    known: Mark | None = None
    """The latest end of the log that the runner has heard of."""
    kv_share: float = 0.0
    """Share of the engine's KV cache that was in use when `places` last changed."""
    waiting: int = 0
    """Number of requests that waited in the engine at that time."""


@dataclass(frozen=True, slots=True)
class RunnerActivity:
    """A runner's answer to QueryActivity."""

    name: str
    incarnation: int
    state: dict[str, Any]


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutcome:
    """Results and failures of one unit: some or all runs of one task."""

    batch_id: BatchId
    submission: str
    unit: Unit
    results: list[RunResult] = field(default_factory=list)
    failures: list[tuple[int, FailureKind, str]] = field(default_factory=list)
    """(run, kind, message) of each run that failed."""
    results_digest: str = ""
    """Digest of the payload with `results` and `failures`, if these are too large for a message."""
    payload: PayloadRef | None = None
    model_version: int = 0
    model_version_end: int = 0
    seconds: float = 0.0
    other_tokens: tuple[int, int] = (0, 0)
    """Prompt and response tokens that belong to no single run, as in `RunsFinished`."""
    lacks: bool = False
    """True if the runner's machine lacks something that the unit needs, such as a module or a secret."""


@dataclass(frozen=True, slots=True)
class OutcomeReport:
    """A group of outcomes. The runner keeps it and sends it again until a `RunUnits.acks` contains its number."""

    name: str
    incarnation: int
    number: int
    outcomes: list[UnitOutcome]
    known: Mark | None = None
    """The latest end of the log that the runner had heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChange:
    """A change of a lease (an outside resource of a run), reported by the run (`events/vocabulary/lease_events.py`)."""

    lease: str
    what: Literal["taken", "held", "renewed", "released", "left"]
    """`left`: the run did not release the lease, and `reason` says why."""
    batch_id: BatchId
    submission: str
    unit: Unit
    run: int
    provider: str = ""
    """This field and the next five are set for `taken`."""
    args: dict[str, Any] = field(default_factory=dict)
    ttl: float = 0.0
    """Set for `renewed` too."""
    creation_timeout: float = 0.0
    attachable: bool = False
    number: int = 0
    handle: Any = None
    """Set for `held`."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A group of lease changes. The runner keeps it and sends it again until a LeaseReply names its number."""

    name: str
    incarnation: int
    number: int
    changes: list[LeaseChange]
    known: Mark | None = None
    """The latest end of the log that the runner had heard of."""


@dataclass(frozen=True, slots=True)
class WeightsLoadResult:
    """A runner's answer to LoadWeights."""

    name: str
    incarnation: int
    version: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersLoadResult:
    """A runner's answer to LoadAdapters."""

    name: str
    incarnation: int
    number: int
    loaded: list[tuple[str, int, float]]
    """(adapter, version, seconds) of each newly loaded adapter."""
    errors: list[tuple[str, int, str]]
    """(adapter, version, error) of each adapter that could not be loaded."""
    adapters: dict[str, int]
    """Adapter -> version, for the adapters that the engine serves now."""


@dataclass(frozen=True, slots=True)
class GroupJoinResult:
    """A runner's answer to the JoinGroup with this id."""

    name: str
    incarnation: int
    id: str
    error: str | None = None


# --- coordinator -> runner ------------------------------------------------------------------------------------------
@quickly_pickled
@dataclass(frozen=True, slots=True)
class UnitAssignment:
    """A unit for a runner, with its task: as JSON, or as the digest of the payload that holds the JSON."""

    batch_id: BatchId
    submission: str
    unit: Unit
    task: bytes | None
    task_digest: str | None = None
    keep_experiences: bool = True
    timeout: float = 0.0
    """Seconds that the attempt may take; 0: explorer.max_timeout."""
    kept: str = ""
    """Digest of the payload with the answers, complete or partial, that lost attempts had; empty without any."""


@dataclass(frozen=True, slots=True)
class RunUnits:
    """Units to run, and (`acks`) the numbers of the OutcomeReports that are durable in the log."""

    incarnation: int
    items: list[UnitAssignment]
    acks: tuple[int, ...] = ()
    end: Mark | None = None
    """End of the log when this was sent."""


@dataclass(frozen=True, slots=True)
class CancelUnits:
    """Order to stop these units (task, first run) of a batch at once. The runner reports no outcome for them."""

    incarnation: int
    batch_id: BatchId
    submission: str
    units: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Acknowledgement that the LeaseReport with this number is in the log."""

    incarnation: int
    number: int
    refused: dict[str, str]
    """Lease -> reason, for leases that the run may not take."""
    attaches: dict[str, Any] = field(default_factory=dict)
    """Lease -> handle, for leases that take over the resource of a lost attempt."""


@dataclass(frozen=True, slots=True)
class QueryActivity:
    """Request for the runner's current activity, which it answers with a RunnerActivity."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    incarnation: int
    version: int
    path: str
    from_group: bool = False
    """True to receive the weights over the trainer's process group. The folder `path` holds the same weights."""


@dataclass(frozen=True, slots=True)
class LoadAdapters:
    """Order to serve these LoRA adapters and no others."""

    incarnation: int
    number: int
    """Number of this order; the answer repeats it."""
    adapters: tuple[AdapterPublished, ...]


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Order to join the process group that the trainer opens at `address:port` to send weights from its memory."""

    incarnation: int
    id: str
    address: str
    port: int
    rank_offset: int
    world_size: int

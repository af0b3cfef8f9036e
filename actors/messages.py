"""Every message between the processes of a system, on one screen.

Messages carry control data only, in groups (many units out, many outcomes back), and never a token. Large values travel
as a `Parcel`: JSON bytes while they are small, otherwise the digest of a payload. A unit's results do the same
(`UnitOutcome.results_digest`). Thespian's transport is quadratic in the size of a message, so `LIMIT` holds for all.

Thespian pickles messages, and the receiver dispatches on the class name alone. A message that may arrive after a
restart names the incarnation that it is for, because an address may later belong to another actor.
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
    """Holds the password of the database, as do the configs of the other messages."""
    port: int
    """Port of the actor system's admin."""
    first_incarnation: int
    """Number of the first incarnation, higher than that of any runner in the log."""
    known: tuple[Claim, ...] = ()
    """The end of the log when the system was started."""


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    config: LaunchedConfig = field(repr=False)
    admin: dict[str, Any]
    """The actor system: `port`, `pid`, `started` of its admin process."""
    alive: dict[str, int]
    """Incarnation of every runner that has a process now."""
    known: tuple[Claim, ...] = ()
    """The end of the log, as the predecessor reported it."""
    told: frozenset[str] = frozenset()
    """Runners that may have heard of a later end of the log, from a predecessor."""
    hosts_heard: dict[str, float] = field(default_factory=dict)
    """Time at which the predecessor last heard of each other host, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class StartRunner:
    """Guardian to runner: start your engine. CoordinatorUp follows when a coordinator is up."""

    name: str
    incarnation: int
    config: LaunchedConfig = field(repr=False)
    model: str = "rollout"
    """The model that it serves. Runners of the rollout model get units; workflows call the others."""
    first_place: int = 0
    """The first GPU or core that its engine takes (`actors.engines.devices`)."""
    places: int = 1
    """Number of GPUs or cores that all engines take together."""
    url: str = ""
    """URL of the server that it supervises, for engines of type `http`."""
    weights: tuple[int, str] = (0, "")
    """Current weights, as in `Servers`; a server is restarted with them."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Coordinator to guardian, repeated every few seconds: external servers that should have a runner now."""

    servers: dict[str, str]
    """Runner -> URL. Runners of the rollout model that are missing here are to retire."""
    retire: dict[str, int]
    """Runner -> incarnation, for runners whose end is not in the log yet."""
    weights: tuple[int, str] = (0, "")
    """Version and folder of the current weights; an empty folder stands for the original model."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Guardian to rollout runners and coordinator: where auxiliary models serve. Sent on changes and now and then."""

    models: dict[str, dict[str, str]]
    """Model -> runner -> URL, of the runners that serve."""


@dataclass(frozen=True, slots=True)
class CoordinatorUp:
    """Coordinator to guardian when it has the lease; guardian to runners: report to this coordinator from now on."""

    coordinator: Any
    epoch: int


@dataclass(frozen=True, slots=True)
class RunnerDied:
    """Guardian to coordinator: this process is gone. Repeated to each later coordinator."""

    name: str
    incarnation: int
    reason: str
    deaths: int = 0
    """Number of lives of this slot that ended within `period` seconds."""
    period: float = 0.0
    quarantined: bool = False
    """The guardian does not start it again."""
    model: str = "rollout"
    asked: bool = False
    """Its end was requested: its units are attempted again, and the death counts against none of them."""


@dataclass(frozen=True, slots=True)
class ReplaceRunner:
    """Coordinator to guardian: end this life of a runner and start another. Ignored if this life has ended."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndedRunners:
    """Guardian to coordinator, now and then: the last ended life of each runner, in case a RunnerDied was lost."""

    ended: dict[str, int]
    """Runner -> incarnation. This life and all before it have ended."""


@dataclass(frozen=True, slots=True)
class CoordinatorWaits:
    """Coordinator to guardian: it can't take over yet, because the log can't be written. It answers clients so."""

    coordinator: Any


@dataclass(frozen=True, slots=True)
class Retire:
    """Order to finish work and end. A runner confirms with RunnerStatus `retired`, the coordinator with Retired."""


@dataclass(frozen=True, slots=True)
class Retired:
    """Coordinator to guardian: everything is written and the log is closed."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Coordinator to guardian, its last message: another system owns the store now, so this system has to end."""

    owner: str


@dataclass(frozen=True, slots=True)
class StoreGone:
    """Coordinator to guardian: the log was deleted or its database dropped, so the system has to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """Host to coordinator: give my runners no new units. The answer, when they have none left, is HostDrained."""

    reason: str
    final: bool = False
    """The host ends now, drained or not."""


@dataclass(frozen=True, slots=True)
class HostDrained:
    """Coordinator to host: no units are left on its runners."""


# --- runner -> coordinator ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A child's heartbeat, to guardian and coordinator. Its arrival shows that the process lives, its content whether
    the process makes progress."""

    name: str
    incarnation: int
    pid: int
    silent: float = 0.0
    """Seconds since the runner's engine loop last answered a call. Large if the loop is blocked."""
    epoch: int = 0
    """Epoch of the coordinator that it reports to."""
    trouble: str = ""
    """Error that keeps it from storing finished results. It keeps them and retries."""
    waits_for: str = ""
    """External action that its engine needs before it can start; meanwhile it does not count as late."""
    end: Mark | None = None
    """End of the log, in the coordinator's heartbeat."""
    runs_wait: str = ""
    """Something outside of the system that some of its runs wait for, such as an environment server, in their words."""
    hosts_heard: dict[str, float] = field(default_factory=dict)
    """Time at which each other host was last heard of, in monotonic seconds; in the coordinator's heartbeat."""


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
    """The version of the weights that it is loading now."""
    adapters: dict[str, int] = field(default_factory=dict)
    """The LoRA adapters that its engine serves, with their versions."""
    endpoint: str = ""
    """URL of its engine's OpenAI-compatible endpoint (`actors/serving/engine_server.py`), once it is ready."""
    running: tuple[tuple[BatchId, str, tuple[tuple[int, int, int], ...]], ...] = ()
    """Units that it has, or whose outcomes it keeps: (batch, submission, ((task, first run, attempt), ...))."""
    model: str = "rollout"
    engine_version: str = ""
    """Version that its engine reports, once it is ready."""
    known: Mark | None = None
    """The end of the log, as far as it has heard."""
    kv_share: float = 0.0
    """Share of its engine's KV cache in use at the last change of its places."""
    waiting: int = 0
    """Number of requests that waited in its engine at that time."""


@dataclass(frozen=True, slots=True)
class RunnerActivity:
    """A runner's answer to QueryActivity."""

    name: str
    incarnation: int
    state: dict[str, Any]


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutcome:
    """Results and failures of one unit."""

    batch_id: BatchId
    submission: str
    unit: Unit
    results: list[RunResult] = field(default_factory=list)
    failures: list[tuple[int, FailureKind, str]] = field(default_factory=list)
    """(run, kind, message) of each run that failed."""
    results_digest: str = ""
    """Digest of the payload that holds both, if they are too large for a message."""
    payload: PayloadRef | None = None
    model_version: int = 0
    model_version_end: int = 0
    seconds: float = 0.0
    other_tokens: tuple[int, int] = (0, 0)
    """Prompt and response tokens that belong to no single run, as in `RunsFinished`."""
    lacks: bool = False
    """The runner's machine lacks something that the unit needs, such as a module or a secret."""


@dataclass(frozen=True, slots=True)
class OutcomeReport:
    """A group of outcomes. The runner keeps it and sends it again until a `RunUnits.acks` names its number."""

    name: str
    incarnation: int
    number: int
    outcomes: list[UnitOutcome]
    known: Mark | None = None
    """The end of the log, as far as the runner had heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChange:
    """A change of a lease, reported by its run (`events/vocabulary/lease_events.py`)."""

    lease: str
    what: Literal["taken", "held", "renewed", "released", "left"]
    """`left`: the run does not release it, for `reason`."""
    batch_id: BatchId
    submission: str
    unit: Unit
    run: int
    provider: str = ""
    """With `taken`, as the next five."""
    args: dict[str, Any] = field(default_factory=dict)
    ttl: float = 0.0
    """Also with `renewed`."""
    creation_timeout: float = 0.0
    attachable: bool = False
    number: int = 0
    handle: Any = None
    """With `held`."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A group of changes. The runner keeps it and sends it again until a LeaseReply names its number."""

    name: str
    incarnation: int
    number: int
    changes: list[LeaseChange]
    known: Mark | None = None
    """The end of the log, as far as the runner had heard."""


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
    """Adapters that its engine serves now."""


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
    """A unit and its task, as JSON or as the digest of the payload that holds it."""

    batch_id: BatchId
    submission: str
    unit: Unit
    task: bytes | None
    task_digest: str | None = None
    keep_experiences: bool = True
    timeout: float = 0.0
    """Seconds that the attempt may take; 0: explorer.max_timeout."""
    kept: str = ""
    """Digest of the payload with what lost attempts had."""


@dataclass(frozen=True, slots=True)
class RunUnits:
    """Units to run, and the numbers of the groups of outcomes that are durable in the log."""

    incarnation: int
    items: list[UnitAssignment]
    acks: tuple[int, ...] = ()
    end: Mark | None = None
    """End of the log when this was sent."""


@dataclass(frozen=True, slots=True)
class CancelUnits:
    """Order to stop these units (task, first run) of a batch, whatever they are doing. No outcome is expected."""

    incarnation: int
    batch_id: BatchId
    submission: str
    units: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Acknowledgement: this group of lease changes is in the log."""

    incarnation: int
    number: int
    refused: dict[str, str]
    """Lease -> reason, for leases that may not be taken."""
    attaches: dict[str, Any] = field(default_factory=dict)
    """Lease -> handle of the resource that it takes over."""


@dataclass(frozen=True, slots=True)
class QueryActivity:
    """Question of what the runner is doing now. Its answer is a RunnerActivity."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    incarnation: int
    version: int
    path: str
    from_group: bool = False
    """Take the weights from the trainer's group. `path` holds the same weights."""


@dataclass(frozen=True, slots=True)
class LoadAdapters:
    """Order to serve these LoRA adapters, and no others."""

    incarnation: int
    number: int
    """Number of this order, which the coordinator counts and the answer repeats."""
    adapters: tuple[AdapterPublished, ...]


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Order to join the group that the trainer opens at `address:port`, to get weights from its memory."""

    incarnation: int
    id: str
    address: str
    port: int
    rank_offset: int
    world_size: int

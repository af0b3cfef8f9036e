"""Every message between processes, on one screen.

Control plane only: a message carries a group (many units out, many outcomes back) and never a token. What could be
large travels as a `Parcel`: JSON bytes while they are small, otherwise the digest of a payload; so do a unit's results
(`UnitOutcome.results_digest`). Thespian's transport is quadratic in the size of a message, so `LIMIT` holds for all of
them.

Messages are found by class name alone (Thespian pickles them), and every one that crosses a restart names the
incarnation that it is meant for: an address may be given to another actor later.
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
    """Holds the password of the database, as that of the others does."""
    port: int
    """Of the actor system's admin."""
    first_incarnation: int
    """Higher than that of any runner in the log."""
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
    """The end of the log as its predecessor told it."""
    told: frozenset[str] = frozenset()
    """Runners that may know more of the log than that: a predecessor told them."""
    hosts_heard: dict[str, float] = field(default_factory=dict)
    """When that predecessor last heard of each other host, monotonic seconds."""


@dataclass(frozen=True, slots=True)
class StartRunner:
    """The coordinator may not be up yet; the guardian sends CoordinatorUp when it is."""

    name: str
    incarnation: int
    config: LaunchedConfig = field(repr=False)
    model: str = "rollout"
    """Which model it serves: units go to those of the rollout model, the others are asked by workflows."""
    first_place: int = 0
    """Its engine's place in the line of GPUs or cores (`actors.engines.devices`)."""
    places: int = 1
    """The number of places of all engines together."""
    url: str = ""
    """The server that it supervises, where its engine is one of others."""
    weights: tuple[int, str] = (0, "")
    """The current weights, as `Servers` tells them: what such a server is restarted with."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Coordinator to guardian: which servers of others are to have a runner now; said again every few seconds."""

    servers: dict[str, str]
    """Runner -> URL. Runners of the rollout model that are not here are to retire."""
    retire: dict[str, int]
    """Runner -> incarnation, of those whose end is not in the log yet."""
    weights: tuple[int, str] = (0, "")
    """The current version, and where it lies; empty: the model as it was given."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Guardian to runners of the rollout model, and to the coordinator: where the auxiliary models are asked, when that
    changes and now and then."""

    models: dict[str, dict[str, str]]
    """Model -> runner -> URL, of those that serve."""


@dataclass(frozen=True, slots=True)
class CoordinatorUp:
    """Coordinator to guardian when it has the lease; guardian to runners: report to this one from now on."""

    coordinator: Any
    epoch: int


@dataclass(frozen=True, slots=True)
class RunnerDied:
    """Guardian to coordinator: this process is gone. Said again to a coordinator that comes up later."""

    name: str
    incarnation: int
    reason: str
    deaths: int = 0
    """Lives of this slot that ended within `period` seconds."""
    period: float = 0.0
    quarantined: bool = False
    """It is not started again."""
    model: str = "rollout"
    asked: bool = False
    """Somebody wanted it to end: what it had is attempted again, and blamed for nothing."""


@dataclass(frozen=True, slots=True)
class ReplaceRunner:
    """Coordinator to guardian: end this life of a runner and start another; nothing where it has ended already."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndedRunners:
    """Guardian to coordinator, now and then: the last life of each runner that has ended, should a message be lost."""

    ended: dict[str, int]
    """Runner -> incarnation; it and all before it are gone."""


@dataclass(frozen=True, slots=True)
class CoordinatorWaits:
    """Coordinator to guardian: it can't take over yet, since the log can't be written, and tells everybody who asks."""

    coordinator: Any


@dataclass(frozen=True, slots=True)
class Retire:
    """Come to an end in order, and say so: a runner by a RunnerStatus `retired`, the coordinator by Retired."""


@dataclass(frozen=True, slots=True)
class Retired:
    """Coordinator to guardian: everything is written, the log is closed."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Coordinator to guardian, its last words: the store belongs to another system now, so this one has to end."""

    owner: str


@dataclass(frozen=True, slots=True)
class StoreGone:
    """Coordinator to guardian: the log was deleted or its database dropped, so the system has nothing to work for."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """Host to coordinator: its runners get nothing new. Answered with HostDrained when they have nothing any more."""

    reason: str
    final: bool = False
    """It ends now, drained or not."""


@dataclass(frozen=True, slots=True)
class HostDrained:
    """Coordinator to host: none of its runners has anything any more."""


# --- runner -> coordinator ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A child's heartbeat, to guardian and coordinator. That it comes says that the process lives, first of all that it
    has begun; what it carries says whether it gets on."""

    name: str
    incarnation: int
    pid: int
    silent: float = 0.0
    """Seconds since the runner's engine loop last answered a call: large where it is blocked."""
    epoch: int = 0
    """Of the coordinator that it reports to."""
    trouble: str = ""
    """Why what it finished can't be stored now: it keeps that, and tries again."""
    waits_for: str = ""
    """What its engine waits for before it can start, which somebody else has to do: it is not late meanwhile."""
    end: Mark | None = None
    """Of the log, in the coordinator's."""
    runs_wait: str = ""
    """What some of its runs wait for that is no part of the system, a server of environments say, as they tell it."""
    hosts_heard: dict[str, float] = field(default_factory=dict)
    """When each other host was last heard of, monotonic seconds, in the coordinator's."""


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
    """The LoRA adapters that its engine serves, and their versions."""
    endpoint: str = ""
    """URL of its engine's OpenAI-compatible endpoint (`actors/serving/engine_server.py`), once it is ready."""
    running: tuple[tuple[BatchId, str, tuple[tuple[int, int, int], ...]], ...] = ()
    """Units that it has, or keeps the outcomes of: (batch, submission, ((task, first run, attempt), ...))."""
    model: str = "rollout"
    engine_version: str = ""
    """What its engine says of itself, once it is ready."""
    known: Mark | None = None
    """The end of the log as it knows it."""
    kv_share: float = 0.0
    """Share of its engine's KV cache that was taken when its places changed last."""
    waiting: int = 0
    """Requests that waited in its engine then."""


@dataclass(frozen=True, slots=True)
class RunnerActivity:
    """A runner's answer to QueryActivity."""

    name: str
    incarnation: int
    state: dict[str, Any]


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutcome:
    """What came of one unit."""

    batch_id: BatchId
    submission: str
    unit: Unit
    results: list[RunResult] = field(default_factory=list)
    failures: list[tuple[int, FailureKind, str]] = field(default_factory=list)
    """(run, kind, message) of each run that failed."""
    results_digest: str = ""
    """The payload that holds both, where they are too large for a message."""
    payload: PayloadRef | None = None
    model_version: int = 0
    model_version_end: int = 0
    seconds: float = 0.0
    other_tokens: tuple[int, int] = (0, 0)
    """Prompt and response tokens that are no single run's: see `RunsFinished`."""
    lacks: bool = False
    """The runner's machine lacks what it needs, a module or a secret."""


@dataclass(frozen=True, slots=True)
class OutcomeReport:
    """A group of outcomes; the runner keeps it, and sends it again, until a `RunUnits.acks` names its number."""

    name: str
    incarnation: int
    number: int
    outcomes: list[UnitOutcome]
    known: Mark | None = None
    """The end of the log as the runner knew it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseChange:
    """What a run tells of a lease (`events/vocabulary/lease_events.py`)."""

    lease: str
    what: Literal["taken", "held", "renewed", "released", "left"]
    """`left`: it does not release it itself, for `reason`."""
    batch_id: BatchId
    submission: str
    unit: Unit
    run: int
    provider: str = ""
    """Of `taken`, as the three below."""
    args: dict[str, Any] = field(default_factory=dict)
    ttl: float = 0.0
    """Also of `renewed`."""
    creation_timeout: float = 0.0
    handle: Any = None
    """Of `held`."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A group of changes; the runner keeps it, and sends it again, until a LeaseReply names its number."""

    name: str
    incarnation: int
    number: int
    changes: list[LeaseChange]
    known: Mark | None = None
    """The end of the log as the runner knew it."""


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
    """(adapter, version, seconds) of each that is new."""
    errors: list[tuple[str, int, str]]
    """(adapter, version, error) of each that could not be loaded."""
    adapters: dict[str, int]
    """What its engine serves now."""


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
    """A unit and its task: as JSON, or as the digest of the payload that holds it."""

    batch_id: BatchId
    submission: str
    unit: Unit
    task: bytes | None
    task_digest: str | None = None
    keep_experiences: bool = True
    timeout: float = 0.0
    """Seconds that the attempt may take; 0: explorer.max_timeout."""


@dataclass(frozen=True, slots=True)
class RunUnits:
    """Units to run, and the groups of outcomes that are safely in the log."""

    incarnation: int
    items: list[UnitAssignment]
    acks: tuple[int, ...] = ()
    end: Mark | None = None
    """Of the log when this was sent."""


@dataclass(frozen=True, slots=True)
class CancelUnits:
    """Stop these units of a batch, whatever they are doing: (task, first run). No outcome is wanted."""

    incarnation: int
    batch_id: BatchId
    submission: str
    units: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """This group of changes is in the log."""

    incarnation: int
    number: int
    refused: dict[str, str]
    """Leases that may not be taken, and why."""


@dataclass(frozen=True, slots=True)
class QueryActivity:
    """What are you doing? Answered with a RunnerActivity."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    incarnation: int
    version: int
    path: str
    from_group: bool = False
    """Take them from the group with the trainer; `path` holds the same."""


@dataclass(frozen=True, slots=True)
class LoadAdapters:
    """Serve these LoRA adapters, and no others."""

    incarnation: int
    number: int
    """Of this order, counted by the coordinator; the answer has it too."""
    adapters: tuple[AdapterPublished, ...]


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Join the group that the trainer opens at `address:port`, to get weights from its memory."""

    incarnation: int
    id: str
    address: str
    port: int
    rank_offset: int
    world_size: int

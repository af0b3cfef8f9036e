"""Simulation of many hosts with one real coordinator under virtual time, with a meter of the coordinator's work.

The Coordinator is real, with its handlers, fleet (dispatcher, registry, hosts), decisions, live state and folds. Clock
and database are doubles (`world.py`, `doubles.py`, `metered.py`), and so are hosts (`far_hosts.py`). A host takes
messages as `actors/hosts/link.py` does. Its runners keep units for a while and report outcomes in groups, through the
real outbox. A client submits batches and waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from thespian.actors import WakeupMessage

import trinity_es.actors.coordinator.actor
from tests.simulation import doubles, schedule
from tests.simulation.far_hosts import LATENCY_SECONDS, Client, FarHost
from tests.simulation.metered import Account, CountedStore, Meter
from tests.simulation.world import Process, Violation, World
from trinity_es.actors import messages, requests
from trinity_es.actors.coordinator.actor import Coordinator
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone
from trinity_es.actors.coordinator.fleet.host_fleet import FarProcess
from trinity_es.events.vocabulary import PayloadRef


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes, durations and faults of a simulation."""

    hosts: int
    runners: int
    """Number of runners of all hosts together."""
    units: int
    """Maximum number of units in flight: the places of all runners together."""
    tasks: int
    batch: int
    """Number of tasks of each batch."""
    seconds: float = 60.0
    """Mean duration of a unit."""
    churn: float = 0.0
    """Interval between two faults of hosts (broken connection, loss, drain); 0 for none."""
    loses_at: float = 0.0
    """Virtual time at which one host is lost; 0 for never."""
    failures: float = 0.01
    """Share of the attempts that fail."""
    seed: int = 0
    hosts_timeout: float = 20.0


# --- the coordinator ------------------------------------------------------------------------------------------------
class ManyWorld(World):
    """A world of one coordinator and many hosts."""

    coordinator: ManyCoordinator
    client: Client

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        made = schedule.config_of(schedule.make(0))
        explorer = {"max_timeout": 1800.0, "max_retry_times": 5, "stall_after": 600.0}
        hosts = {"address": "10.0.0.1:7700", "timeout": plan.hosts_timeout}
        super().__init__(plan.seed, made.model_copy(update={
            "explorer": made.explorer.model_copy(update=explorer), "hosts": made.hosts.model_copy(update=hosts),
        }))
        self.plan, self.meter, self.account = plan, Meter(clock), Account()
        self.invariants = self.account
        self.store = CountedStore(self.store.now, self.account.committed)
        self.hosts: dict[str, FarHost] = {}


class ManyCoordinator(doubles.SimCoordinator):
    """The real coordinator with a meter. Several posted calls wake it once, as its real socket pair does."""

    meter: Meter
    awake = False

    def begin(self) -> None:
        super().begin()
        meter, dispatcher, batches = self.meter, self.fleet.dispatcher, self.handlers.batches
        dispatcher.dispatch = meter.timed("dispatch", dispatcher.dispatch)  # type: ignore[method-assign]
        batches._on_pipeline_done = meter.timed("finalize", batches._on_pipeline_done)  # type: ignore[method-assign]
        batches.start_pipeline = meter.timed("finalize", batches.start_pipeline)  # type: ignore[method-assign]
        fleet = self.hosts
        fleet.hello = meter.timed("join", fleet.hello)  # type: ignore[method-assign]
        fleet._lose = meter.timed("loss", fleet._lose)  # type: ignore[method-assign]
        fleet._on_leaves = meter.timed("loss", fleet._on_leaves)  # type: ignore[method-assign]

    def send(self, to: Any, message: Any) -> None:
        if isinstance(to, FarProcess):
            Coordinator.send(self, to, message)
        else:
            super().send(to, message)

    def receiveMessage(self, message: Any, sender: Any) -> Any:  # Thespian's
        self.awake = False
        with self.meter.during("rest"):
            return super().receiveMessage(message, sender)

    def _handle(self, message: Any, sender: Any) -> None:
        world: Any = doubles.world()
        world.account.heard[type(message).__name__] += 1
        with self.meter.during(_phase(message)):
            super()._handle(message, sender)

    def post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)
        if not self.awake:
            self.awake = True
            doubles.world().later(0.0002, self.process, "", lambda: self.receiveMessage(_Woken(), None))


class _Woken(doubles.WatchMessage):  # type: ignore[misc]  # thespian has no types
    def __init__(self) -> None:
        super().__init__([])


_PHASES = {
    "OutcomeReport": "collect", "Heartbeat": "beats", "RunnerStatus": "beats", "EndedRunners": "beats",
    "RunnerDied": "loss", "_Woken": "rest",
}


def _phase(message: Any) -> str:
    if isinstance(message, requests.Request):
        return message.command if message.command in ("submit", "finalize") else "hosts"
    if isinstance(message, WakeupMessage):
        return "timers" if message.payload[0] in ("beat", "stalls", "hosts", "leases") else "rest"
    return _PHASES.get(type(message).__name__, "rest")


class _End:
    """Double of the head's end of all connections."""

    def __init__(self, world: ManyWorld) -> None:
        self.world = world

    def send(self, host: str, to: str, message: Any) -> None:
        self.world.account.told[type(message).__name__] += 1
        far = self.world.hosts[host]
        connection = far.connection
        self.world.later(LATENCY_SECONDS, None, "", lambda: far.take(connection, to, message))

    def last_heard(self) -> dict[str, float]:
        return {name: self.world.now for name, far in self.world.hosts.items() if far.connection}

    def hang_up(self, host: str, epoch: int) -> None:
        far = self.world.hosts[host]
        self.world.later(LATENCY_SECONDS, None, "", partial(far.cut, far.connection, "the head hung up"))

    def stop(self) -> None:
        """Do nothing."""


class _Pipeline:
    """Pipeline that delivers all experiences."""

    def __init__(self, operators: Any, payloads: Any, post: Callable[[Callable[[], None]], None], models: Any) -> None:
        self.post = post

    def close(self, problem: Callable[[str], None]) -> bool:
        return True

    def run(self, job: Any) -> None:
        n = len(job.refs)
        done = PipelineDone({"pipeline/experiences": float(n)}, [PayloadRef(digest="d" * 64, first=0, count=n)], n, 0)
        doubles.world().later(0.1, None, "", lambda: self.post(lambda: job.done(done)))


class _Lock:
    """Double of the leader lock, which is always free."""

    def __init__(self, url: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class _Guardian:
    """Double of the head's guardian, which ignores messages."""

    def receiveMessage(self, message: Any, sender: Any) -> None:  # as an actor's
        """Do nothing."""


# --- playing ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Figures:
    """Result of a simulation."""

    world: ManyWorld
    tasks: int
    seconds: float
    """Virtual seconds."""
    struck: dict[str, int]


def play(
    plan: Plan, *, at: Callable[[ManyWorld], bool] | None = None, clock: Callable[[], float] = time.process_time
) -> Figures:
    """Run a plan to its end. Raises Violation if a task was lost or finished twice.

    `clock`: clock of the meter, CPU seconds by default. `at` is called after every virtual second until it returns
    True.
    """
    world = ManyWorld(plan, clock)
    patches = {"start_head": lambda *_: _End(world), "LeaderLock": _Lock, "PipelineThread": _Pipeline}
    with (
        doubles.installed(), mock.patch.multiple(trinity_es.actors.coordinator.actor, **patches),
        doubles.running(world), world.meter.collector(),
    ):
        world.spawn_actor = lambda process, kind: _coordinator(world, process)
        guardian = Process(98, "guardian", 0, None, 0.0)
        guardian.receiver = _Guardian()
        process = world.spawn("coordinator", guardian)
        admin = {"pid": 1, "started": "1", "port": 1}
        world.send(guardian, process.address, messages.StartCoordinator(world.config, admin, {}))
        world.client = Client(world)
        _begin(world)
        second = 0.0
        while world.client.finalized * plan.batch < plan.tasks or world.client.waiting:
            if not world.step() or world.now > 20 * plan.seconds + 1000:
                raise Violation(f"not over after {world.now:.0f} s: {len(world.account.done)} of {plan.tasks} tasks")
            if not process.alive:
                raise world.account.failure or Violation("the coordinator ended")
            if at is not None and world.now >= second:
                second = world.now + 1.0
                at = None if at(world) else at
        _check(world)
        return Figures(world, len(world.account.done), world.now, world.struck)


def _coordinator(world: ManyWorld, process: Process) -> ManyCoordinator:
    actor = world.coordinator = ManyCoordinator()
    actor.process, actor.meter = process, world.meter
    return actor


def _begin(world: ManyWorld) -> None:
    plan = world.plan
    if plan.runners % plan.hosts or plan.units % plan.runners:
        raise ValueError(f"{plan.runners} runners on {plan.hosts} hosts and {plan.units} units: all alike, please")
    for number in range(plan.hosts):
        name = f"h{number}"
        far = world.hosts[name] = FarHost(world, name, plan.runners // plan.hosts, plan.units // plan.runners)
        world.later(1.0 + world.between(0.0, 2.0), None, "", far.start)
    world.later(5.0, None, "", world.client.keep_going)
    if plan.loses_at:
        world.later(plan.loses_at, None, "", lambda: world.hosts["h0"].strike("lost"))
    if plan.churn:
        world.later(10.0, None, "", lambda: _churn(world))


def _churn(world: ManyWorld) -> None:
    world.later(world.plan.churn, None, "", lambda: _churn(world))
    there = [h for h in world.hosts.values() if h.connection]
    if len(there) > 1:
        world.rng.choice(there).strike(world.rng.choice(("broken", "lost", "drained")))


def _check(world: ManyWorld) -> None:
    account, plan = world.account, world.plan
    batches = -(-plan.tasks // plan.batch)
    account.require(not account.flying, f"{len(account.flying)} units are in flight, and every batch has ended")
    account.require(len(account.done) == batches * plan.batch, f"{len(account.done)} tasks are finished")
    wrong = {s: n for s, n in account.finalized.items() if n != plan.batch}
    account.require(len(account.finalized) == batches and not wrong, f"batches ended with {wrong or 'others missing'}")
    account.after_step(None)

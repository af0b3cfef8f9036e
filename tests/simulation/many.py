"""Many hosts and runners on one real coordinator, under virtual time: what it does for each task is metered.

Real are the Coordinator with its handlers, fleet (dispatcher, registry, hosts), decisions, live state and folds.
Stand-ins are the clock and the database (`world.py`, `doubles.py`), here also what a host's processes do: a `FarHost`
takes messages as `actors/hosts/link.py` does, its runners keep units for a while and report outcomes in groups, with
the real outbox, and a `Client` submits batches and waits for them.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import orjson
from thespian.actors import WakeupMessage

import trinity_es.actors.coordinator.actor
from tests.simulation import doubles, schedule
from tests.simulation.store import Store
from tests.simulation.world import Process, Violation, World
from trinity_es.actors import messages
from trinity_es.actors.commands import Command, DrainHost, FinalizeBatch, SubmitBatch, encode
from trinity_es.actors.coordinator.actor import Coordinator
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone
from trinity_es.actors.coordinator.fleet.hosts import FarProcess
from trinity_es.actors.hosts.link import FRAME_MESSAGES, Admission, Items
from trinity_es.actors.runner.outbox import Key, Outbox
from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConcurrencyError, Fenced
from trinity_es.events.software_version import VERSION
from trinity_es.events.store.log import Committed, Lease, Recorded, Write
from trinity_es.events.vocabulary import PayloadRef, RunResult

__all__ = ["Figures", "Meter", "Plan", "play"]

LATENCY_SECONDS = 0.001
"""How long a frame is on its way between a host and the head."""
REPORT_SECONDS = 0.1
"""How long a runner gathers outcomes: until those before are stored durably."""
BEAT_SECONDS, ANNOUNCE_BEATS = 2.0, 5
"""As in `actors/runner/actor.py`."""
AWAY_SECONDS = {"broken": 3.0, "lost": 40.0, "drained": 10.0}
"""How long a host stays away, by what became of it."""
SMALL = 100_000
"""Bytes of tasks that travel in the message itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played."""

    hosts: int
    runners: int
    """Of all hosts together."""
    units: int
    """In flight at once: places of all runners together."""
    tasks: int
    batch: int
    """Tasks of each batch."""
    seconds: float = 60.0
    """How long a unit takes, in the mean."""
    churn: float = 0.0
    """Interval between two hosts that break their connection, are lost, or drain; 0: none does."""
    loses_at: float = 0.0
    """When one host is lost, virtual seconds; 0: never."""
    failures: float = 0.01
    """Share of the attempts that fail."""
    seed: int = 0
    hosts_timeout: float = 20.0


class Meter:
    """CPU seconds of the coordinator's turns, by what they are spent on."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        """Of one stretch, with what was done within it."""
        self._stack: list[tuple[str, float]] = []
        self._mark = 0.0

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        begun = self.clock()
        if self._stack:
            self.seconds[self._stack[-1][0]] += begun - self._mark
        self._stack.append((phase, begun))
        self._mark = begun
        try:
            yield
        finally:
            now = self.clock()
            self._stack.pop()
            self.seconds[phase] += now - self._mark
            self.calls[phase] += 1
            self.longest[phase] = max(self.longest.get(phase, 0.0), now - begun)
            self._mark = now

    @contextlib.contextmanager
    def collector(self) -> Iterator[None]:
        """Count what Python's garbage collector takes in a turn as a phase of its own, though within another's stretch.
        """
        begun = 0.0

        def collected(step: str, _: Any) -> None:
            nonlocal begun
            if step == "start":
                begun = self.clock()
            elif self._stack:
                took = self.clock() - begun
                self.seconds["collector"] += took
                self.seconds[self._stack[-1][0]] -= took
                self.longest["collector"] = max(self.longest.get("collector", 0.0), took)

        gc.callbacks.append(collected)
        try:
            yield
        finally:
            gc.callbacks.remove(collected)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, metered."""
        def metered(*args: Any, **options: Any) -> Any:
            with self.during(phase):
                return call(*args, **options)

        return metered


class Account:
    """What the log says of every task: each comes to its end once, and nothing else does."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        """Messages to the coordinator, by kind."""
        self.told: Counter[str] = Counter()
        """Messages of the coordinator, by kind."""
        self.flying: dict[tuple[str, int], tuple[str, int, int]] = {}
        """Stream and task -> runner, incarnation, attempt."""
        self.done: set[tuple[str, int]] = set()
        self.lost: set[tuple[str, int]] = set()
        """Lives of runners."""
        self.finalized: dict[str, int] = {}
        self.most_flying = 0
        self.failure: Violation | None = None

    def require(self, holds: bool, what: str) -> None:
        if not holds and self.failure is None:
            self.failure = Violation(what)

    def committed(self, row: Recorded) -> None:
        event, stream = row.event, row.stream
        self.events[row.type] += 1
        match event:
            case ev.TasksDispatched():
                life = event.runner, event.incarnation
                self.require(life not in self.lost, f"{life} is lost, and was given units of {stream}")
                for unit in event.units:
                    key = stream, unit.task
                    self.require(key not in self.done, f"{key} is finished, and was dispatched")
                    self.require(key not in self.flying, f"{key} was given to {life}; {self.flying.get(key)} has it")
                    self.flying[key] = (*life, unit.attempt)
                self.most_flying = max(self.most_flying, len(self.flying))
            case ev.RunsFinished():
                key = stream, event.task
                self.require(key not in self.done, f"{key} is finished twice")
                self._lands(key, (event.runner, event.incarnation, event.attempt))
                self.done.add(key)
            case ev.AttemptFailed():
                self._lands((stream, event.task), (event.runner, event.incarnation, event.attempt))
                self.require(event.retry, f"{stream} {event.task} was given up: {event.message}")
            case ev.RunnerLost():
                self.lost.add((event.runner, event.incarnation))
            case ev.BatchFinalized():
                self.finalized[stream] = event.result["finished_task_count"]
            case ev.TaskDropped() | ev.BatchAborted():
                self.require(False, f"{row.type} in {stream}")

    def _lands(self, key: tuple[str, int], by: tuple[str, int, int]) -> None:
        self.require(self.flying.pop(key, None) == by, f"{key} came back from {by}, which does not have it")

    def after_step(self, process: Process | None) -> None:
        if self.failure is not None:
            raise self.failure

    def raised(self, process: Process, error: BaseException) -> None:
        self.failure = Violation(f"{process.label} raised {type(error).__name__}: {error}")


class CountedStore(Store):
    """A database that keeps nothing but the versions of streams."""

    def __init__(self, now: Callable[[], float], listener: Callable[[Recorded], None]) -> None:
        super().__init__(now, listener)
        self.position = 0
        self.versions: dict[str, int] = {}

    def _append(
        self, writes: Sequence[Write], commit_id: str, lease: Lease | None, metadata: Mapping[str, Any] | None
    ) -> Committed:
        if lease is not None and lease.epoch != self.epoch:
            raise Fenced(f"lease is at epoch {self.epoch}, this writer holds {lease.epoch}")
        first = self.position + 1
        for write in writes:
            version = self.versions.get(write.stream, 0)
            if version != write.expected_version:
                raise ConcurrencyError(f"stream {write.stream} is at version {version}, not {write.expected_version}")
            for data, event in write.checked or [codec.check(e) for e in write.events]:
                self.position, version = self.position + 1, version + 1
                self.listener(Recorded(
                    position=self.position, stream=write.stream, version=version, type=type(event).__name__,
                    schema_version=event.schema_version, data=data, metadata={}, recorded_at=self.now(),
                    commit_id=commit_id, hash=b"", _event=event,
                ))
            self.versions[write.stream] = version
        return Committed(first_position=first, last_position=self.position, recorded=[], duplicate=False)


# --- the coordinator ------------------------------------------------------------------------------------------------
class ManyWorld(World):
    """A world of one coordinator and many hosts."""

    coordinator: ManyCoordinator
    client: Client

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        made = schedule.config_of(schedule.make(0))
        explorer = replace(made.explorer, max_timeout=1800.0, max_retry_times=5, stall_after=600.0)
        hosts = replace(made.hosts, address="10.0.0.1:7700", timeout=plan.hosts_timeout)
        super().__init__(plan.seed, replace(made, explorer=explorer, hosts=hosts))
        self.plan, self.meter, self.account = plan, Meter(clock), Account()
        self.invariants = self.account
        self.store = CountedStore(self.store.now, self.account.committed)
        self.hosts: dict[str, FarHost] = {}


class ManyCoordinator(doubles.SimCoordinator):
    """The real one, metered. What is posted to it wakes it once, as the real one's socket pair does."""

    meter: Meter
    awake = False

    def begin(self) -> None:
        super().begin()
        meter, dispatcher, batches = self.meter, self.fleet.dispatcher, self.handlers.batches
        dispatcher.dispatch = meter.timed("dispatch", dispatcher.dispatch)  # type: ignore[method-assign]
        batches._pipeline_done = meter.timed("finalize", batches._pipeline_done)  # type: ignore[method-assign]
        batches.start_pipeline = meter.timed("finalize", batches.start_pipeline)  # type: ignore[method-assign]
        fleet = self.hosts
        assert fleet is not None
        fleet.hello = meter.timed("join", fleet.hello)  # type: ignore[method-assign]
        fleet._lose = meter.timed("loss", fleet._lose)  # type: ignore[method-assign]
        fleet._leaves = meter.timed("loss", fleet._leaves)  # type: ignore[method-assign]

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
    if isinstance(message, messages.Request):
        return message.command if message.command in ("submit", "finalize") else "hosts"
    if isinstance(message, WakeupMessage):
        return "timers" if message.payload[0] in ("beat", "stalls", "hosts", "leases") else "rest"
    return _PHASES.get(type(message).__name__, "rest")


class _End:
    """The head's end of all connections."""

    def __init__(self, world: ManyWorld) -> None:
        self.world = world

    def send(self, host: str, to: str, message: Any) -> None:
        self.world.account.told[type(message).__name__] += 1
        far = self.world.hosts[host]
        connection = far.connection
        self.world.later(LATENCY_SECONDS, None, "", lambda: far.take(connection, to, message))

    def hang_up(self, host: str) -> None:
        far = self.world.hosts[host]
        self.world.later(LATENCY_SECONDS, None, "", partial(far.cut, far.connection, "the head hung up"))

    def stop(self) -> None:
        """Nothing is open."""


class _Pipeline:
    """Delivers what it is given."""

    def __init__(self, operators: Any, payloads: Any, post: Callable[[Callable[[], None]], None], models: Any) -> None:
        self.post = post

    def closed(self, problem: Callable[[str], None]) -> bool:
        return True

    def run(self, job: Any) -> None:
        n = len(job.refs)
        done = PipelineDone(
            {"pipeline/experiences": float(n)}, [PayloadRef(digest="d" * 64, first=0, count=n)], n, 0
        )
        doubles.world().later(0.1, None, "", lambda: self.post(lambda: job.done(done)))


class _Lock:
    """Nobody else leads."""

    def __init__(self, url: str) -> None:
        """No connection is made."""

    def stop(self) -> None:
        """There is none."""


# --- hosts ----------------------------------------------------------------------------------------------------------
class FarHost:
    """A host: its connection to the head, its guardian, its runners."""

    def __init__(self, world: ManyWorld, name: str, runners: int, places: int) -> None:
        self.world, self.name, self.slots, self.places = world, name, runners, places
        self.lives = 0
        self.connection = 0
        """Of the one that there is: frames of one before are lost. 0: there is none."""
        self.connections = 0
        self.epoch = 0
        self.runners: dict[str, FarRunner] = {}
        self.out: Items = []

    def start(self) -> None:
        """Begin another life."""
        self.lives += 1
        for slot in range(self.slots):
            name = f"runner-{slot}@{self.name}"
            self.runners[name] = FarRunner(self, name, self.lives, self.places)
        self.dial()

    def dial(self) -> None:
        fleet, world = self.world.coordinator.hosts, self.world
        assert fleet is not None
        said = {"name": self.name, "life": f"life {self.lives}", "pid": 1, "places": {"gpu": 8}, "build": VERSION}
        life = self.lives

        def answered(found: Admission) -> None:
            world.later(LATENCY_SECONDS, None, "", lambda: self.admitted(life, found))

        self.world.coordinator.post(lambda: fleet.hello(said, "10.0.0.2", answered))

    def admitted(self, life: int, found: Admission) -> None:
        if life != self.lives:
            return
        if found.refused:
            self.end()
            self.world.later(1.0, None, "", self.start)
            return
        self.connections += 1
        self.connection, self.epoch, self.out = self.connections, found.epoch, []
        self.send([])
        for runner in self.runners.values():
            runner.announce()
            for group in runner.outbox.due(self.world.now, anew=True):
                self.say(runner.name, group)

    def say(self, name: str, message: Any) -> None:
        """Put a message of this host on its way, with others of the moment."""
        if not self.connection:
            return
        if not self.out:
            self.world.later(LATENCY_SECONDS, None, "", partial(self.flush, self.connection))
        self.out.append((name, message))

    def flush(self, connection: int) -> None:
        if connection == self.connection:
            out, self.out = self.out, []
            for first in range(0, len(out), FRAME_MESSAGES):
                self.send(out[first : first + FRAME_MESSAGES])

    def send(self, items: Items) -> None:
        fleet, epoch = self.world.coordinator.hosts, self.epoch
        assert fleet is not None
        self.world.coordinator.post(lambda: fleet.take(self.name, epoch, items))

    def take(self, connection: int, to: str, message: Any) -> None:
        if connection != self.connection:
            return
        if to:
            if to in self.runners:
                self.runners[to].take(message)
        elif isinstance(message, messages.HostDrained):
            for runner in self.runners.values():
                runner.retire()
            self.say("", messages.HostLeaves("it was drained", final=True))
            self.flush(self.connection)
            self.end()
            self.world.later(AWAY_SECONDS["drained"], None, "", self.start)

    def cut(self, connection: int, why: str) -> None:
        """End a connection; the head hears of it."""
        if connection and connection == self.connection:
            self.connection = 0
            fleet, epoch = self.world.coordinator.hosts, self.epoch
            assert fleet is not None
            self.world.coordinator.post(lambda: fleet.gone(self.name, epoch, why))

    def end(self) -> None:
        """End all processes of this host."""
        self.cut(self.connection, "it ended the connection")
        for runner in self.runners.values():
            runner.gone = True
        self.runners = {}

    def strike(self, kind: str) -> None:
        """Have something become of this host."""
        self.world.strike(kind)
        if kind == "broken":
            self.cut(self.connection, "the link broke")
            self.world.later(AWAY_SECONDS[kind], None, "", self.dial)
        elif kind == "lost":
            self.end()
            self.world.later(AWAY_SECONDS[kind], None, "", self.start)
        else:
            self.world.client.ask(DrainHost(host=self.name, reason="the simulation"), lambda _: None)


class FarRunner:
    """A life of a runner: keeps units for a while, and reports them."""

    def __init__(self, host: FarHost, name: str, incarnation: int, places: int) -> None:
        self.host, self.world, self.name, self.incarnation = host, host.world, name, incarnation
        self.places, self.gone, self.beats = places, False, 0
        self.outbox = Outbox(name, incarnation)
        self.units: dict[Key, messages.UnitAssignment] = {}
        self.finished: list[messages.UnitOutcome] = []
        self.world.later(self.world.between(0.0, BEAT_SECONDS), None, "", self.beat)

    def beat(self) -> None:
        if self.gone:
            return
        self.world.later(BEAT_SECONDS, None, "", self.beat)
        self.host.say(self.name, messages.Heartbeat(self.name, self.incarnation, 1))
        self.beats += 1
        if self.beats % ANNOUNCE_BEATS == 0:
            self.announce()
        for group in self.outbox.due(self.world.now):
            self.host.say(self.name, group)

    def announce(self, state: str = "ready") -> None:
        running: dict[tuple[Any, str], list[tuple[int, int, int]]] = {}
        for (batch_id, submission, task, base), item in self.units.items():
            running.setdefault((batch_id, submission), []).append((task, base, item.unit.attempt))
        self.host.say(self.name, messages.RunnerStatus(
            name=self.name, incarnation=self.incarnation, state=state, pid=1, host=self.host.name, engine="scripted",
            places=self.places, running=tuple((*key, tuple(units)) for key, units in running.items()),
            endpoint="http://10.0.0.2:8000", engine_version="1",
        ))

    def retire(self) -> None:
        self.announce("retired")
        self.gone = True

    def take(self, message: Any) -> None:
        if self.gone or message.incarnation != self.incarnation:
            return
        if isinstance(message, messages.CancelUnits):
            for task, base in message.units:
                self.units.pop((message.batch_id, message.submission, task, base), None)
        if not isinstance(message, messages.RunUnits):
            return
        self.outbox.acknowledge(message.acks)
        for item in message.items:
            key = item.batch_id, item.submission, item.unit.task, item.unit.run_id_base
            had = self.units.get(key)
            if (had is not None and had.unit.attempt >= item.unit.attempt) or self.outbox.has_settled(
                key, item.unit.attempt
            ):
                continue
            self.units[key] = item
            seconds = self.world.plan.seconds * self.world.between(0.5, 1.5)
            self.world.later(seconds, None, "", partial(self.finish, key, item, seconds))

    def finish(self, key: Key, item: messages.UnitAssignment, seconds: float) -> None:
        if self.gone or self.units.get(key) is not item:
            return
        unit, failed = item.unit, self.world.rng.random() < self.world.plan.failures
        runs = range(unit.run_id_base, unit.run_id_base + unit.runs)
        results = [RunResult(run=r, metrics={"reward": 1.0}, experiences=1, response_tokens=512) for r in runs]
        if not self.finished:
            self.world.later(REPORT_SECONDS, None, "", self.report)
        del self.units[key]
        self.finished.append(messages.UnitOutcome(
            batch_id=item.batch_id, submission=item.submission, unit=unit, seconds=seconds,
            results=[] if failed else results, failures=[(r, "infra", "simulated") for r in runs] if failed else [],
            payload=None if failed else PayloadRef(digest="e" * 64, first=0, count=unit.runs),
        ))

    def report(self) -> None:
        if not self.gone:
            outcomes, self.finished = self.finished, []
            self.host.say(self.name, self.outbox.put(outcomes, None, self.world.now))


# --- the trainer ------------------------------------------------------------------------------------------------------
class Client:
    """Keeps enough work submitted, and waits for each batch."""

    def __init__(self, world: ManyWorld) -> None:
        self.world = world
        self.process = Process(99, "client", 0, None, 0.0)
        self.process.receiver = self
        self.waiting: dict[str, Callable[[Any], None]] = {}
        self.submitted = self.finalized = self.numbers = 0

    def ask(self, command: Command[Any], done: Callable[[Any], None]) -> None:
        self.numbers += 1
        request = messages.Request(f"q{self.numbers}", command.name, encode(command))
        self.waiting[request.id] = done
        self.world.send(self.process, self.world.coordinator.process.address, request)

    def receiveMessage(self, message: Any, sender: Any) -> None:  # as an actor's
        if isinstance(message, messages.Reply):
            self.world.account.require(message.error is None, f"{message.id} was answered {message.error}")
            self.waiting.pop(message.id)(message)

    def keep_going(self) -> None:
        """Submit another batch while less than half of the places' worth of tasks waits."""
        plan = self.world.plan
        batches = -(-plan.tasks // plan.batch)
        open_tasks = self.submitted * plan.batch - len(self.world.account.done)
        if self.submitted < batches and open_tasks < 1.5 * plan.units:
            self.submit(self.submitted)
            self.submitted += 1
        if self.finalized < batches:
            self.world.later(0.2, None, "", self.keep_going)

    def submit(self, number: int) -> None:
        plan = self.world.plan
        tasks = orjson.dumps([
            {"workflow": "sim:Sim", "repeat_times": 1, "raw_task": {"question": f"of task {i} of {number}"}}
            for i in range(plan.batch)
        ])
        parcel = messages.Parcel(tasks) if len(tasks) < SMALL else messages.Parcel(None, self.put(tasks))
        command = SubmitBatch(batch_id=number, batch_type="train", tasks=parcel, min_wait_num=None, cursor=None)
        self.ask(command, lambda _: self.ask(
            FinalizeBatch(batch_id=number, batch_type="train", timeout=None), self.ended))

    def put(self, data: bytes) -> str:
        digest = f"{len(self.world.store.payloads):064x}"
        self.world.store.payloads[digest] = data
        return digest

    def ended(self, _: Any) -> None:
        self.finalized += 1


class _Guardian:
    """Of the head, which has no runners of its own."""

    def receiveMessage(self, message: Any, sender: Any) -> None:  # as an actor's
        """Nothing is to be done."""


# --- playing ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Figures:
    """What came of a plan."""

    world: ManyWorld
    tasks: int
    seconds: float
    """Virtual."""
    struck: dict[str, int]


def play(
    plan: Plan, *, at: Callable[[ManyWorld], bool] | None = None, clock: Callable[[], float] = time.process_time
) -> Figures:
    """Play it to its end, with the doubles put in here. Raises Violation where something was lost or doubled.

    `clock`: what the meter counts, CPU seconds by default. `at` is called after every virtual second until it says True.
    """
    world = ManyWorld(plan, clock)
    patches = {"listening": lambda *_: _End(world), "LeaderLock": _Lock, "PipelineThread": _Pipeline}
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
            if not world.step() or world.now > 100 * plan.seconds + 1000:
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

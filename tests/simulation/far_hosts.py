"""Doubles of hosts, their runners and a trainer, for the simulation of many hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from tests.simulation.world import Process
from trinity_es.actors import messages, requests
from trinity_es.actors.commands import Command, DrainHost, FinalizeBatch, SubmitBatch, encode
from trinity_es.actors.hosts.admission_answer import Admission, Items
from trinity_es.actors.runner.outbox import Key, Outbox
from trinity_es.events.software_version import VERSION
from trinity_es.events.vocabulary import PayloadRef, RunResult

if TYPE_CHECKING:
    from tests.simulation.many import ManyWorld

FRAME_MESSAGES = 32
"""Number of messages in a frame. The real link fills frames of 128 KiB; pickling each message here takes too long."""

LATENCY_SECONDS = 0.001
"""Latency of a frame between a host and the head."""
REPORT_SECONDS = 0.1
"""Time for which a runner gathers outcomes before it reports them."""
BEAT_SECONDS, ANNOUNCE_BEATS = 2.0, 5
"""As in `actors/runner/actor.py`."""
AWAY_SECONDS = {"broken": 3.0, "lost": 40.0, "drained": 10.0}
"""Kind of fault -> time for which the host stays away."""
SMALL = 100_000
"""Size in bytes up to which tasks travel in the message itself."""


# --- hosts ----------------------------------------------------------------------------------------------------------
class FarHost:
    """A host: its connection to the head, its guardian, its runners."""

    def __init__(self, world: ManyWorld, name: str, runners: int, places: int) -> None:
        self.world, self.name, self.slots, self.places = world, name, runners, places
        self.lives = 0
        self.connection = 0
        """Number of the current connection, 0 without one. Frames of earlier connections are lost."""
        self.connections = 0
        self.epoch = 0
        self.runners: dict[str, FarRunner] = {}
        self.out: Items = []

    def start(self) -> None:
        """Start a new actor system on this host, and connect."""
        self.lives += 1
        for slot in range(self.slots):
            name = f"runner-{slot}@{self.name}"
            self.runners[name] = FarRunner(self, name, self.lives, self.places)
        self.dial()

    def dial(self) -> None:
        fleet, world = self.world.coordinator.hosts, self.world
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
            for group in runner.outbox.due(self.world.now, resend_all=True):
                self.say(runner.name, group)

    def say(self, name: str, message: Any) -> None:
        """Send a message of this host, in one frame with other messages of the same moment."""
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
        """End a connection, and notify the head."""
        if connection and connection == self.connection:
            self.connection = 0
            fleet, epoch, heard = self.world.coordinator.hosts, self.epoch, self.world.now
            self.world.coordinator.post(lambda: fleet.on_disconnected(self.name, epoch, why, heard))

    def end(self) -> None:
        self.cut(self.connection, "it ended the connection")
        for runner in self.runners.values():
            runner.gone = True
        self.runners = {}

    def strike(self, kind: str) -> None:
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
    """One incarnation of a runner, which keeps each unit for a while and then reports it."""

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
    """Trainer that keeps enough batches submitted, and waits for each."""

    def __init__(self, world: ManyWorld) -> None:
        self.world = world
        self.process = Process(99, "client", 0, None, 0.0)
        self.process.receiver = self
        self.waiting: dict[str, Callable[[Any], None]] = {}
        self.submitted = self.finalized = self.numbers = 0

    def ask(self, command: Command[Any], done: Callable[[Any], None]) -> None:
        self.numbers += 1
        request = requests.Request(f"q{self.numbers}", command.name, encode(command))
        self.waiting[request.id] = done
        self.world.send(self.process, self.world.coordinator.process.address, request)

    def receiveMessage(self, message: Any, sender: Any) -> None:  # as an actor's
        if isinstance(message, requests.Reply):
            self.world.account.require(message.error is None, f"{message.id} was answered {message.error}")
            self.waiting.pop(message.id)(message)

    def keep_going(self) -> None:
        """Submit another batch while open tasks are fewer than 1.5 times the places."""
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
        parcel = requests.Parcel(tasks) if len(tasks) < SMALL else requests.Parcel(None, self.put(tasks))
        command = SubmitBatch(batch_id=number, batch_type="train", tasks=parcel, min_wait_num=None, cursor=None)
        self.ask(command, lambda _: self.ask(
            FinalizeBatch(batch_id=number, batch_type="train", timeout=None), self.ended))

    def put(self, data: bytes) -> str:
        digest = f"{len(self.world.store.payloads):064x}"
        self.world.store.payloads[digest] = data
        return digest

    def ended(self, _: Any) -> None:
        self.finalized += 1

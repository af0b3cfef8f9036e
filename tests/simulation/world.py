"""Virtual time, processes and messages around the actors, and the faults of these.

Everything that happens is an effect on one heap, in order of virtual time. A dead process has no more effects: its code
finishes the handler in which it died, but this changes nothing. So a crash may come between any two effects without an
exception. Effects on a stopped process are held, in order, until it continues.

There are two kinds of fault. A fault of a process is armed at a time and strikes at the process's n-th effect after
that. A fault of the network or the database hits the n-th message, or the next append, after a time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.store import Store
from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.messages import Heartbeat, StartCoordinator, StartRunner

EPOCH = 1_700_000_000.0
"""Unix seconds at the beginning."""
BOOT_SECONDS = 0.02, 0.4
"""Delay until a new process handles its first message."""
EXIT_NOTICE_SECONDS = 0.01, 0.2
"""Delay until a parent learns of a child's end."""


class Violation(Exception):
    """An invariant does not hold."""


class Address:
    """Address of one process, never reused."""

    __slots__ = ("process",)

    def __init__(self, process: Process) -> None:
        self.process = process

    def __repr__(self) -> str:
        return self.process.label


class Process:
    """A process of the simulated machine, or a client's mailbox."""

    __slots__ = (
        "address", "alive", "boots_at", "children", "doomed", "effects_left", "held", "kind", "label", "parent", "pid",
        "receiver", "started", "stopped", "system",
    )

    def __init__(self, pid: int, kind: str, system: int, parent: Process | None, now: float) -> None:
        self.pid, self.kind, self.system, self.parent = pid, kind, system, parent
        self.label = f"{kind}#{pid}"
        self.started = EPOCH + now
        self.address = Address(self)
        self.children: list[Process] = []
        self.alive = True
        self.doomed = False
        """True if its parent has sent it an ActorExitRequest."""
        self.stopped = False
        self.boots_at = now
        self.held: list[tuple[str, Callable[[], None]]] = []
        self.effects_left: int | None = None
        self.receiver: Any = None
        """The actor, with `receiveMessage`."""


@dataclass(slots=True)
class MessageFault:
    """Fault of one message: the one sent when `countdown` is 0."""

    kind: str
    countdown: int
    seconds: float


class World:
    """State of one run. schedule.py sets `invariants` and `trainer`, doubles.py sets `spawn_actor`."""

    def __init__(self, seed: int, config: LaunchedConfig, *, tracing: bool = False) -> None:
        self.rng = random.Random(seed)
        self.seed, self.config = seed, config
        self.now = 0.0
        self.heap: list[tuple[float, int, Process | None, str, Callable[[], None]]] = []
        self.numbers = 0
        self.last_pid = 100
        self.processes: dict[int, Process] = {}
        self.current: Process | None = None
        self.arrivals: dict[tuple[int, int], float] = {}
        self.message_faults: list[MessageFault] = []
        self.disorder_until = 0.0
        self.still_born = 0
        self.steps = 0
        self.tracing, self.trace = tracing, list[str]()
        self.struck: dict[str, int] = {}
        """Kind of fault -> number of times that it had an effect."""
        self.systems = 0
        self.guardians: list[Process] = []
        self.lives: dict[tuple[str, int], list[Process]] = {}
        """(runner, incarnation) -> processes; several if two systems gave the same incarnation."""
        self.loops: list[Any] = []
        self.executions: dict[Any, int] = {}
        self.store = Store(lambda: EPOCH + self.now, self._committed)
        self.invariants: Any = None
        self.trainer: Any = None
        self.spawn_actor: Callable[[Process, str], Any]

    # --- time -------------------------------------------------------------------------------------------------------
    def later(self, seconds: float, process: Process | None, what: str, call: Callable[[], None]) -> None:
        """Schedule a call after `seconds`. It is skipped if `process` is dead by then."""
        self.at(self.now + seconds, process, what, call)

    def at(self, time: float, process: Process | None, what: str, call: Callable[[], None]) -> None:
        self.numbers += 1
        heapq.heappush(self.heap, (time, self.numbers, process, what, call))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def step(self) -> bool:
        """Play the next effect, and check the invariants. Return False if there is none."""
        if not self.heap:
            return False
        at, _, process, what, call = heapq.heappop(self.heap)
        self.now = max(self.now, at)
        if process is not None:
            if not process.alive:
                return True
            if process.stopped:
                process.held.append((what, call))
                return True
            if process.boots_at > self.now:
                self.at(process.boots_at, process, what, call)
                return True
        self.steps += 1
        if self.tracing and what:
            self.note(f"{'' if process is None else process.label + ' '}{what}")
        self.current = process
        try:
            call()
        finally:
            self.current = None
        self.invariants.after_step(process)
        return True

    def note(self, what: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:9.3f}  {what}")

    def strike(self, kind: str) -> None:
        self.struck[kind] = self.struck.get(kind, 0) + 1
        self.note(f"*** {kind}")

    # --- processes --------------------------------------------------------------------------------------------------
    def spawn(self, kind: str, parent: Process | None, system: int | None = None) -> Process:
        self.last_pid += 1
        process = Process(self.last_pid, kind, self.systems if system is None else system, parent, self.now)
        self.processes[process.pid] = process
        process.boots_at = self.now + self.between(*BOOT_SECONDS)
        if parent is not None:
            process.system = parent.system
            parent.children.append(process)
            if not parent.alive:
                process.alive = False
        if self.still_born and kind != "guardian":
            self.still_born -= 1
            self.strike("still_born")
            process.boots_at = self.now + 1e9
        process.receiver = self.spawn_actor(process, kind)
        self.note(f"{process.label} is started")
        return process

    def effect(self, process: Process | None) -> bool:
        """Return True if this process may have its next effect: it lives, and no fault kills it right now."""
        if process is None:
            return True
        if process.alive and process.effects_left is not None:
            process.effects_left -= 1
            if process.effects_left < 0:
                process.effects_left = None
                self.strike(f"kill_{process.kind}")
                self.kill(process)
        return process.alive

    def kill(self, process: Process) -> None:
        """Kill a process and its children, as SIGKILL does."""
        if not process.alive:
            return
        process.alive = False
        self.note(f"{process.label} is dead")
        for child in process.children:
            self.kill(child)
        parent = process.parent
        if parent is not None and parent.alive:
            from thespian.actors import ChildActorExited

            told = ChildActorExited(process.address)
            self.later(
                self.between(*EXIT_NOTICE_SECONDS), parent, f"hears that {process.label} is gone",
                lambda: parent.receiver.receiveMessage(told, None),
            )
        if process.kind == "guardian":
            self.later(self.between(0.1, 1.5), None, "the keeper starts the system", self.start_system)

    def kill_pid(self, pid: int) -> None:
        process = self.processes.get(pid)
        if process is None or not process.alive:
            raise ProcessLookupError
        self.kill(process)

    def stop(self, process: Process, seconds: float) -> None:
        """Stop a process, as SIGSTOP does, and continue it after `seconds`."""
        if not process.alive or process.stopped:
            return
        process.stopped = True
        self.later(seconds, None, f"{process.label} goes on", lambda: self.go_on(process))

    def go_on(self, process: Process) -> None:
        process.stopped = False
        held, process.held = process.held, []
        for what, call in held:
            self.at(self.now, process, what, call)

    @property
    def guardian(self) -> Process | None:
        """Guardian of the system that clients find: of the lease's owner, or of a newer system about to take it."""
        owner = self.store.owner.get("admin", {}).get("guardian", 0)
        found = None
        for guardian in self.guardians:
            if guardian.alive and guardian.pid == owner:
                return guardian
            actor = guardian.receiver
            begins = not getattr(actor, "epoch", 0) and not getattr(actor, "fencing_owner", "")
            if guardian.alive and guardian.pid > owner and begins:
                found = guardian
        return found

    def start_system(self, *, beside: bool = False) -> None:
        """Start a guardian on this store, as `trinity-es up` does, if none lives. With `beside` start one anyway."""
        if self.guardian is not None and not beside:
            return
        if self.store.away:
            self.later(1.0, None, "", lambda: self.start_system(beside=beside))
            return
        self.systems += 1
        guardian = self.spawn("guardian", None)
        self.guardians.append(guardian)
        from trinity_es.actors.messages import Configure

        first = self.store.last_incarnation() + 1
        configure = Configure(self.config, 0, first)
        self.later(0.0, guardian, "is configured", lambda: guardian.receiver.receiveMessage(configure, None))

    def find(self, kind: str) -> Process | None:
        """Return the live process of this kind in the current system, as its guardian lists it, or None."""
        guardian = self.guardian
        if guardian is None or not guardian.alive:
            return None
        if kind == "guardian":
            return guardian
        child = getattr(guardian.receiver, "children", {}).get(kind)
        process = None if child is None else child.address.process
        return process if process is not None and process.alive else None

    # --- messages ---------------------------------------------------------------------------------------------------
    def send(self, source: Process, to: Address, message: Any) -> None:
        """Send a message. Messages between two processes stay in order, unless the fault `disorder` is active."""
        if not self.effect(source) or to is None:
            return
        target = to.process
        seconds, copies = self.between(0.0005, 0.01), 1
        if self.message_faults and not isinstance(message, Heartbeat):
            for fault in list(self.message_faults):
                fault.countdown -= 1
                if fault.countdown < 0:
                    self.message_faults.remove(fault)
                    self.strike(f"{fault.kind} {type(message).__name__}" if self.tracing else fault.kind)
                    if fault.kind == "lose":
                        copies = 0
                    elif fault.kind == "duplicate":
                        copies = 1 if isinstance(message, StartCoordinator | StartRunner) else 2  # never sent twice
                    else:
                        seconds += fault.seconds
        what = f"<- {type(message).__name__} from {source.label}{_message_text(message)}" if self.tracing else ""
        for _ in range(copies):
            at = self.now + seconds
            # A child is started before it gets anything else.
            if self.disorder_until > self.now and target.parent is not source:
                at += self.between(0.0, 0.5)
            else:
                at = max(at, self.arrivals.get((source.pid, target.pid), 0.0) + 1e-6)
                self.arrivals[source.pid, target.pid] = at
            self.at(at, target, what, lambda: target.receiver.receiveMessage(message, source.address))
            seconds += self.between(0.0, 1.0)

    def _committed(self, row: Any) -> None:
        if self.tracing:
            self.note(f"    log {row.position} [{row.metadata.get('epoch')}] {row.stream} {_event_text(row.event)}")
        self.invariants.committed(row)


def _message_text(message: Any) -> str:
    """Return the important values of a message, for the trace."""
    name = type(message).__name__
    if name == "RunUnits":
        return f" acks {list(message.acks)} units {[_unit_label(i.batch_id, i.unit) for i in message.items]}"
    if name == "OutcomeReport":
        return f" no. {message.number}: " + ", ".join(
            _unit_label(o.batch_id, o.unit) + (" failed" if o.failures else "") for o in message.outcomes
        )
    if name == "RunnerStatus":
        running = [f"{b}/{t}.{r}@{a}" for b, _, units in message.running for t, r, a in units]
        return f" {message.state} of life {message.incarnation} has {running}"
    if name == "Request":
        return f" {message.command} {message.args.get('batch_id', '')} ({message.id})"
    if name == "Reply":
        return f" ({message.id}) {message.error['type'] if message.error else 'ok'}"
    if name in ("RunnerDied", "StartRunner"):
        return f" {message.name} life {message.incarnation}"
    return ""


def _unit_label(batch_id: Any, unit: Any) -> str:
    return f"{batch_id}/{unit.task}.{unit.run_id_base}@{unit.attempt}"


def _event_text(event: Any) -> str:
    name = type(event).__name__
    if name == "TasksDispatched":
        units = [f"{u.task}.{u.run_id_base}@{u.attempt}" for u in event.units]
        return f"{name} {units} to {event.runner} life {event.incarnation}"
    if name in ("TaskFinished", "RunsFinished"):
        return f"{name} {event.task} runs {[r.run for r in event.runs]} by {event.runner} life {event.incarnation}"
    if name == "AttemptFailed":
        return (
            f"{name} {event.task} runs {event.failed_runs} attempt {event.attempt} {event.kind} retry={event.retry} "
            f"blamed={event.blamed} on {event.runner} life {event.incarnation}"
        )
    for key in ("incarnation", "epoch"):
        if hasattr(event, key):
            return f"{name} {getattr(event, key)}"
    return name


worlds: list[World] = []
"""Active worlds; the last one is current."""


def world() -> World:
    return worlds[-1]


def here() -> Process:
    """Return the process whose code is running."""
    return world().current

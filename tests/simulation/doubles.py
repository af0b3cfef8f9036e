"""Doubles of everything under the real actors: Thespian, the log's writer, the pipeline, reading threads.

The actors are the real classes with `SimActor` mixed in, which overrides Thespian's methods. `installed` patches the
names of the operating system and the database in the actors' modules.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import orjson
from thespian.actors import ActorExitRequest, WakeupMessage, WatchMessage

import trinity_es.actors.base
import trinity_es.actors.coordinator.actor
import trinity_es.actors.coordinator.handlers.batch_delivery
import trinity_es.actors.coordinator.handlers.wiring
import trinity_es.actors.coordinator.live_state
import trinity_es.actors.coordinator.log_session
import trinity_es.actors.coordinator.log_writer
import trinity_es.actors.coordinator.sender_mark_checks
import trinity_es.actors.guardian.actor
import trinity_es.actors.runner.actor
import trinity_es.actors.runner.engine_thread
import trinity_es.actors.runner.journal_writer
import trinity_es.actors.runner.unit_reports
from tests.simulation import store as stores
from tests.simulation.engine import SimEngine, SimExperience, SimPool, SimWorkflows
from tests.simulation.machine import Event, SimAsyncio, SimLoop, SimOs, kill_group, process_start_time, threads
from tests.simulation.world import EPOCH, Process, World, here, world, worlds
from trinity_es.actors.coordinator.actor import Coordinator
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.log_writer import LogWriter, UnitOfWork
from trinity_es.actors.coordinator.suspect_requests import RequestsInHand
from trinity_es.actors.guardian.actor import Guardian
from trinity_es.actors.runner.actor import Runner
from trinity_es.actors.runner.engine_thread import EngineThread
from trinity_es.actors.runner.unit_reports import Reporter
from trinity_es.events.errors import PipelineError
from trinity_es.events.store.database.retry import Backoff, is_transient
from trinity_es.events.vocabulary import PayloadRef


# --- actors ---------------------------------------------------------------------------------------------------------
class SimActor:
    """Mixin that replaces the methods of Thespian and SafeActor."""

    process: Process

    def send(self, to: Any, message: Any) -> None:
        if isinstance(message, ActorExitRequest):
            to.process.doomed = True
        world().send(self.process, to, message)

    def createActor(self, cls: type[Any]) -> Any:  # Thespian's
        world().effect(self.process)
        return world().spawn(cls.__name__.lower(), self.process).address

    def wakeupAfter(self, delay: timedelta, payload: Any = None) -> None:  # Thespian's
        message = WakeupMessage(delay, payload)
        what = f"timer {payload[0]}" if world().tracing and payload[0] not in ("beat", "check", "stalls") else ""
        world().later(delay.total_seconds(), self.process, what, lambda: self.receiveMessage(message, None))

    @property
    def myAddress(self) -> Any:  # Thespian's
        return self.process.address

    def now(self) -> float:
        return world().now

    def chance(self) -> float:
        return world().rng.random()

    def open_log(self, directory: str, name: str) -> None:
        """Do nothing: there is no file."""

    def start_watch(self) -> None:
        """Do nothing: `post` schedules a message instead."""

    def post(self, call: Callable[[], None]) -> None:
        if not self.process.alive:  # tasks are discarded after their process died
            return
        self._posted.append(call)
        wake = WatchMessage([])
        world().later(0.0002, self.process, "", lambda: self.receiveMessage(wake, None))

    def receiveMessage(self, message: Any, sender: Any) -> Any:  # Thespian's
        result = super().receiveMessage(message, sender)
        if isinstance(message, ActorExitRequest):
            world().kill(self.process)
        return result

    def _handle_exception(self, error: BaseException) -> None:
        if self.process.alive:
            world().invariants.raised(self.process, error)
        super()._handle_exception(error)


class SimGuardian(SimActor, Guardian):
    pass


class SimCoordinator(SimActor, Coordinator):
    def open_store(self) -> Any:
        process, database = self.process, world().store
        database.require()
        return stores.LogDouble(database, lambda: process.alive), stores.PayloadDouble(database)


class SimServer:
    """Endpoint of the engine, which gets no requests."""

    url = "http://nowhere"

    def serves(self) -> bool:
        """Do nothing."""
        return True

    async def stop(self) -> None:
        """Do nothing."""


class SimRunner(SimActor, Runner):
    def on_StartRunner(self, message: Any, sender: Any) -> None:
        world().lives.setdefault((message.name, message.incarnation), []).append(self.process)
        super().on_StartRunner(message, sender)

    def report(self, outcomes: Any) -> None:
        super().report(outcomes)
        world().invariants.reported(self, outcomes)


class SimEngineSide(EngineThread):
    def run_loop(self) -> None:
        """Run the loop's callbacks as effects of this process instead of a thread."""
        self.start_task = self.loop.create_task(self.start_engine())

    async def serve(self, engine: Any) -> Any:
        return SimServer()


class SimReporter(Reporter):
    def open(self) -> None:
        world().store.require()
        self._quick = self.payloads = stores.PayloadDouble(world().store)


_ACTORS = {"guardian": SimGuardian, "coordinator": SimCoordinator, "runner": SimRunner}


def spawn_actor(process: Process, kind: str) -> Any:
    actor = _ACTORS[kind]()
    actor.process = process
    return actor


# --- the log's writer and the pipeline ------------------------------------------------------------------------------
class SimWriter(LogWriter):
    """LogWriter whose thread is a sequence of effects: take a group, commit, notify the actor.

    The process may die between any two of them. A commit that has begun may then still succeed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.process = here()
        self.busy = False
        self.commit: Callable[[], None] | None = None

    def _run(self) -> None:
        """Do nothing: there is no thread."""

    def submit(self, turn: UnitOfWork) -> None:
        super().submit(turn)
        self._kick()

    def _kick(self) -> None:
        if not self.busy and self._queue:
            self.busy = True
            world().later(0.0003 + self._queue[-1].follow_up_seconds, self.process, "", self._take)

    def _take(self) -> None:
        group, self._queue = self._queue, []
        if not group:
            self.busy = False
            return
        writes = [w for turn in group for w in turn.writes]
        if self._fatal_error is not None:
            broken = self._fatal_error
            self._end(lambda: self._report_failure(broken, group))
        elif not writes:
            self._end(lambda: self._call_durable(group))
        else:
            commit_id = f"{self._lease.name}:{self._lease.epoch}:{next(self._commit_numbers)}"
            self._try(group, writes, commit_id, Backoff(), None)

    def _try(
        self, group: Sequence[UnitOfWork], writes: Any, commit_id: str, pauses: Backoff, until: float | None
    ) -> None:
        done = False

        def commit() -> None:
            nonlocal done, until
            if done or (not self.process.alive and not comes_through):
                return
            done, self.commit = True, None
            try:
                self._log.append(writes, commit_id=commit_id, lease=self._lease, metadata=self._metadata)
            except Exception as e:
                broken = e

                def give_up() -> None:
                    self.commit, self._fatal_error = None, broken
                    self._end(lambda: self._report_failure(broken, group))

                def retry() -> None:
                    if self.commit is give_up:
                        self._try(group, writes, commit_id, pauses, until)

                until = world().now + self._retry_for if until is None else until
                if is_transient(e) and world().now < until and not self._stopped:
                    self.commit = give_up  # for `stop`, which ends the pause
                    world().later(pauses.next(self._chance()), self.process, "tries to write again", retry)
                else:
                    give_up()
                return
            self.written += 1
            self._end(lambda: self._call_durable(group))

        comes_through = world().rng.random() < 0.5
        if not world().effect(self.process):
            return
        self.commit = commit
        # The database has the request, so it commits even if this process is stopped or killed meanwhile.
        world().later(world().between(0.001, 0.02), None, "", commit)

    def _end(self, call: Callable[[], None]) -> None:
        """Call the actor after a delay, in which other effects may happen."""

        def tell() -> None:
            self.busy = False
            self._post(call)
            self._kick()

        world().later(world().between(0.0002, 0.01), self.process, "", tell)

    def stop(self) -> None:
        """Write the queue at once, without virtual time passing."""
        self._stopped = True
        while self._queue or self.commit is not None:
            if self.commit is not None:
                self.commit()
            else:
                self._take()


class SimJobs:
    """Double of the pipeline's thread, which delivers experiences after a delay."""

    def __init__(self, operators: Any, payloads: Any, post: Callable[[Callable[[], None]], None], models: Any) -> None:
        self.payloads, self.post, self.process = payloads, post, here()

    def close(self, problem: Callable[[str], None]) -> bool:
        return True

    def run(self, job: Any) -> None:
        world().later(world().between(0.01, 0.55) ** 2, self.process, "", lambda: self._work(job))

    def _work(self, job: Any) -> None:
        try:
            if world().store.away:
                world().later(0.5, self.process, "", lambda: self._work(job))
                return
            result: Any = self._process(job.refs)
        except Exception as e:
            result = e
        self.post(lambda: job.done(result))

    def _process(self, refs: Sequence[PayloadRef]) -> PipelineDone:
        if world().rng.random() < 0.02:
            raise PipelineError("the simulated operator fails")
        found = []
        for ref in refs:
            kept = orjson.loads(self.payloads.get(ref.digest))
            found.extend(kept[ref.first : ref.first + ref.count])
        found.sort()
        world().invariants.delivered(found)
        digest = self.payloads.put(orjson.dumps(found))
        return PipelineDone(
            {"pipeline/experiences": float(len(found))}, [PayloadRef(digest=digest, first=0, count=len(found))],
            len(found), 0,
        )


# --- all of it ------------------------------------------------------------------------------------------------------
class SimReader:
    """Double of the reading threads, whose results come after a delay, in which other effects may happen."""

    def __init__(self, post: Callable[[Callable[[], None]], None], *, retry_for: float) -> None:
        self.post, self.retry_for, self.process = post, retry_for, here()

    def run(self, read: Callable[[], Any], done: Callable[[Any], None], *, once: bool = False) -> None:
        until = world().now + (0.0 if once else self.retry_for)

        def work() -> None:
            found: Any
            try:
                found = read()
            except Exception as e:
                if is_transient(e) and world().now < until:
                    world().later(0.5, self.process, "", work)
                    return
                found = e
            self.post(lambda: done(found))

        world().later(world().between(0.0005, 0.02), self.process, "", work)


class SimWatch:
    """Double of the watch of the database, which never finds trouble."""

    trouble = None

    def __init__(self, *_: Any) -> None:
        """Do nothing: there is no thread."""

    def stop(self) -> None:
        """Do nothing."""


_coordinator_jobs = {
    "os": SimOs, "PipelineThread": SimJobs, "patient": lambda store, *_, **__: store,
    "threading": SimpleNamespace(Event=Event),
    "RequestsInHand": lambda *_: RequestsInHand(), "watch_store": lambda *_: None,
}
_PATCHES: list[tuple[Any, dict[str, Any]]] = [
    (trinity_es.actors.base, {
        "_FATAL": (),
        "faulthandler": SimpleNamespace(enable=lambda: None, disable=lambda: None),
    }),
    (trinity_es.actors.coordinator.live_state, {
        "open_batches": stores.open_batches, "runner_states": stores.runner_states,
        "delivered_batches": stores.delivered_batches, "other_streams": stores.other_streams,
        "greatest_batch_id": stores.greatest_batch_id,
        "read_open": stores.read_open,
    }),
    (trinity_es.actors.coordinator.handlers.batch_delivery, {"next_delivered": stores.next_delivered}),
    (trinity_es.actors.coordinator.log_writer, {"threading": threads}),
    (trinity_es.actors.coordinator.sender_mark_checks, {"threading": threads}),
    (trinity_es.actors.guardian.actor, {
        "os": SimOs, "kill_group": kill_group, "process_start_time": process_start_time,
    }),
    (trinity_es.actors.coordinator.actor, _coordinator_jobs),
    (trinity_es.actors.coordinator.log_session, {"LogWriter": SimWriter, "Reader": SimReader, "Watch": SimWatch}),
    (trinity_es.actors.coordinator.handlers.wiring, {
        "RunnerRegistry": lambda live, sender: RunnerRegistry(live, sender, lambda: EPOCH + world().now),
    }),
    (trinity_es.actors.runner.unit_reports, {"Experience": SimExperience}),
    (trinity_es.actors.runner.actor, {"os": SimOs, "EngineThread": SimEngineSide}),
    (trinity_es.actors.runner.journal_writer, {"time": SimpleNamespace(monotonic=lambda: world().now)}),
    (trinity_es.actors.runner.engine_thread, {
        "os": SimOs, "asyncio": SimAsyncio(), "threading": threads, "EngineLoop": lambda _: SimLoop(),
        "Reporter": SimReporter, "WorkerPool": SimPool, "WorkflowRunner": SimWorkflows, "resolve": lambda *_: SimEngine,
        "time": SimpleNamespace(monotonic=lambda: world().now),
    }),
]


_MAY_BE_MISSING = {"threading", "time", "patient"}
"""Names that a module may lack. If any other one is missing, patching fails, so that no real code stays in use."""


class _Traced(logging.Handler):
    """Handler that writes the actors' log lines into the trace."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        world().note(f"    {record.name}: {text}")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Patch the doubles into the actors' modules, for this block."""
    log = logging.getLogger("trinity_es")
    level, propagate = log.level, log.propagate
    handler = _Traced()
    with contextlib.ExitStack() as stack:
        for module, names in _PATCHES:
            there = {n: d for n, d in names.items() if n not in _MAY_BE_MISSING or hasattr(module, n)}
            stack.enter_context(mock.patch.multiple(module, **there))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*was never awaited", RuntimeWarning)  # its process died before
        log.addHandler(handler)
        log.propagate = False
        stack.enter_context(mock.patch.object(sys, "unraisablehook"))  # of discarded tasks
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate


@contextlib.contextmanager
def running(one: World) -> Iterator[None]:
    """Make this the current world, for this block."""
    logging.getLogger("trinity_es").setLevel(logging.INFO if one.tracing else logging.CRITICAL + 1)
    one.spawn_actor = spawn_actor
    worlds.append(one)
    try:
        yield
    finally:
        for process in one.processes.values():
            process.alive = False
        for loop in one.loops:
            loop.close()
        worlds.pop()

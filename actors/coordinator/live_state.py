"""The coordinator's live state: what the log says is open, and the turn that is being decided.

Events are folded into memory at once and gathered in the turn; what is to happen because of them waits in the turn too
(`then`), until the log's writer has made them durable. When a write fails the live state is read anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import orjson

from trinity_es.actors.coordinator.log_reader import NotRead, read_now
from trinity_es.actors.coordinator.log_writer import UnitOfWork
from trinity_es.actors.coordinator.units_in_flight import UnitsInFlight
from trinity_es.actors.requests import Parcel, pack
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.store.records.recorded import Write, checked_write
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.adapter_versions import Adapters, current_adapters, evolve_adapters, evolve_loaded
from trinity_es.projections.batch import BatchState, evolve, fold
from trinity_es.projections.experience_queue import QueueState, evolve_queue, load_queue
from trinity_es.projections.host_states import HostEvent, Hosts, evolve_hosts
from trinity_es.projections.leases import OpenLeases, evolve_leases
from trinity_es.projections.runner import (
    Lives,
    RunnerEvent,
    RunnerLife,
    RunnerState,
    Weights,
    evolve_lives,
    evolve_weights,
)
from trinity_es.projections.servers import Servers, evolve_servers
from trinity_es.projections.tables.open_leases import read_open
from trinity_es.projections.tables.read_models import delivered_batches, open_batches
from trinity_es.projections.tables.runner_history import runner_states
from trinity_es.projections.tables.streams import greatest_batch_id, other_streams

__all__ = ["LiveState", "Loaded"]

E = TypeVar("E", bound=ev.Event)
Ask = Callable[[Callable[[], Any], Callable[[Any], None]], None]

REMEMBERED_BATCHES = 64
"""Maximum number of ended batches kept in memory, for a client that asks again; older ones are read from the log."""


@dataclass(slots=True)
class Loaded:
    """What the log says is open, when it was read."""

    batches: dict[BatchId, BatchState]
    greatest_id: int
    versions: dict[str, int]
    tasks: dict[BatchId, list[Parcel]]
    lives: Lives
    queue: QueueState
    attempt_times: ev.PaceMeasured | None
    weights: Weights
    adapters: Adapters
    loaded_adapters: set[str]
    servers: Servers
    hosts: Hosts
    leases: OpenLeases


def load_state(log: EventLog, payloads: PayloadStore, queue_capacity: int) -> Loaded:
    """Fold everything that is open from the log. It takes as long as the database does: not for a handler."""
    with log.engine.connect() as connection:
        found = open_batches(connection)
        states = runner_states(connection)
        delivered = delivered_batches(connection, queue_capacity)
        leases = read_open(connection)
    queue = load_queue(log, delivered, queue_capacity)
    versions = other_streams(log)
    batches: dict[BatchId, BatchState] = {}
    tasks: dict[BatchId, list[Parcel]] = {}
    for stream, batch_id in found:
        given: list[ev.BatchSubmitted | ev.TasksAdded] = []
        state = _folded(log, batch_id, given)
        if state is not None and not state.state.ended:
            batches[batch_id], versions[stream] = state, state.version
            tasks[batch_id] = _tasks_of(given, payloads)
    times, published = _newest(log, ev.PaceMeasured), _newest(log, ev.WeightsPublished)
    served = _served(log, states)
    lives: Lives = {}
    for name, (incarnation, how) in states.items():
        lives[name, incarnation] = RunnerLife(
            name=name, incarnation=incarnation, state=RunnerState(how), served=name in served
        )
    adapters = _adapters(log, versions)
    return Loaded(
        batches=batches, greatest_id=greatest_batch_id(log), versions=versions, tasks=tasks, lives=lives, queue=queue,
        attempt_times=times,
        weights=Weights() if published is None else evolve_weights(Weights(), published),
        adapters=adapters, loaded_adapters=_loaded(log, adapters), servers=_servers(log), hosts=_hosts(log),
        leases=leases,
    )


def _adapters(log: EventLog, streams: Iterable[str]) -> Adapters:
    """Return the newest event of each adapter that has a stream: as many reads as there ever were adapters."""
    found: Adapters = {}
    for stream in [s for s in streams if s.startswith(ev.AdapterPublished.stream_of(""))]:
        events = [e for e in (log.last(stream, "AdapterPublished"), log.last(stream, "AdapterRemoved")) if e]
        for recorded in sorted(events, key=lambda e: e.position):
            evolve_adapters(found, cast(ev.AdapterPublished, recorded.event))
    return found


def _loaded(log: EventLog, adapters: Adapters) -> set[str]:
    """Return the current adapters that some engine has had, as `evolve_loaded` tells: mostly soon after they came."""
    found = set[str]()
    for name, event in current_adapters(adapters).items():
        removed = log.last(event.own_stream(), "AdapterRemoved")
        [first] = log.read(stream=event.own_stream(), after=0 if removed is None else removed.position, limit=1)
        for recorded in log.rare(["AdapterLoaded", "RunnerReady"], after=first.position):
            told = set[str]()
            evolve_loaded(told, recorded.event, adapters)
            if name in told:
                found.add(name)
                break
    return found


def _servers(log: EventLog) -> Servers:
    servers: Servers = {}
    for recorded in log.read(stream=ev.ServerAdded.stream):
        evolve_servers(servers, cast("ev.ServerAdded | ev.ServerRemoved", recorded.event))
    return servers


def _hosts(log: EventLog) -> Hosts:
    hosts: Hosts = {}
    for recorded in log.read(stream=ev.HostJoined.stream):
        evolve_hosts(hosts, cast(HostEvent, recorded.event))
    return hosts


def _newest(log: EventLog, kind: type[E]) -> E | None:
    last = log.last(kind.stream, kind.__name__)
    return None if last is None else cast(E, last.event)


def _folded(
    log: EventLog, batch_id: BatchId, given: list[ev.BatchSubmitted | ev.TasksAdded] | None = None
) -> BatchState | None:
    """Return a batch's state; `given` gets the events that hold its tasks."""

    def events() -> Iterator[ev.Event]:
        for recorded in log.read(stream=batch_stream(batch_id)):
            if given is not None and isinstance(recorded.event, ev.BatchSubmitted | ev.TasksAdded):
                if isinstance(recorded.event, ev.BatchSubmitted):
                    given.clear()
                given.append(recorded.event)
            yield recorded.event

    return fold(events())


def _tasks_of(given: Sequence[ev.BatchSubmitted | ev.TasksAdded], payloads: PayloadStore) -> list[Parcel]:
    lists = [e.tasks if e.tasks is not None else orjson.loads(payloads.get(e.tasks_digest or "")) for e in given]
    return [pack(task, payloads) for tasks in lists for task in tasks]


def _served(log: EventLog, states: Mapping[str, tuple[int, str]]) -> set[str]:
    """Return the runners whose newest life has served: see `RunnerLife.served`.

    It finds what `evolve_lives` would, without reading streams that grow with every version.
    """
    found, sought = set[str](), dict[str, int]()
    for name, (incarnation, _) in states.items():
        loaded = log.last(ev.WeightsLoaded.stream_of(name), "WeightsLoaded")
        if loaded is not None and cast(ev.WeightsLoaded, loaded.event).incarnation == incarnation:
            found.add(name)
        else:
            sought[name] = incarnation
    for recorded in log.rare(["RunnerReady"], descending=True):  # several of one life: each takeover records one
        ready = cast(ev.RunnerReady, recorded.event)
        if not sought:
            break
        if sought.get(ready.runner) != ready.incarnation:
            sought.pop(ready.runner, None)  # those of its newest life have all been seen
            continue
        published = next(log.rare(["WeightsPublished"], before=recorded.position, descending=True, limit=1), None)
        if published is None or cast(ev.WeightsPublished, published.event).version == ready.model_version:
            found.add(ready.runner)
            del sought[ready.runner]
    return found


class LiveState:
    """Batches, stream versions, weights and the queue of experiences, as of the end of the current turn."""

    def __init__(
        self, log: EventLog, payloads: PayloadStore, *, queue_capacity: int = 100_000, ask: Ask | None = None
    ) -> None:
        """Read the log here and now: the coordinator does so in a thread. `ask`: see the attribute."""
        self.log, self.payloads = log, payloads
        self._queue_capacity = queue_capacity
        self.turn = UnitOfWork()
        self.fetch: Callable[[Hashable, Callable[[], Any]], Any] = read_now
        """What a read gives, under a key that names it; while a request is handled it may have to be read first."""
        self.ask: Ask = ask or _ask_now
        """Have something read (or a payload written) by a thread, and be told what came of it."""
        self.load()

    def load(self) -> None:
        """Read everything that is open from the log; what was in memory, the turn too, is forgotten."""
        self.adopt(self.read_log())

    def read_log(self) -> Loaded:
        """Return what `adopt` takes. For any thread; may take as long as the database does."""
        return load_state(self.log, self.payloads, self._queue_capacity)

    def adopt(self, loaded: Loaded) -> None:
        """Go on with what was read; what was in memory, the turn too, is forgotten."""
        self.turn = UnitOfWork()
        self.batches, self.versions, self._tasks = loaded.batches, loaded.versions, loaded.tasks
        self._greatest_id = loaded.greatest_id
        self.in_flight = UnitsInFlight(self.batches.values())
        self.ended: OrderedDict[BatchId, BatchState] = OrderedDict()
        self.weights, self.adapters = loaded.weights, loaded.adapters
        self.loaded_adapters = loaded.loaded_adapters
        """Those that some engine had: one that never had any is not waited for."""
        self.hosts = loaded.hosts
        self.lives, self.servers, self.leases = loaded.lives, loaded.servers, loaded.leases
        """Of runners: the newest of each that the log had when it was read, and all that were recorded since."""
        self.queue, self.attempt_times = loaded.queue, loaded.attempt_times

    def find(self, batch_id: BatchId) -> BatchState | None:
        """Return a batch, open or ended; None when the log has none of this id."""
        state = self.batches.get(batch_id) or self.ended.get(batch_id)
        if state is None:
            if type(batch_id) is int and batch_id > self._greatest_id:
                return None  # a trainer's steps count up: there is nothing to be read, as nobody else writes batches
            stream = batch_stream(batch_id)
            read = lambda: _folded(self.log, batch_id)  # noqa: E731
            state = self.fetch(stream, read)
            version = 0 if state is None else state.version
            if self.versions.setdefault(stream, version) != version:  # it went on while it was read
                raise NotRead(stream, read)
        return state

    # --- the turn ---------------------------------------------------------------------------------------------------
    def then(self, call: Callable[[], None]) -> None:
        """Have this done when everything that was recorded so far is durable."""
        self.turn.then.append(call)

    def close_turn(self) -> UnitOfWork:
        turn, self.turn = self.turn, UnitOfWork()
        return turn

    def record(self, *events: ev.Event) -> None:
        """Record events of this turn, each in its own stream, and fold them. For those of a batch: `record_batch`.

        Raises InvalidEvent for what the log can't hold, before anything is folded: in the writer it would fail the
        turns of others too.
        """
        by_stream: dict[str, list[ev.Event]] = {}
        for event in events:
            by_stream.setdefault(event.own_stream(), []).append(event)
        for write in [self._checked(stream, of_stream) for stream, of_stream in by_stream.items()]:
            for event in self._take(write):
                evolve_loaded(self.loaded_adapters, event, self.adapters)
                if isinstance(event, ev.WeightsPublished):
                    self.weights = evolve_weights(self.weights, event)
                elif isinstance(event, ev.AdapterPublished | ev.AdapterRemoved):
                    evolve_adapters(self.adapters, event)
                elif isinstance(event, ev.ServerAdded | ev.ServerRemoved):
                    evolve_servers(self.servers, event)
                elif isinstance(event, HostEvent):
                    evolve_hosts(self.hosts, event)
                elif event.stream == ev.LeaseTaken.stream:
                    evolve_leases(self.leases, event)
                elif isinstance(event, ev.PaceMeasured):
                    self.attempt_times = event
                elif event.stream == ev.RunnerStarted.stream:
                    evolve_lives(self.lives, event, self.weights)
                    self.in_flight.changed[cast(RunnerEvent, event).runner] = None

    def _checked(self, stream: str, events: Sequence[ev.Event]) -> Write:
        known = self.versions.get(stream, 0)  # of all but ended batches' it is known, and those were found first
        return checked_write(stream, known, events)

    def _take(self, write: Write) -> list[ev.Event]:
        """Put it into the turn; returns the events as every reader of the log will get them."""
        self.turn.writes.append(write)
        events = [read_back for _, read_back in write.checked or ()]
        for version, event in enumerate(events, write.expected_version + 1):
            evolve_queue(self.queue, write.stream, version, event)
        self.versions[write.stream] = write.expected_version + len(events)
        return events

    def record_batch(self, batch_id: BatchId, events: Sequence[ev.Event]) -> None:
        """Record and fold events of one batch. Raises InvalidEvent as `record` does."""
        if not events:
            return
        stream = batch_stream(batch_id)
        state = self.batches.get(batch_id)
        if state is None and isinstance(events[0], ev.BatchTrained):
            state = self.find(batch_id)  # first: it may have to be read, and nothing may be changed before that
        for event in self._take(self._checked(stream, events)):
            state = evolve(state, event)
            self.in_flight.evolve(state, event)
        self.turn.batches[batch_id] = None
        if type(batch_id) is int:
            self._greatest_id = max(self._greatest_id, batch_id)
        assert state is not None
        state.version = self.versions[stream]
        if state.state.ended:
            self.batches.pop(batch_id, None)
            self._tasks.pop(batch_id, None)
            self.ended[batch_id] = state
            while len(self.ended) > REMEMBERED_BATCHES:
                self.ended.popitem(last=False)
        else:
            self.ended.pop(batch_id, None)
            self.batches[batch_id] = state

    # --- tasks ------------------------------------------------------------------------------------------------------
    def keep_tasks(self, batch_id: BatchId, tasks: Sequence[Parcel], *, more: bool = False) -> None:
        """Keep a new batch's tasks at hand, as they will be sent; with `more`, those that join it."""
        known = self._tasks[batch_id] if more else []
        self._tasks[batch_id] = [*known, *tasks]

    def task(self, batch: BatchState, number: int) -> Parcel:
        """Return a task of an open batch: its JSON, or the payload that holds it."""
        return self._tasks[batch.batch_id][number]


def _ask_now(read: Callable[[], Any], done: Callable[[Any], None]) -> None:
    found: Any
    try:
        found = read()
    except Exception as e:
        found = e
    done(found)

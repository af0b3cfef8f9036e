"""The coordinator's live state: everything that is open in the log, and the turn being decided.

A handler's events are folded into memory at once and collected in the turn. Actions that follow from them (`then`) wait
in the turn until the log's writer has made the events durable. When a write fails, the state is read again.
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
from trinity_es.events.store.records.log_values import Write, checked_write
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
from trinity_es.projections.tables.stream_queries import greatest_batch_id, other_streams

__all__ = ["LiveState", "Loaded"]

E = TypeVar("E", bound=ev.Event)
Ask = Callable[[Callable[[], Any], Callable[[Any], None]], None]

REMEMBERED_BATCHES = 64
"""Maximum number of ended batches kept in memory for clients that ask again; older ones are read from the log."""


@dataclass(slots=True)
class Loaded:
    """Everything that was open in the log when it was read."""

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
    """Fold everything that is open from the log; too slow for a handler."""
    with log.engine.connect() as connection:
        open_streams = open_batches(connection)
        states = runner_states(connection)
        delivered = delivered_batches(connection, queue_capacity)
        leases = read_open(connection)
    queue = load_queue(log, delivered, queue_capacity)
    versions = other_streams(log)
    batches: dict[BatchId, BatchState] = {}
    tasks: dict[BatchId, list[Parcel]] = {}
    for stream, batch_id in open_streams:
        submissions: list[ev.BatchSubmitted | ev.TasksAdded] = []
        state = _batch_state(log, batch_id, submissions)
        if state is not None and not state.state.ended:
            batches[batch_id], versions[stream] = state, state.version
            tasks[batch_id] = _parcels(submissions, payloads)
    times, published = _newest(log, ev.PaceMeasured), _newest(log, ev.WeightsPublished)
    served = _serving_runners(log, states)
    lives: Lives = {}
    for name, (incarnation, state_name) in states.items():
        lives[name, incarnation] = RunnerLife(
            name=name, incarnation=incarnation, state=RunnerState(state_name), served=name in served
        )
    adapters = _adapters(log, versions)
    return Loaded(
        batches=batches, greatest_id=greatest_batch_id(log), versions=versions, tasks=tasks, lives=lives, queue=queue,
        attempt_times=times,
        weights=Weights() if published is None else evolve_weights(Weights(), published),
        adapters=adapters, loaded_adapters=_loaded_adapters(log, adapters), servers=_servers(log), hosts=_hosts(log),
        leases=leases,
    )


def _adapters(log: EventLog, streams: Iterable[str]) -> Adapters:
    adapters: Adapters = {}
    for stream in [s for s in streams if s.startswith(ev.AdapterPublished.stream_of(""))]:
        events = [e for e in (log.last(stream, "AdapterPublished"), log.last(stream, "AdapterRemoved")) if e]
        for recorded in sorted(events, key=lambda e: e.position):
            evolve_adapters(adapters, cast(ev.AdapterPublished, recorded.event))
    return adapters


def _loaded_adapters(log: EventLog, adapters: Adapters) -> set[str]:
    """Return the current adapters that some engine loaded, by the rule of `evolve_loaded`."""
    names = set[str]()
    for name, event in current_adapters(adapters).items():
        removed = log.last(event.own_stream(), "AdapterRemoved")
        [first] = log.read(stream=event.own_stream(), after=0 if removed is None else removed.position, limit=1)
        for recorded in log.rare(["AdapterLoaded", "RunnerReady"], after=first.position):
            loaded = set[str]()
            evolve_loaded(loaded, recorded.event, adapters)
            if name in loaded:
                names.add(name)
                break
    return names


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


def _batch_state(
    log: EventLog, batch_id: BatchId, submissions: list[ev.BatchSubmitted | ev.TasksAdded] | None = None
) -> BatchState | None:
    """Return a batch's state, and put the events that hold its tasks into `submissions`."""

    def events() -> Iterator[ev.Event]:
        for recorded in log.read(stream=batch_stream(batch_id)):
            if submissions is not None and isinstance(recorded.event, ev.BatchSubmitted | ev.TasksAdded):
                if isinstance(recorded.event, ev.BatchSubmitted):
                    submissions.clear()
                submissions.append(recorded.event)
            yield recorded.event

    return fold(events())


def _parcels(submissions: Sequence[ev.BatchSubmitted | ev.TasksAdded], payloads: PayloadStore) -> list[Parcel]:
    lists = [e.tasks if e.tasks is not None else orjson.loads(payloads.get(e.tasks_digest or "")) for e in submissions]
    return [pack(task, payloads) for tasks in lists for task in tasks]


def _serving_runners(log: EventLog, states: Mapping[str, tuple[int, str]]) -> set[str]:
    """Return the runners whose newest life has served, as `evolve_lives` does but without reading long streams."""
    names, unknown = set[str](), dict[str, int]()
    for name, (incarnation, _) in states.items():
        loaded = log.last(ev.WeightsLoaded.stream_of(name), "WeightsLoaded")
        if loaded is not None and cast(ev.WeightsLoaded, loaded.event).incarnation == incarnation:
            names.add(name)
        else:
            unknown[name] = incarnation
    for recorded in log.rare(["RunnerReady"], descending=True):  # a life may have several: each takeover records one
        ready = cast(ev.RunnerReady, recorded.event)
        if not unknown:
            break
        if unknown.get(ready.runner) != ready.incarnation:
            unknown.pop(ready.runner, None)  # all events of its newest life have been seen
            continue
        published = next(log.rare(["WeightsPublished"], before=recorded.position, descending=True, limit=1), None)
        if published is None or cast(ev.WeightsPublished, published.event).version == ready.model_version:
            names.add(ready.runner)
            del unknown[ready.runner]
    return names


class LiveState:
    """Batches, stream versions, weights and the queue of experiences, as of the end of the current turn."""

    def __init__(
        self, log: EventLog, payloads: PayloadStore, *, queue_capacity: int = 100_000, ask: Ask | None = None
    ) -> None:
        """Read the log in the calling thread."""
        self.log, self.payloads = log, payloads
        self._queue_capacity = queue_capacity
        self.turn = UnitOfWork()
        self.fetch: Callable[[Hashable, Callable[[], Any]], Any] = read_now
        """Return the result of a read under a key. While a request is handled it may raise NotRead."""
        self.ask: Ask = ask or _ask_now
        """Have a thread read, or write a payload, and pass the result to a callback."""
        self.load()

    def load(self) -> None:
        """Read everything that is open from the log, and drop the state and the turn in memory."""
        self.adopt(self.read_log())

    def read_log(self) -> Loaded:
        """Return the log's state for `adopt`; for any thread, and as slow as the database."""
        return load_state(self.log, self.payloads, self._queue_capacity)

    def adopt(self, loaded: Loaded) -> None:
        """Replace the state in memory, and drop the turn."""
        self.turn = UnitOfWork()
        self.batches, self.versions, self._tasks = loaded.batches, loaded.versions, loaded.tasks
        self._greatest_id = loaded.greatest_id
        self.in_flight = UnitsInFlight(self.batches.values())
        self.ended: OrderedDict[BatchId, BatchState] = OrderedDict()
        self.weights, self.adapters = loaded.weights, loaded.adapters
        self.loaded_adapters = loaded.loaded_adapters
        """Adapters that some engine loaded; the others are not required of any engine."""
        self.hosts = loaded.hosts
        self.lives, self.servers, self.leases = loaded.lives, loaded.servers, loaded.leases
        """`lives` has each runner's newest life as of the reading, and all lives recorded since."""
        self.queue, self.attempt_times = loaded.queue, loaded.attempt_times

    def find(self, batch_id: BatchId) -> BatchState | None:
        """Return a batch, open or ended; None if no batch has this id."""
        state = self.batches.get(batch_id) or self.ended.get(batch_id)
        if state is None:
            if type(batch_id) is int and batch_id > self._greatest_id:
                return None  # steps count up, and this coordinator is the only writer of batches
            stream = batch_stream(batch_id)
            read = lambda: _batch_state(self.log, batch_id)  # noqa: E731
            state = self.fetch(stream, read)
            version = 0 if state is None else state.version
            if self.versions.setdefault(stream, version) != version:  # it changed during the read
                raise NotRead(stream, read)
        return state

    # --- the turn ---------------------------------------------------------------------------------------------------
    def then(self, call: Callable[[], None]) -> None:
        """Call this once everything recorded so far is durable."""
        self.turn.then.append(call)

    def close_turn(self) -> UnitOfWork:
        turn, self.turn = self.turn, UnitOfWork()
        return turn

    def record(self, *events: ev.Event) -> None:
        """Record events of this turn, each in its own stream, and fold them; batches have `record_batch`.

        Raises InvalidEvent for content that the log can't hold, before it folds, since the writer would fail other
        turns with it.
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
        expected = self.versions.get(stream, 0)  # only ended batches lack a version, and `find` sets theirs
        return checked_write(stream, expected, events)

    def _take(self, write: Write) -> list[ev.Event]:
        """Put a write into the turn; return its events as every reader of the log will get them."""
        self.turn.writes.append(write)
        events = [read_back for _, read_back in write.checked or ()]
        for version, event in enumerate(events, write.expected_version + 1):
            evolve_queue(self.queue, write.stream, version, event)
        self.versions[write.stream] = write.expected_version + len(events)
        return events

    def record_batch(self, batch_id: BatchId, events: Sequence[ev.Event]) -> None:
        """Record and fold events of one batch. Raises InvalidEvent for content that the log can't hold."""
        if not events:
            return
        stream = batch_stream(batch_id)
        state = self.batches.get(batch_id)
        if state is None and isinstance(events[0], ev.BatchTrained):
            state = self.find(batch_id)  # before any change, since it may raise NotRead
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
        """Keep the tasks of a new batch, or with `more` those added to it, in the form in which they are sent."""
        earlier = self._tasks[batch_id] if more else []
        self._tasks[batch_id] = [*earlier, *tasks]

    def task(self, batch: BatchState, number: int) -> Parcel:
        """Return a task of an open batch: its JSON, or the payload that holds it."""
        return self._tasks[batch.batch_id][number]


def _ask_now(read: Callable[[], Any], done: Callable[[Any], None]) -> None:
    result: Any
    try:
        result = read()
    except Exception as e:
        result = e
    done(result)

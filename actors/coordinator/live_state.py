"""The coordinator's live state: everything that is open in the log, and the turn being decided.

A handler's events are folded into memory at once and collected in the turn. Actions that follow from them
(`when_durable`) wait in the turn until the log's writer has written the events. When a write fails, the state is read
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import orjson

from trinity_es.actors.coordinator.log_reader import NotRead, read_now
from trinity_es.actors.coordinator.log_writer import UnitOfWork
from trinity_es.actors.coordinator.units_in_flight import UnitsInFlight
from trinity_es.actors.requests import Parcel, pack
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogError
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
S = TypeVar("S")
RunInThread = Callable[[Callable[[], Any], Callable[[Any], None]], None]

REMEMBERED_BATCHES = 64
"""Maximum number of ended batches kept in memory for clients that ask again; older ones are read from the log."""


@dataclass(slots=True)
class Loaded:
    """Batches, runners and leases that were open in the log when a coordinator read it at its start."""

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
    """Read the log, and fold everything that is open in it. Too slow for a handler."""
    with log.engine.connect() as connection:
        open_streams = open_batches(connection)
        states = runner_states(connection)
        deliveries = delivered_batches(connection, queue_capacity)
        leases = read_open(connection)
    queue = load_queue(log, deliveries, queue_capacity)
    versions = other_streams(log)
    batches: dict[BatchId, BatchState] = {}
    tasks: dict[BatchId, list[Parcel]] = {}
    for stream, batch_id in open_streams:
        submissions: list[ev.BatchSubmitted | ev.TasksAdded] = []
        state = _read_batch(log, batch_id, submissions)
        if state is not None and not state.state.ended:
            batches[batch_id], versions[stream] = state, state.version
            tasks[batch_id] = _packed_tasks(submissions, payloads)
    attempt_times, publication = _last_event(log, ev.PaceMeasured), _last_event(log, ev.WeightsPublished)
    serving_runners = _read_serving_runners(log, states)
    lives: Lives = {
        (name, n): RunnerLife(name=name, incarnation=n, state=RunnerState(state), was_current=name in serving_runners)
        for name, (n, state) in states.items()
    }
    adapters = _read_adapters(log, versions)
    return Loaded(
        batches=batches, greatest_id=greatest_batch_id(log), versions=versions, tasks=tasks, lives=lives, queue=queue,
        attempt_times=attempt_times,
        weights=Weights() if publication is None else evolve_weights(Weights(), publication),
        adapters=adapters, loaded_adapters=_read_loaded_adapters(log, adapters),
        servers=_fold_stream(log, ev.ServerAdded.stream, Servers(), evolve_servers),
        hosts=_fold_stream(log, ev.HostJoined.stream, Hosts(), evolve_hosts), leases=leases,
    )


def _read_adapters(log: EventLog, streams: Iterable[str]) -> Adapters:
    """Return the state of each adapter whose stream is in `streams`, folded from its last events."""
    adapters: Adapters = {}
    for stream in [s for s in streams if s.startswith(ev.AdapterPublished.stream_of(""))]:
        last_events = [e for e in (log.last(stream, "AdapterPublished"), log.last(stream, "AdapterRemoved")) if e]
        for recorded in sorted(last_events, key=lambda e: e.position):
            evolve_adapters(adapters, cast(ev.AdapterPublished, recorded.event))
    return adapters


def _read_loaded_adapters(log: EventLog, adapters: Adapters) -> set[str]:
    """Return the names of the current adapters that at least one engine has loaded, as `evolve_loaded` counts them: if
    an adapter was removed and published again, only loads after the new publication count."""
    names = set[str]()
    for name, event in current_adapters(adapters).items():
        removal = log.last(event.own_stream(), "AdapterRemoved")
        removed_at = 0 if removal is None else removal.position
        [publication] = log.read(stream=event.own_stream(), after=removed_at, limit=1)
        for recorded in log.read_rare(["AdapterLoaded", "RunnerReady"], after=publication.position):
            loaded = set[str]()
            evolve_loaded(loaded, recorded.event, adapters)
            if name in loaded:
                names.add(name)
                break
    return names


def _fold_stream(log: EventLog, stream: str, state: S, evolve_state: Callable[[S, Any], None]) -> S:
    for recorded in log.read(stream=stream):
        evolve_state(state, recorded.event)
    return state


def _last_event(log: EventLog, event_type: type[E]) -> E | None:
    """Return the last event of a type that has a stream of its own; None if there is none."""
    last = log.last(event_type.stream, event_type.__name__)
    return None if last is None else cast(E, last.event)


def _read_batch(
    log: EventLog, batch_id: BatchId, submissions: list[ev.BatchSubmitted | ev.TasksAdded] | None = None
) -> BatchState | None:
    """Return a batch's state, and put the events that hold its tasks into `submissions`; None without events."""

    def events() -> Iterator[ev.Event]:
        for recorded in log.read(stream=batch_stream(batch_id)):
            if submissions is not None and isinstance(recorded.event, ev.BatchSubmitted | ev.TasksAdded):
                if isinstance(recorded.event, ev.BatchSubmitted):  # the id is used again
                    submissions.clear()
                submissions.append(recorded.event)
            yield recorded.event

    return fold(events())


def _packed_tasks(submissions: Sequence[ev.BatchSubmitted | ev.TasksAdded], payloads: PayloadStore) -> list[Parcel]:
    parcels: list[Parcel] = []
    for event in submissions:
        tasks = event.tasks if event.tasks is not None else orjson.loads(payloads.get(event.tasks_digest or ""))
        parcels += [pack(task, payloads) for task in tasks]
    return parcels


def _read_serving_runners(log: EventLog, states: Mapping[str, tuple[int, str]]) -> set[str]:
    """Return the runners whose newest life `was_current`, by the rule of `evolve_lives`. Reads no long streams."""
    # A newest life that loaded no weights `was_current` if it was ready with the weights that were current then.
    serving_names, unclear = set[str](), dict[str, int]()
    for name, (incarnation, _) in states.items():
        loaded = log.last(ev.WeightsLoaded.stream_of(name), "WeightsLoaded")
        if loaded is not None and cast(ev.WeightsLoaded, loaded.event).incarnation == incarnation:
            serving_names.add(name)
        else:
            unclear[name] = incarnation
    # A life may have several RunnerReady, since each new coordinator records one.
    for recorded in log.read_rare(["RunnerReady"], descending=True):
        ready = cast(ev.RunnerReady, recorded.event)
        if not unclear:
            break
        if unclear.get(ready.runner) != ready.incarnation:
            unclear.pop(ready.runner, None)  # all events of its newest life have been seen
            continue
        publications = log.read_rare(["WeightsPublished"], before=recorded.position, descending=True, limit=1)
        publication = next(publications, None)
        if publication is None or cast(ev.WeightsPublished, publication.event).version == ready.model_version:
            serving_names.add(ready.runner)
            del unclear[ready.runner]
    return serving_names


class LiveState:
    """State in memory (batches, stream versions, weights, queue of experiences), and the events of the current turn."""

    def __init__(
        self, log: EventLog, payloads: PayloadStore, *, queue_capacity: int = 100_000,
        run_in_thread: RunInThread | None = None,
    ) -> None:
        """Read the log in the calling thread. Without `run_in_thread`, all reads block."""
        self.log, self.payloads = log, payloads
        self._queue_capacity = queue_capacity
        self.turn = UnitOfWork()
        self.fetch: Callable[[Hashable, Callable[[], Any]], Any] = read_now
        """Called with a key and a function that reads; returns the result. For a request it may raise NotRead."""
        self.run_in_thread: RunInThread = run_in_thread or _run_now
        """Calls a function in a thread, and passes its result or exception to a callback."""
        self.load()

    def load(self) -> None:
        """Read all that is open from the log, and put it in place of the state in memory. Drop the unwritten events."""
        self.replace_state(self.read_log())

    def read_log(self) -> Loaded:
        """Return the log's state for `replace_state`; for any thread, and as slow as the database."""
        return load_state(self.log, self.payloads, self._queue_capacity)

    def replace_state(self, loaded: Loaded) -> None:
        self.turn = UnitOfWork()
        self.batches, self.versions, self._tasks = loaded.batches, loaded.versions, loaded.tasks
        self._greatest_id = loaded.greatest_id
        self.in_flight = UnitsInFlight(self.batches.values())
        self.ended_batches: OrderedDict[BatchId, BatchState] = OrderedDict()
        self.weights, self.adapters = loaded.weights, loaded.adapters
        self.loaded_adapters = loaded.loaded_adapters
        """Adapters that some engine loaded; the others are not required of any engine."""
        self.hosts = loaded.hosts
        self.lives, self.servers, self.leases = loaded.lives, loaded.servers, loaded.leases
        """`lives` has each runner's newest life as of the reading, and all lives recorded since."""
        self.queue, self.attempt_times = loaded.queue, loaded.attempt_times

    def find_batch(self, batch_id: BatchId) -> BatchState | None:
        """Return a batch, open or ended; None if no batch has this id. An old batch is read from the log, which raises
        NotRead while a request is handled."""
        state = self.batches.get(batch_id) or self.ended_batches.get(batch_id)
        if state is None:
            if type(batch_id) is int and batch_id > self._greatest_id:
                return None  # steps count up, and this coordinator is the only writer of batches
            stream = batch_stream(batch_id)
            read = lambda: _read_batch(self.log, batch_id)  # noqa: E731
            state = self.fetch(stream, read)
            version = 0 if state is None else state.version
            if self.versions.setdefault(stream, version) != version:  # it changed during the read
                raise NotRead(stream, read)
        return state

    # --- the turn ---------------------------------------------------------------------------------------------------
    def when_durable(self, call: Callable[[], None]) -> None:
        """Call `call` once all events recorded so far are durable. It is never called if they can't be written."""
        self.turn.durable_calls.append(call)

    def record_from_thread(
        self, event: ev.Event, post: Callable[[Callable[[], None]], None], *, unless_open: Iterable[BatchId] = (),
    ) -> bool:
        """Record an event in the actor's loop, to which `post` passes a call, and wait in this thread until it is
        durable. Return False, and record nothing, if one of the batches `unless_open` is open. Raises LogError."""
        is_recorded: Future[bool] = Future()

        def record() -> None:
            if any(batch_id in self.batches for batch_id in unless_open):
                is_recorded.set_result(False)
                return
            try:
                self.record(event)
            except LogError as e:
                is_recorded.set_exception(e)
                return
            self.when_durable(lambda: is_recorded.set_result(True))
            self.turn.failure_calls.append(is_recorded.set_exception)

        post(record)
        return is_recorded.result()

    def close_turn(self) -> UnitOfWork:
        """Return the current turn, and begin the next one."""
        turn, self.turn = self.turn, UnitOfWork()
        return turn

    def record(self, *events: ev.Event) -> None:
        """Add events to the turn, each in its own stream, and fold them. Events of a batch go to `record_batch`.

        Raises InvalidEvent, before anything changes, for content that the log can't hold. The writer would fail other
        turns with it.
        """
        events_by_stream: dict[str, list[ev.Event]] = {}
        for event in events:
            events_by_stream.setdefault(event.own_stream(), []).append(event)
        writes = [self._checked_write(stream, stream_events) for stream, stream_events in events_by_stream.items()]
        for write in writes:
            for event in self._put_into_turn(write):
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
                    self.in_flight.changed_runners[cast(RunnerEvent, event).runner] = None

    def _checked_write(self, stream: str, events: Sequence[ev.Event]) -> Write:
        """Return a write that appends these events to their stream. Raises InvalidEvent."""
        expected_version = self.versions.get(stream, 0)  # only ended batches lack a version, which `find_batch` sets
        return checked_write(stream, expected_version, events)

    def _put_into_turn(self, write: Write) -> list[ev.Event]:
        """Put a write into the turn, and return its events as readers of the log will get them."""
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
            state = self.find_batch(batch_id)  # before any change, since it may raise NotRead
        for event in self._put_into_turn(self._checked_write(stream, events)):
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
            self.ended_batches[batch_id] = state
            while len(self.ended_batches) > REMEMBERED_BATCHES:
                self.ended_batches.popitem(last=False)
        else:
            self.ended_batches.pop(batch_id, None)
            self.batches[batch_id] = state

    # --- tasks ------------------------------------------------------------------------------------------------------
    def keep_tasks(self, batch_id: BatchId, tasks: Sequence[Parcel], *, are_added: bool = False) -> None:
        """Keep the tasks of a new batch, or tasks added to an open one, packed as runners get them."""
        earlier_tasks = self._tasks[batch_id] if are_added else []
        self._tasks[batch_id] = [*earlier_tasks, *tasks]

    def task(self, batch: BatchState, number: int) -> Parcel:
        """Return a task of an open batch: its JSON, or the payload that holds it."""
        return self._tasks[batch.batch_id][number]


def _run_now(read: Callable[[], Any], done: Callable[[Any], None]) -> None:
    """Read in the calling thread, for tests, and pass on the result or the exception."""
    result: Any
    try:
        result = read()
    except Exception as e:
        result = e
    done(result)

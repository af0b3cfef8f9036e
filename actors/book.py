"""The coordinator's book: what the log says is open, and the turn that is being decided.

Events are folded into memory at once and gathered in the turn; what is to happen because of them waits in the turn too
(`then`), until the log's writer has made them durable. When a write fails the book is read anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import orjson

from actors.writer import Turn
from events import vocabulary as ev
from events.errors import LogCorrupt
from events.log import EventLog, Write
from events.payloads import PayloadStore
from events.values import BatchId, batch_stream
from projections.batch import BatchState, evolve, fold
from projections.queue import STREAM as QUEUE
from projections.queue import evolve_queue, load_queue
from projections.readmodels import delivered_batches, open_batches, runner_states
from projections.retained import EXPERIENCES

__all__ = ["Book"]

REMEMBERED_BATCHES = 64
"""Ended batches that are kept in memory for a client that asks again; older ones are read from the log."""


class Book:
    """Batches, stream versions, weights and the queue of experiences, as of the end of the current turn."""

    def __init__(self, log: EventLog, payloads: PayloadStore, *, queue_capacity: int = 100_000) -> None:
        self.log, self.payloads = log, payloads
        self._queue_capacity = queue_capacity
        self.turn = Turn()
        self.load()

    def load(self) -> None:
        """Fold everything that is open from the log; what was in memory, the turn too, is forgotten."""
        self.turn = Turn()
        self.batches: dict[BatchId, BatchState] = {}
        self.ended: OrderedDict[BatchId, BatchState] = OrderedDict()
        self.versions: dict[str, int] = {}
        self._tasks: dict[BatchId, list[bytes]] = {}
        with self.log.engine.connect() as connection:
            found = open_batches(connection)
            self.runner_states = runner_states(connection)
            """Incarnation and state of every runner, as the log said when it was read."""
            delivered = delivered_batches(connection, self._queue_capacity)
        self.queue = load_queue(self.log, delivered, self._queue_capacity)
        for stream in (QUEUE, "pace", EXPERIENCES, "answers", "weights"):
            self.versions[stream] = self.log.stream_version(stream)  # read now: no handler waits for the log later
        for stream, batch_id in found:
            state = self._read(batch_id)
            if state is not None and not state.state.ended:
                self.batches[batch_id] = state
                self.versions[stream] = state.version
        self.pace: ev.PaceMeasured | None = None
        for recorded in self.log.read(stream="pace"):
            if isinstance(recorded.event, ev.PaceMeasured):
                self.pace = recorded.event
        self.weights = (0, "")
        self.weights_method = ""
        """How the current weights were published."""
        for recorded in self.log.read(stream="weights"):
            if isinstance(recorded.event, ev.WeightsPublished):
                self.weights = (recorded.event.version, recorded.event.path)
                self.weights_method = recorded.event.method

    def _read(self, batch_id: BatchId) -> BatchState | None:
        return fold(r.event for r in self.log.read(stream=batch_stream(batch_id)))

    def find(self, batch_id: BatchId) -> BatchState | None:
        """A batch, open or ended; None when the log has none of this id."""
        state = self.batches.get(batch_id) or self.ended.get(batch_id) or self._read(batch_id)
        if state is None:
            self.versions.setdefault(batch_stream(batch_id), 0)  # nobody else writes it: no need to look again
        return state

    def has_served(self, runner: str, incarnation: int) -> bool:
        """Whether this life of a runner has had weights that were the current ones, by the log."""
        published = [r.position for r in self.log.read(stream="weights", types=["WeightsPublished"])]
        return any(
            isinstance(r.event, ev.WeightsLoaded) or not published or r.position < published[0]
            for r in self.log.read(stream=f"runner/{runner}", types=["RunnerReady", "WeightsLoaded"])
            if getattr(r.event, "incarnation", None) == incarnation
        )

    # --- the turn ---------------------------------------------------------------------------------------------------
    def then(self, call: Callable[[], None]) -> None:
        """Have this done when everything that was recorded so far is durable."""
        self.turn.then.append(call)

    def close_turn(self) -> Turn:
        turn, self.turn = self.turn, Turn()
        return turn

    def record(self, stream: str, events: Sequence[ev.Event]) -> None:
        """Record events of this turn. For a batch's stream use `record_batch`, which folds them too."""
        if not events:
            return
        if stream not in self.versions:
            self.versions[stream] = self.log.stream_version(stream)
        self.turn.writes.append(Write(stream=stream, expected_version=self.versions[stream], events=list(events)))
        for version, event in enumerate(events, self.versions[stream] + 1):
            evolve_queue(self.queue, stream, version, event)
        self.versions[stream] += len(events)

    def record_batch(self, batch_id: BatchId, events: Sequence[ev.Event]) -> None:
        """Record and fold events of one batch."""
        if not events:
            return
        stream = batch_stream(batch_id)
        self.record(stream, events)
        state = self.batches.get(batch_id)
        for event in events:
            if isinstance(event, ev.BatchTrained) and state is None:
                state = self.find(batch_id)
            state = evolve(state, event)
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
    def keep_tasks(self, batch_id: BatchId, tasks: Sequence[dict[str, object]], *, more: bool = False) -> None:
        """Keep a new batch's tasks at hand, encoded as they will be sent; with `more`, those that join it."""
        known = self._known_tasks(batch_id) if more else []
        self._tasks[batch_id] = known + [orjson.dumps(task) for task in tasks]

    def task(self, batch: BatchState, number: int) -> bytes:
        """A task of an open batch as JSON."""
        return self._known_tasks(batch.batch_id)[number]

    def _known_tasks(self, batch_id: BatchId) -> list[bytes]:
        """The tasks of an open batch; read from the log where another coordinator took them."""
        if batch_id not in self._tasks:
            given: list[ev.BatchSubmitted | ev.TasksAdded] = []
            for recorded in self.log.read(stream=batch_stream(batch_id), types=["BatchSubmitted", "TasksAdded"]):
                event = recorded.event
                assert isinstance(event, ev.BatchSubmitted | ev.TasksAdded)
                given = [event] if isinstance(event, ev.BatchSubmitted) else [*given, event]
            if not given:
                raise LogCorrupt(f"batch {batch_id!r} has no BatchSubmitted")
            lists = [e.tasks if e.tasks is not None else self._stored(e.tasks_digest) for e in given]
            self._tasks[batch_id] = [orjson.dumps(task) for tasks in lists for task in tasks]
        return self._tasks[batch_id]

    def _stored(self, digest: str | None) -> list[dict[str, object]]:
        return list(orjson.loads(self.payloads.get(digest or "")))

"""Fold of the experience queue: the experiences that train batches delivered, and how often each was taken.

The fold uses BatchFinalized, ExperiencesTaken and the events that undo them. It needs about 16 bytes per experience.
The queue holds the newest deliveries, up to `capacity` experiences. Older deliveries leave the queue, but stay in the
log and the payload store. A delivery also leaves when its payloads are freed or the batch is submitted again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.freed_payloads import freed_positions

if TYPE_CHECKING:  # numpy is imported in the functions that use it, so that other commands start without it
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "STREAM", "Delivery", "QueueState", "add_older", "evolve_queue", "find_older", "load_queue", "slice_refs",
]

STREAM = "queue"
REMEMBERED_REQUESTS = 4096
"""Number of requests whose results are kept, for clients that repeat a request because they lost the answer."""


@dataclass(slots=True, kw_only=True)
class Delivery:
    """Experiences that one finalized train batch delivered. Arrays have an entry per experience, in delivery order."""

    batch_id: BatchId
    version: int
    """Version of the batch's stream at its BatchFinalized."""
    refs: list[ev.PayloadRef]
    model_versions: npt.NDArray[np.int64]
    use_counts: npt.NDArray[np.int32]
    taken_at: npt.NDArray[np.float64]
    """Unix seconds of the last take; -inf if never taken."""
    takes: list[tuple[ev.TakenItem, float, int | None]] = field(default_factory=list)
    """(item, unix seconds, training step) of each take."""

    def take(self, item: ev.TakenItem, at: float, step: int | None) -> None:
        span = slice(item.first, item.first + item.count)
        self.use_counts[span] += 1
        self.taken_at[span] = at
        self.takes.append((item, at, step))

    def give_back(self, step: int) -> None:
        """Undo the takes for training steps after `step`."""
        takes, self.takes = self.takes, []
        self.use_counts[:], self.taken_at[:] = 0, -math.inf
        for item, at, step_of_take in takes:
            if step_of_take is None or step_of_take <= step:
                self.take(item, at, step_of_take)


@dataclass(slots=True, kw_only=True)
class QueueState:
    """Experiences in the queue, taken or not."""

    capacity: int
    deliveries: OrderedDict[tuple[str, int], Delivery] = field(default_factory=OrderedDict)
    """(batch stream, version of its BatchFinalized) -> delivery, in order of finalizing."""
    requests: OrderedDict[str, list[ev.TakenItem]] = field(default_factory=OrderedDict)
    """Id of a client's request -> experiences that it got."""
    unread: dict[str, int] = field(default_factory=dict)
    """Batch stream -> first position, newest first, of batches whose deliveries are not loaded yet."""
    size: int = 0
    """Number of experiences in `deliveries`."""
    unused: int = 0
    """Number of experiences that left because of the capacity and were never taken."""


def evolve_queue(state: QueueState, stream: str, version: int, event: ev.Event) -> QueueState:
    """Apply one event of any stream to the state, in place, and return the state."""
    match event:
        case ev.BatchFinalized() if event.result.get("batch_type") == "train" and event.selected:
            _add_delivery(state, stream, version, event)
            _drop_beyond_capacity(state)
        case ev.BatchSubmitted():
            _remove_deliveries(state, stream)
        case ev.PayloadsFreed():
            for batch_id in event.batches:
                _remove_deliveries(state, batch_stream(batch_id))
        case ev.ExperiencesTaken():
            for item in event.items:
                delivery = state.deliveries.get((batch_stream(item.batch_id), item.version))
                if delivery is not None:
                    delivery.take(item, event.at, event.step)
            state.requests[event.request] = event.items
            while len(state.requests) > REMEMBERED_REQUESTS:
                state.requests.popitem(last=False)
        case ev.ExperiencesReturned():
            for delivery in state.deliveries.values():
                if any(step is not None and step > event.step for _, _, step in delivery.takes):
                    delivery.give_back(event.step)
    return state


def _add_delivery(state: QueueState, stream: str, version: int, event: ev.BatchFinalized) -> None:
    import numpy as np

    count = event.selected
    versions = np.zeros(count, np.int64)  # 0 for experiences whose version the event does not have
    known_versions = [weights_version for repeats, weights_version in event.model_versions for _ in range(repeats)]
    versions[: len(known_versions)] = known_versions[:count]  # a slice beyond the end is as long as the array
    state.deliveries[stream, version] = Delivery(
        batch_id=event.result["batch_id"], version=version, refs=list(event.experiences), model_versions=versions,
        use_counts=np.zeros(count, np.int32), taken_at=np.full(count, -np.inf),
    )
    state.size += count


def _drop_beyond_capacity(state: QueueState) -> None:
    """Remove the oldest deliveries beyond the capacity, except for the newest one. Count their unused experiences."""
    while state.size > state.capacity and len(state.deliveries) > 1:
        _, oldest = state.deliveries.popitem(last=False)
        state.size -= len(oldest.use_counts)
        state.unused += int((oldest.use_counts == 0).sum())


def _remove_deliveries(state: QueueState, stream: str) -> None:
    state.unread.pop(stream, None)
    for key in [k for k in state.deliveries if k[0] == stream]:
        state.size -= len(state.deliveries.pop(key).use_counts)


def load_queue(log: EventLog, delivered: Iterable[tuple[str, int]], capacity: int) -> QueueState:
    """Return the queue of a log. `delivered`: (stream, first position) of finalized train batches, newest first.

    If no experience was ever taken, the deliveries stay `unread`; the caller loads them before the first take.
    """
    state = QueueState(capacity=capacity, unread=dict(delivered))
    recorded = list(log.read(stream=STREAM))
    if recorded:
        add_older(state, find_older(log, dict(state.unread), capacity))
    for item in recorded:
        evolve_queue(state, item.stream, item.version, item.event)
    return state


def find_older(log: EventLog, unread: dict[str, int], room: int) -> list[Recorded]:
    """Return the BatchFinalized events of the newest `unread` batches, until they have `room` experiences."""
    freed = freed_positions(log.read_rare(["PayloadsFreed"]))
    deliveries = []
    for stream, first in unread.items():
        if room <= 0:
            break
        if freed.get(stream, 0) < first:
            last_finalized = log.last(stream, "BatchFinalized", after=first)
            assert last_finalized is not None
            assert isinstance(last_finalized.event, ev.BatchFinalized)
            deliveries.append(last_finalized)
            room -= last_finalized.event.selected
    return deliveries


def add_older(state: QueueState, deliveries: Iterable[Recorded]) -> None:
    """Add the deliveries from `find_older` before the present ones. Skip batches resubmitted or freed meanwhile."""
    unread = state.unread
    newer_deliveries, state.deliveries, state.unread = state.deliveries, OrderedDict(), {}
    for item in sorted(deliveries, key=lambda r: r.position):
        if item.stream in unread and isinstance(item.event, ev.BatchFinalized) and item.event.selected:
            _add_delivery(state, item.stream, item.version, item.event)
    state.deliveries |= newer_deliveries
    unused = state.unused
    _drop_beyond_capacity(state)
    state.unused = unused  # deliveries that don't fit were counted before


def slice_refs(refs: Iterable[ev.PayloadRef], first: int, count: int) -> list[ev.PayloadRef]:
    """Return references to `count` experiences from index `first` on, among all experiences of `refs` in order."""
    sliced = []
    for ref in refs:
        skip_count = min(first, ref.count)
        take_count = min(ref.count - skip_count, count)
        if take_count:
            sliced.append(ev.PayloadRef(digest=ref.digest, first=ref.first + skip_count, count=take_count))
        first, count = first - skip_count, count - take_count
    return sliced

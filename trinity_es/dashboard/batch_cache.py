"""Cache of folded batches, so that a page's request reads only the events since the previous request.

So a page of a batch of ten thousand tasks that is loaded every second reads only one second's events.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice

from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState, evolve
from trinity_es.projections.history.attempts import BatchTimeline, fold_timeline
from trinity_es.projections.incremental_fold import KeptFold
from trinity_es.projections.reading.log_reader import Log

__all__ = ["BatchCache", "CachedBatch"]

MAX_EVENTS = 120_000
"""Maximum number of events of all cached batches together. The last used batch is kept however many it has."""


class CachedBatch:
    """Timeline of one batch, the positions of its events, and its state at the last requested event.

    Callers of its methods must hold `lock`.
    """

    def __init__(self, batch_id: BatchId) -> None:
        self.batch_id = batch_id
        self.lock = threading.Lock()
        self.timeline: BatchTimeline | None = None
        self.positions = array("q")
        """Positions of the events of its stream. The event of version n is at index n - 1."""
        self._fold = KeptFold(self._extend_timeline)
        self._past_state: BatchState | None = None
        self._past_version = 0
        """Stream version up to which `_past_state` is folded; 0 without a state."""
        self._past_event: Recorded | None = None

    def follow(self, log: Log) -> BatchTimeline:
        """Fold new events, and return the timeline up to the log's end. Raises BatchNotFound."""
        self.timeline = self._fold.follow(partial(log.events, self.batch_id))
        return self.timeline

    def _extend_timeline(self, recorded: Iterable[Recorded], timeline: BatchTimeline | None) -> BatchTimeline:
        def note_positions() -> Iterator[Recorded]:
            for item in recorded:
                self.positions.append(item.position)
                yield item

        if timeline is None:  # a fold from the first event, also after the log was restored from a copy
            self.positions = array("q")
            self._past_state, self._past_version = None, 0
        return fold_timeline(note_positions(), timeline)

    def version_at(self, position: int) -> int:
        """Return the stream version of the last event at or before a log position; 0 if there is none."""
        return bisect_right(self.positions, position)

    def page(self, log: Log, first: int, count: int) -> list[Recorded]:
        """Return at most `count` events, beginning with stream version `first`."""
        if count < 1 or not 1 <= first <= len(self.positions):
            return []
        events = log.events(self.batch_id, self.positions[first - 1] - 1)
        return list(islice(events, min(count, len(self.positions) - first + 1)))

    def state_at(self, log: Log, version: int) -> tuple[BatchState, Recorded]:
        """Return the batch's state after the event of this stream version, and that event.

        The next call changes the returned state. A later version folds the events in between; an earlier version folds
        from the first event.
        """
        if not 1 <= version <= len(self.positions):
            raise BatchNotFound(f"batch {self.batch_id!r} has no event {version}: it has {len(self.positions)} events")
        if version == self._past_version and self._past_state is not None and self._past_event is not None:
            return self._past_state, self._past_event
        if version < self._past_version:
            self._past_state, self._past_version = None, 0
        after = self.positions[self._past_version - 1] if self._past_version else 0
        for recorded in log.events(self.batch_id, after):
            self._past_state, self._past_version = evolve(self._past_state, recorded.event), recorded.version
            if recorded.version == version:
                self._past_event = recorded
                return self._past_state, recorded
        raise BatchNotFound(f"batch {self.batch_id!r} has no event {version}")


class BatchCache:
    """Folded batches of one log, by stream. The least recently used batch is dropped first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = ""
        self._cached: dict[str, CachedBatch] = {}

    @contextmanager
    def of(self, log: Log, batch_id: BatchId) -> Iterator[CachedBatch]:
        """Yield a batch, folded up to the log's end and locked for this thread. Raises BatchNotFound."""
        generation, stream = log.head().generation, batch_stream(batch_id)
        with self._lock:
            if generation != self._generation:  # the log was replaced
                self._cached.clear()
                self._generation = generation
            cached = self._cached.pop(stream, None) or CachedBatch(batch_id)
            self._cached[stream] = cached
            while len(self._cached) > 1 and sum(len(c.positions) for c in self._cached.values()) > MAX_EVENTS:
                del self._cached[next(iter(self._cached))]
        with cached.lock:
            try:
                cached.follow(log)
            except BaseException:
                with self._lock:
                    self._cached.pop(stream, None)
                raise
            yield cached

"""A batch's course, folded once and kept while it is looked at: the next request reads only what came since.

So a page of a batch of ten thousand tasks that is asked for every second costs what happened in that second. A few
courses are kept, by how many events they hold.
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
from trinity_es.events.store.records.recorded import Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState, evolve
from trinity_es.projections.history.attempts import BatchTimeline, tell
from trinity_es.projections.incremental_fold import KeptFold
from trinity_es.projections.reading.log_reader import Log

__all__ = ["BatchCache", "CachedBatch"]

KEPT = 120_000
"""Events of all courses that are kept, at most; one is kept however long it is."""


class CachedBatch:
    """The course of one batch. Its methods may be called by whoever holds `lock`."""

    def __init__(self, batch_id: BatchId) -> None:
        self.batch_id, self.lock = batch_id, threading.Lock()
        self.story: BatchTimeline | None = None
        self.positions = array("q")
        """Of every event of its stream: the event of version n stands at n - 1."""
        self._kept = KeptFold(self._tell)
        self._at: BatchState | None = None
        self._at_version = 0
        self._at_event: Recorded | None = None

    def follow(self, log: Log) -> BatchTimeline:
        """Return everything up to the log's end. Raises BatchNotFound."""
        self.story = self._kept.follow(partial(log.events, self.batch_id))
        return self.story

    def _tell(self, recorded: Iterable[Recorded], story: BatchTimeline | None) -> BatchTimeline:
        if story is None:  # from its begin, once more where the log was put back to a copy
            self.positions, self._at, self._at_version = array("q"), None, 0
        return tell(self._noted(recorded), story)

    def _noted(self, recorded: Iterable[Recorded]) -> Iterator[Recorded]:
        for item in recorded:
            self.positions.append(item.position)
            yield item

    def version_at(self, position: int) -> int:
        """Return the version of the last event at or before a position of the log; 0: none was."""
        return bisect_right(self.positions, position)

    def page(self, log: Log, first: int, count: int) -> list[Recorded]:
        """Return events from version `first` on, so many."""
        if count < 1 or not 1 <= first <= len(self.positions):
            return []
        events = log.events(self.batch_id, self.positions[first - 1] - 1)
        return list(islice(events, min(count, len(self.positions) - first + 1)))

    def state_at(self, log: Log, version: int) -> tuple[BatchState, Recorded]:
        """Return the state as of the event of this version, and the event. The state holds until the next call.

        A step forward folds that event alone; a step back begins anew; the same one again, as a live page asks for it,
        folds nothing.
        """
        if not 1 <= version <= len(self.positions):
            raise BatchNotFound(f"batch {self.batch_id!r} has no event {version}: it has {len(self.positions)}")
        if self._at is not None and self._at_event is not None and version == self._at_version:
            return self._at, self._at_event
        if version < self._at_version:
            self._at, self._at_version = None, 0
        after = self.positions[self._at_version - 1] if self._at_version else 0
        for recorded in log.events(self.batch_id, after):
            self._at, self._at_version = evolve(self._at, recorded.event), recorded.version
            if recorded.version == version:
                self._at_event = recorded
                return self._at, recorded
        raise BatchNotFound(f"batch {self.batch_id!r} has no event {version}")


class BatchCache:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = ""
        self._courses: dict[str, CachedBatch] = {}

    @contextmanager
    def of(self, log: Log, batch_id: BatchId) -> Iterator[CachedBatch]:
        """Give the course of a batch up to now, for this thread alone. Raises BatchNotFound."""
        generation, stream = log.head().generation, batch_stream(batch_id)
        with self._lock:
            if generation != self._generation:  # another log lies there
                self._courses.clear()
                self._generation = generation
            course = self._courses.pop(stream, None) or CachedBatch(batch_id)
            self._courses[stream] = course
            while len(self._courses) > 1 and sum(len(c.positions) for c in self._courses.values()) > KEPT:
                del self._courses[next(iter(self._courses))]
        with course.lock:
            try:
                course.follow(log)
            except BaseException:
                with self._lock:
                    self._courses.pop(stream, None)
                raise
            yield course

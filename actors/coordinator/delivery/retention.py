"""Retention (`store.retention`), which deletes the payloads of batches that were trained long enough ago.

A batch's experiences are deleted once it and `keep` later steps were acknowledged and the outputs have written them.
For an aborted batch, or a finished batch of a scheduler, `keep` steps must have been acknowledged since its end. Events
and tasks stay. Payloads are named by their content, so a payload that another kept batch refers to stays too.

A thread runs after each acknowledgement and at a start. It selects batches, has the actor's loop record PayloadsFreed,
and deletes once that is durable, so the log explains every missing payload. If the process ends in between, the next
coordinator deletes the payloads of the last event; therefore events come one at a time.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from sqlalchemy import select

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogError
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.values import BatchId, BatchLifecycleState, batch_stream
from trinity_es.projections.freed_payloads import EXPERIENCES, experience_digests, freed_positions
from trinity_es.projections.tables import read_models

__all__ = ["Retention"]

MAX_BATCHES_PER_EVENT = 256
"""Maximum number of batches that one event frees."""

_LOG = logging.getLogger("trinity_es.retention")


@dataclass(frozen=True, slots=True)
class _BatchRow:
    """Values of one batch in the table of batches."""

    batch_id: BatchId
    batch_type: str
    state: str
    trained_step: int | None
    first_position: int
    last_position: int
    """Position of the last event of the batch's stream; `first_position` is that of the first."""


class Retention:
    """Thread that deletes payloads for one coordinator. Without `keep` there is none."""

    def __init__(
        self, keep: int | None, live: LiveState, payloads: PayloadStore, post: Callable[[Callable[[], None]], None],
        written_position: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Start the thread, unless `keep` (a number of steps) is None; then all payloads stay.

        `post` runs a callable in the actor's loop, which alone may change `live`. `written_position` returns the
        position in the log up to which the outputs have written everything.
        """
        self._written_position = written_position
        self.keep, self._live, self._payloads, self._post = keep, live, payloads, post
        self._log = live.log
        self._wake_up = threading.Event()
        self._digests: dict[str, tuple[int, frozenset[str]]] = {}
        """Stream of a kept batch -> position up to which it was read, and the digests in it."""
        if keep is not None:
            threading.Thread(target=self._run, name="retention", daemon=True).start()

    def wake(self) -> None:
        """Have the thread delete the payloads that are no longer kept."""
        self._wake_up.set()

    # --- the thread -------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        last_deletion_finished = False
        while True:
            self._wake_up.wait()
            self._wake_up.clear()
            try:
                if not last_deletion_finished:
                    self._finish_last_deletion()
                    last_deletion_finished = True
                while self._delete_next_group():
                    pass
            except LogError as e:  # for instance the database is away: the next acknowledgement retries
                _LOG.warning("nothing was freed: %s", e)
            except Exception:
                _LOG.exception("nothing was freed")

    def _kept_rows(self) -> dict[str, _BatchRow]:
        """Return stream -> row for each batch whose payloads were not deleted since it was submitted."""
        c = read_models.batches.c
        query = select(c.stream, c.batch_id, c.batch_type, c.state, c.trained_step, c.first_position, c.last_position)
        with self._log.engine.connect() as connection:
            rows = {r[0]: _BatchRow(orjson.loads(r[1]), *r[2:]) for r in connection.execute(query)}
        freed_at = freed_positions(self._log.read(stream=EXPERIENCES, types=["PayloadsFreed"]))
        return {stream: row for stream, row in rows.items() if freed_at.get(stream, 0) < row.first_position}

    def _delete_next_group(self) -> bool:
        """Delete the payloads of a group of batches. Return False if there is none, or if a batch was submitted again.
        Raises LogError."""
        kept = self._kept_rows()
        streams = self._candidates(kept)
        if not streams:
            return False
        digests = self._unshared_digests(streams, kept)
        sizes = [size for d in digests if (size := self._payloads.size(d)) is not None]
        batch_ids = [kept[s].batch_id for s in streams]
        event = ev.PayloadsFreed(batches=batch_ids, payloads=len(sizes), bytes=sum(sizes))
        if not self._live.record_from_thread(event, self._post, unless_open=batch_ids):
            return False
        self._delete(digests)
        return True

    def _candidates(self, kept: dict[str, _BatchRow]) -> list[str]:
        """Return the streams of batches whose payloads can be deleted now, the oldest first."""
        assert self.keep is not None
        acknowledged: dict[int, int] = {}
        for row in kept.values():
            if row.trained_step is not None:
                acknowledged[row.trained_step] = max(row.last_position, acknowledged.get(row.trained_step, 0))
        newest_steps = sorted(acknowledged)[-self.keep :]
        if len(newest_steps) < self.keep:
            return []
        oldest_step, oldest_position = newest_steps[0], min(acknowledged[step] for step in newest_steps)

        def may_go(row: _BatchRow) -> bool:
            is_collected = row.batch_type == "collect" and row.state == BatchLifecycleState.FINALIZED.value
            if row.state == BatchLifecycleState.ABORTED.value or is_collected:
                return row.last_position < oldest_position
            return row.trained_step is not None and row.trained_step < oldest_step

        def is_written(stream: str) -> bool:
            finalized = self._log.read(stream=stream, types=["BatchFinalized"])
            return all(recorded.position <= written for recorded in finalized)

        written = self._written_position()
        streams = [s for s, row in kept.items() if may_go(row)]
        if not math.isinf(written):  # there are outputs
            streams = [s for s in streams if is_written(s)]
        return sorted(streams, key=lambda s: kept[s].first_position)[:MAX_BATCHES_PER_EVENT]

    def _unshared_digests(self, streams: list[str], kept: dict[str, _BatchRow]) -> set[str]:
        """Return the digests to which only the batches of these streams refer."""
        for stream in self._digests.keys() - kept.keys():
            del self._digests[stream]
        for stream, row in kept.items():
            position, digests = self._digests.get(stream, (0, frozenset[str]()))
            if position < row.last_position:
                new_events = self._log.read(stream=stream, after=position, until=row.last_position)
                self._digests[stream] = row.last_position, digests | experience_digests(new_events)
        used_here: set[str] = set()
        for stream in streams:
            is_kept = stream in kept
            used_here |= self._digests[stream][1] if is_kept else experience_digests(self._log.read(stream=stream))
        used_elsewhere = experience_digests(self._log.read(stream=EXPERIENCES, types=["ExperiencesProcessed"]))
        used_elsewhere.update(*(digests for s, (_, digests) in self._digests.items() if s not in streams))
        return used_here - used_elsewhere

    def _finish_last_deletion(self) -> None:
        """Delete the payloads that the last PayloadsFreed names, except those that other batches use. The coordinator
        that recorded this event may have ended before it deleted them."""
        last = self._log.last(EXPERIENCES, "PayloadsFreed")
        if last is not None and isinstance(last.event, ev.PayloadsFreed):
            kept = self._kept_rows()
            streams = [batch_stream(b) for b in last.event.batches]
            self._delete(self._unshared_digests([s for s in streams if s not in kept], kept))

    def _delete(self, digests: set[str]) -> None:
        for digest in sorted(digests):
            self._payloads.delete(digest)

"""The runner's journal: records of unfinished runs.

At each interval, one write holds the new tokens of all open calls to the engine. The end of a call or step is written
at once. A thread does the slow parts: it syncs files to disk, and writes waiting records to PostgreSQL as one group. If
the store can't be written, runs go on without a journal, and the runner's log says so. If records are lost, a later
attempt only continues from an earlier token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trinity_es.actors.config.run_sections import ProgressConfig
from trinity_es.actors.rollout.run_journal import OpenCall
from trinity_es.actors.runner.outbox import Key
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.journal_store import Journals, Life

__all__ = ["Journal"]

SEGMENT_BYTES = 4 * 1024 * 1024
"""Size at which a new segment begins. A segment is deleted when the log has the outcomes of all its units."""
PATIENCE_SECONDS = 2.0
"""Maximum time that a call to the engine waits until its end is recorded, since a database may hang."""


class Journal:
    """Journal of one incarnation of a runner, used on the engine's loop."""

    def __init__(
        self, opens: Callable[[], Journals], life: Life, settings: ProgressConfig, log: logging.Logger
    ) -> None:
        self._opens, self._life, self._settings, self._log = opens, life, settings, log
        self.open: set[OpenCall] = set()
        self._store: Journals | None = None
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._segment, self._sizes = 0, dict[int, int]()
        """Number of the current segment; bytes in each segment that is not deleted."""
        self._units: dict[int, set[Key]] = {0: set()}
        """Unsettled units that may have records, by segment."""
        self._active: set[Key] = set()
        self._unsynced = self._durable = False
        self._failing = False

    async def run(self) -> None:
        """Until cancelled, write queued records at once, and the new tokens of open calls at each interval.

        While no unit runs and all is synced, wait for the next unit without waking up.
        """
        with contextlib.suppress(Exception):  # the first write retries, and logs the error
            await self._in_thread(self._open)
        due = time.monotonic() + self._settings.seconds
        while True:
            seconds = max(0.0, due - time.monotonic()) if self._active or self._unsynced else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), seconds)
            self._wake.clear()
            records, durable = [data for data, _ in self._waiting], self._durable
            self._durable = False
            written, self._waiting = [done for _, done in self._waiting], []
            if time.monotonic() >= due:
                due = time.monotonic() + self._settings.seconds
                records += [record for call in self.open for record in call.progress()]
                durable = durable or bool(records) or self._unsynced
            try:
                if records or durable:
                    await self._put(b"".join(records), durable)
            finally:
                for done in written:
                    if not done.done():
                        done.set_result(None)

    async def write(self, records: Sequence[bytes], *, durable: bool = False) -> None:
        """Write records; return once they survive a crash of this process, or after `PATIENCE_SECONDS`.

        If `durable` they survive a crash of the machine too; otherwise only after the next interval.
        """
        data = b"".join(records)
        if not data or (self._waiting and sum(len(w) for w, _ in self._waiting) > self._settings.max_bytes):
            return
        if self._write_at_once(data):
            if not durable:
                return
            data = b""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((data, done))
        self._durable = self._durable or durable
        self._wake.set()
        await asyncio.wait([done], timeout=PATIENCE_SECONDS)

    def begin(self, key: Key) -> None:
        """Keep all segments from the current one on until this unit (runs of one task) is released."""
        if not self._active:
            self._wake.set()
        self._active.add(key)
        self._units[self._segment].add(key)

    def release(self, key: Key) -> None:
        """Delete the segments that only this unit (runs of one task) still needed: the log has its outcome."""
        self._active.discard(key)
        if not self._active and self._sizes.get(self._segment):
            self._next_segment()
        for segment, units in list(self._units.items()):
            units.discard(key)
            if not units and segment != self._segment:
                self._free(segment)

    def _write_at_once(self, data: bytes) -> bool:
        """Write the data if the store is open and quick, and return whether it is. A failure is only logged."""
        if self._store is None or not self._store.quick:
            return False
        try:
            self._append(self._segment, data, False)
        except Exception as e:
            self._fail(e)
        else:
            if not self._unsynced:
                self._wake.set()
            self._unsynced = True
            self._grow(len(data))
        return True

    async def _put(self, data: bytes, durable: bool) -> None:
        """Write records. `durable` syncs them and all earlier ones to disk; otherwise the next interval does."""
        if data and self._write_at_once(data):
            data = b""
        if not data and not durable:
            return
        self._unsynced = not durable
        try:
            await self._in_thread(self._append, self._segment, data, durable)
        except Exception as e:
            self._unsynced = True
            self._fail(e)
        else:
            self._grow(len(data))

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            self._log.error("the journal can't be written, and runs go on without it: %s", error)
        self._failing = True
        self._next_segment()  # the current one may end in half a record

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _open(self) -> Journals:
        if self._store is None:
            self._store = self._opens()
        return self._store

    def _append(self, segment: int, data: bytes, durable: bool) -> None:
        self._open().append(self._life, segment, data, durable=durable)

    def _grow(self, size: int) -> None:
        """Count written bytes. Begin a new segment if this one is full; delete the oldest beyond `max_bytes`."""
        if not size:  # a sync, which succeeds on a full disk too
            return
        if self._failing:
            self._log.warning("the journal is written again")
            self._failing = False
        self._sizes[self._segment] = self._sizes.get(self._segment, 0) + size
        if self._sizes[self._segment] >= SEGMENT_BYTES:
            self._next_segment()
        while sum(self._sizes.values()) > self._settings.max_bytes and len(self._sizes) > 1:
            oldest = min(self._sizes)
            self._log.warning("the journal is full (explorer.progress.max_bytes): its oldest part is dropped")
            self._free(oldest)

    def _next_segment(self) -> None:
        last, self._segment = self._segment, self._segment + 1
        self._units[self._segment] = set(self._active)
        if not self._units[last]:
            self._free(last)

    def _free(self, segment: int) -> None:
        self._units.pop(segment, None)
        if self._sizes.pop(segment, None) is not None:
            self._thread.submit(self._drop, segment)

    def _drop(self, segment: int) -> None:
        try:
            if self._store is not None:
                self._store.drop(self._life, segment)
        except LogUnavailable as e:
            self._log.warning("a settled part of the journal was not deleted: %s", e)

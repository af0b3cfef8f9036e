"""Updates of open pages: one task follows the log's end, and each page gets server-sent events.

A page sends the position up to which it knows the log (`after`, or `Last-Event-ID` when its browser reconnects). It
gets messages about later events:

    id: 9
    event: log
    data: {"position": 9, "events": 4, "streams": ["batch/3", "runner/runner-0"]}

Positions are consecutive, so a page misses no event. `streams` is null if there were more events than the tail
remembers; then anything may have changed. `event: notice` has the log's problem (gone, locked, damaged), or an empty
text if there is none; it is sent first, and after each change. `event: reset` says that the log was replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import orjson

from trinity_es.events.errors import LogNotFound, TrinityError
from trinity_es.events.store.database.urls import masked

if TYPE_CHECKING:
    from trinity_es.projections.reading.log_reader import Log

__all__ = ["Tail", "messages", "open_log"]

INTERVAL_SECONDS = 0.2
"""Interval of the reads of the log's end, and of the messages to a page."""
MAX_REMEMBERED = 5000
"""Number of events whose streams the tail remembers."""
HEARTBEAT_SECONDS = 15.0
"""After this time without a message the server sends a comment, which reveals closed connections."""
PATIENCE_SECONDS = 1.0
"""How long to wait for a locked or unreachable database before the page reports it."""

_log = logging.getLogger(__name__)


def open_log(url: str) -> Log:
    """Open a log like `log_reader.open_log`, but wait for its database only PATIENCE_SECONDS."""
    from trinity_es.events.store.log import EventLog
    from trinity_es.projections.reading.log_reader import Log

    return Log(EventLog.open(url, read_only=True, patience=PATIENCE_SECONDS), url)


class Tail:
    """Follows the end of one log. An asyncio task reads it every `interval` seconds."""

    def __init__(self, url: str, interval: float = INTERVAL_SECONDS) -> None:
        self.url, self.interval = url, interval
        self.position = 0
        self.generation = ""
        """Identity of the log. It changes when the log is replaced or restored from a copy."""
        self.notice = "the log has not been read yet"
        """Problem of the log; empty if there is none."""
        self.closing = False
        self._lock = threading.Lock()
        self._opened: Log | None = None
        self._hash = b""
        """Hash of the event at `position`. It differs if the log was restored from a copy."""
        self._recent: deque[tuple[int, str]] = deque(maxlen=MAX_REMEMBERED)
        self._remembered_after = 0
        """`_recent` has the streams of all events after this position."""
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tail")
        self._task: asyncio.Task[None] | None = None

    def log(self) -> Log:
        """Return the log, and open it if need be. May be called in any thread. Raises the errors of `open_log`."""
        with self._lock:
            log = self._opened
        if log is not None:
            if not log.is_replaced():
                return log
            self._close_log()
        new_log = open_log(self.url)  # without the lock, as it takes seconds, and `_close_log` runs on the event loop
        with self._lock:
            if self._opened is None:
                self._opened = new_log
            log = self._opened
        if log is not new_log:  # another thread has opened the log meanwhile
            new_log.close()
        return log

    def _close_log(self) -> None:
        """Close the log, as its file may be gone or replaced. The next `log()` opens it again."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    async def start(self) -> None:
        await self._read_end()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self.closing = True
        self._wake_waiters()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=True)
        self._close_log()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            await self._read_end()

    async def _read_end(self) -> None:
        """Read the log's end. If it or the notice has changed, wake the waiting pages."""
        loop = asyncio.get_running_loop()
        try:
            position, generation, hash_, events = await loop.run_in_executor(self._thread, self._read_new_events)
            notice = ""
        except Exception as e:  # every error becomes a notice, so that the task goes on
            if not isinstance(e, TrinityError):
                _log.warning("the log can't be read", exc_info=True)
            self._close_log()
            position, generation, hash_, events = self.position, self.generation, self._hash, []
            notice = f"there is no log at {masked(self.url)} (yet)" if isinstance(e, LogNotFound) else f"{e}"
        if (position, generation, notice) == (self.position, self.generation, self.notice):
            return
        if events is None:
            self._recent.clear()
            self._remembered_after = position
        for position_and_stream in events or ():
            if len(self._recent) == MAX_REMEMBERED:  # the deque drops the oldest
                self._remembered_after = self._recent[0][0]
            self._recent.append(position_and_stream)
        self.position, self.generation, self._hash, self.notice = position, generation, hash_, notice
        self._wake_waiters()

    def _read_new_events(self) -> tuple[int, str, bytes, list[tuple[int, str]] | None]:
        """Return the log's last position, its generation, its last hash, and (position, stream) of each new event.

        Instead of the events, returns None if the log was replaced or restored from a copy, or if it has more new
        events than the tail remembers.
        """
        log = self.log()
        head = log.head()
        if head.hash == self._hash:
            return self.position, self.generation, self._hash, []
        if head.generation != self.generation.partition(".")[0]:
            return head.position, head.generation, head.hash, None
        last_known = log.at(self.position)
        if self.position and (last_known is None or last_known.hash != self._hash):
            return head.position, f"{head.generation}.{head.hash.hex()[:8]}", head.hash, None
        if head.position - self.position > MAX_REMEMBERED:
            return head.position, self.generation, head.hash, None
        recorded = list(log.read(after=self.position))
        position, hash_ = (recorded[-1].position, recorded[-1].hash) if recorded else (self.position, self._hash)
        return position, self.generation, hash_, [(r.position, r.stream) for r in recorded]

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Wait at most `seconds` for a change of the log's end or of the notice."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def since(self, after: int) -> list[str] | None:
        """Return the streams with events after this position; None if the tail does not remember all these events."""
        if after < self._remembered_after:
            return None
        return sorted({stream for _, stream in takewhile(lambda event: event[0] > after, reversed(self._recent))})


def _message(name: str, data: dict[str, Any], position: int | None = None) -> bytes:
    """Encode a server-sent event. Its id is the log position."""
    id_line = b"" if position is None else b"id: %d\n" % position
    return id_line + b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


async def messages(
    tail: Tail, after: int, generation: str, *, is_ending: Callable[[], bool] = lambda: False
) -> AsyncIterator[bytes]:
    """Yield the server-sent events for a page that knows the log of this generation up to `after`.

    The stream ends after a `reset`, or when the tail is closing or `is_ending` returns True.
    """
    yield b"retry: 1000\n\n"
    last_notice: str | None = None  # so that a notice is sent first: a reconnecting page may show an old one
    last_sent = time.monotonic()
    while not (tail.closing or is_ending()):
        if tail.notice != last_notice:
            last_notice = tail.notice
            yield _message("notice", {"text": last_notice})
            last_sent = time.monotonic()
        if not tail.notice and (tail.generation != generation or tail.position < after):
            yield _message("reset", {"position": tail.position}, tail.position)
            return
        if tail.position > after:
            position = tail.position
            data = {"position": position, "events": position - after, "streams": tail.since(after)}
            after, last_sent = position, time.monotonic()
            yield _message("log", data, position)
            await asyncio.sleep(tail.interval)
            continue
        if time.monotonic() - last_sent > HEARTBEAT_SECONDS:
            last_sent = time.monotonic()
            yield b": here\n\n"
        await tail.wait(0.5)

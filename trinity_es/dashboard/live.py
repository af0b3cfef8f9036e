"""What pages hear of the log: one tail for all of them, and the server-sent events that carry it.

Positions of the log have no gap, so "from 5 to 9" is four events, none of them missed. A page says up to which position
it knows the log (`after`, or `Last-Event-ID` when its browser connects again) and is told what came since, in groups:

    id: 9
    event: log
    data: {"position": 9, "events": 4, "streams": ["batch/3", "runner/runner-0"]}

`streams` is null where more happened than the tail remembers: anything may have changed. `event: notice` tells that the
log is gone, locked or damaged (its text empty: it is not, or that is over), first of all and whenever that changes;
`event: reset` that another log lies there now.
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
from typing import TYPE_CHECKING, Any

import orjson

from trinity_es.events.errors import LogNotFound, TrinityError
from trinity_es.events.store.database.urls import masked

if TYPE_CHECKING:
    from trinity_es.projections.reading.log_reader import Log

__all__ = ["Tail", "messages", "open_log"]

INTERVAL = 0.2
"""Seconds between two looks at the log, and between two messages to a page."""
REMEMBERED = 5000
"""Maximum number of events whose streams the tail remembers."""
HEARTBEAT = 15.0
"""Seconds after which a page hears that the server is still there."""
PATIENCE = 1.0
"""Seconds that a lock or a lost connection is waited out: a page rather says so."""

_log = logging.getLogger(__name__)


def open_log(url: str) -> Log:
    """Return a log that does not wait long. Raises as `projections.reading.log_reader.open_log`."""
    from trinity_es.events.store.log import EventLog
    from trinity_es.projections.reading.log_reader import Log

    return Log(EventLog.open(url, read_only=True, patience=PATIENCE), url)


class Tail:
    """The end of one log, looked at again and again while the server runs."""

    def __init__(self, url: str, interval: float = INTERVAL) -> None:
        self.url, self.interval = url, interval
        self.position = 0
        self.generation = ""
        """Of the log as pages know it; another one: the log was replaced, or put back to a copy."""
        self.notice = "the log was not looked at yet"
        """What is wrong with the log; empty where nothing is."""
        self.closing = False
        self._lock = threading.Lock()
        self._opened: Log | None = None
        self._hash = b""
        """Of the event at `position`: another one, or none, stands there when the log was put back to a copy."""
        self._recent: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._known = 0
        """The streams of all events after this position are remembered."""
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tail")
        self._task: asyncio.Task[None] | None = None

    def log(self) -> Log:
        """Return the log, opened when it is first there. For threads. Raises LogNotFound, NotALog, LogUnavailable, ...
        """
        with self._lock:
            kept = self._opened
        if kept is not None:
            if not kept.is_replaced():
                return kept
            self._forget()
        opened = open_log(self.url)  # not under the lock: this may take seconds, and `_forget` runs on the event loop
        with self._lock:
            if self._opened is None:
                self._opened = opened
            kept = self._opened
        if kept is not opened:
            opened.close()
        return kept

    def _forget(self) -> None:
        """Open the log anew next time: its file may be gone, or be another one."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    async def start(self) -> None:
        """Look once, and go on looking."""
        await self._look()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; whoever waits is woken."""
        self.closing = True
        self._wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=True)
        self._forget()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            await self._look()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            position, generation, hash_, new = await loop.run_in_executor(self._thread, self._read)
            notice = ""
        except Exception as e:  # whatever happens to a log, the tail goes on, and says what it is
            if not isinstance(e, TrinityError):
                _log.warning("the log can't be read", exc_info=True)
            self._forget()
            position, generation, hash_, new = self.position, self.generation, self._hash, []
            notice = f"there is no log at {masked(self.url)} (yet)" if isinstance(e, LogNotFound) else f"{e}"
        if (position, generation, notice) == (self.position, self.generation, self.notice):
            return
        if new is None:
            self._recent.clear()
            self._known = position
        for item in new or ():
            if len(self._recent) == REMEMBERED:
                self._known = self._recent[0][0]
            self._recent.append(item)
        self.position, self.generation, self._hash, self.notice = position, generation, hash_, notice
        self._wake()

    def _read(self) -> tuple[int, str, bytes, list[tuple[int, str]] | None]:
        """Return where the log ends, which one it is, the hash of its last event, and what is new; None: anything may
        be.
        """
        log = self.log()
        head = log.head()
        if head.hash == self._hash:
            return self.position, self.generation, self._hash, []
        if head.generation != self.generation.partition(".")[0]:
            return head.position, head.generation, head.hash, None
        last = log.at(self.position)
        if self.position and (last is None or last.hash != self._hash):
            return head.position, f"{head.generation}.{head.hash.hex()[:8]}", head.hash, None
        if head.position - self.position > REMEMBERED:
            return head.position, self.generation, head.hash, None
        new = list(log.read(after=self.position))
        position, hash_ = (new[-1].position, new[-1].hash) if new else (self.position, self._hash)
        return position, self.generation, hash_, [(r.position, r.stream) for r in new]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Until something changed, or so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def since(self, after: int) -> list[str] | None:
        """Return the streams in which something happened after this position; None: not known any more, any may be."""
        if after < self._known:
            return None
        found: dict[str, None] = {}
        for position, stream in reversed(self._recent):
            if position <= after:
                break
            found[stream] = None
        return sorted(found)


def _message(name: str, data: dict[str, Any], ident: int | None = None) -> bytes:
    head = b"" if ident is None else b"id: %d\n" % ident
    return head + b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


async def messages(
    tail: Tail, after: int, generation: str, *, ended: Callable[[], bool] = lambda: False
) -> AsyncIterator[bytes]:
    """Yield the server-sent events for a page that knows the log up to `after`, until the server ends."""
    yield b"retry: 1000\n\n"
    told: str | None = None  # what was wrong when a page lost its server may be over
    heard = time.monotonic()
    while not (tail.closing or ended()):
        if tail.notice != told:
            told = tail.notice
            yield _message("notice", {"text": told})
            heard = time.monotonic()
        if not tail.notice and (tail.generation != generation or tail.position < after):
            yield _message("reset", {"position": tail.position}, tail.position)
            return
        if tail.position > after:
            position = tail.position
            data = {"position": position, "events": position - after, "streams": tail.since(after)}
            after, heard = position, time.monotonic()
            yield _message("log", data, position)
            await asyncio.sleep(tail.interval)
            continue
        if time.monotonic() - heard > HEARTBEAT:
            heard = time.monotonic()
            yield b": here\n\n"  # who is gone is noticed by this
        await tail.wait(0.5)

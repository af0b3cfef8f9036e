"""Reads of the log and the payload store in threads, so that no handler waits for a database.

If a request needs data that is not in memory, the router sets it aside, a thread reads, and the router handles the
request again from its start (`Fetch`). That is sound because a handler reads before it changes anything. A database
that hangs blocks only these threads. `Watch` probes it, so that `status` can show how long it has been silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sqlalchemy.exc import DBAPIError

from trinity_es.events.errors import LogRewound, LogUnavailable
from trinity_es.events.store.database.retry import patiently

__all__ = ["Fetch", "NotRead", "Reader", "Watch", "read_now"]

THREADS = 4
"""Number of concurrent reads."""
WATCH_SECONDS = 1.0
"""Interval between two probes of the database."""
SILENT_SECONDS = 2.0
"""Time without an answer after which the database counts as silent."""


class NotRead(Exception):
    """Signal that a handler needs data that is not in memory: the result of `read`, under the name `key`."""

    def __init__(self, key: Hashable, read: Callable[[], Any]) -> None:
        super().__init__(key)
        self.key, self.read = key, read


class Fetch(dict[Hashable, Any]):
    """Results of reads for the request being handled."""

    def __call__(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return the result of `read`. Raises its exception, or NotRead if no thread has run it."""
        if key not in self:
            raise NotRead(key, read)
        if isinstance(self[key], Exception):
            raise self[key]
        return self[key]


def read_now(_: Hashable, read: Callable[[], Any]) -> Any:
    """Read in the calling thread, for starts and tests."""
    return read()


class Reader:
    """Pool of reading threads; `post` delivers each result, a value or an exception, in the actor's loop."""

    def __init__(self, post: Callable[[Callable[[], None]], None], *, retry_for: float) -> None:
        """Retry each read for `retry_for` seconds while the database is in trouble."""
        self._post, self._retry_for = post, retry_for
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reader")

    def run(self, read: Callable[[], Any], done: Callable[[Any], None], *, once: bool = False) -> None:
        """Call `read` in a thread, then `done` with its value or exception. Database errors become LogUnavailable. With
        `once` there are no retries."""
        self._pool.submit(self._work, read, done, 0.0 if once else self._retry_for)

    def _work(self, read: Callable[[], Any], done: Callable[[Any], None], seconds: float) -> None:
        result: Any
        try:
            result = patiently(read, seconds=seconds)
        except DBAPIError as e:
            result = LogUnavailable(
                f"the log can't be read ({type(e.orig).__name__}): nothing was done; send the request again"
            )
        except Exception as e:
            result = e
        self._post(lambda: done(result))


class Watch:
    """Thread that checks once a second whether the database answers. Any thread may ask it for the result."""

    def __init__(
        self, is_reachable: Callable[[], bool], now: Callable[[], float], on_rewound: Callable[[LogRewound], None]
    ) -> None:
        """Start a thread that calls `is_reachable`, which may block, again and again, until it raises LogRewound.

        Then the thread calls `on_rewound` with this error, and ends.
        """
        self._is_reachable, self._now, self._on_rewound = is_reachable, now, on_rewound
        self._answered_at = now()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    @property
    def trouble(self) -> str | None:
        """Message that says how long the database has been silent; None while it answers."""
        silent_seconds = self._now() - self._answered_at
        if silent_seconds < WATCH_SECONDS + SILENT_SECONDS:
            return None
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - silent_seconds))
        return f"the database has not answered for {silent_seconds:.0f} s (since {since}); everything waits for it"

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_SECONDS):
            try:
                has_answered = self._is_reachable()
            except LogRewound as e:
                self._on_rewound(e)
                return
            except Exception:  # an error is an answer too
                has_answered = True
            if has_answered:
                self._answered_at = self._now()

"""How the coordinator reads the log and the payload store: by threads, so that no handler waits for a database.

A request that needs what is not in memory is set aside while a thread reads it, and is then handled from its start
(`Fetch`). That is sound because a handler reads before it changes anything. A database that stands still stops these
threads and nothing else; `Watch` asks it now and then, so that everybody can be told since when it does not answer.
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
"""Reads that go on at the same time."""
WATCH_SECONDS = 1.0
"""Interval between two questions to the database whether it is there."""
SILENT_SECONDS = 2.0
"""Seconds after which a database that has not answered is told of."""


class NotRead(Exception):
    """What a handler needs has to be read first."""

    def __init__(self, key: Hashable, read: Callable[[], Any]) -> None:
        super().__init__(key)
        self.key, self.read = key, read


class Fetch:
    """What was read for the request that is being handled."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """Return what `read` gave. Raises what it raised; NotRead where it was not done yet."""
        if key not in self._known:
            raise NotRead(key, read)
        found = self._known[key]
        if isinstance(found, Exception):
            raise found
        return found

    def put(self, key: Hashable, found: Any) -> None:
        self._known[key] = found

    def forget(self, key: Hashable) -> None:
        """Drop what was read: it is older than what is known by now."""
        self._known.pop(key, None)


def read_now(_: Hashable, read: Callable[[], Any]) -> Any:
    """Read here and now: where nobody waits, at a start and in tests."""
    return read()


class Reader:
    """Reads in threads; what came of it, a value or an exception, is told in the actor's loop, through `post`."""

    def __init__(self, post: Callable[[Callable[[], None]], None], *, retry_for: float) -> None:
        """`retry_for`: seconds that trouble of the database is waited out."""
        self._post, self._retry_for = post, retry_for
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="reader")

    def ask(self, read: Callable[[], Any], done: Callable[[Any], None], *, once: bool = False) -> None:
        """Have it read; `done` gets the value, or the exception: LogUnavailable for all that is the database's.

        `once`: who asks tries again himself.
        """
        self._pool.submit(self._work, read, done, 0.0 if once else self._retry_for)

    def _work(self, read: Callable[[], Any], done: Callable[[Any], None], seconds: float) -> None:
        found: Any
        try:
            found = patiently(read, seconds=seconds)
        except DBAPIError as e:
            found = LogUnavailable(f"the log can't be read ({type(e.orig).__name__}): nothing was done, ask again")
        except Exception as e:
            found = e
        self._post(lambda: done(found))


class Watch:
    """Asks the database, now and then, whether it is there. For any thread."""

    def __init__(
        self, is_reachable: Callable[[], bool], now: Callable[[], float], rewound: Callable[[LogRewound], None]
    ) -> None:
        """`is_reachable` may block for as long as it likes; `rewound` is told once where it raises that."""
        self._is_reachable, self._now, self._rewound = is_reachable, now, rewound
        self._answered = now()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    @property
    def trouble(self) -> str | None:
        """Since when the database has not answered; None while it does."""
        silent = self._now() - self._answered
        if silent < WATCH_SECONDS + SILENT_SECONDS:
            return None
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - silent))
        return f"the database does not answer, for {silent:.0f} s now (since {since}); everything waits for it"

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(WATCH_SECONDS):
            try:
                there = self._is_reachable()
            except LogRewound as e:
                self._rewound(e)
                return
            except Exception:  # whatever it says, it answered
                there = True
            if there:
                self._answered = self._now()

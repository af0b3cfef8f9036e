"""Classification of database errors, and retries of those that pass by themselves.

Passing errors are a lost connection, a server that ends, starts or has no free connection, a lock or file that another
process holds, and a deadlock. Other errors, such as a full disk, are raised at once. Retry only calls that are safe to
repeat: appends are, because of their commit id, and payloads, because of their digest.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent import futures
from random import random
from typing import Literal, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trinity_es.events.errors import LogUnavailable

__all__ = [
    "NO_ROOM", "POOLED", "REFUSED", "TLS_TROUBLE", "Backoff", "Trouble", "classify", "is_transient",
    "patiently", "within", "without_repeats",
]

Trouble = Literal["passing", "unavailable", "corrupt", "not_a_log", "missing"]

T = TypeVar("T")

_PASSING_STATES = frozenset({"55P03", "57014", "53300", "25P03", "25P04"})
"""SQL states: lock not available, statement cancelled, too many connections, transaction idle or open for too long."""

TLS_TROUBLE = re.compile(
    r"certificate verify failed|certificate for .* does not match|root certificate file|server does not support SSL"
)
"""Messages of libpq about a server without a valid certificate. A retry does not help."""
NO_ROOM = re.compile(r"too many connections|too many clients|remaining connection slots|no more connections allowed")
"""Messages of a server or a pooler without a free connection."""
POOLED = re.compile(r"in statement pooling mode")
"""Message of PgBouncer in the mode that allows no transactions."""
REFUSED = re.compile(
    r"authentication failed|no password supplied|role \".*\" does not exist|no pg_hba.conf"
    r"|permission denied for database|is not permitted to log in|no such user"
)
"""Messages of a server or a pooler that does not let the user in."""


def is_transient(error: BaseException) -> bool:
    """Return True if this error may pass, so that a retry may succeed. Knows our errors, SQLAlchemy's and drivers'."""
    if isinstance(error, LogUnavailable):
        return bool(error.details.get("passing"))
    return isinstance(error, PoolTimeout) or classify(error) == "passing"


def classify(error: BaseException | None) -> Trouble | None:
    """Return the kind of an error of SQLAlchemy or a driver; None if it is a bug of ours or of a projector."""
    if isinstance(error, DBAPIError):
        error = error.orig
    if isinstance(error, sqlite3.Error):
        return _classify_sqlite(error)
    if error is None or type(error).__module__.partition(".")[0] != "psycopg":  # by name: it may not be installed
        return None
    state, message = getattr(error, "sqlstate", None), str(error)
    if POOLED.search(message):
        return "unavailable"
    if state is None:  # no connection, or it broke
        if re.search(r'database ".*" does not exist|no such database', message):
            return "missing"
        if REFUSED.search(message) or TLS_TROUBLE.search(message):
            return "unavailable"
        kinds = {cls.__name__ for cls in type(error).__mro__}  # a ConnectionTimeout is an OperationalError
        return "passing" if kinds & {"OperationalError", "InterfaceError"} else None
    if state.startswith(("08", "40", "57P")) or state in _PASSING_STATES:  # connection, rollback, shutdown
        return "passing"
    if state == "3D000":  # no such database
        return "missing"
    if state.startswith(("53", "28", "58")) or state in ("25006", "42501", "3F000"):  # see ErrorMessages
        return "unavailable"
    if state.startswith("XX"):  # internal error
        return "corrupt"
    return "not_a_log" if state == "42P01" and 'relation "es_' in message else None


def _classify_sqlite(error: sqlite3.Error) -> Trouble | None:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")):
        return "passing"
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return "unavailable"
    if name.startswith("SQLITE_CORRUPT"):
        return "corrupt"
    if name.startswith("SQLITE_NOTADB"):
        return "not_a_log"
    return "not_a_log" if "no such table: es_" in str(error) else None


class Backoff:
    """Sequence of pauses that double from `first` up to `longest` seconds."""

    def __init__(self, first: float = 0.05, longest: float = 2.0) -> None:
        self._first, self._longest = first, longest
        self._pause = first

    def next(self, chance: float) -> float:
        """Return the next pause, shortened by up to half. `chance` is a random number in [0, 1), against collisions."""
        pause, self._pause = self._pause, min(self._pause * 2, self._longest)
        return pause * (1.0 - chance / 2)

    def reset(self) -> None:
        self._pause = self._first


def without_repeats(tell: Callable[[Exception], None]) -> Callable[[Exception], None]:
    """Return a function that passes an error to `tell` only if its text differs from the last error's."""
    last_text = ""

    def tell_news(error: Exception) -> None:
        nonlocal last_text
        if str(error) != last_text:
            last_text = str(error)
            tell(error)

    return tell_news


def _sleep(pause: float) -> bool:
    """Sleep, then return False, which tells `patiently` to go on."""
    time.sleep(pause)
    return False


def patiently(
    work: Callable[[], T], *, seconds: float, wait: Callable[[float], bool] = _sleep,
    now: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random,
    tell: Callable[[Exception], None] = lambda error: None,
) -> T:
    """Run `work()` and return its result. Retry passing errors for about `seconds`, then raise the last one.

    `wait(pause)` pauses between tries, and returns True to give up. `tell` gets each error that is retried.
    """
    pauses, deadline = Backoff(), None
    while True:
        try:
            return work()
        except Exception as e:
            if not is_transient(e):
                raise
            deadline = now() + seconds if deadline is None else deadline
            if now() >= deadline:
                raise
            tell(e)
            if wait(pauses.next(chance())):
                raise


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run `work()` in a thread, and return its result or raise its error. Raises LogUnavailable after `seconds`.

    The thread is then abandoned, because a call to a frozen server never returns.
    """
    outcome: futures.Future[T] = futures.Future()

    def work_in_thread() -> None:
        try:
            outcome.set_result(work())
        except BaseException as e:
            outcome.set_exception(e)

    threading.Thread(target=work_in_thread, name="asks the database", daemon=True).start()
    if not futures.wait([outcome], seconds).done:
        raise LogUnavailable(f"the database did not answer within {seconds:.0f} s: check that its server runs",
                             passing=True)
    return outcome.result()

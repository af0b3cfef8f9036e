"""The leader lock: an advisory lock in a PostgreSQL store that is held while a coordinator lives.

The lease decides which writer may append, but does not show other hosts whether its holder is alive. The server
releases this lock a few seconds after the holder's host is gone (keepalives), so a standby head compares no clocks.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing, suppress

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from trinity_es.events.errors import TrinityError
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.retry import Backoff

__all__ = ["LeaderLock", "is_led", "wait_until_leaderless"]

_KEY = 0x7472696E6573
"""Key of the advisory lock. Such locks belong to one database, as a log does."""
LOOK_SECONDS = 1.0
"""Interval at which the holder checks its connection, and a waiting process tries the lock."""
_log = logging.getLogger(__name__)


class LeaderLock:
    """Background thread that takes the leader lock, keeps it, and takes it again after a lost connection."""

    def __init__(self, url: str) -> None:
        self._url, self._stopped = url, threading.Event()
        threading.Thread(target=self._run, name="leader-lock", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pauses = Backoff(0.2, 5.0)
        while not self._stopped.is_set():
            database = Database(self._url, patience=0.0)
            try:
                with database.engine.connect() as connection:
                    self._hold(connection, pauses)
            except (DBAPIError, TrinityError) as e:
                _log.warning("the leader lock is not held: %s", str(e).splitlines()[0])
            finally:
                with suppress(DBAPIError):
                    database.close()
            self._stopped.wait(pauses.next(0.5))

    def _hold(self, connection: Connection, pauses: Backoff) -> None:
        """Wait for the lock on this connection, then keep it until `stop`. Raises DBAPIError if the connection ends."""
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.exec_driver_sql("SET statement_timeout = 0; SET lock_timeout = 0")
        try_lock = text("SELECT pg_try_advisory_lock(:key)")  # true if this connection has the lock now
        while not self._stopped.is_set() and not connection.execute(try_lock, {"key": _KEY}).scalar():
            self._stopped.wait(LOOK_SECONDS)  # the server may still think that a predecessor's connection is open
        pauses.reset()
        while not self._stopped.wait(LOOK_SECONDS):
            connection.exec_driver_sql("SELECT 1")  # raises if the connection ended, and the lock with it


def is_led(url: str) -> bool:
    """Return True if a process holds the lock of the PostgreSQL store at this URL. Raises LogUnavailable."""
    try_lock = text("SELECT pg_try_advisory_xact_lock(:key)")  # the end of the transaction releases it
    with closing(Database(url, read_only=True, patience=5.0)) as database:
        return not database.read(lambda connection: connection.execute(try_lock, {"key": _KEY}).scalar())


def wait_until_leaderless(url: str, seconds: float) -> None:
    """Wait until the lock has been free for `seconds`, so that a restarting coordinator can take it again.

    While the database can't be read, the lock counts as held.
    """
    free_since = time.monotonic()
    while time.monotonic() - free_since < seconds:
        try:
            led = is_led(url)
        except TrinityError as e:
            _log.warning("the database can't say who leads: %s", e)
            led = True
        time.sleep(LOOK_SECONDS / 2)
        if led:
            free_since = time.monotonic()

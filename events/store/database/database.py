"""Connections to the database of a log: opening, locking, transactions, retries.

This folder hides the differences between SQLite and PostgreSQL: the write lock (a lock file beside the SQLite file, the
head row on PostgreSQL), the meaning of durability, and which errors may be retried.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import NullPool, QueuePool

from trinity_es.events.atomic_file import sync
from trinity_es.events.errors import ConfigError, LogError, LogUnavailable
from trinity_es.events.private_files import create_private, holder, open_private
from trinity_es.events.store.database.error_messages import ErrorMessages
from trinity_es.events.store.database.file_identity import OpenedFiles, SidecarGone
from trinity_es.events.store.database.postgres import postgres_engine
from trinity_es.events.store.database.prepared import Prepared
from trinity_es.events.store.database.retry import classify
from trinity_es.events.store.database.urls import masked, parse_url, place_of, secrets_in

__all__ = ["Database", "Durability", "Tell"]

Durability = Literal["process", "power"]

T = TypeVar("T")

Tell = Callable[[Exception], None]

CHECKPOINT_BYTES = 4 * 1024 * 1024
"""Approximate bytes that a writer adds to SQLite's write-ahead log (WAL) before it checkpoints them."""
MOST_WAL_BYTES = 2 * CHECKPOINT_BYTES
"""Size from which a WAL is truncated. It grows beyond this while an active reader keeps SQLite from reusing it."""
TRUNCATION_SECONDS = 1.0
"""Interval between two attempts to truncate a WAL, which fail while such a reader is active."""
_BUSY_MILLISECONDS = 5000
_BEGIN = {sql: Prepared(text(sql)) for sql in ("BEGIN", "BEGIN IMMEDIATE")}


class Database:
    """One process's connections to one database. Safe for threads; not usable after a fork.

    Each call retries passing errors for `patience` seconds: a lost connection, a lock that another process holds.
    """

    def __init__(self, url: str, *, durability: Durability = "power", read_only: bool = False, patience: float = 20.0):
        if durability not in ("process", "power"):
            raise ConfigError(f"durability is {durability!r}: it must be 'process' or 'power'")
        parsed = parse_url(url)
        self.shown, self.place = masked(parsed), place_of(parsed)
        self.durability = durability
        self.read_only = read_only
        self.patience = patience
        self.dialect: Literal["sqlite", "postgresql"] = "sqlite" if parsed.drivername == "sqlite" else "postgresql"
        self.path = Path(parsed.database or "").absolute() if self.dialect == "sqlite" else None
        self._files = OpenedFiles(self.path) if self.path else None
        self._errors = ErrorMessages(self.shown, self.path, read_only=read_only, secrets=secrets_in(parsed))
        self._pid = os.getpid()
        self._thread_lock = threading.RLock()
        self._lock_file = -1
        self._unflushed = 0  # bytes written since the last checkpoint, roughly
        self._next_truncation = 0.0  # of the write-ahead log, in monotonic seconds
        self.engine = self._sqlite_engine() if self.path else postgres_engine(parsed, self.shown, read_only=read_only)
        self._writing_engine = self.engine.execution_options(es_begin="BEGIN IMMEDIATE")  # an option of each connection

    # --- connecting -------------------------------------------------------------------------------------------------
    def _sqlite_engine(self) -> Engine:
        files = self._files
        assert files is not None
        pool = NullPool if self.read_only else QueuePool  # a reader's connection may not be kept: see _connect_to_read
        engine = create_engine("sqlite://", creator=lambda: files.connect(read_only=self.read_only), poolclass=pool)
        synchronous = "FULL" if self.durability == "power" else "NORMAL"

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
            if not self.read_only:
                cursor.execute(f"PRAGMA synchronous={synchronous}")
            # SQLite before 3.51.3 can corrupt a database when two processes write and checkpoint at once (the
            # "WAL-reset bug"), so only the connection that holds the write lock checkpoints.
            cursor.execute("PRAGMA wal_autocheckpoint=0")
            cursor.close()

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            # A transaction that reads first and writes later would fail with "locked" instead of waiting.
            begin = connection.get_execution_options().get("es_begin", "BEGIN")
            if begin:
                _BEGIN[begin].change(connection, {})

        return engine

    def close(self) -> None:
        """Close every connection. On SQLite the last process that closes moves the write-ahead log into the file."""
        if os.getpid() != self._pid:
            return  # a forked child must not touch its parent's connections
        with self._thread_lock:
            if self._lock_file >= 0:
                with contextlib.suppress(LogError, OSError), self._file_lock():
                    self.engine.dispose()
            self.engine.dispose()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    # --- transactions -----------------------------------------------------------------------------------------------
    def read(self, work: Callable[[Connection], T], *, patience: float | None = None, tell: Tell | None = None) -> T:
        """Run `work` in a reading transaction. Passing errors go to `tell` and are retried. Raises LogUnavailable."""
        self._require_same_process()

        def attempt() -> T:
            with self.engine.connect() as connection, connection.begin():
                return work(connection)

        return self._with_retries(attempt, self.patience if patience is None else patience, tell=tell)

    def write(
        self, work: Callable[[Connection], T], *, patience: float | None = None, size: int = 4096,
        tell: Tell | None = None,
    ) -> T:
        """Run `work` in a writing transaction. On SQLite this call takes the write lock, on PostgreSQL `work` must.

        Passing errors are retried, so `work` must check whether an earlier try was committed. `size`: approximate
        number of bytes that `work` writes. Raises LogUnavailable.
        """
        self._require_same_process()
        if self.read_only:
            raise LogUnavailable(f"{self.shown} was opened for reading only; open it without read_only to write")

        def attempt() -> T:
            with self._thread_lock, self._file_lock() if self.path else contextlib.nullcontext():
                try:
                    result = self._write_once(work)
                except SidecarGone as e:
                    self._save_sidecars(e)
                    result = self._write_once(work)
                if self._files is not None:
                    self._unflushed += size
                    wal_is_long = self._files.wal_bytes > MOST_WAL_BYTES
                    truncate = wal_is_long and time.monotonic() >= self._next_truncation
                    if truncate or self._unflushed >= CHECKPOINT_BYTES:
                        self._checkpoint(truncate=truncate)
                return result

        return self._with_retries(attempt, self.patience if patience is None else patience, size, tell)

    def _write_once(self, work: Callable[[Connection], T]) -> T:
        """Run `work` once in a transaction. Before and after the commit, check that the SQLite file is at its path."""
        require_names: Callable[[], None] = (lambda: None) if self._files is None else self._files.require_names
        with self._writing_engine.connect() as connection:
            with connection.begin():
                require_names()
                result = work(connection)
                require_names()
            require_names()  # a commit into a file that lost its name must not be acknowledged
        return result

    def require_place(self) -> None:
        if self._files is None or self.read_only:
            return
        try:
            self._files.require_names()
        except SidecarGone as e:
            with self._thread_lock, self._file_lock():
                self._with_retries(partial(self._save_sidecars, e), 0.0)

    @property
    def file(self) -> tuple[int, int] | None:
        """Device and inode of the open SQLite file; None on PostgreSQL."""
        return self._files.file if self._files is not None else None

    def is_replaced(self) -> bool:
        return self._files is not None and self._files.is_replaced()

    def _save_sidecars(self, cause: SidecarGone) -> None:
        """Move the content of a write-ahead log that lost its name into the file, then drop all connections.

        The caller holds the write lock. Raises LogReplaced while another process reads the old write-ahead log, or if
        a process wrote into a new one under its name.
        """
        files = self._files
        assert files is not None
        if not files.new_wal_is_empty():
            raise files.gone_error(cause)
        with self.engine.connect().execution_options(es_begin="") as connection:
            busy = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0]
        if busy:
            raise files.gone_error(cause)
        files.forget_sidecars()
        self.engine.dispose()
        log = logging.getLogger("trinity_es.log")  # not at import: Thespian silences existing loggers
        log.warning("%s while the log was in use; its content was moved into the log", cause)

    def make(self, fill: Callable[[Database], None]) -> bool:
        """Make a missing SQLite file: create it under another name, call `fill`, and rename it.

        Return False if another process made the file first. After LogUnavailable or an error of `fill` no file remains.
        """
        assert self.path is not None
        path = Path(os.path.realpath(self.path))  # the target, if the path is a link
        temporary_path = path.with_name(f"{path.name}.making")
        temporary_files = [Path(f"{temporary_path}{suffix}") for suffix in ("", "-wal", "-shm", "-journal", ".lock")]
        with self._thread_lock, self._file_lock():
            if path.exists():
                return False
            for file in temporary_files:
                file.unlink(missing_ok=True)  # left by a process that died
            new_database = Database(str(temporary_path), durability=self.durability, patience=self.patience)
            try:
                create_private(temporary_path)  # SQLite gives its files beside it the same mode
                new_database.prepare()
                fill(new_database)
                new_database.close()
                os.rename(temporary_path, path)
            except OSError as e:
                raise LogUnavailable(
                    f"{path} can't be made ({e.strerror}): let this user write in {path.parent}") from e
            finally:
                new_database.close()
                for file in temporary_files:
                    file.unlink(missing_ok=True)
            sync(path.parent)
        return True

    def prepare(self) -> None:
        """Switch a SQLite file to a write-ahead log, and checkpoint a long one. Nothing to do on PostgreSQL."""
        if self.path is None or self.read_only:
            return

        def attempt() -> None:
            with self._thread_lock, self._file_lock():
                with self.engine.connect().execution_options(es_begin="") as connection:
                    mode = connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar()
                if mode != "wal":
                    raise LogUnavailable(
                        f"{self.path} can't be used by more than one process: its file system has no shared memory; "
                        "put it on a local disk, or use PostgreSQL"
                    )
                # Writers that were killed before their checkpoint may have left a long write-ahead log.
                with contextlib.suppress(OSError):
                    size = os.stat(f"{self.path}-wal").st_size
                    if size > CHECKPOINT_BYTES:
                        self._checkpoint(truncate=size > MOST_WAL_BYTES)

        self._with_retries(attempt, min(5.0, self.patience))

    def _checkpoint(self, *, truncate: bool) -> None:
        """Move SQLite's write-ahead log into the database file. With `truncate` also empty it, if no reader uses it.

        The caller holds the write lock. This never waits for readers.
        """
        self._unflushed, self._next_truncation = 0, time.monotonic() + TRUNCATION_SECONDS
        # The append is already committed, so an error here must not fail it. The next append reports a full disk.
        with (
            contextlib.suppress(DBAPIError),
            self.engine.connect().execution_options(es_begin="") as connection,
        ):
            if truncate:
                connection.exec_driver_sql("PRAGMA busy_timeout=0")
                try:
                    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
                finally:
                    connection.exec_driver_sql(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
            else:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def _require_same_process(self) -> None:
        if os.getpid() != self._pid:
            raise LogUnavailable(f"{self.shown} was opened in process {self._pid}; open it again in this process")

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Hold the write lock of a SQLite log: a flock on a file beside it, which ends with its process.

        SQLite's own busy wait is unfair: one of four busy writers had a thousandth of the others' turns. The caller
        must hold `_thread_lock`, because all threads share the lock file's descriptor.
        """
        if self._lock_file < 0:
            name = f"{os.path.realpath(self.path or '')}.lock"  # the same for all links to the file
            try:
                self._lock_file = open_private(name)
            except OSError as e:
                raise LogUnavailable(f"{name}, the write lock of the log, can't be opened: {e.strerror}") from e
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for_lock()
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _wait_for_lock(self) -> None:
        """Wait for the write lock in order of arrival. Raises LogUnavailable after `patience` seconds.

        Only a blocking flock waits in order, and it can't time out. So a thread blocks in it, and releases the lock at
        once if this call has given up by then.
        """
        fd = self._lock_file
        locked, gave_up = threading.Event(), threading.Event()
        events_lock = threading.Lock()  # only one of the two events is set

        def wait_in_line() -> None:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with events_lock:
                if gave_up.is_set():
                    os.close(fd)  # ends the lock as well
                else:
                    locked.set()

        threading.Thread(target=wait_in_line, daemon=True, name="es-write-lock").start()
        locked.wait(self.patience)
        with events_lock:
            if locked.is_set():
                return
            gave_up.set()
            self._lock_file = -1  # the thread closes it
            lock_holder = holder(fd)
        raise LogUnavailable(
            f"{self.path}.lock, the write lock of the log, has been held for {self.patience:.0f} s by {lock_holder}: "
            "resume it if it is suspended, or end it", passing=True,
        )

    # --- errors and retries -----------------------------------------------------------------------------------------
    def _with_retries(self, attempt: Callable[[], T], patience: float, size: int = 4096, tell: Tell | None = None) -> T:
        """Call `attempt`, and retry passing errors for `patience` seconds. A full connection pool is not retried.

        `size`: bytes that `attempt` writes, for messages. `tell` gets each error that is retried. Raises LogError.
        """
        deadline, pause = time.monotonic() + patience, 0.01
        while True:
            try:
                return attempt()
            except DBAPIError as e:
                kind = classify(e)
                if kind is None:
                    raise
                if kind != "passing" or time.monotonic() + pause > deadline:
                    raise self._errors.error(kind, e, size) from e
                if tell is not None:
                    tell(self._errors.error(kind, e, size))
            except PoolTimeout as e:
                raise LogUnavailable(f"{self.shown}: {self._errors.scrubbed(e)}", passing=True) from e
            time.sleep(pause * random.uniform(0.5, 1.0))  # random, so that writers that collided do not collide again
            pause = min(pause * 2, 1.0)

"""A database that a log lives in: how it is found, connected to, locked, retried and complained about.

Used by `log.py` and `payloads.py` only. SQLite and PostgreSQL differ here and nowhere else: the write lock (a lock
file beside the SQLite file, the head row on PostgreSQL), what durability means, and which errors pass.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import NullPool, QueuePool

from trinity_es.events.atomic_file import sync
from trinity_es.events.errors import ConfigError, LogCorrupt, LogError, LogNotFound, LogUnavailable, NotALog
from trinity_es.events.private_files import create_private, holder, open_private, tighten
from trinity_es.events.store.disk import NO_FILE, is_out_of_files, room
from trinity_es.events.store.file_identity import BesideGone, Place
from trinity_es.events.store.retry import NO_ROOM, POOLED, REFUSED, TLS_TROUBLE, Trouble, classify

__all__ = [
    "Database", "Durability", "Tell", "file_of", "file_url", "masked", "parse_url", "place_of", "require_encoding",
]

Durability = Literal["process", "power"]

T = TypeVar("T")

Tell = Callable[[Exception], None]

CHECKPOINT_BYTES = 4 * 1024 * 1024
"""Maximum, about, of what a writer adds to SQLite's write-ahead log before it moves it into the database file."""
MOST_WAL_BYTES = 2 * CHECKPOINT_BYTES
"""Size from which a write-ahead log is cut. It grows so long while a reader keeps it from being begun again."""
CUT_SECONDS = 1.0
"""Interval between two tries to cut it, which fail while that reader is there."""

_SECRET_KEYS = re.compile(r"(?i)(password|passwd|sslpassword|secret|token)=[^&\s'\"]+")

_PLAIN_KEYS = frozenset({"host", "hostaddr", "port", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl"})
"""Keys of a URL's query whose values are no secrets: names of files, which an error has to name."""


def parse_url(url: str) -> URL:
    """Return the database URL of a path, of `sqlite:///path`, `postgresql://...` or a full SQLAlchemy URL.

    In a URL of a file %, ? and # are written %25, %3F and %23, as `file_url` does; a path has them as they are. Raises
    ConfigError for another database, for SQLite in memory or with options, and for what is no URL.
    """
    if "://" not in url:
        if not url or url == ":memory:":
            raise ConfigError("a log needs a file or a PostgreSQL database: give a path, sqlite:///path or postgresql://")
        return URL.create("sqlite", database=os.path.expanduser(url))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as e:
        # The text itself may hold a password.
        raise ConfigError("the store's url can't be read; write sqlite:///path or postgresql://user@host/db") from e
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigError("a log in memory would not survive its process: give a path, as in sqlite:///run/log.db")
        if "?" in url:
            raise ConfigError(f"the store's url {url} has options after its ?, which a file has not: where the file's "
                              "name has that letter, write %3F, or give the path alone")
        return URL.create("sqlite", database=os.path.expanduser(parsed.database))
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigError(f"a log lives in SQLite or PostgreSQL, not in {backend}: {masked(parsed)}")


def file_url(path: str | Path) -> str:
    """Return the URL of a SQLite log, in which letters that mean something else in a URL are escaped."""
    return "sqlite:///" + re.sub("[%?#]", lambda found: f"%{ord(found[0]):02X}", str(path))


def file_of(url: str) -> Path | None:
    """Return the file of a SQLite log; None where it lies in PostgreSQL, or the URL can't be read."""
    try:
        parsed = parse_url(url)
    except ConfigError:
        return None
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def place_of(url: URL | str) -> str:
    """Return where a store is, in words that stay: the path of its file without links, or the address of its database
    without the user.
    """
    url = parse_url(url) if isinstance(url, str) else url
    if url.get_backend_name() == "sqlite":
        return os.path.realpath(url.database or "")
    return f"postgresql {url.host or ''}:{url.port or ''} {url.query.get('host', '')} {url.database}"


def require_encoding(shown: str, connection: Any, *, refused: Sequence[str] = ()) -> None:
    """Require a PostgreSQL database in UTF-8, or at least in none of these encodings. Raises ConfigError."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding in refused if refused else encoding != "UTF8":
        raise ConfigError(f"the encoding of {shown} is {encoding}, which does not hold every text: make the database "
                          "with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0")


def masked(url: URL | str) -> str:
    """Return the URL as it may be shown: no password in it, nor in its query."""
    if isinstance(url, str):
        try:
            url = parse_url(url)
        except ConfigError:
            return "(unreadable url)"
    if url.get_backend_name() == "sqlite":
        return file_url(url.database or "")
    return _SECRET_KEYS.sub(r"\1=***", url.render_as_string(hide_password=True).replace(" ", "%20"))


_held: set[URL] = set()
"""Where this process has seen that its connections are sessions."""


def _require_sessions(shown: str, connection: Any, another: Callable[[], Any]) -> None:
    """Require that a connection stays one and the same process of the server: settings and locks are tied to that.

    A pooler gives another one to each transaction. `connection` commits by itself; `another` makes a second one, whose
    transaction holds a server process meanwhile. Raises ConfigError.
    """
    def process(of: Any) -> int:
        return int(of.execute("SELECT pg_backend_pid()").fetchone()[0])

    own = process(connection)
    with contextlib.closing(another()) as other:
        try:
            changes = process(other) == own or any(process(connection) != own for _ in range(3))
        except Exception as e:
            if not POOLED.search(str(e)):
                raise
            changes = True
    if changes:
        raise ConfigError(f"{shown} is behind a pooler that gives each transaction another connection, and a run needs "
                          "one of its own: give the database's own address in store.url, or set pool_mode=session "
                          "there")


class Database:
    """One process's connections to one database. Safe for threads; not for use after a fork.

    `patience` is how many seconds passing trouble (a lost connection, a lock held by another) is waited out.
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
        self._place = Place(self.path) if self.path else None
        given = [str(value) for key, value in parsed.query.items() if key not in _PLAIN_KEYS]
        self._secrets = [s for s in (str(parsed.password or ""), *given) if len(s) > 3]
        self._pid = os.getpid()
        self._thread_lock = threading.RLock()
        self._lock_file = -1
        self._unflushed = 0  # bytes written since the last checkpoint, about
        self._next_cut = 0.0  # of the write-ahead log, by the monotonic clock
        self.engine = self._sqlite_engine() if self.path else self._postgres_engine(parsed)

    # --- connecting -------------------------------------------------------------------------------------------------
    def _sqlite_engine(self) -> Engine:
        place = self._place
        assert place is not None
        pool = NullPool if self.read_only else QueuePool  # a reader's connection is good for a moment: see Place
        engine = create_engine("sqlite://", creator=lambda: place.connect(read_only=self.read_only), poolclass=pool)
        synchronous = "FULL" if self.durability == "power" else "NORMAL"

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, _record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
            if not self.read_only:
                cursor.execute(f"PRAGMA synchronous={synchronous}")
            # SQLite before 3.51.3 can corrupt a database when two processes write and checkpoint at once (the
            # "WAL-reset bug"): so no connection checkpoints by itself, only the one that holds the write lock.
            cursor.execute("PRAGMA wal_autocheckpoint=0")
            cursor.close()

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            # A transaction that reads first and writes later would fail with "locked" instead of waiting.
            begin = connection.get_execution_options().get("es_begin", "BEGIN")
            if begin:
                connection.exec_driver_sql(begin)

        return engine

    def _postgres_engine(self, url: URL) -> Engine:
        more: dict[str, Any] = {k: v for k, v in _POSTGRES_ARGS.items() if k not in url.query}
        if self.read_only:
            more["prepare_threshold"] = None  # a prepared statement would stay where a pooler takes the connection back
        try:
            engine = create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, connect_args=more)
        except ModuleNotFoundError as e:
            raise ConfigError("PostgreSQL needs psycopg: pip install 'trinity-es[postgres]'") from e

        def another() -> Any:
            arguments, options = engine.dialect.create_connect_args(url)
            return engine.dialect.connect(*arguments, **{**options, **more})

        @event.listens_for(engine, "connect", insert=True)  # before SQLAlchemy asks for a text
        def _configure(connection: Any, _record: Any) -> None:
            require_encoding(self.shown, connection, refused=("SQL_ASCII",))  # which gives bytes for texts
            if self.read_only:
                connection.read_only = True  # of each transaction: a session's setting would stay, as above
                return
            autocommit, connection.autocommit = connection.autocommit, True
            if url not in _held:
                _require_sessions(self.shown, connection, another)
                _held.add(url)
            # Of "process" and "power" alike: with it off, the death of one server process takes the last commits of
            # all.
            connection.execute(f"SET synchronous_commit = on; SET {'; SET '.join(_LIMITS)}; {_KEEPALIVE}")
            connection.autocommit = autocommit

        if self.read_only:
            @event.listens_for(engine, "begin")
            def _begin(connection: Connection) -> None:
                connection.exec_driver_sql(f"SET LOCAL {'; SET LOCAL '.join(_LIMITS)}")

        return engine

    def close(self) -> None:
        """Close every connection. On SQLite the last one out moves the write-ahead log into the file."""
        if os.getpid() != self._pid:
            return  # a child that inherited us must not touch the parent's connections
        with self._thread_lock:
            if self.path and not self.read_only and self._lock_file >= 0:
                try:
                    with self._file_lock():
                        self.engine.dispose()
                except (LogError, OSError):
                    self.engine.dispose()
            else:
                self.engine.dispose()
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    # --- transactions -----------------------------------------------------------------------------------------------
    def read(
        self, work: Callable[[Connection], T], *, patience: float | None = None, tell: Tell | None = None
    ) -> T:
        """`work` in one reading transaction. Retried on passing trouble, which `tell` hears; raises LogUnavailable."""
        self._check_process()

        def attempt() -> T:
            with self.engine.connect() as connection, connection.begin():
                return work(connection)

        return self._patiently(attempt, self.patience if patience is None else patience, tell=tell)

    def write(
        self, work: Callable[[Connection], T], *, patience: float | None = None, size: int = 4096,
        tell: Tell | None = None,
    ) -> T:
        """`work` in one writing transaction, alone among all writers of all processes on SQLite.

        On PostgreSQL `work` itself takes the lock it needs. Retried on passing trouble, so `work` must tell whether it
        was done before; `size` is about how many bytes it writes. Raises LogUnavailable; then nothing was written, or
        (a connection lost in the commit) it was and a retry will find it.
        """
        self._check_process()
        if self.read_only:
            raise LogUnavailable(f"{self.shown} was opened for reading only; open it without read_only to write")

        def attempt() -> T:
            with self._thread_lock, self._file_lock() if self.path else contextlib.nullcontext():
                try:
                    result = self._write(work)
                except BesideGone as e:
                    self._save_beside(e)
                    result = self._write(work)
                if self._place is not None:
                    self._unflushed += size
                    long = self._place.wal_bytes > MOST_WAL_BYTES and time.monotonic() >= self._next_cut
                    if long or self._unflushed >= CHECKPOINT_BYTES:
                        self._checkpoint(cut=long)
                return result

        return self._patiently(attempt, self.patience if patience is None else patience, size, tell)

    def _write(self, work: Callable[[Connection], T]) -> T:
        connection = self.engine.connect().execution_options(es_begin="BEGIN IMMEDIATE")
        with connection:
            with connection.begin():
                self._require_place()
                result = work(connection)
                self._require_place()
            self._require_place()  # or it lost its name while it was written: nobody is told that it is safe
        return result

    def _require_place(self) -> None:
        if self._place is not None:
            self._place.require()

    def require_place(self) -> None:
        """See that a SQLite log still has its name, and save what lies beside it where that lost its own.

        Costs a few calls of `stat`. Raises LogReplaced, LogCorrupt, LogUnavailable.
        """
        if self._place is None or self.read_only:
            return
        try:
            self._place.require()
        except BesideGone as gone:
            why = gone
            with self._thread_lock, self._file_lock():
                self._patiently(lambda: self._save_beside(why), 0.0)

    @property
    def named(self) -> tuple[int, int] | None:
        """Device and inode of the SQLite file that is open here; None on PostgreSQL."""
        return self._place.named if self._place is not None else None

    def is_replaced(self) -> bool:
        """Return True if another SQLite file lies under the name of the one that was opened here."""
        return self._place is not None and self._place.is_replaced()

    def _save_beside(self, why: BesideGone) -> None:
        """Move what a write-ahead log without a name holds into the file, and open all anew. The lock is held.

        Only whole: as long as somebody reads there, or wrote into another one under its name, it is told.
        """
        place = self._place
        assert place is not None
        if not place.beside_is_empty():
            raise place.gone(why)
        with self.engine.connect().execution_options(es_begin="") as connection:
            busy = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0]
        if busy:
            raise place.gone(why)
        place.forget_beside()
        self.engine.dispose()
        _text_log().warning("%s while the log was in use: what it held was moved into the log", why)

    def make(self, fill: Callable[[Database], None]) -> bool:
        """Make the SQLite file where there is none: filled under another name, and given its own when it is whole.

        Returns True, or False where somebody was faster. Raises LogUnavailable, and what `fill` raises; nothing has the
        name then.
        """
        assert self.path is not None
        path = Path(os.path.realpath(self.path))  # of a link it is the file that is missing
        making = path.with_name(f"{path.name}.making")
        beside = [making, *(Path(f"{making}{more}") for more in ("-wal", "-shm", "-journal", ".lock"))]
        with self._thread_lock, self._file_lock():
            if path.exists():
                return False
            for name in beside:
                name.unlink(missing_ok=True)  # its maker died
            new = Database(str(making), durability=self.durability, patience=self.patience)
            try:
                create_private(making)  # SQLite gives what it makes beside it the same mode
                new.prepare()
                fill(new)
                new.close()
                os.rename(making, path)
            except OSError as e:
                raise LogUnavailable(f"{path} can't be made: {e.strerror}; see that this user may write there") from e
            finally:
                new.close()
                for name in beside:
                    name.unlink(missing_ok=True)
            sync(path.parent)
        return True

    def prepare(self) -> None:
        """Bring a SQLite file into the shape that writers need; on PostgreSQL there is nothing to do."""
        if self.path is None or self.read_only:
            return

        tighten(self.path, *(f"{self.path}{more}" for more in ("-wal", "-shm", "-journal")))  # an older release's

        def attempt() -> None:
            with self._thread_lock, self._file_lock():
                with self.engine.connect().execution_options(es_begin="") as connection:
                    mode = connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar()
                if mode != "wal":
                    raise LogUnavailable(
                        f"{self.path} can't be used by more than one process: its file system knows no shared memory; "
                        "put it on a local disk, or use PostgreSQL"
                    )
                # Writers that were killed before their turn to checkpoint leave it to the next.
                with contextlib.suppress(OSError):
                    size = os.stat(f"{self.path}-wal").st_size
                    if size > CHECKPOINT_BYTES:
                        self._checkpoint(cut=size > MOST_WAL_BYTES)

        self._patiently(attempt, min(5.0, self.patience))

    def _checkpoint(self, *, cut: bool) -> None:
        """Move SQLite's write-ahead log into the database file, and with `cut` make its file empty if no reader needs
        it. The write lock is held; never waits for readers.
        """
        self._unflushed, self._next_cut = 0, time.monotonic() + CUT_SECONDS
        # The append before it is committed already: what goes wrong here is no failure of that append, and a full
        # disk will be told to the next one.
        with (
            contextlib.suppress(DBAPIError),
            self.engine.connect().execution_options(es_begin="") as connection,
        ):
            if cut:
                connection.exec_driver_sql("PRAGMA busy_timeout=0")
                try:
                    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
                finally:
                    connection.exec_driver_sql(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
            else:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise LogUnavailable(f"{self.shown} was opened in process {self._pid}; open it again in this one")

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Give the write lock of a SQLite log: flock on a file beside it. It ends with its process.

        SQLite's own busy wait is unfair: among four busy writers one had a thousandth of the others' turns. A thread
        of this process must hold `_thread_lock`, because the lock belongs to the open file.
        """
        if self._lock_file < 0:
            self._lock_file = self._open_lock_file()
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for_lock()
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _open_lock_file(self) -> int:
        name = f"{os.path.realpath(self.path or '')}.lock"  # one for all names that lead to the file
        try:
            return open_private(name)
        except OSError as e:
            raise LogUnavailable(f"{name}, the write lock of the log, can't be opened: {e.strerror}") from e

    def _wait_for_lock(self) -> None:
        """Queue for the lock, in order of arrival, and no longer than `patience`: its holder may be stopped.

        Only a blocking flock queues, and it knows no timeout: so a thread blocks, and gives the lock back if it comes
        too late.
        """
        fd, gate, state = self._lock_file, threading.Lock(), {"late": False, "done": False}
        arrived = threading.Event()

        def queue() -> None:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with gate:
                if state["late"]:
                    os.close(fd)  # ends the lock as well
                    return
                state["done"] = True
            arrived.set()

        threading.Thread(target=queue, daemon=True, name="es-write-lock").start()
        arrived.wait(self.patience)
        with gate:
            if state["done"]:
                return
            state["late"] = True
            self._lock_file = -1  # the file is that thread's now
            who = holder(fd)
        raise LogUnavailable(
            f"{self.path}.lock, the write lock of the log, has been held for {self.patience:.0f} s by {who}: let it go "
            "on if it is stopped, or end it", passing=True,
        )

    # --- trouble ----------------------------------------------------------------------------------------------------
    def _patiently(
        self, attempt: Callable[[], T], patience: float, size: int = 4096, tell: Tell | None = None
    ) -> T:
        deadline, pause = time.monotonic() + patience, 0.01
        while True:
            try:
                return attempt()
            except DBAPIError as e:
                kind = classify(e)
                if kind is None:
                    raise
                if kind != "passing" or time.monotonic() + pause > deadline:
                    raise self._error(kind, e, size) from e
                if tell is not None:
                    tell(self._error(kind, e, size))
            except PoolTimeout as e:
                raise LogUnavailable(f"{self.shown}: {self._scrub(e)}", passing=True) from e
            time.sleep(pause * random.uniform(0.5, 1.0))  # apart, so that writers that collided do not collide again
            pause = min(pause * 2, 1.0)

    def _error(self, kind: Trouble, e: DBAPIError, size: int) -> LogError:
        what = self._scrub(e.orig)
        if kind == "missing":
            return LogNotFound(f"no database at {self.shown} ({what}); create it, or correct store.url")
        if kind == "not_a_log":
            return NotALog(f"{self.shown} holds no log ({what}); check store.url")
        if kind == "corrupt":
            return LogCorrupt(f"{self.shown} is damaged ({what}); stop all writers and restore the last good copy")
        if kind == "passing" and NO_ROOM.search(str(e.orig)):
            return LogUnavailable(
                f"{self.shown} takes no more connections ({what}): raise max_connections of its server, or the "
                "CONNECTION LIMIT of this user or database", passing=True,
            )
        if kind == "passing" and self.read_only:
            return LogUnavailable(f"{self.shown} can't be reached or locked now ({what}); see that its server runs, "
                                  "and that this is where it is", passing=True)
        if kind == "passing":
            return LogUnavailable(
                f"{self.shown} can't be reached or locked now ({what}); nothing was acknowledged, the same commit can "
                "be tried again", passing=True,
            )
        lost = "" if self.read_only else "; nothing was acknowledged"
        return LogUnavailable(f"{self.shown} can't be used ({what}){lost}{self._remedy(e, size)}")

    def _remedy(self, e: DBAPIError, size: int) -> str:
        name = getattr(e.orig, "sqlite_errorname", "") or getattr(e.orig, "sqlstate", "") or ""
        if TLS_TROUBLE.search(str(e.orig)):
            return (": sslrootcert in store.url (or PGSSLROOTCERT) has to name the CA that signed the server's "
                    "certificate, which has to be one for the host in store.url")
        if POOLED.search(str(e.orig)):
            return ": give the database's own address in store.url, or set pool_mode=session in the pooler"
        if REFUSED.search(str(e.orig)) or name.startswith("28"):
            return (": its server refused this user; correct user and password in store.url (or PGUSER, PGPASSWORD), "
                    "or let them in by its pg_hba.conf")
        if name == "42501":
            return ": the user of store.url lacks this right; let the database's owner GRANT it"
        if name == "3F000":
            return (": no schema of its search_path is there; name one that is, where it is set (PGOPTIONS, options in "
                    "store.url, ALTER ROLE or DATABASE), or create it")
        if name == "53100":
            return ": free space on its server's disk, and it goes on by itself"
        if self.path and is_out_of_files():
            return f": {NO_FILE}"
        if self.path and (name == "SQLITE_FULL" or name.startswith(_NO_ROOM)):
            return f": {room(self.path.parent, size)}"
        if self.path and name.startswith("SQLITE_IOERR"):
            return f": the disk of {self.path.parent} fails; the machine's log (dmesg) tells more"
        if name.startswith("SQLITE_READONLY") or name == "25006":
            return ": it is read-only, its rights or its disk's; make it writable, and it goes on by itself"
        if self.path and name.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM")):
            return f": see that {self.path.parent} is there, that this user may write there, and that its disk has room"
        return ""

    def _scrub(self, e: object) -> str:
        said = " ".join(str(e).split())
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return _SECRET_KEYS.sub(r"\1=***", said)

    def __repr__(self) -> str:
        return f"<Database {self.shown}>"


_BUSY_MILLISECONDS = 5000

_NO_ROOM = ("SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMOPEN", "SQLITE_IOERR_TRUNCATE")
"""Failures of a write, for which SQLite does not tell a full disk, a quota and a limit of file sizes apart."""

_POSTGRES_ARGS = {
    "connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "tcp_user_timeout": 20000,
}
"""A server that vanishes without a word, with its machine or its network, is noticed in some 20 s, not 15 minutes."""
_LIMITS = (
    "lock_timeout = '5s'", "statement_timeout = '60s'", "idle_in_transaction_session_timeout = '30s'",
    "client_min_messages = warning",
)
_KEEPALIVE = (
    "SET tcp_keepalives_idle = 3; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3; "
    "SET tcp_user_timeout = '10s'"
)
"""So the server notices a client that vanishes in some 10 s: one that was cut off in the middle of a message would keep
its locks for two hours, and nobody could take the lease. Timeouts of statements do not count while it reads."""


def _text_log() -> logging.Logger:
    return logging.getLogger("trinity_es.log")  # not at import: Thespian silences what it finds

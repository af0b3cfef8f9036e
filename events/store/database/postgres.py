"""Connections to PostgreSQL: with a server process of their own, in UTF-8, with timeouts and keepalives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

from trinity_es.events.errors import ConfigError
from trinity_es.events.store.database.retry import POOLED

__all__ = ["postgres_engine", "require_encoding"]

_POSTGRES_ARGS = {
    "connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3,
    "tcp_user_timeout": 20000,
}
"""Options with which a client notices in some 20 s, not 15 minutes, that its server or the network is gone."""
_LIMITS = (
    "lock_timeout = '5s'", "statement_timeout = '60s'", "idle_in_transaction_session_timeout = '30s'",
    "client_min_messages = warning",
)
_KEEPALIVE = (
    "SET tcp_keepalives_idle = 3; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3; "
    "SET tcp_user_timeout = '10s'"
)
"""Settings with which the server notices in some 10 s that a client is gone. Without them a client that vanishes in the
middle of a message keeps its locks for two hours, because no statement timeout runs then."""


def require_encoding(shown: str, connection: Any, *, refused: Sequence[str] = ()) -> None:
    """Raise ConfigError if the database's encoding is not UTF-8, or with `refused` if it is one of these."""
    encoding = connection.info.parameter_status("server_encoding")
    is_refused = encoding in refused if refused else encoding != "UTF8"
    if is_refused:
        raise ConfigError(f"the encoding of {shown} is {encoding}, which does not hold every text: make the database "
                          "with CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0")


_session_urls: set[URL] = set()
"""URLs whose connections keep their server process, as checked before."""


def _require_own_session(shown: str, connection: Any, connect_again: Callable[[], Any]) -> None:
    """Raise ConfigError if a pooler may give each transaction of this connection another server process.

    The server process holds the session's settings and locks. `connection` is in autocommit mode. `connect_again` opens
    a second connection, whose transaction occupies one server process meanwhile.
    """
    def server_process(session: Any) -> int:
        return int(session.execute("SELECT pg_backend_pid()").fetchone()[0])

    pid = server_process(connection)
    with contextlib.closing(connect_again()) as second:
        try:
            is_shared = server_process(second) == pid or any(server_process(connection) != pid for _ in range(3))
        except Exception as e:
            if not POOLED.search(str(e)):
                raise
            is_shared = True
    if is_shared:
        raise ConfigError(f"{shown} is behind a pooler that gives each transaction another connection, and a run needs "
                          "one of its own: give the database's own address in store.url, or set pool_mode=session "
                          "in the pooler")


def postgres_engine(url: URL, shown: str, *, read_only: bool) -> Engine:
    """Return an engine for a log's database. Raises ConfigError, also later when a connection is opened."""
    defaults: dict[str, Any] = {k: v for k, v in _POSTGRES_ARGS.items() if k not in url.query}
    if read_only:
        defaults["prepare_threshold"] = None  # a prepared statement would outlive its transaction in a pooler
    try:
        engine = create_engine(url, isolation_level="READ COMMITTED", pool_pre_ping=True, connect_args=defaults)
    except ModuleNotFoundError as e:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'trinity-es[postgres]'") from e

    def connect_again() -> Any:
        arguments, options = engine.dialect.create_connect_args(url)
        return engine.dialect.connect(*arguments, **{**options, **defaults})

    @event.listens_for(engine, "connect", insert=True)  # before SQLAlchemy reads its first text
    def _configure(connection: Any, _record: Any) -> None:
        require_encoding(shown, connection, refused=("SQL_ASCII",))  # psycopg returns its texts as bytes
        if read_only:
            connection.read_only = True  # for each transaction: a session's setting would stay in the pooler
            return
        autocommit, connection.autocommit = connection.autocommit, True
        if url not in _session_urls:
            _require_own_session(shown, connection, connect_again)
            _session_urls.add(url)
        # For "process" and "power" alike: with it off, the death of one server process loses the last commits of all.
        connection.execute(f"SET synchronous_commit = on; SET {'; SET '.join(_LIMITS)}; {_KEEPALIVE}")
        connection.autocommit = autocommit

    if read_only:
        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            connection.exec_driver_sql(f"SET LOCAL {'; SET LOCAL '.join(_LIMITS)}")

    return engine

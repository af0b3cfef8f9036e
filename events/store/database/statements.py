"""Prebuilt statements of appends and of page reads, and the lock with which an append begins."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, cast, false, func, or_, select, text, update
from sqlalchemy import Double as SqlDouble

from trinity_es.events.errors import LogCorrupt, LogTooNew
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.prepared import Insertion, Prepared

__all__ = [
    "COMMIT_AND_EPOCH", "EVENTS", "MAX_POSITION", "MOVE_HEAD", "NEXT_PAGE", "PAGE", "STREAM_PAGE", "LockedHead",
    "lock_head", "page_of", "set_versions", "versions",
]

PAGE = 1000
"""Number of events that one query reads."""

_E = schema.events.c

EVENTS = Insertion(schema.events)
# As text for both dialects: their own `insert` would import all of PostgreSQL's dialect for a SQLite file.
_UPSERT = "INSERT INTO es_stream (stream, version) {} ON CONFLICT (stream) DO UPDATE SET version = excluded.version"
_SET_VERSION = Prepared(text(_UPSERT.format("VALUES (:stream, :version)")))
_SET_VERSIONS = Prepared(text(_UPSERT.format(
    "SELECT * FROM unnest(CAST(:streams AS text[]), CAST(:versions AS bigint[]))"
)))
MOVE_HEAD = Prepared(update(schema.heads).values(
    last_position=bindparam("p"), last_hash=bindparam("h"), recorded_at=bindparam("t")
))
_LOCK_HEAD = {
    # SQLite's clock is this machine's.
    "sqlite": Prepared(select(schema.heads, bindparam("now", type_=SqlDouble))),
    # The database's clock, so that hosts' clocks may differ. clock_timestamp is read after the wait for the row.
    "postgresql": Prepared(select(
        schema.heads, cast(func.extract("epoch", func.clock_timestamp()), SqlDouble)
    ).with_for_update()),
}
COMMIT_AND_EPOCH = Prepared(select(
    select(_E.position).where(_E.commit_id == bindparam("commit"), _E.commit_index == 0).scalar_subquery(),
    select(schema.leases.c.epoch).where(schema.leases.c.name == bindparam("lease")).scalar_subquery(),
))
"""Query for the position of a commit's first event and the epoch of a lease, each null if it does not exist."""


@lru_cache(64)
def page_of(in_stream: bool, types: tuple[str, ...] | None = None) -> Prepared:
    """Return the query for a page of events of one stream or all streams, of these types or all types."""
    position = schema.POSITION_IN_STREAM if in_stream else _E.position
    query = select(schema.events).where(position > bindparam("after"), position <= bindparam("until"))
    if in_stream:  # versions and positions rise together; with the version the index starts at this page
        query = query.where(_E.stream == bindparam("stream"), _E.version > bindparam("version")).order_by(_E.version)
    else:
        query = query.order_by(_E.position)
    if types is not None:
        query = query.where(or_(*(_E.type == name for name in types)) if types else false())
    return Prepared(query.limit(bindparam("limit")))


MAX_POSITION = 2**62
"""Position beyond every event."""
NEXT_PAGE, STREAM_PAGE = page_of(False), page_of(True)
_VERSION = Prepared(text("SELECT stream, version FROM es_stream WHERE stream = :stream"))
_VERSIONS = Prepared(text("SELECT stream, version FROM es_stream WHERE stream = ANY(:streams)"))


class LockedHead(NamedTuple):
    """The head row, locked, and the current time."""

    id: int
    last_position: int
    last_hash: bytes
    recorded_at: float
    generation: str
    schema_rev: int
    now: float
    """Unix seconds."""


def lock_head(connection: Connection, db: Database) -> LockedHead:
    """Lock and return the head row. On PostgreSQL the lock lasts until the commit; on SQLite the caller holds one.

    The lock is a statement of its own, so later statements see all commits before it. Raises LogCorrupt, LogTooNew.
    """
    row = _LOCK_HEAD[db.dialect].first(connection, {"now": time.time()})
    if row is None:
        raise LogCorrupt(f"{db.shown}: the log's head row is missing; restore the last good copy")
    head = LockedHead(*row)
    if head.schema_rev > schema.SCHEMA_REV:
        raise LogTooNew(f"{db.shown} was upgraded to log schema {head.schema_rev} meanwhile; upgrade trinity-es")
    return head


def versions(connection: Connection, streams: Iterable[str]) -> dict[str, int]:
    """Return the version of each of these streams that exists."""
    if connection.dialect.name == "sqlite":  # without a server, several statements cost less than a list of names
        return dict(row for stream in streams for row in _VERSION.rows(connection, {"stream": stream}))
    return dict(_VERSIONS.rows(connection, {"streams": list(streams)}))


def set_versions(connection: Connection, versions: Mapping[str, int]) -> None:
    if connection.dialect.name == "sqlite":
        _SET_VERSION.change_all(connection, [{"stream": stream, "version": v} for stream, v in versions.items()])
    else:
        _SET_VERSIONS.change(connection, {"streams": [*versions], "versions": [*versions.values()]})

"""The statements of an append and of reading pages, built once, and the lock that an append begins with."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, bindparam, cast, func, insert, select, text, update
from sqlalchemy import Double as SqlDouble

from trinity_es.events.errors import LogCorrupt, LogTooNew
from trinity_es.events.store import schema
from trinity_es.events.store.database import Database

__all__ = [
    "CHECKPOINT", "COMMIT", "EPOCH", "INSERT", "LOCK_HEAD", "MOVE_HEAD", "NEXT_PAGE", "PAGE", "UPSERT", "VERSIONS",
    "lock_head",
]

PAGE = 1000
"""Maximum number of events that a reader fetches at once."""

_E = schema.events.c
_K = schema.checkpoints.c

INSERT = insert(schema.events)
# In words, and the same on both: the dialects' own `insert` would import all of PostgreSQL's for a file of SQLite.
UPSERT = text(
    "INSERT INTO es_stream (stream, version) VALUES (:stream, :version) "
    "ON CONFLICT (stream) DO UPDATE SET version = excluded.version"
)
MOVE_HEAD = update(schema.heads).values(
    last_position=bindparam("p"), last_hash=bindparam("h"), recorded_at=bindparam("t")
)
LOCK_HEAD = {
    # SQLite's clock is this machine's.
    "sqlite": select(schema.heads, bindparam("now", type_=SqlDouble).label("now")),
    # The clock of the database, so that hosts need not agree; clock_timestamp moves on while the row is waited for.
    "postgresql": select(
        schema.heads, cast(func.extract("epoch", func.clock_timestamp()), SqlDouble).label("now")
    ).with_for_update(),
}
COMMIT = select(_E.position).where(_E.commit_id == bindparam("c"), _E.commit_index == 0)
NEXT_PAGE = (
    select(schema.events).where(_E.position > bindparam("after")).order_by(_E.position).limit(bindparam("limit"))
)
EPOCH = select(schema.leases.c.epoch).where(schema.leases.c.name == bindparam("n"))
VERSIONS = select(schema.streams).where(schema.streams.c.stream.in_(bindparam("names", expanding=True)))
CHECKPOINT = select(schema.checkpoints).where(_K.name == bindparam("n"))


def lock_head(connection: Connection, db: Database) -> Row[Any]:
    """Return the head row, and on PostgreSQL the turn to write: its lock is held until the commit is visible.

    It is a statement of its own, so that what follows sees all that was committed before it got the turn. Raises
    LogCorrupt, LogTooNew.
    """
    row = connection.execute(LOCK_HEAD[db.dialect], {"now": time.time()}).one_or_none()
    if row is None:
        raise LogCorrupt(f"{db.shown}: the log's head row is missing; restore the last good copy")
    if row.schema_rev > schema.SCHEMA_REV:
        raise LogTooNew(f"{db.shown} was upgraded to log schema {row.schema_rev} meanwhile; upgrade trinity-es")
    return row

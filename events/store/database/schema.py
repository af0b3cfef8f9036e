"""Tables of the log, the triggers that keep events from changing, and the hash that proves that they did not.

The log assigns positions itself: a sequence of the database leaves gaps and commits out of order.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.event import listens_for

__all__ = [
    "BULK", "GENESIS", "IS_RARE", "POSITION_IN_STREAM", "REFUSAL", "SCHEMA_REV", "body_hash", "chain_hash",
    "checkpoints", "create_journal_table", "create_payload_table", "create_triggers", "drop_triggers", "events",
    "heads", "journals", "leases", "payloads", "streams", "tables",
]

SCHEMA_REV = 1
"""Revision of these tables. A log with a higher one is refused."""

tables = MetaData()
_payload_tables = MetaData()
_journal_tables = MetaData()

# On SQLite a plain INTEGER PRIMARY KEY is the row's own key: no second index.
_Position = BigInteger().with_variant(Integer(), "sqlite")

heads = Table(
    "es_log_head",
    tables,
    Column("id", SmallInteger, primary_key=True, autoincrement=False),
    Column("last_position", BigInteger, nullable=False),
    Column("last_hash", LargeBinary, nullable=False),
    Column("recorded_at", Double, nullable=False),  # of the last event: time never goes back in the log
    Column("generation", Text, nullable=False),  # changes when a log is restored, so that readers notice
    Column("schema_rev", Integer, nullable=False),
    CheckConstraint("id = 0"),
)

events = Table(
    "es_event",
    tables,
    Column("position", _Position, primary_key=True, autoincrement=False),
    Column("stream", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("type", Text, nullable=False),
    Column("schema_version", SmallInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("recorded_at", Double, nullable=False),  # unix seconds
    Column("commit_id", Text, nullable=False),
    Column("commit_index", Integer, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    UniqueConstraint("stream", "version"),
    CheckConstraint("position >= 1"),
    CheckConstraint("version >= 1"),
)
POSITION_IN_STREAM = events.c.position + literal_column("0")
"""Position, in a form that lets only the stream's index serve queries of one stream between positions. With the bare
column PostgreSQL may also read the index of all positions, which grows with the log."""

BULK = ("AnswersRecorded", "AnswersRewarded", "RunsFinished", "TaskFinished", "TasksDispatched")
"""Frequent event types, by name: nine of ten events of a run with batches of some size."""

IS_RARE = text(f"type NOT IN ({', '.join(repr(name) for name in BULK)})")
"""Condition in the index and in each query, as a literal: otherwise a database does not see that the query fits a
partial index."""

# Indexes as text for both dialects: a partial Index on PostgreSQL would import all of its dialect, even for a SQLite
# file.
_CREATE_COMMIT_INDEX = text("CREATE UNIQUE INDEX es_event_commit ON es_event (commit_id) WHERE commit_index = 0")
"""One entry per commit instead of per event: a commit's events lie next to each other."""
_CREATE_RARE_INDEX = text(f"CREATE INDEX es_event_rare ON es_event (type, position) WHERE {IS_RARE}")
"""Bulk events are left out, so appending them costs nothing here, and the index stays small."""


@listens_for(events, "after_create")
def _create_indexes(_table: Table, connection: Connection, **_options: Any) -> None:
    connection.execute(_CREATE_COMMIT_INDEX)
    connection.execute(_CREATE_RARE_INDEX)


streams = Table(
    "es_stream",
    tables,
    Column("stream", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

leases = Table(
    "es_lease",
    tables,
    Column("name", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("owner", LargeBinary, nullable=False),  # JSON
)

checkpoints = Table(
    "es_checkpoint",
    tables,
    Column("name", Text, primary_key=True),
    Column("version", Integer, nullable=False),  # of the read model
    Column("position", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),  # of the event at that position
    Column("generation", Text, nullable=False),
)

payloads = Table(
    "es_payload",
    _payload_tables,
    Column("digest", Text, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

journals = Table(
    "es_journal",
    _journal_tables,
    Column("number", BigInteger, Identity(), primary_key=True),
    Column("runner", Text, nullable=False),
    Column("incarnation", Integer, nullable=False),
    Column("segment", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("es_journal_life", "runner", "incarnation"),
)
"""Journals of runners (`journals.py`), in PostgreSQL alone."""

GENESIS = bytes(32)
"""Hash before the first event."""

_BODY = struct.Struct(">QHI")
_LINK = struct.Struct(">Qd")
_LENGTH = struct.Struct(">Q")


def body_hash(
    *, stream: str, version: int, type: str, schema_version: int, data: bytes, metadata: bytes, commit_id: str,
    commit_index: int,
) -> bytes:
    """Compute SHA-256 over the parts of an event that are fixed before its place in the log."""
    parts = stream.encode(), type.encode(), commit_id.encode(), data, metadata
    # Each part has its length in front, so that no byte can move from one field to the next.
    joined = b"".join([part for text in parts for part in (_LENGTH.pack(len(text)), text)])
    return hashlib.sha256(_BODY.pack(version, schema_version, commit_index) + joined).digest()


def chain_hash(previous: bytes, position: int, recorded_at: float, body: bytes) -> bytes:
    """Compute the event's hash: SHA-256 over the event and the hash of the event before it."""
    return hashlib.sha256(previous + _LINK.pack(position, recorded_at) + body).digest()


REFUSAL = " BEGIN RAISE EXCEPTION 'events never change: % refused', lower(TG_OP); END "
"""Body of the function with which PostgreSQL refuses to change an event."""

_TRIGGERS = {
    "sqlite": [
        "CREATE TRIGGER IF NOT EXISTS es_event_no_update BEFORE UPDATE ON es_event "
        "BEGIN SELECT RAISE(ABORT, 'events never change: update refused'); END",
        "CREATE TRIGGER IF NOT EXISTS es_event_no_delete BEFORE DELETE ON es_event "
        "BEGIN SELECT RAISE(ABORT, 'events never change: delete refused'); END",
        # INSERT OR REPLACE would delete a row without firing the trigger above.
        "CREATE TRIGGER IF NOT EXISTS es_event_no_replace BEFORE INSERT ON es_event "
        "WHEN NEW.position <= (SELECT last_position FROM es_log_head) "
        "BEGIN SELECT RAISE(ABORT, 'events never change: that position is taken'); END",
    ],
    "postgresql": [
        "CREATE OR REPLACE FUNCTION es_event_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$${REFUSAL}$$",
        "CREATE OR REPLACE TRIGGER es_event_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON es_event "
        "FOR EACH STATEMENT EXECUTE FUNCTION es_event_refuse()",
    ],
}


def create_triggers(connection: Connection) -> None:
    """Make the database refuse UPDATE, DELETE, TRUNCATE and REPLACE of events."""
    for statement in _TRIGGERS[connection.dialect.name]:
        connection.execute(text(statement))


def drop_triggers(connection: Connection) -> None:
    """Remove the triggers: for an operator's repair, and for tests that change events."""
    if connection.dialect.name == "sqlite":
        for name in ("es_event_no_update", "es_event_no_delete", "es_event_no_replace"):
            connection.execute(text(f"DROP TRIGGER IF EXISTS {name}"))
    else:
        connection.execute(text("DROP TRIGGER IF EXISTS es_event_no_change ON es_event"))


def create_payload_table(connection: Connection) -> None:
    _payload_tables.create_all(connection)


def create_journal_table(connection: Connection) -> None:
    connection.execute(select(func.pg_advisory_xact_lock(0x7472696A)))  # IF NOT EXISTS alone collides
    _journal_tables.create_all(connection)

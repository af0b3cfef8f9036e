"""Tables of the log, the triggers that refuse changes of events, and the hash chain that reveals them.

The log assigns positions itself, because a database sequence leaves gaps and its values commit out of order.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.event import listens_for

__all__ = [
    "BULK", "FIRST_REV", "GENESIS", "IS_RARE", "POSITION_IN_STREAM", "REFUSAL", "SCHEMA_REV", "body_hash",
    "chain_hash", "checkpoints", "create_table", "create_triggers", "drop_triggers", "events", "heads", "journals",
    "leases", "payload_place", "payloads", "streams", "tables",
]

SCHEMA_REV = 2
"""Newest schema revision that this software knows. It refuses a log with a higher one."""
FIRST_REV = 1
"""Schema revision of a log without a row in `payload_place`. The first release can open such a log."""

tables = sa.MetaData()
"""Tables that every log has. `payload_place`, `payloads` and `journals` are created when they are needed."""

# On SQLite a plain INTEGER PRIMARY KEY is the row's own key: no second index.
_Position = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

heads = sa.Table(
    "es_log_head", tables,
    sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("last_position", sa.BigInteger, nullable=False),
    sa.Column("last_hash", sa.LargeBinary, nullable=False),
    sa.Column("recorded_at", sa.Double, nullable=False),  # of the last event: time never goes back in the log
    sa.Column("generation", sa.Text, nullable=False),  # changes when a log is restored, so that readers notice
    sa.Column("schema_rev", sa.Integer, nullable=False),
    sa.CheckConstraint("id = 0"),
)

events = sa.Table(
    "es_event", tables,
    sa.Column("position", _Position, primary_key=True, autoincrement=False),
    sa.Column("stream", sa.Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("schema_version", sa.SmallInteger, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Column("metadata", sa.LargeBinary, nullable=False),
    sa.Column("recorded_at", sa.Double, nullable=False),  # unix seconds
    sa.Column("commit_id", sa.Text, nullable=False),
    sa.Column("commit_index", sa.Integer, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("stream", "version"),
    sa.CheckConstraint("position >= 1"),
    sa.CheckConstraint("version >= 1"),
)
POSITION_IN_STREAM = events.c.position + sa.literal_column("0")
"""Position plus 0, for queries of one stream between positions. With the bare column PostgreSQL may choose the index of
all positions, which grows with the log, instead of the stream's."""

BULK = ("AnswersRecorded", "AnswersRewarded", "RunsFinished", "TaskFinished", "TasksDispatched")
"""Names of the frequent event types. Nine of ten events of a run with large batches are of these."""

IS_RARE = sa.text(f"type NOT IN ({', '.join(repr(name) for name in BULK)})")
"""Condition of the partial index and of its queries. It has literals, because with parameters a database does not see
that a query matches the index."""


@listens_for(events, "after_create")
def _create_indexes(_table: sa.Table, connection: sa.Connection, **_options: Any) -> None:
    # As text for both dialects: a partial Index on PostgreSQL would import all of its dialect, even for a SQLite file.
    # One entry per commit instead of per event: a commit's events lie next to each other.
    connection.execute(sa.text("CREATE UNIQUE INDEX es_event_commit ON es_event (commit_id) WHERE commit_index = 0"))
    # Bulk events are left out, so appending them costs nothing here, and the index stays small.
    connection.execute(sa.text(f"CREATE INDEX es_event_rare ON es_event (type, position) WHERE {IS_RARE}"))


streams = sa.Table(
    "es_stream", tables,
    sa.Column("stream", sa.Text, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

leases = sa.Table(
    "es_lease", tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.LargeBinary, nullable=False),  # JSON
)

checkpoints = sa.Table(
    "es_checkpoint", tables,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),  # of the read model
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),  # of the event at that position
    sa.Column("generation", sa.Text, nullable=False),
)

payloads = sa.Table(
    "es_payload", sa.MetaData(),
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

payload_place = sa.Table(
    "es_payload_place", sa.MetaData(),
    sa.Column("id", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("store", sa.LargeBinary, nullable=False),  # JSON of the StoreIdentity whose payloads these are
    sa.CheckConstraint("id = 0"),
)

journals = sa.Table(
    "es_journal", sa.MetaData(),
    sa.Column("number", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("runner", sa.Text, nullable=False),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("segment", sa.Integer, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Index("es_journal_life", "runner", "incarnation"),
)
"""Journals of runners (`journal_store.py`), in PostgreSQL alone."""

GENESIS = bytes(32)
"""Hash before the first event."""

_BODY = struct.Struct(">QHI")
_LINK = struct.Struct(">Qd")
_LENGTH = struct.Struct(">Q")


def body_hash(
    *, stream: str, version: int, type: str, schema_version: int, data: bytes, metadata: bytes, commit_id: str,
    commit_index: int,
) -> bytes:
    """Return the SHA-256 over the parts of an event that do not depend on its position and time."""
    # Each part has its length in front, so that a byte can't move from one field to the next unnoticed.
    fixed = _BODY.pack(version, schema_version, commit_index)
    joined = b"".join((fixed, _with_length(stream), _with_length(type), _with_length(commit_id),
                       _LENGTH.pack(len(data)), data, _LENGTH.pack(len(metadata)), metadata))
    return hashlib.sha256(joined).digest()


@lru_cache(256)  # events of a stream, a type and a commit follow each other
def _with_length(text: str) -> bytes:
    """Return a text as UTF-8, with its length in front."""
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def chain_hash(previous: bytes, position: int, recorded_at: float, body: bytes) -> bytes:
    """Return the hash of an event: SHA-256 over the previous event's hash, its position, its time and its body hash."""
    return hashlib.sha256(previous + _LINK.pack(position, recorded_at) + body).digest()


REFUSAL = " BEGIN RAISE EXCEPTION 'events never change: % refused', lower(TG_OP); END "
"""Body of the trigger function with which PostgreSQL refuses to change an event."""

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


def create_triggers(connection: sa.Connection) -> None:
    """Make the database refuse UPDATE, DELETE, TRUNCATE and REPLACE of events."""
    for statement in _TRIGGERS[connection.dialect.name]:
        connection.execute(sa.text(statement))


def drop_triggers(connection: sa.Connection) -> None:
    """Remove the triggers, for an operator's repair and for tests that change events."""
    if connection.dialect.name == "sqlite":
        for name in ("es_event_no_update", "es_event_no_delete", "es_event_no_replace"):
            connection.execute(sa.text(f"DROP TRIGGER IF EXISTS {name}"))
    else:
        connection.execute(sa.text("DROP TRIGGER IF EXISTS es_event_no_change ON es_event"))


def create_table(connection: sa.Connection, table: sa.Table) -> None:
    """Create `payloads` or `journals` in PostgreSQL if it is missing."""
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(0x7472696F)))  # IF NOT EXISTS alone collides
    table.create(connection, checkfirst=True)

"""Verification of a log, for `EventLog.verify`. It changes nothing.

After a broken hash it continues from the stored hash, so that one changed event is one problem and not a thousand. Any
content of a damaged file becomes a problem and no exception. Events are read page by page up to the head. A short last
transaction reads the events since then, and the tables to compare with, so concurrent writers cause no false problems.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import orjson
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from trinity_es.events import codec
from trinity_es.events.errors import LogCorrupt, LogError, NotALog
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.retry import classify
from trinity_es.events.store.records.log_values import Head, Recorded

__all__ = ["Problems", "Watcher", "check_pages", "raw_text", "verify"]

MOST_PROBLEMS = 100
"""Maximum number of reported problems. Further ones are only counted."""

PAGE = 1000

_COLUMNS = tuple(column.name for column in schema.events.columns)
_TYPES = (int, str, int, str, int, bytes, bytes, float, str, int, bytes)
"""Types of the columns, in order. SQLite stores a value of any type in any column."""

# As text, because the columns' values must be checked before they are converted.
_PAGE = text(
    f"SELECT {', '.join(_COLUMNS)} FROM es_event WHERE position > :after AND position <= :until "
    "ORDER BY position LIMIT :size"
)
_HEAD = text("SELECT id, last_position, last_hash, recorded_at, generation, schema_rev FROM es_log_head")
_STREAMS = text("SELECT stream, version FROM es_stream")
_BEYOND = text("SELECT max(position) FROM es_event")


class Watcher(Protocol):
    """Additional check of the events that `verify` reads."""

    def check_events(self, recorded: Sequence[Recorded]) -> None:
        """Check the next decodable events. Each event comes once, in order of position."""

    def finish(self, connection: Connection, head: Head, is_complete: bool) -> None:
        """Do the checks that need all events, in the last transaction.

        `is_complete`: True if no event was missing or unreadable.
        """


class Problems:
    """List of the first `MOST_PROBLEMS` problems, and the number of further ones."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._more = 0

    def add(self, problem: str) -> None:
        if len(self._first) < MOST_PROBLEMS:
            self._first.append(problem)
        else:
            self._more += 1

    def texts(self) -> list[str]:
        return [*self._first, f"and {self._more} more"] if self._more else self._first


def verify(
    database: Database, progress: Callable[[int, int], None] | None = None, watcher: Watcher | None = None
) -> list[str]:
    """Check the log up to its last event at the end of this call, and return all problems. Raises LogUnavailable."""
    problems = Problems()
    chain = _ChainCheck(problems)

    def check_rows(rows: Sequence[Any], end: int) -> None:
        position_before = chain.position
        events = [recorded for row in rows if (recorded := chain.check_row(tuple(row))) is not None]
        if rows and chain.position == position_before:
            raise LogCorrupt(f"{database.shown}: no event after position {position_before} can be read in order")
        if watcher is not None and events:
            watcher.check_events(events)
        if progress:
            progress(chain.position, end)

    def next_page(connection: Connection, until: int) -> Sequence[Any]:
        with raw_text(connection):
            return connection.execute(_PAGE, {"after": chain.position, "until": until, "size": PAGE}).all()

    def check_end(connection: Connection) -> None:
        if database.dialect == "postgresql":
            connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        with raw_text(connection):
            heads = connection.execute(_HEAD).all()
        end = _last_position(heads, problems)
        while rows := next_page(connection, end):
            check_rows(rows, end)
        _compare_with_tables(connection, chain, heads, problems)
        if watcher is not None:
            verified_end = Head(position=chain.position, generation=str(heads[0][4]) if heads else "", hash=chain.hash)
            watcher.finish(connection, verified_end, chain.is_complete and chain.position == end)

    try:
        head = database.read(lambda c: c.execute(text("SELECT last_position FROM es_log_head")).first())
        end = head[0] if head is not None and isinstance(head[0], int) else 0
        while rows := database.read(lambda c: next_page(c, end)):
            check_rows(rows, end)
        database.read(check_end, patience=0.0)
    except (LogCorrupt, NotALog) as e:
        problems.add(f"after position {chain.position}: {e.message}")
    except (SQLAlchemyError, UnicodeDecodeError) as e:  # a driver's own message may quote the damaged file
        problems.add(f"after position {chain.position}: {database.shown} can't be read: {getattr(e, 'orig', e)}")
    return problems.texts()


@contextmanager
def raw_text(connection: Connection) -> Iterator[None]:
    """In this block, read invalid UTF-8 in SQLite with its bytes escaped (`\\xe9`). The driver would raise an error."""
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name != "sqlite":
        yield
        return
    driver.text_factory = lambda data: data.decode(errors="backslashreplace")
    try:
        yield
    finally:
        driver.text_factory = str


def check_pages(connection: Connection) -> list[str]:
    """Run SQLite's integrity check of pages, trees and indexes, and return the problems."""
    try:
        with raw_text(connection):
            lines = [str(row[0]) for row in connection.execute(text(f"PRAGMA integrity_check({MOST_PROBLEMS})"))]
    except (DBAPIError, UnicodeDecodeError) as e:
        return [f"the database file: its pages can't be checked: {getattr(e, 'orig', e)}"]
    if lines == ["ok"]:
        return []
    try:
        roots = {str(row[1]): row[0] for row in connection.execute(text("SELECT name, rootpage FROM sqlite_master"))}
    except (DBAPIError, UnicodeDecodeError):
        roots = {}

    def with_name(line: str) -> str:  # "Tree 7 page 9: ..." with the name of the table or index
        return re.sub(r"^(On tree|Tree) (\d+)", lambda m: f"{roots.get(m[2], 'tree')} ({m[1].lower()} {m[2]})", line)

    parts = [part for line in lines for part in line.splitlines() if part.strip() and not part.startswith("***")]
    return [f"the database file: {with_name(part)}" for part in parts]


class _ChainCheck:
    """Check of each event against the event before it, and the state that this needs."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self.versions: dict[str, int] = {}
        self.position, self.hash, self.recorded_at = 0, schema.GENESIS, 0.0
        self.is_complete = True
        self._commit, self._index = "", 0

    def check_row(self, row: tuple[Any, ...]) -> Recorded | None:
        """Check the next row and report its problems. Return its event; None if it is unreadable or out of order."""
        add = self._problems.add
        position, stream, version, name, schema_version, data, metadata, recorded_at, commit_id, index, stored = row
        at = f"position {position} ({stream} {version}, {name})"
        if tuple(map(type, row)) != _TYPES:
            for column, value, kind in zip(_COLUMNS, row, _TYPES, strict=True):
                if type(value) is not kind:
                    add(f"{at}: its {column} is of type {type(value).__name__}, not {kind.__name__}: it was changed")
            self.is_complete = False
            if isinstance(position, int) and position > self.position:
                self.position = position
                self.hash = stored if isinstance(stored, bytes) else b""
            return None
        missing = position - self.position - 1
        self.is_complete &= missing == 0
        if missing < 0:
            add(f"{at}: it comes after position {self.position}")
            return None
        if missing:
            first = self.position + 1
            add(f"position {first}: missing" if missing == 1 else f"positions {first} to {position - 1}: missing")
        expected = self.versions.get(stream, 0) + 1
        if version != expected:
            add(f"{at}: stream {stream} has version {version} instead of {expected}")
        if index != 0 and (commit_id != self._commit or index != self._index + 1):
            add(f"{at}: it is event {index} of commit {commit_id}, but does not follow it")
        if recorded_at < self.recorded_at and name != "ClockStepped":
            add(f"{at}: it was recorded before the event before it")
        if _expected_hash(self.hash, row) != stored:
            # After missing events the hash can't be checked: the previous hash is unknown.
            add(f"{at}: its hash does not match it and the event before it: one of them was changed"
                if not missing else f"{at}: its hash can't be checked, the event before it is missing")
        self.versions[stream] = version
        self.hash, self.position, self.recorded_at = stored, position, recorded_at
        self._commit, self._index = commit_id, index
        try:
            event, decoded_metadata = codec.decode(name, schema_version, data), orjson.loads(metadata)
        except LogError as e:
            add(f"{at}: {e.message}")
        except orjson.JSONDecodeError as e:
            add(f"{at}: its metadata is no JSON: {e}")
        else:
            return Recorded(
                position=position, stream=stream, version=version, type=name, schema_version=schema_version, data=data,
                metadata=decoded_metadata, recorded_at=recorded_at, commit_id=commit_id, hash=stored, _event=event,
            )
        self.is_complete = False
        return None


def _expected_hash(previous: bytes, row: tuple[Any, ...]) -> bytes | None:
    """Return the hash that the row should have; None if a value is out of range, so that it has none."""
    try:
        position, stream, version, name, schema_version, data, metadata, recorded_at, commit_id, index, _ = row
        body = schema.body_hash(
            stream=stream, version=version, type=name, schema_version=schema_version, data=data, metadata=metadata,
            commit_id=commit_id, commit_index=index,
        )
        return schema.chain_hash(previous, position, recorded_at, body)
    except (struct.error, UnicodeEncodeError):
        return None


def _last_position(heads: Sequence[Any], problems: Problems) -> int:
    """Return the last position in the log's head row, or 0 without a row. Report the row's problems."""
    if len(heads) != 1:
        problems.add("the log's head row is missing" if not heads else f"the log has {len(heads)} head rows")
    if not heads:
        return 0
    row = heads[0]
    kinds = (("id", int), ("last_position", int), ("last_hash", bytes), ("recorded_at", float), ("generation", str),
             ("schema_rev", int))
    for (column, kind), value in zip(kinds, row, strict=True):
        if type(value) is not kind:
            problems.add(f"the log's head: its {column} is of type {type(value).__name__}, not {kind.__name__}")
    if row[5] not in (schema.FIRST_REV, schema.SCHEMA_REV):
        problems.add(f"the log's head: schema_rev is {row[5]}, this software writes {schema.SCHEMA_REV}")
    return row[1] if type(row[1]) is int else 0


def _compare_with_tables(connection: Connection, chain: _ChainCheck, heads: Sequence[Any], problems: Problems) -> None:
    """Compare the log's head row and the table of streams with the events, and report differences."""
    if heads:
        _, end, last_hash, recorded_at, _, _ = heads[0]
        if chain.position != end:
            first_missing = chain.position + 1
            positions = f"position {end}" if first_missing == end else f"positions {first_missing} to {end}"
            problems.add(f"{positions}: missing, the log's head is at {end}")
        elif last_hash != chain.hash:
            problems.add(f"position {end}: its hash is not the one in the log's head")
        elif recorded_at != chain.recorded_at:
            problems.add(f"the log's head: it says that position {end} was recorded at {recorded_at}, and the event "
                         f"{chain.recorded_at}")
        with raw_text(connection):
            beyond = connection.execute(_BEYOND).scalar()
        if isinstance(beyond, int) and isinstance(end, int) and beyond > end:
            problems.add(f"positions {end + 1} to {beyond}: they lie after the log's head")
    try:
        with raw_text(connection):
            stored = {row[0]: row[1] for row in connection.execute(_STREAMS)}
    except (DBAPIError, UnicodeDecodeError) as e:
        if classify(e) not in ("corrupt", None):
            raise
        problems.add(f"the table of streams can't be read: {getattr(e, 'orig', e)}")
        return
    for stream in sorted(stored.keys() | chain.versions.keys(), key=str):
        if stored.get(stream) != chain.versions.get(stream):
            problems.add(
                f"stream {stream}: {chain.versions.get(stream, 0)} is its last version among the events, "
                f"{stored.get(stream, 0)} in the table of streams"
            )

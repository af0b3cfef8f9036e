"""Whether a log is what was written: the work behind `EventLog.verify`.

Reads; never repairs. A problem is a sentence that names its position or stream. After a break in the chain it goes on
from the stored hash, so that one changed event is one problem and not a thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row, func, select, true

from events import codec, schema
from events.database import Database
from events.errors import LogError

__all__ = ["verify"]

MOST = 100
"""Problems told; more are counted."""

PAGE = 1000


def verify(database: Database, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Everything wrong with the log as it stood when this began; [] where it is sound."""
    # One statement, so that head and streams are of one moment on every database and isolation level.
    e, h, s = schema.events.c, schema.heads.c, schema.streams.c
    query = select(schema.heads, s.stream, s.version).select_from(
        schema.heads.outerjoin(schema.streams, true())
    )
    snapshot = database.read(lambda c: c.execute(query).all())
    if not snapshot:
        return ["the log's head row is missing"]
    end = snapshot[0].last_position
    problems = _Problems()
    versions: dict[str, int] = {}
    previous, position, recorded_at, commit, index = schema.GENESIS, 0, 0.0, "", 0

    def page(connection: Connection) -> list[Row[Any]]:
        wanted = select(schema.events).where(e.position > position, e.position <= end).order_by(e.position).limit(PAGE)
        return list(connection.execute(wanted).all())

    while rows := database.read(page):
        for row in rows:
            at = f"position {row.position} ({row.stream} {row.version}, {row.type})"
            missing = row.position - position - 1
            if missing:
                lost = f"position {position + 1}" if missing == 1 else f"positions {position + 1} to {row.position - 1}"
                problems.add(f"{lost}: missing")
            expected = versions.get(row.stream, 0) + 1
            if row.version != expected:
                problems.add(f"{at}: stream {row.stream} has version {row.version} where {expected} belongs")
            if row.commit_index != 0 and (row.commit_id != commit or row.commit_index != index + 1):
                problems.add(f"{at}: it is event {row.commit_index} of commit {row.commit_id}, but does not follow it")
            if row.recorded_at < recorded_at:
                problems.add(f"{at}: it was recorded before the event before it")
            if schema.row_hash(previous, dict(row._mapping)) != bytes(row.hash):
                # After missing events the hash can't be checked: the one before is not known.
                problems.add(f"{at}: its hash does not match it and the event before it: one of them was changed"
                             if not missing else f"{at}: its hash can't be checked, the event before it is missing")
            try:
                codec.decode(row.type, row.schema_version, bytes(row.data))
            except LogError as error:
                problems.add(f"{at}: {error.message}")
            versions[row.stream] = row.version
            previous, position, recorded_at = bytes(row.hash), row.position, row.recorded_at
            commit, index = row.commit_id, row.commit_index
        if progress:
            progress(position, end)
    if position != end:
        problems.add(f"positions {position + 1} to {end}: missing, the log's head is at {end}")
    elif bytes(snapshot[0].last_hash) != previous:
        problems.add(f"position {end}: its hash is not the one in the log's head")
    stored = {r.stream: r.version for r in snapshot if r.stream is not None}
    for stream in sorted(stored.keys() | versions.keys()):
        if stored.get(stream) != versions.get(stream):
            problems.add(
                f"stream {stream}: {versions.get(stream, 0)} is its last version among the events, "
                f"{stored.get(stream, 0)} in the table of streams"
            )
    beyond = database.read(lambda c: c.execute(select(func.max(e.position))).scalar_one_or_none()) or 0
    now = database.read(lambda c: c.execute(select(h.last_position)).scalar_one())
    if beyond > now:
        problems.add(f"positions {now + 1} to {beyond}: they lie after the log's head")
    return problems.told()


class _Problems:
    def __init__(self) -> None:
        self._told: list[str] = []
        self._more = 0

    def add(self, problem: str) -> None:
        if len(self._told) < MOST:
            self._told.append(problem)
        else:
            self._more += 1

    def told(self) -> list[str]:
        return [*self._told, f"and {self._more} more"] if self._more else self._told

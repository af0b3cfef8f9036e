"""A log of many millions of events, made in minutes by copying a short log many times.

The rows of every table are copied, with shifted numbers of batches, steps and positions, and new hashes. So the result
equals a log made by appends, and `verify` finds no problem (a test checks a small log). SQLite only.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import orjson

from trinity_es.events.store.database import schema
from trinity_es.events.store.database.urls import parse_url

AT_ONCE = 100
"""Number of copies in one transaction."""
_NUMBERED = {"BatchSubmitted": ("batch_id",), "BatchFinalized": ("result", "batch_id"), "BatchTrained": ("step",)}
"""{event type: path of the batch's number in its data}."""
_MOVED = {
    "es_stream": {"stream": "batch"},
    "rm_batch": {"stream": "batch", "batch_id": "number", "trained_step": "number", "first_position": "position",
                 "last_position": "position"},
    "rm_delivery": {"stream": "batch", "batch_id": "number", "position": "position"},
    "rm_use": {"stream": "batch", "step": "number", "position": "position"},
}
"""{table: {column whose values are shifted: kind of its values}}."""


def lengthen(url: str, events: int) -> int:
    """Repeat the batches of a log, numbered from 1, until it has at least `events` events; return their number."""
    with closing(sqlite3.connect(str(parse_url(url).database), isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        names, logged = _rows(db, "es_event ORDER BY position")
        template, width = [dict(zip(names, row, strict=True)) for row in logged], _count(db, "es_stream")
        rows = {table: _rows(db, table) for table in _MOVED}
        others = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                  if name.startswith(("rm_", "es_payload")) and name not in _MOVED and _count(db, name)}
        if others:
            raise ValueError(f"rows of {sorted(others)} can't be copied")
        length, (last, at) = len(template), db.execute("SELECT last_hash, recorded_at FROM es_log_head").fetchone()
        copies = max(0, -(-events // length) - 1)
        for first in range(1, copies + 1, AT_ONCE):
            db.execute("BEGIN")
            for copy in range(first, min(first + AT_ONCE, copies + 1)):
                made, last = _copied(template, copy, width, length, last, at)
                db.executemany(f"INSERT INTO es_event VALUES ({', '.join('?' * len(made[0]))})", made)
                for table, (columns, some) in rows.items():
                    moved = [_moved(table, columns, row, copy * width, copy * length) for row in some]
                    db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", moved)
                end = (copy + 1) * length
            db.execute("UPDATE es_log_head SET last_position = ?, last_hash = ?", (end, last))
            db.execute("UPDATE es_checkpoint SET position = ?, hash = ?", (end, last))
            db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return length * (copies + 1)


def _count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _rows(db: sqlite3.Connection, table: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    cursor = db.execute(f"SELECT * FROM {table}")
    return [column[0] for column in cursor.description], cursor.fetchall()


def _copied(
    template: list[dict[str, Any]], copy: int, width: int, length: int, last: bytes, at: float
) -> tuple[list[tuple[Any, ...]], bytes]:
    """Return the event rows of copy number `copy`, and the hash of the last one."""
    made = []
    for row in template:
        body = {key: row[key] for key in ("version", "type", "schema_version", "metadata", "commit_index")}
        body |= {"stream": _stream(row["stream"], copy * width), "commit_id": f"{row['commit_id']}-{copy}",
                 "data": _data(row, copy * width)}
        position = row["position"] + copy * length
        last = schema.chain_hash(last, position, at, schema.body_hash(**body))
        made.append((
            position, body["stream"], row["version"], row["type"], row["schema_version"], body["data"], row["metadata"],
            at, body["commit_id"], row["commit_index"], last,
        ))
    return made, last


def _data(row: dict[str, Any], more: int) -> bytes:
    if (path := _NUMBERED.get(row["type"])) is None:
        return bytes(row["data"])
    found = whole = orjson.loads(row["data"])
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] += more
    return orjson.dumps(whole, option=orjson.OPT_SORT_KEYS)


def _stream(stream: str, more: int) -> str:
    return f"batch/{int(stream.removeprefix('batch/')) + more}"


def _moved(table: str, columns: list[str], row: tuple[Any, ...], number: int, position: int) -> list[Any]:
    """Return a row of a read model, shifted for a copy by this batch number and position."""
    moved = []
    for column, value in zip(columns, row, strict=True):
        match _MOVED[table].get(column):
            case "batch":
                value = _stream(value, number)
            case "number":
                value = type(value)(int(value) + number)
            case "position":
                value += position
        moved.append(value)
    return moved

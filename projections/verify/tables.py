"""The rows of the read models against those that the events make: the work of `verify/log.py` on one database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from trinity_es.events.store.checks.verify import Problems, raw_text
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.retry import is_transient
from trinity_es.projections.tables import host_work, open_leases

__all__ = ["NEWER", "REBUILD", "UNREADABLE", "compare_tables", "short"]

UNREADABLE = (SQLAlchemyError, ValueError, TypeError, OverflowError)
"""What comes of a damaged file: errors of the driver (whose own text may be no UTF-8), and of values of other types."""
NEWER = {open_leases.NAME, host_work.NAME}
"""Tables that logs of older releases lack: where they would be empty nothing is wrong."""
REBUILD = "`trinity-es rebuild` makes it again"


def compare_tables(connection: Connection, scratch: sqlite3.Connection, problems: Problems) -> None:
    """Tell every row of the read models that is another than in `scratch`, where they were folded anew."""
    for table, columns, key in _tables(scratch):
        try:
            _compare(connection, scratch, problems, table, columns, key)
        except UNREADABLE as e:
            if is_transient(e):
                raise
            problems.add(f"table {table} can't be read ({getattr(e, 'orig', e)}): {REBUILD}")


def _tables(scratch: sqlite3.Connection) -> Iterator[tuple[str, list[str], list[int]]]:
    """Name, columns and places of the key among them, of every table of the read models."""
    own = {table.name for table in schema.tables.sorted_tables}
    names = [row[0] for row in scratch.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for name in sorted(set(names) - own):
        if not name.startswith("sqlite_"):
            info = list(scratch.execute(f"PRAGMA table_info({name})"))
            key = sorted((row for row in info if row[5]), key=lambda row: row[5])
            yield name, [row[1] for row in info], [row[0] for row in key]


def _compare(
    connection: Connection, scratch: sqlite3.Connection, problems: Problems, table: str, columns: list[str],
    key: list[int],
) -> None:
    there = {column["name"] for column in inspect(connection).get_columns(table)} if inspect(
        connection).has_table(table) else set()
    (count,) = scratch.execute(f"SELECT count(*) FROM {table}").fetchone()
    if not there and table in NEWER and not count:
        return  # an older release made the log, which knew nothing of what it holds
    if lacks := [column for column in columns if column not in there]:
        problems.add(f"table {table} lacks {', '.join(lacks) if there else 'altogether'}: {REBUILD}")
        return
    listed = ", ".join(columns)
    same = " AND ".join(f"{columns[i]} = ?" for i in key)
    lookup = f"SELECT {listed} FROM {table} WHERE {same}"
    exact = connection.dialect.name == "sqlite"  # elsewhere the types of columns are kept, and a bool is no int
    query, seen, met = text(f"SELECT {listed} FROM {table}"), 0, 0
    options = {"stream_results": True, "yield_per": 1000}
    with raw_text(connection), closing(connection.execute(query, execution_options=options)) as rows:
        for row in rows:
            seen += 1
            values = tuple(row)
            if seen > 2 * count + 1000:
                problems.add(f"table {table}: it has more than {seen} rows where {count} belong")
                return
            expected = _row(scratch, lookup, [values[i] for i in key])
            shown = ", ".join(short(values[i]) for i in key)
            if expected is None:
                problems.add(f"table {table}: no event tells of its row {shown}")
                continue
            met += 1
            for column, is_, ought in zip(columns, values, expected, strict=True):
                if is_ != ought or (exact and type(is_) is not type(ought)):
                    problems.add(f"table {table}, row {shown}: {column} is {short(is_)}, by the events it is "
                                      f"{short(ought)}")
    if met < count:
        _missing(connection, scratch, problems, table, columns, key)
    elif met > count:
        problems.add(f"table {table}: it has {met} rows where {count} belong")


def _row(scratch: sqlite3.Connection, lookup: str, key: list[Any]) -> tuple[Any, ...] | None:
    try:
        found: tuple[Any, ...] | None = scratch.execute(lookup, key).fetchone()
    except (sqlite3.Error, OverflowError, UnicodeEncodeError):
        return None
    return found


def _missing(
    connection: Connection, scratch: sqlite3.Connection, problems: Problems, table: str, columns: list[str],
    key: list[int],
) -> None:
    names = [columns[i] for i in key]
    query = text(f"SELECT 1 FROM {table} WHERE " + " AND ".join(f"{name} = :k{i}" for i, name in enumerate(names)))
    for row in scratch.execute(f"SELECT {', '.join(names)} FROM {table}"):
        if connection.execute(query, {f"k{i}": value for i, value in enumerate(row)}).first() is None:
            problems.add(f"table {table}: its row {', '.join(map(short, row))} is missing")


def short(value: Any, length: int = 80) -> str:
    shown = repr(value)
    return shown if len(shown) <= length else shown[: length - 3] + "..."

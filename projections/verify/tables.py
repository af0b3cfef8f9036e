"""Comparison of the read models' rows with those folded from the events."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from trinity_es.events.store.checks.verify import Problems, raw_text
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.retry import is_transient
from trinity_es.projections.tables import host_work, open_leases

__all__ = ["NEWER", "REBUILD", "UNREADABLE", "compare_tables", "short"]

UNREADABLE = (SQLAlchemyError, ValueError, TypeError, OverflowError)
"""Errors that a damaged file may cause: of the driver, of text that is not UTF-8, and of values of wrong types."""
NEWER = {open_leases.NAME, host_work.NAME}
"""Tables that logs of older releases lack. This is no problem if the table would be empty."""
REBUILD = "run `trinity-es rebuild`"


def compare_tables(connection: Connection, scratch: sqlite3.Connection, problems: Problems) -> None:
    """Report every row of the log's read models that differs from the expected row in `scratch`."""
    for table, columns, key in _read_model_tables(scratch):
        try:
            _compare(connection, scratch, problems, table, columns, key)
        except UNREADABLE as e:
            if is_transient(e):
                raise
            problems.add(f"table {table} can't be read ({getattr(e, 'orig', e)}): {REBUILD}")


def _read_model_tables(scratch: sqlite3.Connection) -> Iterator[tuple[str, list[str], list[int]]]:
    """Yield (name, columns, column indices of the key) of every table of the read models."""
    of_log = {table.name for table in schema.tables.sorted_tables}
    names = {row[0] for row in scratch.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for name in sorted(names - of_log):
        if not name.startswith("sqlite_"):
            info = list(scratch.execute(f"PRAGMA table_info({name})"))
            key = sorted((row for row in info if row[5]), key=lambda row: row[5])
            yield name, [row[1] for row in info], [row[0] for row in key]


def _compare(
    connection: Connection, scratch: sqlite3.Connection, problems: Problems, table: str, columns: list[str],
    key: list[int],
) -> None:
    """Compare each row of a table with the expected one, then report expected rows that the table lacks."""
    table_exists = inspect(connection).has_table(table)
    stored = {column["name"] for column in inspect(connection).get_columns(table)} if table_exists else set()
    (expected_count,) = scratch.execute(f"SELECT count(*) FROM {table}").fetchone()
    if not table_exists and table in NEWER and not expected_count:
        return  # the log is of an older release without this table
    if missing := [column for column in columns if column not in stored]:
        problems.add(f"table {table} {'lacks ' + ', '.join(missing) if table_exists else 'is missing'}: {REBUILD}")
        return
    names = ", ".join(columns)
    condition = " AND ".join(f"{columns[i]} = ?" for i in key)
    lookup = f"SELECT {names} FROM {table} WHERE {condition}"
    # Other databases enforce column types, and there a bool is no int.
    compares_types = connection.dialect.name == "sqlite"
    query = text(f"SELECT {names} FROM {table}")
    row_count, matched_count = 0, 0
    options = {"stream_results": True, "yield_per": 1000}
    with raw_text(connection), closing(connection.execute(query, execution_options=options)) as rows:
        for row in rows:
            row_count += 1
            values = tuple(row)
            if row_count > 2 * expected_count + 1000:
                problems.add(f"table {table}: it has more than {row_count} rows, expected {expected_count}")
                return
            expected = _expected_row(scratch, lookup, [values[i] for i in key])
            key_text = ", ".join(short(values[i]) for i in key)
            if expected is None:
                problems.add(f"table {table}: no event makes its row {key_text}")
                continue
            matched_count += 1
            for column, value, folded in zip(columns, values, expected, strict=True):
                if value != folded or (compares_types and type(value) is not type(folded)):
                    problems.add(f"table {table}, row {key_text}: {column} is {short(value)}, by the events it is "
                                 f"{short(folded)}")
    if matched_count < expected_count:
        _report_missing(connection, scratch, problems, table, [columns[i] for i in key])
    elif matched_count > expected_count:
        problems.add(f"table {table}: it has {matched_count} rows, expected {expected_count}")


def _expected_row(scratch: sqlite3.Connection, lookup: str, key: list[Any]) -> tuple[Any, ...] | None:
    with suppress(sqlite3.Error, OverflowError, UnicodeEncodeError):
        return scratch.execute(lookup, key).fetchone()  # type: ignore[no-any-return]  # the driver's own
    return None


def _report_missing(
    connection: Connection, scratch: sqlite3.Connection, problems: Problems, table: str, names: list[str]
) -> None:
    query = text(f"SELECT 1 FROM {table} WHERE " + " AND ".join(f"{name} = :k{i}" for i, name in enumerate(names)))
    for row in scratch.execute(f"SELECT {', '.join(names)} FROM {table}"):
        if connection.execute(query, {f"k{i}": value for i, value in enumerate(row)}).first() is None:
            problems.add(f"table {table}: its row {', '.join(map(short, row))} is missing")


def short(value: Any, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."

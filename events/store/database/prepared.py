"""SQL statements that are compiled once per dialect and then passed straight to the driver.

SQLAlchemy takes some 30 us to run a prebuilt statement, and 100 us to build it first; sqlite3 itself takes 5 us.
An append runs ten statements. Errors are those of SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

from sqlalchemy import Connection, Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

__all__ = ["Gathered", "Insertion", "Prepared"]

Values = Mapping[str, Any]
"""Parameter -> value: a bool, number, text, bytes or None, which the driver gets without conversion."""


class Prepared:
    """A SQL statement whose text never changes: each execution gives it other parameters only."""

    def __init__(self, statement: ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, dict[str, Any]]] = {}

    def rows(self, connection: Connection, values: Values) -> list[tuple[Any, ...]]:
        return self._run(connection, "execute", values).fetchall()  # type: ignore[no-any-return]  # the driver's own

    def first(self, connection: Connection, values: Values) -> tuple[Any, ...] | None:
        return self._run(connection, "execute", values).fetchone()  # type: ignore[no-any-return]  # the driver's own

    def change(self, connection: Connection, values: Values) -> int:
        """Run an INSERT, UPDATE or DELETE, and return the number of affected rows."""
        return int(self._run(connection, "execute", values).rowcount)

    def change_all(self, connection: Connection, rows: Sequence[Values]) -> None:
        if len(rows) == 1:  # psycopg's executemany takes half as long again
            self._run(connection, "execute", rows[0])
        elif rows:
            self._run(connection, "executemany", rows)

    def _run(self, connection: Connection, method: str, values: Any) -> Any:
        """Run the compiled statement with the driver's `execute` or `executemany`, and return the cursor."""
        sql, constants = self._compiled.get(connection.dialect.name) or self._compile(connection)
        if constants:
            values = constants | values if method == "execute" else [constants | row for row in values]
        driver: Any = connection.connection.dbapi_connection
        try:
            cursor = driver.cursor()
            getattr(cursor, method)(sql, values)
        except connection.dialect.loaded_dbapi.Error as e:
            _raise_sqlalchemy_error(connection, sql, e)
        return cursor

    def _compile(self, connection: Connection) -> tuple[str, dict[str, Any]]:
        """Compile the statement for this connection's dialect, and return and cache its SQL and fixed parameters."""
        dialect = connection.dialect
        # Named parameters on both: sqlite3 knows `:name` too.
        named_dialect = type(dialect)(paramstyle="named") if dialect.name == "sqlite" else type(dialect)()  # type: ignore[call-arg]
        compiled = self._statement.compile(dialect=named_dialect)
        constants = {name: value for name, value in compiled.params.items() if value is not None}
        self._compiled[dialect.name] = sql_and_values = str(compiled), constants
        return sql_and_values


_SEVERAL = 16
"""Number of rows in one INSERT on SQLite, which takes three quarters of the time of single INSERTs."""


class Insertion:
    """Insertion of whole rows into a table, on PostgreSQL by COPY.

    COPY takes a fifth of the time of `executemany` for 1,024 rows, a third for 64, and no longer for a single row.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        names = ", ".join(table.columns.keys())
        row = f"({', '.join('?' for _ in table.columns)})"
        self._insert = f"INSERT INTO {table.name} ({names}) VALUES {row}"
        self._insert_several = f"{self._insert}{f', {row}' * (_SEVERAL - 1)}"
        self._copy = f"COPY {table.name} ({names}) FROM STDIN (FORMAT BINARY)"
        self._types: list[str] = []

    def insert(self, connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert these rows, which have a value for each column in order. Raises DBAPIError."""
        driver: Any = connection.connection.dbapi_connection
        is_sqlite = connection.dialect.name == "sqlite"
        try:
            if is_sqlite:
                last = len(rows) - len(rows) % _SEVERAL
                groups = (rows[first : first + _SEVERAL] for first in range(0, last, _SEVERAL))
                driver.executemany(self._insert_several, map(list, map(chain.from_iterable, groups)))
                driver.executemany(self._insert, rows[last:])
                return
            with driver.cursor() as cursor, cursor.copy(self._copy) as copy:
                if not self._types:
                    self._types = [c.type.compile(connection.dialect).lower() for c in self._table.columns]
                copy.set_types(self._types)
                for row in rows:
                    copy.write_row(row)
        except connection.dialect.loaded_dbapi.Error as e:
            _raise_sqlalchemy_error(connection, self._insert if is_sqlite else self._copy, e)


class Gathered:
    """Buffer of rows to write. `write` runs each statement once for all its rows instead of once per row."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._rows: dict[Prepared, list[Values]] = {}

    def add(self, statement: Prepared, *rows: Values) -> None:
        """Buffer these rows for a statement. `write` keeps the order of a statement's rows, not that of statements."""
        self._rows.setdefault(statement, []).extend(rows)

    def waiting(self, statement: Prepared) -> Sequence[Values]:
        return self._rows.get(statement, ())

    def write(self) -> Connection:
        """Write and clear all buffered rows. Return the connection, through which they are now visible."""
        all_rows, self._rows = self._rows, {}
        for statement, rows in all_rows.items():
            statement.change_all(self.connection, rows)
        return self.connection


def _raise_sqlalchemy_error(connection: Connection, sql: str, error: Exception) -> NoReturn:
    """Raise the driver's error as SQLAlchemy would, after invalidating a lost connection."""
    dialect = connection.dialect
    is_lost = dialect.is_disconnect(error, connection.connection, None)  # type: ignore[arg-type]  # typed for its own
    if is_lost:
        connection.invalidate(error)
    raise DBAPIError.instance(
        sql, None, error, dialect.loaded_dbapi.Error, connection_invalidated=is_lost, dialect=dialect
    ) from error

"""Statements that go straight to the driver raise, and give up, what SQLAlchemy would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, bindparam, create_engine, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from trinity_es.events.store.database import schema
from trinity_es.events.store.database.prepared import Prepared

NEW = Prepared(text("INSERT INTO es_stream (stream, version) VALUES (:stream, :version)"))
ALL = Prepared(text("SELECT stream, version FROM es_stream WHERE version > :after ORDER BY stream"))
RAISE = Prepared(
    update(schema.streams).where(schema.streams.c.stream == bindparam("of"))
    .values(version=schema.streams.c.version + 10)
)


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    schema.tables.create_all(engine)
    with engine.connect() as connection:
        yield connection


def test_rows_are_written_changed_and_read(connection: Connection) -> None:
    NEW.change_all(connection, [{"stream": "a", "version": 1}, {"stream": "b", "version": 2}])
    NEW.change_all(connection, [])
    assert RAISE.change(connection, {"of": "a"}) == 1  # the 10 is a value of the statement itself
    assert RAISE.change(connection, {"of": "nobody"}) == 0
    assert ALL.rows(connection, {"after": 0}) == [("a", 11), ("b", 2)]
    assert ALL.first(connection, {"after": 2}) == ("a", 11)
    assert ALL.first(connection, {"after": 11}) is None


def test_what_the_driver_raises_comes_out_as_sqlalchemys(connection: Connection) -> None:
    NEW.change(connection, {"stream": "a", "version": 1})
    with pytest.raises(IntegrityError, match=r"UNIQUE constraint failed: es_stream.stream") as raised:
        NEW.change(connection, {"stream": "a", "version": 2})
    assert raised.value.orig is not None
    assert not raised.value.connection_invalidated
    assert ALL.rows(connection, {"after": 0}) == [("a", 1)]  # the connection is as good as before


def test_a_lost_connection_is_given_up(connection: Connection) -> None:
    driver = connection.connection.dbapi_connection
    driver.close()
    with pytest.raises(DBAPIError) as raised:
        ALL.rows(connection, {"after": 0})
    assert raised.value.connection_invalidated
    assert connection.invalidated

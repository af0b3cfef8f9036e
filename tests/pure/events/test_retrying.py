"""Which trouble of a database passes, how it is waited out, and what prepared statements raise."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import Connection, bindparam, create_engine, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trinity_es.events.errors import ConcurrencyError, Fenced, LogUnavailable
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.prepared import Prepared
from trinity_es.events.store.database.retry import Backoff, classify, is_transient, patiently, without_repeats


def of_sqlite(name: str) -> sqlite3.Error:
    error = sqlite3.OperationalError(name)
    error.sqlite_errorname = name
    return error


def of_postgres(state: str | None, said: str = "said") -> psycopg.Error:
    cls: type[psycopg.Error] = psycopg.OperationalError if state is None else psycopg.errors.lookup(state)
    return cls(said)


@pytest.mark.parametrize("error", [
    *(of_postgres(state, state) for state in (
        "08006", "08000",  # connection lost
        "57P01", "57P02", "57P03",  # the server ends, crashed, starts
        "53300",  # too many connections
        "40001", "40P01", "40003",  # run it again; deadlock; who knows whether it was done
        "55P03", "57014", "25P03",  # a lock, a statement, a transaction that took too long
    )),
    *(of_postgres(None, said) for said in (
        "server closed the connection unexpectedly", "the database system is starting up",
        'connection to server on socket "/tmp/x" failed: No such file or directory', "Connection refused",
        "sorry, too many clients already", "the connection is closed",
    )),
    *map(of_sqlite, ["SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT", "SQLITE_LOCKED", "SQLITE_PROTOCOL"]),
], ids=str)
def test_passes(error: Exception) -> None:
    assert is_transient(error)
    assert is_transient(DBAPIError("SELECT 1", {}, error))


@pytest.mark.parametrize(("error", "kind"), [
    (of_postgres("53100"), "unavailable"),  # disk full
    (of_postgres("25006"), "unavailable"),  # read-only
    (of_postgres("28P01"), "unavailable"),  # wrong password
    (of_postgres(None, 'FATAL: role "x" does not exist'), "unavailable"),
    (of_postgres(None, 'FATAL: database "x" does not exist'), "missing"),
    (of_postgres("3D000"), "missing"),
    (of_postgres("XX001"), "corrupt"),
    (of_postgres("42P01", 'relation "es_event" does not exist'), "not_a_log"),
    (of_postgres("42601"), None),  # a syntax error is a bug of ours
    (of_postgres("23505"), None),
    (of_sqlite("SQLITE_FULL"), "unavailable"),
    (of_sqlite("SQLITE_IOERR_WRITE"), "unavailable"),
    (of_sqlite("SQLITE_CORRUPT"), "corrupt"),
    (of_sqlite("SQLITE_NOTADB"), "not_a_log"),
    (of_sqlite("SQLITE_ERROR"), None),
    (ValueError("x"), None),
])
def test_stays(error: Exception, kind: str | None) -> None:
    assert classify(error) == kind
    assert not is_transient(error)


def test_of_our_own_errors_the_one_that_says_so() -> None:
    assert is_transient(LogUnavailable("away", passing=True))
    assert is_transient(PoolTimeout("no connection left"))
    for error in (LogUnavailable("disk full"), Fenced("x"), ConcurrencyError("x"), ValueError("x")):
        assert not is_transient(error)


def test_pauses_double_up_to_the_longest_and_begin_anew() -> None:
    pauses = Backoff(0.05, 2.0)
    assert [pauses.next(0.0) for _ in range(8)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert pauses.next(0.5) == 1.5
    pauses.reset()
    assert pauses.next(0.0) == 0.05


class Clock:
    def __init__(self) -> None:
        self.time, self.pauses = 0.0, 0

    def wait(self, seconds: float) -> bool:
        self.time += seconds
        self.pauses += 1
        return False


def failing(times: int, error: Exception) -> Callable[[], int]:
    calls = [0]

    def work() -> int:
        calls[0] += 1
        if calls[0] <= times:
            raise error
        return calls[0]

    return work


def test_what_passes_is_tried_again() -> None:
    clock, heard = Clock(), list[Exception]()
    away = LogUnavailable("away", passing=True)
    got = patiently(
        failing(5, away), seconds=60, wait=clock.wait, now=lambda: clock.time, chance=lambda: 0.0, tell=heard.append
    )
    assert (got, clock.pauses, heard) == (6, 5, [away] * 5)
    assert clock.time == pytest.approx(0.05 + 0.1 + 0.2 + 0.4 + 0.8)


def test_what_does_not_pass_in_time_is_raised() -> None:
    clock = Clock()
    with pytest.raises(LogUnavailable, match="away"):
        patiently(
            failing(10_000, LogUnavailable("away", passing=True)), seconds=60, wait=clock.wait,
            now=lambda: clock.time, chance=lambda: 0.0,
        )
    assert 60 <= clock.time <= 62


def test_what_stays_is_raised_at_once() -> None:
    clock = Clock()
    with pytest.raises(LogUnavailable, match="disk full"):
        patiently(failing(1, LogUnavailable("disk full")), seconds=60, wait=clock.wait)
    assert clock.pauses == 0


def test_it_can_be_told_to_give_up() -> None:
    with pytest.raises(LogUnavailable, match="away"):
        patiently(failing(3, LogUnavailable("away", passing=True)), seconds=60, wait=lambda pause: True)


def test_what_is_said_again_is_not_news() -> None:
    heard: list[str] = []
    tell = without_repeats(lambda e: heard.append(str(e)))
    for said in ("refused", "refused", "starting up", "starting up", "refused"):
        tell(LogUnavailable(said))
    assert heard == ["refused", "starting up", "refused"]


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

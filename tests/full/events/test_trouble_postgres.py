"""Trouble with PostgreSQL: connections cut, servers that restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from sqlalchemy import text

from tests.helpers.faults import Server
from tests.helpers.logs import dropped, write
from trinity_es.events.errors import LogNotFound, LogUnavailable
from trinity_es.events.store.database import Database
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads import digest_of, open_payloads, patient
from trinity_es.events.store.retry import is_transient
from trinity_es.testing import wait_until


@pytest.mark.postgres
class TestPostgres:
    def test_a_database_that_is_not_there(self, postgres: Callable[[], str]) -> None:
        url = postgres()
        missing = url.replace("/t", "/nope_t", 1) if "/t" in url.split("?")[0] else url
        with pytest.raises(LogNotFound, match="does not exist"):
            EventLog.open(missing, create=True)

    def test_a_database_without_a_log(self, postgres: Callable[[], str]) -> None:
        with pytest.raises(LogNotFound, match="empty database"):
            EventLog.open(postgres())

    def test_a_database_of_other_tables_gets_its_log_beside_them(self, postgres: Callable[[], str]) -> None:
        url = postgres()
        with closing(Database(url)) as other, other.engine.begin() as connection:
            connection.execute(text("CREATE TABLE recipes (name TEXT)"))
        with pytest.raises(LogNotFound, match="recipes"):
            EventLog.open(url)
        EventLog.open(url, create=True).close()
        EventLog.open(url).close()

    def test_connections_that_the_server_ends_are_made_again(self, postgres: Callable[[], str]) -> None:
        url = postgres()
        with EventLog.open(url, create=True) as log, EventLog.open(url) as other:
            write(log, "a", 0)
            for i in range(1, 4):
                with other.engine.begin() as connection:
                    connection.execute(
                        text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
                             "current_database() AND pid <> pg_backend_pid()")
                    )
                write(log, "a", i)
            assert [r.version for r in log.read()] == [1, 2, 3, 4]

    def test_a_read_only_server_is_told(self, postgres: Callable[[], str]) -> None:
        url = postgres()
        with EventLog.open(url, create=True) as log, log.engine.begin() as connection:
            connection.execute(
                text(f"ALTER DATABASE {connection.engine.url.database} SET default_transaction_read_only = on")
            )
        with EventLog.open(url, patience=0.5) as log, pytest.raises(LogUnavailable, match="read-only"):
            write(log, "a", 0)

    @pytest.mark.parametrize("durability", ["process", "power"])
    def test_a_commit_is_never_acknowledged_before_it_is_written(
        self, postgres: Callable[[], str], durability: str
    ) -> None:
        """Whatever the server's own setting is. With it off, a killed server process takes acknowledged commits."""
        url = postgres()
        with EventLog.open(url, create=True) as log, log.engine.begin() as connection:
            connection.execute(text(f"ALTER DATABASE {log.engine.url.database} SET synchronous_commit = off"))
        log = EventLog.open(url, durability=durability)  # type: ignore[arg-type]  # a str of the parametrize
        with log, log.engine.connect() as connection:
            assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == "on"


@pytest.mark.postgres
class TestAServerThatRestarts:
    def test_connections_of_the_pool_are_made_anew(self, own_server: Server) -> None:
        """Also where nobody tries twice: read models are read from the engine itself."""
        url = own_server.url(own_server.new_database())
        with EventLog.open(url, create=True) as log:
            write(log, "a", 0)
            own_server.stop()
            own_server.start()
            wait_until(lambda: own_server.answers(), "the server to answer")
            with log.engine.connect() as connection:
                assert connection.execute(text("SELECT count(*) FROM es_event")).scalar_one() == 1

    def test_loses_nothing_that_was_acknowledged_also_with_the_lesser_durability(self, own_server: Server) -> None:
        url = own_server.url(own_server.new_database())
        with EventLog.open(url, create=True, durability="process") as log:
            for i in range(20):
                write(log, "a", i)
            own_server.stop()
            own_server.start()
            assert log.head().position == 20

    def test_payloads_wait_for_it_and_are_stored_once(self, own_server: Server) -> None:
        store = open_payloads(own_server.url(own_server.new_database()), patience=0.1)
        own_server.stop()
        with pytest.raises(LogUnavailable):
            store.put(b"dear")
        timer = threading.Timer(1.0, own_server.start)
        timer.start()
        waiting = patient(store, 30.0)
        assert waiting.put(b"dear") == store.put(b"dear")
        assert waiting.get(digest_of(b"dear")) == b"dear"
        assert list(store.digests()) == [digest_of(b"dear")]
        timer.join()
        store.close()

    def test_a_writer_waits_for_it(self, own_server: Server) -> None:
        url = own_server.url(own_server.new_database())
        with EventLog.open(url, create=True) as log:
            write(log, "a", 0)
            own_server.stop()
            assert not log.is_reachable()
            with pytest.raises(LogUnavailable) as caught:
                log.append([Write(stream="a", expected_version=1, events=[dropped(1)])], commit_id="b", patience=0.0)
            assert is_transient(caught.value)
            timer = threading.Timer(1.0, own_server.start)
            timer.start()
            write(log, "a", 1)
            timer.join()
            assert log.is_reachable()
            assert log.head().position == 2
            assert log.verify() == []

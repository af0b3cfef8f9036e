"""Trouble with PostgreSQL: connections cut, servers that restart."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from tests.helpers.faults import Server
from tests.helpers.handmade import cli
from tests.helpers.logs import dropped, write
from tests.helpers.pooler import pooled
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, LogNotFound, LogUnavailable
from trinity_es.events.store.database.database import Database
from trinity_es.events.store.database.leader_lock import is_led
from trinity_es.events.store.database.retry import is_transient
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import digest_of, open_payloads, patient
from trinity_es.system import lifecycle
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
@pytest.mark.parametrize(("role", "says", "finds"), [
    ("LOGIN", "permission denied for schema public.*GRANT", "may not create tables there"),
    ("NOLOGIN", "not permitted to log in.*server refused this user; correct user and password in store.url", ""),
    ("LOGIN CONNECTION LIMIT 1", "takes no more connections.*CONNECTION LIMIT", "4 connections are free"),
])
def test_who_is_not_let_in_is_told_by_whom_and_the_way_out(
    postgres: Callable[[], str], tmp_path: Path, role: str, says: str, finds: str
) -> None:
    url, name = postgres(), f"r{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        if "LIMIT" in role:
            connection.execute("GRANT CREATE ON SCHEMA public TO public")
        connection.execute(f"CREATE ROLE {name} {role}")
    mine = url.replace("//postgres:", f"//{name}")
    with pytest.raises(LogUnavailable, match=says):
        EventLog.open(mine, create=True, patience=0.0)
    if "LIMIT" in role:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"ALTER ROLE {name} CONNECTION LIMIT 4")
    config = {"store": {"url": mine}, "explorer": {"rollout_model": {"engine_type": "scripted"}}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))  # JSON is YAML
    done = cli("doctor", tmp_path / "c.yaml", "--json")
    [store] = [f for f in json.loads(done.stdout)["findings"] if f["what"] == "store"]
    assert (done.exit_code, store["verdict"] in ("wrong", "missing")) == (1, True)
    assert re.search(finds or says, store["told"])
    if "LIMIT" in role:
        with pytest.raises(ConfigError, match="lets this user have 4 connections, but a run holds 6 or more: raise"):
            lifecycle.start(Config.from_dict(config, folder=tmp_path))
        with psycopg.connect(url) as connection:  # it began nothing
            assert connection.execute("SELECT count(*) FROM es_event").fetchone() == (0,)


@pytest.mark.postgres
def test_a_search_path_without_a_schema_is_told_with_its_database_and_the_way_out(postgres: Callable[[], str]) -> None:
    url = postgres()
    with pytest.raises(LogUnavailable, match=r"postgresql.*no schema has been selected.*search_path.*PGOPTIONS"):
        EventLog.open(f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3Dnosuch", create=True)


@pytest.mark.postgres
class TestAPooler:
    """It gives each transaction whatever process of the server is free, and another application the next time."""

    def test_who_reads_leaves_nothing_behind(self, postgres: Callable[[], str]) -> None:
        direct = postgres()
        with EventLog.open(direct, create=True) as log:
            write(log, "a", 0)
            open_payloads(direct).put(b"dear")
        with pooled(direct) as url, psycopg.connect(url, prepare_threshold=None) as other:
            before = left(other)
            for _ in range(8):  # what is asked often is prepared by psycopg
                with EventLog.open(url, read_only=True) as log, closing(open_payloads(url, create=False)) as store:
                    for _ in range(8):
                        assert [r.version for r in log.read()] == [1]
                        assert store.get(digest_of(b"dear")) == b"dear"
            assert is_led(url) is False
            assert left(other) == before
            other.execute("CREATE TABLE after (x int)")
            other.commit()

    @pytest.mark.parametrize("create", [True, False], ids=["a new log", "one that is there"])
    def test_a_run_is_refused_by_name(self, postgres: Callable[[], str], create: bool) -> None:
        direct = postgres()
        if not create:
            EventLog.open(direct, create=True).close()
        with pooled(direct) as url, psycopg.connect(url, prepare_threshold=None) as other:
            before = left(other)
            for opened in (EventLog.open, open_payloads):
                with pytest.raises(ConfigError, match=r"behind a pooler.*own address in store.url, or set pool_mode="):
                    opened(url, create=True)
            assert left(other) == before


def left(connection: psycopg.Connection) -> list[Any]:
    """What outlives a transaction: settings, prepared statements, locks, the temporary schema."""
    found = connection.execute(
        "SELECT (SELECT array_agg(name || setting ORDER BY name) FROM pg_settings WHERE source = 'session'), "
        "(SELECT count(*) FROM pg_prepared_statements), "
        "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'), pg_my_temp_schema()::int, "
        "current_setting('default_transaction_read_only')").fetchall()
    connection.commit()
    return found


@pytest.mark.postgres
class TestAServerThatRestarts:
    def test_loses_nothing_that_was_acknowledged_also_with_the_lesser_durability(self, own_server: Server) -> None:
        url = own_server.url(own_server.new_database())
        with EventLog.open(url, create=True, durability="process") as log:
            for i in range(20):
                write(log, "a", i)
            own_server.stop()
            own_server.start()
            wait_until(lambda: own_server.answers(), "the server to answer")
            with log.engine.connect() as connection:  # nobody tries twice here: the pool itself connects again
                assert connection.execute(text("SELECT count(*) FROM es_event")).scalar_one() == 20
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


def database(postgres: Callable[[], str], encoding: str) -> str:
    url = postgres()
    server, _, _ = url.partition("?")[0].rpartition("/")
    name = f"encoded_{encoding.lower()}"
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    query = url.partition("?")[2]
    return f"{server}/{name}" + (f"?{query}" if query else "")


@pytest.mark.postgres
@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_is_not_in_utf8_is_refused_by_its_encoding(postgres: Callable[[], str], encoding: str) -> None:
    url = database(postgres, encoding)
    with pytest.raises(ConfigError, match=rf"the encoding of .* is {encoding}, .*: make the database with CREATE"):
        EventLog.open(url, create=True)
    refused = ConfigError if encoding == "SQL_ASCII" else LogNotFound
    with pytest.raises(refused, match=r"is (SQL_ASCII|an empty database)"):
        EventLog.open(url, create=False, read_only=True)  # nothing was written

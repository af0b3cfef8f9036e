"""A log lies in a database that holds every text; another one is refused by its encoding before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from trinity_es.events.errors import ConfigError, LogNotFound
from trinity_es.events.store.log import EventLog

pytestmark = pytest.mark.postgres


def database(postgres: Callable[[], str], encoding: str) -> str:
    url = postgres()
    server, _, _ = url.partition("?")[0].rpartition("/")
    name = f"encoded_{encoding.lower()}"
    with psycopg.connect(url.replace("postgresql+psycopg", "postgresql"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    query = url.partition("?")[2]
    return f"{server}/{name}" + (f"?{query}" if query else "")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_is_not_in_utf8_is_refused_by_its_encoding(postgres: Callable[[], str], encoding: str) -> None:
    url = database(postgres, encoding)
    with pytest.raises(ConfigError, match=rf"the encoding of .* is {encoding}, .*: make the database with CREATE"):
        EventLog.open(url, create=True)
    refused = ConfigError if encoding == "SQL_ASCII" else LogNotFound
    with pytest.raises(refused, match=r"is (SQL_ASCII|an empty database)"):
        EventLog.open(url, create=False, read_only=True)  # nothing was written

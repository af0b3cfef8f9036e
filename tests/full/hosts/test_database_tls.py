"""A store in a PostgreSQL that asks for a password, in TLS: all parts of a run over hosts reach it so, or not."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.certificates import Authority
from tests.helpers.hosts import KEY, head_of, host_joins, ready
from tests.helpers.namespaces import Postgres, made_postgres
from tests.helpers.postgres_tls import in_tls
from tests.helpers.servers import free_port
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.log import EventLog

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(240)]
PASSWORD = secrets.token_hex(12)
PATIENCE = 1000.0
"""Seconds that trouble which passes may be waited out."""


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with made_postgres("127.0.0.1", free_port(), "127.0.0.1/32", PASSWORD) as made:
        yield made


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def port(database: Postgres, authority: Authority) -> Iterator[int]:
    """Where it answers in TLS alone."""
    with in_tls(authority.issue("localhost"), "127.0.0.1", ("127.0.0.1", database.port)) as made:
        yield made


def url(port: int, ca: Path, host: str = "localhost", mode: str = "verify-full") -> str:
    return f"postgresql://postgres:{PASSWORD}@{host}:{port}/run?sslmode={mode}&sslrootcert={ca}"


def test_a_run_over_hosts_whose_database_speaks_tls(
    port: int, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head, keeper, host, workers, payloads, clients and commands: whoever spoke without TLS would be refused."""
    monkeypatch.setenv("TRINITY_ES_KEY", KEY)
    store = url(port, authority.ca)
    with head_of(store, tmp_path, system={"keeper": True}) as head, host_joins(store, "b", tmp_path) as b:
        ready(head.client, "b")
        head.submit(1, 48, 0.1)
        head.finish(1, 48)
        assert head.ran_on(1)["b"] > 0
        for command in ("hosts", "status", "verify", "batches"):
            done = subprocess.run([sys.executable, "-m", "trinity_es", command, "--log", store],
                                  capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, (command, done.stderr)
            assert PASSWORD not in done.stdout + done.stderr
        assert b.drain() == 0
        assert len(head.events(ev.HostLeft)) == 1
    written = [path for path in (*(tmp_path / "head-logs").iterdir(), *(tmp_path / "host-b").iterdir(), b.said)
               if path.is_file() and path.suffix != ".json"]  # admin.json and its like are this user's alone
    assert [path.name for path in written if PASSWORD.encode() in path.read_bytes()] == []


def of_another(folder: Path) -> Path:
    return Authority(folder, "other").ca


def missing(folder: Path) -> Path:
    return folder / "nowhere.pem"


@pytest.mark.parametrize(("ca", "host", "said"), [
    (of_another, "localhost", "certificate verify failed"),
    (None, "127.0.0.1", 'certificate for "localhost" does not match host name "127.0.0.1"'),
    (missing, "localhost", 'nowhere.pem" does not exist'),
], ids=["of another CA", "for another name", "no CA"])
def test_a_server_that_is_not_believed_is_refused_at_once_with_the_way_out(
    port: int, authority: Authority, tmp_path: Path, ca: object, host: str, said: str
) -> None:
    store = url(port, ca(tmp_path) if callable(ca) else authority.ca, host)
    with pytest.raises(LogUnavailable) as refused:
        EventLog.open(store, create=True, patience=PATIENCE)
    assert said in refused.value.message
    assert "sslrootcert in store.url (or PGSSLROOTCERT) has to name the CA" in refused.value.message
    assert not refused.value.details.get("passing"), "time does not mend it"
    assert PASSWORD not in repr(refused.value)


def test_a_server_without_tls_is_refused_where_the_url_wants_it(database: Postgres, authority: Authority) -> None:
    with pytest.raises(LogUnavailable, match="server does not support SSL") as refused:
        EventLog.open(url(database.port, authority.ca), create=True, patience=PATIENCE)
    assert not refused.value.details.get("passing"), "time does not mend it"

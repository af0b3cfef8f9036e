"""A run over hosts with addresses and a network of their own: network namespaces, PostgreSQL over TCP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hosts import KEY, Head, JoinedHost, head_of, host_joins, ready
from tests.helpers.namespaces import Network, Postgres, lacks, made_network, made_postgres
from tests.helpers.of_the_day import FAULTS, by_turns
from tests.helpers.paths import ROOT
from tests.helpers.servers import free_port
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog
from trinity_es.testing import wait_until

pytestmark = [
    pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(280), pytest.mark.skipif(bool(lacks()), reason=lacks())
]
TIMEOUT = 4.0
"""Seconds after which a host that is not heard of is lost."""


@pytest.fixture
def network() -> Iterator[Network]:
    with made_network() as made:
        yield made


@pytest.fixture
def database(network: Network) -> Iterator[Postgres]:
    with made_postgres(network.head, free_port(), network.all) as made:
        yield made


@pytest.fixture
def head(network: Network, database: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setenv("TRINITY_ES_KEY", KEY)
    port = free_port()
    hosts = {"address": f"{network.head}:{port}", "timeout": TIMEOUT}
    with head_of(database.url, tmp_path, hosts, port=port) as made:
        yield made


CLIENT = """
import sys
import trinity_es
from tests.helpers.systems import scripted, sleepers

config = scripted(sys.argv[1], store={"url": sys.argv[2]})
with trinity_es.connect(config) as client:
    client.submit_batch(batch_id=100, tasks=sleepers(8), batch_type="train")
    done = client.finalize_train_batch(100, timeout=60)
    print(done["finished_task_count"], len(list(client.experiences(100))))
"""


def client_on(host: JoinedHost, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [*host.inside(), sys.executable, "-c", CLIENT, str(folder / "client"), host.url]
    env = {**host.env, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@by_turns("network and database", FAULTS)
def test_f1_nothing_is_lost_or_doubled_whatever_happens_to_hosts_network_and_database(
    network: Network, database: Postgres, head: Head, tmp_path: Path
) -> None:
    def joined(host: str) -> int:
        return sum(e.host == host for e in head.events(ev.HostJoined))

    def lost(host: str) -> int:
        return sum(e.host == host for e in head.events(ev.HostLost))

    spaces = {host: network.add(host) for host in ("b", "c", "d")}
    with (
        host_joins(database.url, "b", tmp_path, inside=spaces["b"]) as b,
        host_joins(database.url, "c", tmp_path, inside=spaces["c"]) as c,
    ):
        for host in ("b", "c"):
            ready(head.client, host)
        there = {h["host"]: h["address"] for h in head.client.status()["hosts"]}
        assert len(set(there.values())) == 2
        assert network.head not in there.values()

        done = client_on(c, tmp_path)  # it asks the system of its own host, and that the head
        assert done.stdout.split() == ["8", "8"], done.stderr

        head.submit(1, 96, 0.5)  # a host joins in the middle, and gets work of the next batch; one dies
        with host_joins(database.url, "d", tmp_path, inside=spaces["d"]):
            ready(head.client, "d")
            head.submit(5, 160, 0.5)
            b.kill()
            wait_until(lambda: lost("b") == 1, "the loss of b", TIMEOUT + 10)
            head.finish(1, 96)
            head.finish(5, 160)
            assert head.ran_on(5)["d"] > 0

            head.submit(2, 160, 0.5)  # a cable is pulled
            wait_until(lambda: head.settled() >= 8, "8 tasks", 30)
            network.away("c")
            wait_until(lambda: lost("c") == 1, "the loss of c", TIMEOUT + 10)
            network.back("c")
            wait_until(lambda: joined("c") == 2, "c is back", 60)
            head.finish(2, 160)

            ready(head.client, "c")
            head.submit(3, 96, 0.5)  # packets are lost one way
            wait_until(lambda: head.settled() >= 8, "8 tasks", 30)
            with network.one_way("c", "to head"):
                wait_until(lambda: lost("c") == 2, "the loss of c", TIMEOUT + 10)
            wait_until(lambda: joined("c") == 3, "c is back", 60)
            head.finish(3, 96)

            ready(head.client, "c")
            head.submit(4, 96, 0.3)  # the database restarts
            wait_until(lambda: head.settled() >= 8, "8 tasks", 30)
            database.stop()
            database.start()
            head.finish(4, 96)
    assert {e.kind for e in head.events(ev.AttemptFailed)} == {"runner_lost"}
    assert not any(e.blamed for e in head.events(ev.AttemptFailed))


HOLDS = """
import os, sys, time
from trinity_es.events.store.database.database import Database

with Database(sys.argv[1]).engine.connect() as connection:
    connection.exec_driver_sql("SELECT * FROM es_log_head FOR UPDATE")
    handle = connection.connection.dbapi_connection.fileno()
    os.write(handle, b"P" + (1000).to_bytes(4, "big") + b"half of a message")
    print("holds", flush=True)
    time.sleep(600)
"""


def test_a_lock_of_a_host_cut_off_in_the_middle_of_a_message_is_let_go(network: Network, database: Postgres) -> None:
    EventLog.open(database.url, create=True).close()
    held = subprocess.Popen([*network.add("x"), sys.executable, "-c", HOLDS, database.url], cwd=ROOT,
                            stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout.readline() == "holds\n"
        network.away("x")
        with EventLog.open(database.url) as log:
            wait_until(lambda: log.acquire_lease("coordinator", {}) is not None, "the lease of another host", 40)
    finally:
        held.kill()
        held.wait()
        held.stdout.close()

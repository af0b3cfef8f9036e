"""A PostgreSQL that stands still with its connections open is a pause: nobody dies of it, and it is told."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.helpers.database_trouble import births, judge, on, unnoticed
from tests.helpers.faults import Server
from tests.helpers.systems import StartSystem, play_batch, sleepers
from trinity_es.cli.common import find_batch
from trinity_es.client import health
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.postgres]
BEATS = 5.0
"""Seconds without a heartbeat after which a child is ended."""


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    """Stop every process of the server, as when its machine hangs: connections stay open, and nothing answers."""
    root = psutil.Process(server.pid)
    family = [root]
    root.suspend()
    try:
        family += root.children(recursive=True)
        for process in family:
            process.suspend()
        yield
    finally:
        for process in reversed(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def deaths(client: RolloutClient) -> int:
    return sum(len(c["reason"]) > 0 for c in client._link.where().status["children"])


def fast_status(client: RolloutClient) -> dict[str, Any]:
    began = time.monotonic()
    status = client.status(5.0)
    assert time.monotonic() - began < 3
    return status


def test_a_server_that_freezes_is_a_pause_and_is_told(own_server: Server, start_system: StartSystem) -> None:
    client = start_system(
        system={"heartbeat_timeout": BEATS, "hang_timeout": BEATS}, **on(own_server.url(own_server.new_database()))
    )
    client.submit_batch(batch_id=1, tasks=sleepers(48, seconds=0.2), batch_type="train")
    play_batch(client, 9, sleepers(1))
    with ThreadPoolExecutor(8) as pool:
        with frozen(own_server):
            asked = [
                pool.submit(client.finalize_train_batch, 1, timeout=90),
                pool.submit(client.submit_batch, batch_id=2, tasks=sleepers(4), batch_type="train"),
                pool.submit(client.next_batch, 0, 60),
                pool.submit(client.acknowledge, 9, 1),
                pool.submit(client.finalize_train_batch, 9, timeout=60),
            ]
            until = time.monotonic() + 2.5 * BEATS
            wait_until(lambda: "answer" in str(fast_status(client).get("trouble")), "status to tell of it", 10)
            why = pool.submit(client.why, 1)
            looked = pool.submit(health.read_health, client.config)  # as `trinity-es status` does
            explained = pool.submit(health.explain, client.config, "1", find_batch)
            assert "has not answered" in why.result(30)
            assert any("has not answered" in problem for problem in looked.result(60)["problems"])
            assert looked.result()["up"]
            assert looked.result()["coordinator"]["epoch"] == 1
            assert [w.cause for w in explained.result(60)] == ["no_database"]
            while time.monotonic() < until:
                fast_status(client)
                time.sleep(0.5)
        results = [one.result() for one in asked]
    assert results[0]["finished_task_count"] == 48
    assert results[2][0] == 9
    judge(client, 1, results[0], 48)
    assert client.finalize_train_batch(2, timeout=60)["finished_task_count"] == 4
    assert unnoticed(client)
    assert deaths(client) == 0


def test_a_coordinator_started_on_a_frozen_server_waits(own_server: Server, start_system: StartSystem) -> None:
    client = start_system(system={"heartbeat_timeout": BEATS}, **on(own_server.url(own_server.new_database())))
    client.submit_batch(batch_id=1, tasks=sleepers(8, seconds=0.2), batch_type="train")

    def coordinator() -> dict[str, Any]:
        return next(c for c in client._link.where().status["children"] if c["name"] == "coordinator")

    with frozen(own_server):
        first = coordinator()["pid"]
        psutil.Process(first).send_signal(signal.SIGKILL)
        wait_until(lambda: coordinator()["pid"] not in (0, first), "another coordinator", 20)
        second = coordinator()["pid"]
        until = time.monotonic() + 2 * BEATS
        while time.monotonic() < until:
            assert coordinator()["pid"] == second, "it died of the database"
            time.sleep(0.5)
    began = time.monotonic()
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 8
    assert time.monotonic() - began < 15
    assert births(client) == 2


def test_a_system_is_ended_while_its_server_is_frozen(own_server: Server, start_system: StartSystem) -> None:
    client = start_system(**on(own_server.url(own_server.new_database())))
    client.submit_batch(batch_id=1, tasks=sleepers(8, seconds=0.2), batch_type="train")
    with frozen(own_server):
        began = time.monotonic()
        client.shutdown()
        assert time.monotonic() - began < 30

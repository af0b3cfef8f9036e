"""Promise 4: a database that goes away for a while is a pause, and nothing is lost, doubled, or told that is not so."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.database_trouble import TASKS, judge, on, text_log, unnoticed
from tests.helpers.faults import Server, Wire
from tests.helpers.systems import StartSystem, sleepers
from trinity_es.client.rollout_client import RolloutClient

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def run_through(client: RolloutClient, trouble: Callable[[], None]) -> dict[str, Any]:
    """A batch during which there is trouble, with calls that wait through it. None of them may see an error."""
    with ThreadPoolExecutor(2) as pool:
        client.submit_batch(batch_id=1, tasks=sleepers(TASKS, seconds=0.2), batch_type="train")
        waiting = pool.submit(client.finalize_train_batch, 1, timeout=90)
        time.sleep(0.5)
        troubled = pool.submit(trouble)
        time.sleep(0.2)
        client.submit_batch(batch_id=2, tasks=sleepers(4), batch_type="train")  # asked while there is trouble
        troubled.result()
        assert client.finalize_train_batch(2, timeout=90)["finished_task_count"] == 4
        return waiting.result()


@pytest.mark.postgres
def test_a_server_that_is_stopped_and_started_is_a_pause(own_server: Server, start_system: StartSystem) -> None:
    client = start_system(**on(own_server.url(own_server.new_database())))

    def restart() -> None:
        own_server.stop()
        time.sleep(3)
        own_server.start()

    result = run_through(client, restart)
    judge(client, 1, result)
    assert unnoticed(client)
    told = [text_log(client, name).read_text() for name in ("coordinator", "runner-0")]
    assert sum("waits: " in t or "trying again: " in t for t in told) >= 1


@pytest.mark.postgres
def test_a_wire_cut_for_longer_than_the_log_waits(own_server: Server, wire: Wire, start_system: StartSystem) -> None:
    client = start_system(system={"heartbeat_timeout": 6.0}, **on(wire.url(own_server.new_database())))

    def cut() -> None:
        wire.cut()
        time.sleep(10)  # and longer than the guardian waits for a heartbeat
        wire.join()

    judge(client, 1, run_through(client, cut))
    assert unnoticed(client)


@pytest.mark.postgres
def test_a_system_ends_while_the_database_is_away(own_server: Server, wire: Wire, start_system: StartSystem) -> None:
    client = start_system(**on(wire.url(own_server.new_database())))
    client.submit_batch(batch_id=1, tasks=sleepers(TASKS, seconds=0.2), batch_type="train")
    wire.cut()
    time.sleep(1)
    started = time.monotonic()
    client.shutdown()
    assert time.monotonic() - started < 15

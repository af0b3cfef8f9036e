"""Promise 4: a database that goes away for a while is a pause, and nothing is lost, doubled, or told that is not so."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers.database_trouble import TASKS, judge, on, text_log, unnoticed
from tests.helpers.faults import Server, Wire
from tests.helpers.s3_server import BUCKET, S3Server, s3_server
from tests.helpers.systems import StartSystem, pid_of, sleepers
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.payloads.payload_place import recorded_place
from trinity_es.projections.verify.log import verify_log
from trinity_es.system import lifecycle
from trinity_es.testing import wait_until

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


# --- payloads in S3 ---------------------------------------------------------------------------------------------------
@pytest.fixture
def own_s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_a_killed_runner_and_a_store_that_is_away_cost_nothing(start_system: StartSystem, own_s3: S3Server) -> None:
    client = start_system(store={"payloads": f"s3://{BUCKET}/{uuid.uuid4().hex}"})
    url = client.config.store.url
    assert recorded_place(url, patience=1.0).startswith("s3:")
    client.submit_batch(batch_id=1, tasks=sleepers(8, seconds=0.3), batch_type="train")
    own_s3.stop()
    wait_until(lambda: "s3://" in client.why(1) and "does not answer" in client.why(1), "why to name the store", 60)
    os.kill(pid_of(client, "runner-0"), signal.SIGKILL)
    timer = threading.Timer(4.0, own_s3.start)
    timer.start()
    try:
        wait_until(lambda: client.batch(1).is_complete, "the tasks to be done", 90)
    finally:
        timer.join()
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 8
    assert sorted({e.eid.task for e in client.experiences(1)}) == list(range(8))
    assert verify_log(url).problems == []
    assert "a-secret-of-tests" not in str(client.status())


def test_a_start_says_that_it_waits_for_a_store_that_is_away(
    start_system: StartSystem, own_s3: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"payloads": f"s3://{BUCKET}/{uuid.uuid4().hex}"}
    own_s3.stop()
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "BUCKET_SECONDS", 0.1)
        with pytest.raises(LogUnavailable, match="does not answer"):
            start_system(store=store)
    caplog.clear()
    timer = threading.Timer(2.0, own_s3.start)
    timer.start()
    try:
        start_system(store=store)
    finally:
        timer.join()
    [told] = [record.message for record in caplog.records if "the start waits" in record.message]
    assert f"{store['payloads']} does not answer" in told

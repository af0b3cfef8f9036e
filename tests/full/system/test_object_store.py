"""A whole system whose payloads are in S3: killed, and with a store that goes away and comes back."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator

import pytest

from tests.helpers.s3_server import BUCKET, S3Server, s3_server
from tests.helpers.systems import StartSystem, pid_of, sleepers
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.payloads.payload_place import recorded_place
from trinity_es.projections.verify.log import verify_log
from trinity_es.system import lifecycle
from trinity_es.testing import wait_until


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

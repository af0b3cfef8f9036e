"""What a client can say by mistake: it is refused by name, and the coordinator lives on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.parity_rows import NewId
from tests.helpers.systems import StartSystem, pid_of, play_batch, scripted
from trinity_es import RolloutCoordinator, Task, Workflow
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import DataError, SyncError
from trinity_es.events.experience import Experience
from trinity_es.testing import SleepWorkflow, wait_until

Call = Callable[[RolloutClient, int], Any]


class FailsAtLength(Workflow):
    def run(self) -> list[Experience]:
        raise RuntimeError("so long " * 1000)


MISTAKES: dict[str, Call] = {
    "a timeout that is text": lambda c, b: c.finalize_train_batch(b, timeout="abc"),  # type: ignore[arg-type]
    "a timeout that is no number": lambda c, b: c.finalize_train_batch(b, timeout=float("nan")),
    "a step that is text": lambda c, b: c.acknowledge(b, "x"),  # type: ignore[arg-type]
    "a step below 0": lambda c, b: c.acknowledge(b, -5),
    "a step that is true": lambda c, b: c.acknowledge(b, True),
    "a version below 0": lambda c, b: c.sync_weights(-1, "x"),
    "a number of experiences below 0": lambda c, b: c.take_experiences(-1),
    "a position below 0": lambda c, b: list(c.processed_experiences(-1)),
    "a loss that is nan": lambda c, b: c.acknowledge(b, 1, {"loss": float("nan")}),
    "a loss that is text": lambda c, b: c.acknowledge(b, 1, {"loss": "high"}),  # type: ignore[dict-item]
    "min_wait_num as text": lambda c, b: submit(c, b + 1, min_wait_num="3"),
    "a cursor without its keys": lambda c, b: submit(c, b + 1, cursor={"taskset": "x"}),
    "a cursor that is no mapping": lambda c, b: submit(c, b + 1, cursor=5),
    "repeat_times as text": lambda c, b: submit(c, b + 1, repeat_times="4"),
    "repeat_times that is no whole number": lambda c, b: submit(c, b + 1, repeat_times=2.5),
    "a batch id of 600 characters": lambda c, b: submit(c, "x" * 600),
    "a batch id with a line end": lambda c, b: submit(c, "12/a\nb"),
    "a batch id beyond 64 bits": lambda c, b: submit(c, 10**400),
    "a list as batch id": lambda c, b: c.finalize_train_batch([b]),  # type: ignore[arg-type]
    "a list as batch id of an abort": lambda c, b: c.abort_batch([b], reason="x"),  # type: ignore[arg-type]
    "a reason that is no text": lambda c, b: c.abort_batch(b, reason=5),  # type: ignore[arg-type]
    "a version that is text": lambda c, b: c.sync_weights("1", "/tmp"),  # type: ignore[arg-type]
    "a sync timeout that is text": lambda c, b: c.sync_weights(1, "/tmp", timeout="x"),  # type: ignore[arg-type]
    "a position that is text": lambda c, b: c.next_batch(after="x", timeout=5),  # type: ignore[arg-type]
}


def submit(client: RolloutClient, batch: Any, *, repeat_times: Any = 1, **args: Any) -> None:
    tasks = [Task(workflow=SleepWorkflow, repeat_times=repeat_times)]
    client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train", **args)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_it_is_sent(mistake: str, shared: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    new_id()
    submit(shared, batch)
    pid = pid_of(shared, "coordinator")
    with pytest.raises(DataError):
        MISTAKES[mistake](shared, batch)
    assert shared.finalize_train_batch(batch, timeout=float("inf"))["finished_task_count"] == 1
    assert pid_of(shared, "coordinator") == pid


def test_a_workflow_that_fails_at_length_fails_alone(shared: RolloutClient, new_id: NewId) -> None:
    batch = new_id()
    tasks = [Task(workflow=FailsAtLength, repeat_times=64), Task(workflow=SleepWorkflow)]
    play_batch(shared, batch, tasks)
    statuses = shared.batch(batch).statuses
    assert (statuses[0].ok, statuses[1].ok) == (False, True)
    assert (statuses[0].message or "").partition("First error: ")[2].startswith("workflow: ")


def test_a_version_that_did_not_load_may_be_published_from_elsewhere(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system()
    with pytest.raises(SyncError, match="no weights"):
        client.sync_weights(1, tmp_path / "missing")
    (tmp_path / "here").mkdir()
    assert client.sync_weights(1, tmp_path / "here")["runners"] == ["runner-0"]
    assert client.sync_weights(1, tmp_path / "here")["runners"] == ["runner-0"]
    with pytest.raises(SyncError, match="a new version"):
        client.sync_weights(1, tmp_path)


def test_several_that_start_a_store_s_system_at_once_share_one(tmp_path: Path) -> None:
    config = scripted(tmp_path)
    found: list[RolloutCoordinator] = []
    failures: list[BaseException] = []

    def begin() -> None:
        try:
            found.append(asyncio.run(RolloutCoordinator.get_actor(config)))
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    try:
        assert not failures
        assert len({c.client._link.admin["pid"] for c in found}) == 1
        assert sorted(c._owns_system for c in found) == [False, True]
    finally:
        from trinity_es.client.teardown import end_system

        end_system(config)
        for coordinator in found:
            coordinator.client.close()


def test_promise_9_a_runner_that_comes_back_and_can_not_load_the_current_weights_serves_nothing(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(explorer={"rollout_model": {"engine_num": 1}})
    weights = tmp_path / "w1"
    weights.mkdir()
    client.sync_weights(1, weights)
    weights.rmdir()  # what the trainer must never do
    os.kill(pid_of(client, "runner-0"), signal.SIGKILL)
    wait_until(lambda: [r for r in client.status()["runners"] if r["state"] == "failed"], "the runner to fail")
    # `status` tells what the coordinator knows; a moment later it is in the log
    failed = wait_until(lambda: [r.event for r in client.log.events() if r.type == "RunnerFailed"], "the event")
    assert "could not load weights 1" in failed[0].reason

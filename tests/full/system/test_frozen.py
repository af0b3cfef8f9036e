"""Processes that are stopped (SIGSTOP), not dead: nobody else waits for them, and who watches over them notices."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import trinity_es
from tests.helpers.of_the_day import of_the_day
from tests.helpers.systems import StartSystem, admin, finalize_in_thread, guardian, pid_of, sleepers
from trinity_es.actors.commands import GetStatus
from trinity_es.client import connection
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import FinalizeTimeout, NotRunning
from trinity_es.system import running_system
from trinity_es.testing import wait_until

NEVER = {"heartbeat_timeout": 600.0}
"""Nobody is ended for being silent while a test looks at what the silence does to others."""


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    processes = [psutil.Process(pid) for pid in pids]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.resume()


@contextmanager
def calling(call: Any, threads: int) -> Iterator[None]:
    """Call it again and again, from so many threads."""
    over = threading.Event()

    def loop() -> None:
        while not over.wait(0.02):
            call()

    all_of = [threading.Thread(target=loop, daemon=True) for _ in range(threads)]
    for thread in all_of:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in all_of:
            thread.join(timeout=20)


def slowest_status(client: RolloutClient, seconds: float) -> float:
    slowest, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
        began = time.monotonic()
        client._link.call(GetStatus(), 10.0)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_one_frozen_runner_keeps_no_answer_and_no_work_from_the_others(start_system: StartSystem) -> None:
    client = start_system(explorer={"max_concurrency": 4, "rollout_model": {"engine_num": 2}}, system=NEVER)
    client.submit_batch(batch_id=1, tasks=sleepers(600, 0.2), batch_type="train")
    wait_until(lambda: client.batch(1).completed_task_count >= 8, "eight tasks")
    with frozen(pid_of(client, "runner-0")), calling(client.get_all_state, 6):
        assert slowest_status(client, 4.0) < 1.0
        done = client.batch(1).completed_task_count
        assert slowest_status(client, 2.0) < 1.0
        assert client.batch(1).completed_task_count > done + 10, "the healthy runner stands still"
        states = client.get_all_state()
        assert {name: s["answered"] for name, s in states.items()} == {"runner-0": False, "runner-1": True}
    wait_until(lambda: client.get_runner_state("runner-0")["answered"], "the runner to answer again")


MANY_CALLS = """
import sys, threading
from pathlib import Path
import trinity_es
from tests.helpers.systems import scripted, sleepers
clients = [trinity_es.connect(scripted(Path(sys.argv[1]))) for _ in range(30)]
def ask(client):
    while True:
        client.status()
for client in clients:
    threading.Thread(target=client.finalize_train_batch, args=(10,), daemon=True).start()
    threading.Thread(target=ask, args=(client,), daemon=True).start()
threading.Event().wait()
"""


def test_thirty_frozen_clients_with_answers_under_way_keep_none_from_the_others(
    start_system: StartSystem, tmp_path: Path
) -> None:
    client = start_system(explorer={"max_concurrency": 8}, system=NEVER)
    for batch in range(10, 110):  # so that the answer to `status` is large
        client.submit_batch(batch_id=batch, tasks=sleepers(1, 600.0), batch_type="train")

    def all_wait() -> bool:
        return any(b["batch_id"] == 10 and b["waited_for"] == 30 for b in client.status()["batches"])

    with subprocess.Popen([sys.executable, "-c", MANY_CALLS, str(tmp_path)]) as others:
        try:
            wait_until(all_wait, "thirty clients to wait for a batch")
            with frozen(others.pid):
                client.abort_batch(10, reason="so that all of them are answered")
                assert slowest_status(client, 4.0) < 1.0
                assert client.status()["system"], "the guardian answers too"
        finally:
            others.kill()


def took(call: Callable[[], Any], error: type[Exception] | None = None) -> float:
    began = time.monotonic()
    if error is None:
        call()
    else:
        with pytest.raises(error):
            call()
    return time.monotonic() - began


def test_a_stopped_guardian_keeps_no_answer_of_the_coordinator_and_every_deadline_holds(
    start_system: StartSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_system(system=NEVER)
    client.submit_batch(batch_id=1, tasks=sleepers(4, 7.0), batch_type="train")
    client.submit_batch(batch_id=2, tasks=sleepers(4, 600.0), batch_type="train")
    coordinator = pid_of(client, "coordinator")
    family = running_system.processes(client._link.admin)
    with frozen(client._link.admin["guardian"]):
        # longer than a client waits before it asks the guardian where the coordinator is
        assert took(lambda: client.finalize_train_batch(1, timeout=15)) < 12
        assert took(lambda: client.finalize_train_batch(2, timeout=2), FinalizeTimeout) < 4
        assert took(lambda: client.submit_batch(batch_id=3, tasks=sleepers(1, 0), batch_type="train")) < 2
        assert took(lambda: client._link.where(1.0)) < 2
        assert took(lambda: client.status(3.0)) < 5
        with frozen(coordinator):
            assert took(lambda: client.finalize_train_batch(2, timeout=2), FinalizeTimeout) < 4
            assert took(lambda: client.status(2.0), TimeoutError) < 4
            assert took(lambda: client.next_batch(timeout=1), TimeoutError) < 3
            assert took(lambda: client.take_experiences(1, timeout=1), TimeoutError) < 3
        monkeypatch.setattr(connection, "CONNECT_SECONDS", 1.0)
        with frozen(client._link.admin["pid"]):
            assert took(lambda: trinity_es.connect(client.config), NotRunning) < 10
        assert took(lambda: trinity_es.connect(client.config).close()) < 5
        assert took(client.shutdown) < 15
        assert not running_system.wait_gone(family, 5.0)


@pytest.mark.parametrize("victims", of_the_day([guardian, admin]))  # in turns; ALL=1 plays both
def test_a_guardian_or_admin_that_is_stopped_is_ended_and_the_waiting_client_gets_its_answer(
    victims: Callable[[RolloutClient], list[psutil.Process]], start_system: StartSystem
) -> None:
    client = start_system(system={"keeper": True, "heartbeat_timeout": 4.0})
    client.submit_batch(batch_id=1, tasks=sleepers(4, 0.1) + sleepers(4, 6.0), batch_type="train")
    wait_until(lambda: client.batch(1).completed_task_count >= 4, "four tasks")
    before, family = client._link.admin, running_system.processes(client._link.admin)
    answer = finalize_in_thread(client, 1)
    for process in victims(client):
        process.suspend()
    found = running_system.find
    wait_until(lambda: (found(client.config) or before)["pid"] != before["pid"], "the next life", timeout=60)
    assert answer.result(60)["finished_task_count"] == 8
    assert not running_system.wait_gone(family, 10), "a process of the earlier life is left"
    told = (Path(client.config.system.log_dir) / "keeper.log").read_text()
    assert "gave no sign of life" in told


def test_when_everything_stood_still_nobody_is_ended_for_it(start_system: StartSystem) -> None:
    quick = {"heartbeat_timeout": 4.0, "hang_timeout": 3.0}
    client = start_system(explorer={"rollout_model": {"engine_num": 2}}, system={"keeper": True, **quick})
    client.submit_batch(batch_id=1, tasks=sleepers(16, 3.0), batch_type="train")
    wait_until(lambda: client.status()["batches"][0]["running_units"] > 0, "units to run")
    kept = wait_until(lambda: running_system.keeper(client.config), "the keeper")
    before, family = client._link.admin, [p.pid for p in running_system.processes(client._link.admin)]
    for everybody in ([kept, *family], [*reversed(family), kept]):
        with frozen(*everybody):
            time.sleep(8.0)  # the silence itself: nothing can be waited for
    assert client.finalize_train_batch(1, timeout=60)["finished_task_count"] == 16
    time.sleep(5.0)  # who would be ended for it would be by now
    assert client._link.admin == before
    assert {p.pid for p in running_system.processes(before)} == set(family)
    assert running_system.keeper(client.config) == kept
    assert [r.type for r in client.log.events() if isinstance(r.event, ev.RunnerLost)] == []

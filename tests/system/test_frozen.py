"""Processes that are stopped (SIGSTOP), not dead: nobody else waits for them, and who watches over them notices."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.system.conftest import StartSystem
from tests.system.test_deaths import pid_of
from trinity_es import Task
from trinity_es.client import RolloutClient
from trinity_es.testing import SleepWorkflow, wait_until

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
        while not over.is_set():
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


def sleeps(n: int, seconds: float) -> list[Task]:
    return [Task(workflow=SleepWorkflow, workflow_args={"seconds": seconds}) for _ in range(n)]


def slowest_status(client: RolloutClient, seconds: float) -> float:
    """The longest time that `status` takes while one asks it for so long."""
    slowest, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        client._link.call("status", {}, 10.0)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_one_frozen_runner_keeps_no_answer_and_no_work_from_the_others(start_system: StartSystem) -> None:
    client = start_system(explorer={"places": 4, "rollout_model": {"engine_num": 2}}, system=NEVER)
    client.submit_batch(batch_id=1, tasks=sleeps(600, 0.2), batch_type="train")
    wait_until(lambda: client.batch(1).completed_task_count >= 8, "eight tasks")
    with frozen(pid_of(client, "runner-0")), calling(client.get_all_state, 6):
        assert slowest_status(client, 6.0) < 1.0
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
from tests.system.conftest import scripted
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
    client = start_system(explorer={"places": 8}, system=NEVER)
    for batch in range(10, 110):  # so that the answer to `status` is large
        client.submit_batch(batch_id=batch, tasks=sleeps(1, 600.0), batch_type="train")

    def all_wait() -> bool:
        return any(b["batch_id"] == 10 and b["waited_for"] == 30 for b in client.status()["batches"])

    with subprocess.Popen([sys.executable, "-c", MANY_CALLS, str(tmp_path)]) as others:
        try:
            wait_until(all_wait, "thirty clients to wait for a batch")
            with frozen(others.pid):
                client.abort_batch(10, reason="so that all of them are answered")
                assert slowest_status(client, 6.0) < 1.0
                assert client.status()["system"], "the guardian answers too"
        finally:
            others.kill()

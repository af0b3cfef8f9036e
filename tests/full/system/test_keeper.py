"""Guardian and admin may die too: the keeper starts the system again, and a client that waits sees a pause."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import trinity_es
from tests.helpers.systems import (
    StartSystem,
    everything,
    kill_all,
    play_batch,
    scripted,
    tasks,
)
from trinity_es.events.errors import NotRunning, StartupError
from trinity_es.system import leftovers, lifecycle, running_system
from trinity_es.testing import wait_until


@pytest.mark.slow
def test_threads_that_call_while_everything_dies_get_their_answers(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(system={"keeper": True})
    wait_until(lambda: running_system.keeper(client.config), "the keeper")
    result = play_batch(client, 1, tasks(2, tmp_path / "ran", 0.0))
    over, errors, answered = threading.Event(), [], Counter[int]()

    def ask(number: int) -> None:
        while not over.wait(0.02) and not errors:
            try:
                assert client.finalize_train_batch(1) == result
                answered[number] += 1
            except Exception as e:
                errors.append(e)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    try:
        for arrive in (trinity_es.connect, trinity_es.running):
            before = client._link.admin
            kill_all(everything(client))
            with arrive(client.config) as newcomer:  # which starts no system of its own
                assert newcomer.finalize_train_batch(1) == result
            wait_until(lambda gone=before: client._link.admin != gone or errors, "the next life", timeout=60)
            known = Counter(answered)
            wait_until(lambda all_of=known: errors or all(answered[n] > all_of[n] for n in range(8)), "every thread")
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=30)
    assert not errors, repr(errors[0])


def test_without_a_keeper_a_client_is_told_at_once_what_to_do(start_system: StartSystem) -> None:
    client = start_system()
    kill_all(everything(client))
    with pytest.raises(NotRunning, match="trinity-es up"):
        client.finalize_train_batch(1, timeout=60)


def test_a_start_whose_system_is_killed_under_it_says_so_and_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    config = scripted(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(lifecycle.start, config)

        def begun() -> list[psutil.Process]:
            found = [p for p in leftovers.leftovers(config) if "ActorAddr" in p.name() or "MultiProcAdmin" in p.name()]
            return found if any(p.name().startswith("Guardian") for p in found) or starting.done() else []

        kill_all(wait_until(begun, "the guardian"))
        with pytest.raises(StartupError, match="died while it started"):
            starting.result(timeout=120)
    assert leftovers.leftovers(config) == []

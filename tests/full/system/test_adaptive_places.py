"""E12: a runner's places follow what its engine tells of its load, in real processes; each change is an event."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import trinity_es
from tests.helpers.systems import StartSystem, child, events, pid_of, play_batch
from trinity_es import Task
from trinity_es.actors.engines.interface import Completion, EngineConfig, EngineLoad, Sampling
from trinity_es.actors.runner.adaptive_places import START
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.testing import ScriptedEngine, wait_until


class LoadedEngine(ScriptedEngine):
    """Tells of each request a step in which as many run as it was asked, and what its file `told` says."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(replace(config, options={"latency_seconds": 0.05}))
        self.folder, self.running = Path(config.options["folder"]), 0
        self.on_load: Any = None

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        self.running += 1
        with open(self.folder / "running", "a") as file:
            file.write(f"{self.running}\n")
        await asyncio.sleep(0)  # the others begin first
        share, waiting, again = (self.folder / "told").read_text().split()
        told = EngineLoad(
            running=self.running, waiting=int(waiting), recomputed=int(again), kv_share=float(share), most_running=1000
        )
        if self.on_load is not None:
            self.on_load(told)
        try:
            return await super().generate(prompt, sampling)
        finally:
            self.running -= 1


def no_reward(response: str, prompt: str, truth: str | None) -> float:
    return 0.0


def start(start_system: StartSystem, folder: Path, places: int | str) -> RolloutClient:
    (folder / "told").write_text("0.1 0 0")
    engine = {
        "engine_type": "tests.full.system.test_adaptive_places:LoadedEngine", "engine_args": {"folder": str(folder)},
    }
    return start_system(explorer={"max_concurrency": places, "rollout_model": engine}, system={"restart_pause": 0.1})


def play(client: RolloutClient, folder: Path, batch: int, count: int) -> int:
    """Play so many tasks; returns the maximum of them that the engine worked on at once."""
    (folder / "running").write_text("")
    tasks = [Task(workflow="single_turn", raw_task={"prompt": f"{i}"}, rollout_args={"max_tokens": 4},
                  reward_fn="tests.full.system.test_adaptive_places:no_reward") for i in range(count)]
    play_batch(client, batch, tasks)
    return max(int(line) for line in (folder / "running").read_text().split())


def places(client: RolloutClient) -> int:
    [runner] = client.status()["runners"]
    return int(runner["places"])


def test_units_at_once_follow_the_engine_and_each_change_is_an_event(start_system: StartSystem, tmp_path: Path) -> None:
    client = start(start_system, tmp_path, "auto")
    assert play(client, tmp_path, 1, 400) > START
    wait_until(lambda: places(client) == 256, "as many as there may be")
    assert [e.places for e in events(client, ev.ConcurrencyChanged)] == [128, 256], "few events, and all of them"
    (tmp_path / "told").write_text("0.99 7 100000")
    play(client, tmp_path, 2, 500)
    wait_until(lambda: places(client) < 200, "too much is computed again: fewer")
    changes = events(client, ev.ConcurrencyChanged)
    assert changes[2].places == 192
    assert (changes[2].kv_share, changes[2].waiting, changes[2].runner) == (0.99, 7, "runner-0")
    (tmp_path / "told").write_text("0.99 0 0")  # full, and nothing wrong with it
    before = places(client)
    assert play(client, tmp_path, 3, 100) <= before
    last = events(client, ev.ConcurrencyChanged)[-1].places  # the round that had begun may have ended with one more
    assert places(client) == last <= before
    with trinity_es.open_log(client.config.store.url) as log:
        assert log.verify() == []
        assert [r.places for r in log.runner_lives()] == [last]


def test_a_runner_that_is_started_again_begins_as_every_runner_does(start_system: StartSystem, tmp_path: Path) -> None:
    """What killed it may have been so many units at once."""
    client = start(start_system, tmp_path, "auto")
    play(client, tmp_path, 1, 400)
    wait_until(lambda: places(client) == 256, "as many as there may be")
    pid = pid_of(client, "runner-0")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: child(client, "runner-0")["pid"] not in (pid, None), "another process")
    wait_until(lambda: child(client, "runner-0")["state"] == "ready", "it to serve")
    wait_until(lambda: places(client) == START, "its places")
    assert [e.places for e in events(client, ev.RunnerReady)] == [START, START]
    assert play(client, tmp_path, 2, 70) <= START


def test_an_engine_that_tells_nothing_keeps_what_it_begins_with(start_system: StartSystem) -> None:
    client = start_system(explorer={"max_concurrency": "auto"})
    tasks = [Task(workflow="single_turn", raw_task={"prompt": "a"}, rollout_args={"max_tokens": 4},
                  reward_fn="tests.full.system.test_adaptive_places:no_reward")] * 300
    play_batch(client, 1, tasks)
    assert (places(client), events(client, ev.ConcurrencyChanged)) == (START, [])

"""Weights without a disk on the real actor system: published, loaded, lost, made again (PARITY P34)."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trinity_es
from tests.helpers import runs, systems
from tests.helpers.memory_sync import play, served
from tests.helpers.of_the_day import of_the_day
from tests.helpers.systems import StartSystem
from trinity_es import Explorer
from trinity_es.config.config import Config, load_config
from trinity_es.events.errors import ConfigError
from trinity_es.events.values import Task
from trinity_es.system import leftovers, lifecycle
from trinity_es.testing import SleepWorkflow, wait_until
from trinity_es.weights import shared_memory

pytestmark = pytest.mark.timeout(240)


def state(seed: int) -> dict[str, Any]:
    return {"layer.weight": np.full((4, 4), seed, np.float32), "layer.bias": np.full(4, -seed, np.float32)}


@pytest.fixture
def tidy() -> Iterator[Callable[[Config], None]]:
    """Whatever a test does, nothing of it stays in shared memory."""
    known: list[Config] = []
    yield known.append
    for config in known:
        shutil.rmtree(shared_memory.memory_dir(config), ignore_errors=True)


def published(config: Config) -> list[tuple[int, str]]:
    return [(e.version, e.method) for _, e in runs.events_of(config, "WeightsPublished")]


# --- a trainer of one's own -----------------------------------------------------------------------------------------
def test_p34_weights_reach_engines_through_memory(start_system: StartSystem, tidy: Callable[[Config], None]) -> None:
    client = start_system(explorer={"rollout_model": {"engine_num": 2}})
    tidy(client.config)
    assert client.sync_weights(1, state(1))["runners"] == ["runner-0", "runner-1"]
    assert client.sync_weights(2, state(2))["version"] == 2
    assert served(client) == [2, 2]
    places = [Path(e.path) for _, e in runs.events_of(client.config, "WeightsPublished")]
    assert published(client.config) == [(1, "memory"), (2, "memory")]
    assert [p.is_dir() for p in places] == [False, True]
    assert places[1].parent == shared_memory.memory_dir(client.config)
    np.testing.assert_array_equal(client.get_weight("layer.bias"), np.full(4, -2, np.float32))
    with pytest.raises(KeyError, match=r"did you mean layer.bias"):
        client.get_weight("layer.bais")
    play(client, 1)


def test_p34_a_checkpoint_of_what_is_in_memory_takes_its_place_and_nothing_is_left_after_the_end(
    start_system: StartSystem, tmp_path: Path, tidy: Callable[[Config], None]
) -> None:
    client = start_system()
    config = client.config
    tidy(config)
    client.sync_weights(1, state(1))
    [(_, event)] = runs.events_of(config, "WeightsPublished")
    saved = Path(shutil.copytree(event.path, tmp_path / "saved"))
    assert client.sync_weights(1, saved) == {"version": 1, "runners": ["runner-0"], "from_group": False}
    assert published(config) == [(1, "memory"), (1, "checkpoint")]
    assert len(runs.events_of(config, "WeightsLoaded")) == 1
    client.shutdown()
    assert not shared_memory.memory_dir(config).exists()
    with trinity_es.running(config) as again:
        wait_until(lambda: served(again) == [1], "the runner to load the checkpoint")


def test_p34_an_engine_that_comes_back_without_the_memory_serves_nothing_until_it_is_there_again(
    start_system: StartSystem, tidy: Callable[[Config], None]
) -> None:
    client = start_system()
    config = client.config
    tidy(config)
    client.sync_weights(3, state(3))
    client.close()
    systems.kill_all(leftovers.leftovers(config))
    wait_until(lambda: not leftovers.leftovers(config), "every process to be gone")
    shutil.rmtree(shared_memory.memory_dir(config))  # what a restart of the machine does
    lifecycle.start(config)
    with trinity_es.connect(config) as again:
        try:
            failed = wait_until(
                lambda: [r for r in again.status()["runners"] if r["state"] == "failed"], "the runner to say so", 60
            )
            assert "it could not load weights 3" in failed[0]["reason"]
            assert "shared memory" in failed[0]["reason"]
            again.submit_batch(batch_id=1, tasks=[Task(workflow=SleepWorkflow)], batch_type="train")
            with pytest.raises(TimeoutError):
                again.finalize_train_batch(1, timeout=1.0)
            assert runs.events_of(config, "TaskFinished") == []
            again.sync_weights(3, state(3))
            wait_until(lambda: served(again) == [3], "the runner to have the weights again", 60)
            assert again.finalize_train_batch(1, timeout=60)["finished_task_count"] == 1
        finally:
            again.shutdown()


# --- the explorer ---------------------------------------------------------------------------------------------------
class MemoryTrainer(runs.SteadyTrainer):
    def state_dict(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.weights.encode()).digest()
        return {"w": np.frombuffer(digest, np.uint8).astype(np.float32), "steps": np.array([self.steps], np.int64)}


TRAINER = {
    "class": "tests.full.system.test_memory_sync:MemoryTrainer", "args": {"seconds": 1.0}, "keep_checkpoints": 2,
    "save_interval": 2,
}


def memory_config(folder: Path, **trainer: Any) -> Path:
    return runs.make_config(
        folder, synchronizer={"sync_method": "memory"}, trainer={**TRAINER, **trainer},
        explorer={"eval_interval": 2, "max_concurrency": 2, "rollout_model": {
            "engine_type": "scripted", "script": {"latency_seconds": 0.1, "load_seconds": 0.5},
        }},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = memory_config(tmp_path_factory.mktemp("undisturbed"))
    config = load_config(path)
    runs.went_well("run", path, *runs.AT_ONCE, cwd=path.parent)
    assert published(config) == [
        (1, "memory"), (2, "memory"), (2, "checkpoint"), (3, "memory"), (4, "memory"), (4, "checkpoint"),
        (5, "memory"), (5, "checkpoint"),
    ]
    assert not shared_memory.memory_dir(config).exists()
    return comparable(config)


def comparable(config: Config) -> dict[str, Any]:
    found = runs.outcome(config)
    found["versions"] = sorted(set(found["versions"]))
    return found


def loaded(config: Config, version: int) -> bool:
    return any(e.version == version for _, e in runs.events_of(config, "WeightsLoaded"))


MOMENTS: dict[str, tuple[Callable[[Config], bool], bool, int]] = {
    "in step 4, and the memory lost": (lambda c: runs.count(c, "TaskFinished", 4) >= 1, True, 2),
    "weights 3 published, not loaded": (lambda c: (3, "memory") in published(c) and not loaded(c, 3), False, 2),
    "weights 2 published, not saved": (lambda c: loaded(c, 2) and (2, "checkpoint") not in published(c), False, 0),
    "the last weights loaded, not saved": (lambda c: loaded(c, 5) and (5, "checkpoint") not in published(c), False, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", [*MOMENTS][:1] + of_the_day([*MOMENTS][1:]))
def test_p34_after_kill_9_of_everything_a_run_in_memory_ends_as_if_nothing_had_been(
    tmp_path: Path, undisturbed: dict[str, Any], tidy: Callable[[Config], None], moment: str
) -> None:
    reached, lost, checkpoint = MOMENTS[moment]
    path = memory_config(tmp_path / "run")
    tidy(load_config(path))
    config = runs.killed_when(reached, path, moment, 90)
    version = published(config)[-1][0]
    if lost:
        shutil.rmtree(shared_memory.memory_dir(config))
    runs.went_well("resume", path, *runs.AT_ONCE, cwd=tmp_path)
    assert comparable(config) == undisturbed
    assert published(config).count((version, "memory")) == 1 + lost  # that it was written anew is in the log
    assert [e.step for _, e in runs.events_of(config, "ExperiencesRedelivered")] == [checkpoint]
    assert not runs.events_of(config, "WeightsFailed")
    assert not shared_memory.memory_dir(config).exists()


async def test_p34_a_trainer_that_can_not_give_its_weights_says_so_before_it_trains(tmp_path: Path) -> None:
    config = load_config(memory_config(tmp_path / "run", **{"class": "tests.helpers.runs:SteadyTrainer"}))
    explorer = Explorer(config)
    try:
        with pytest.raises(ConfigError, match=r"SteadyTrainer has no method state_dict\(\)"):
            await explorer.prepare()
    finally:
        await explorer.shutdown()
    assert runs.events_of(config, "BatchSubmitted") == []


def test_p34_a_retention_shorter_than_the_way_back_to_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = memory_config(tmp_path / "run", save_interval=5)
    config = load_config(path, ["store.retention=4"])
    with pytest.raises(ConfigError, match="up to 5 steps"):
        asyncio.run(Explorer(config).prepare())

"""Doubles of the engine, the worker pool and the player of workflows."""

from __future__ import annotations

import asyncio
import zlib
from random import Random
from typing import Any

import orjson

from tests.simulation.world import here, world
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.shared_event_loop import Limits
from trinity_es.actors.runner_activity import RunActivity
from trinity_es.events.errors import SyncError
from trinity_es.events.vocabulary import RunResult


class SimExperience:
    """Double of `Experience` for runners. An experience is the list [batch, task, run]."""

    @staticmethod
    def serialize_many(experiences: list[Any]) -> bytes:
        return orjson.dumps(experiences)


class SimEngine:
    """Engine that only starts, loads weights and stops."""

    def __init__(self, config: Any) -> None:
        self.model_version = 0
        self.process = here()

    async def start(self) -> None:
        await asyncio.sleep(world().between(0.05, 0.6))

    async def load_weights(self, version: int, path: str) -> None:
        await asyncio.sleep(world().between(0.05, 0.5))
        if world().rng.random() < 0.03:
            raise SyncError("the simulated weights can't be read")
        self.model_version = version

    async def stop(self) -> None:
        await asyncio.sleep(0.05)


class SimPool:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def reward(batch_id: Any, task: int, run: int) -> float:
    """Return the reward of a run, which is the same in every attempt and never 0."""
    return 1.0 + zlib.crc32(f"{batch_id}/{task}/{run}".encode()) % 1000 / 1000


class SimWorkflows:
    """Player of units. The outcome of an attempt depends on the schedule's seed, the unit and the number of tries."""

    def __init__(self, engine: SimEngine, *, timeout: float | None = None, **_: Any) -> None:
        self.activity = RunActivity()
        self.engine, self.timeout, self.process = engine, timeout or 1e9, here()
        self.engine_dead: str | None = None
        self.limits = Limits()

    async def execute(
        self, task: Any, batch_id: Any, runs: range, *, timeout: float | None, leases: Any, journal: Any
    ) -> UnitResult:
        key = (batch_id, task.task_id, runs[0])
        tries = world().executions[key] = world().executions.get(key, 0) + 1
        fate = Random(zlib.crc32(f"{world().seed} {key} {tries}".encode()))
        done = UnitResult(model_version=self.engine.model_version, model_version_end=self.engine.model_version)
        roll, seconds = fate.random(), fate.choice((0.05, 0.3, 1.5)) * (0.5 + fate.random())
        if roll < 0.03:  # it hangs until its timeout
            done.seconds = timeout or self.timeout
            await asyncio.sleep(done.seconds)
            done.failures = [(run, "timeout", "simulated") for run in runs]
            return done
        await asyncio.sleep(seconds)
        if roll < 0.045:
            world().strike("engine_dead")
            self.engine_dead = "simulated"
            done.failures = [(run, "infra", "simulated") for run in runs]
            return done
        if roll < 0.06:
            world().strike("poison")
            world().kill(self.process)
            return done
        for run in runs:
            roll = fate.random()
            if roll < 0.12:
                kind = "data" if roll < 0.02 else "workflow" if roll < 0.07 else "infra"
                done.failures.append((run, kind, "simulated"))
                continue
            metrics = {"reward": reward(batch_id, task.task_id, run)}
            done.results.append(RunResult(run=run, metrics=metrics, experiences=1, response_tokens=1))
            done.experiences.append([str(batch_id), task.task_id, run])
        done.model_version_end = self.engine.model_version
        done.seconds = seconds
        return done

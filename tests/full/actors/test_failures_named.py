"""What is wrong with one run is that run's failure, and told by its own name."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workers.pool import WorkerPool
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task
from trinity_es.testing import ScriptedEngine
from trinity_es.workflows.workflow import Workflow


def spoiled(args: dict[str, Any], run: int) -> Experience:
    """An experience that is no good in run 1: made so, or changed afterwards."""
    fields: dict[str, Any] = {"tokens": [1, 2, 3, 4], "prompt_length": 2, "reward": 1.0, "logprobs": [-0.5, -0.5]}
    name, value = args["name"], args["value"]
    bad = run == 1
    if args["made"] and bad:
        return Experience(**{**fields, name: value})
    experience = Experience(**fields)
    experience.eid.run = run
    if bad:
        setattr(experience, name, value)
    return experience


class OneRun(Workflow):
    """Run 1 of a seeded task is the one that is no good."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        return [spoiled(self.task.workflow_args, self.model.sampling.seed)]


class SyncRun(Workflow):
    def run(self) -> list[Experience]:
        return [spoiled(self.task.workflow_args, self.model.sampling.seed)]


class AllRuns(Workflow):
    can_repeat = True

    def run(self) -> list[Experience]:
        return [spoiled(self.task.workflow_args, self.run_id_base + i) for i in range(self.repeat_times)]


class RaisesTimeout(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        raise TimeoutError("my database did not answer")


class RaisesTimeoutSync(Workflow):
    def run(self) -> list[Experience]:
        raise TimeoutError("my database did not answer")


class TimesOutItself(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)
        return []


async def played(
    workflow: type[Workflow], pool: WorkerPool | None = None, *, runs: int = 3, timeout: float = 60, **arguments: Any
) -> UnitResult:
    runner = WorkflowRunner(ScriptedEngine(EngineConfig(model_path="")), workers=pool, timeout=timeout)
    task = Task(workflow=workflow, workflow_args=arguments, rollout_args={"seed": 0}, task_id=7)
    return await runner.execute(task, 5, range(runs))


@pytest.mark.parametrize(("name", "value", "says"), [
    ("logprobs", [-0.5, math.nan], "logprobs[1] is nan"),
    ("advantages", [math.inf, 0.0], "advantages[0] is inf"),
    ("multi_modal_inputs", {"x": np.array([math.nan])}, "multi_modal_inputs.x[0] is nan"),
    ("reward", 1.7e308, "reward is 1.7e+308"),
    ("metrics", {"nested": {"score": math.nan}}, "metrics.nested.score is nan"),
    ("info", {"a": [1.0, math.inf]}, "info.a[1] is inf"),
])
@pytest.mark.parametrize("made", [True, False])
async def test_a_non_number_fails_its_run_alone_and_is_named(made: bool, name: str, value: Any, says: str) -> None:
    done = await played(OneRun, made=made, name=name, value=value)
    assert [r.run for r in done.results] == [0, 2]
    [(run, kind, message)] = done.failures
    assert (run, kind) == (1, "data" if made or name in ("metrics", "info") else "workflow")
    assert says in message
    assert ("run 1: a new experience: " in message) if made else ("experience 5/7/1/0/" in message)


@pytest.mark.parametrize("workflow", [SyncRun, AllRuns])
async def test_the_same_in_a_worker_and_where_it_does_all_runs(pool: WorkerPool, workflow: type[Workflow]) -> None:
    done = await played(workflow, pool, made=False, name="logprobs", value=[-0.5, math.nan])
    assert [r.run for r in done.results] == [0, 2]
    assert [e.eid.run for e in done.experiences] == [0, 2]
    [(run, kind, message)] = done.failures
    assert (run, kind) == (1, "workflow")
    assert "experience 5/7/1/0/" in message
    assert "logprobs[1] is nan" in message


@pytest.mark.parametrize(
    ("workflow", "in_worker"),
    [(RaisesTimeout, False), (TimesOutItself, False), (RaisesTimeoutSync, False), (RaisesTimeoutSync, True)],
)
async def test_a_workflows_own_timeout_error_is_its_failure_and_not_the_attempts(
    pool: WorkerPool, workflow: type[Workflow], in_worker: bool
) -> None:
    [(run, kind, message)] = (await played(workflow, pool if in_worker else None, runs=1)).failures
    assert (run, kind) == (0, "workflow"), message
    assert "max_timeout" not in message
    assert "TimeoutError" in message


@pytest.mark.parametrize("in_worker", [False, True])
async def test_the_attempts_own_timeout_is_told_in_thread_and_worker(pool: WorkerPool, in_worker: bool) -> None:
    done = await played(Slow, pool if in_worker else None, runs=1, timeout=0.2)
    assert done.failures == [(0, "timeout", "no end after 0.2 s (max_timeout)")]


class Slow(Workflow):
    def run(self) -> list[Experience]:
        import time

        time.sleep(1.5)  # what is tested is that nobody waits for it
        return []

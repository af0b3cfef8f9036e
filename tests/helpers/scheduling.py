"""Workflows and tasks like those of Trinity-RFT's scheduler tests, for tests of the Scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trinity_es import EID, Experience, Task, Workflow
from trinity_es.client.rollout_client import RolloutClient


def experience(run: int, step: int, **info: Any) -> Experience:
    return Experience(
        eid=EID(run=run, step=step), tokens=np.zeros(5, dtype=np.int32), prompt_length=2,
        logprobs=np.zeros(3, dtype=np.float32), reward=0.5, info=info, metrics={"run_metrics": float(run)},
    )


class Dummy(Workflow):
    """Sync workflow that plays all runs itself. `raw_task["error_type"]`: `timeout_<seconds>`, `exception`, `exit`."""

    can_repeat = True

    def misbehave(self) -> None:
        error = (self.task.raw_task or {}).get("error_type", "")
        if error.startswith("timeout"):
            time.sleep(float(error.rpartition("_")[2]))
        elif error == "exception":
            raise ValueError("Exception occurred")
        elif error == "exit":
            os._exit(1)

    def run(self) -> list[Experience]:
        self.misbehave()
        steps = self.task.workflow_args.get("step_num", 1)
        return [experience(self.run_id_base + i, s) for s in range(steps) for i in range(self.repeat_times)]


class OneRun(Dummy):
    """Dummy that plays one run at a time and is reused for the next."""

    can_repeat, can_reset = False, True
    used = 0

    def reset(self, task: Task) -> None:
        self.task, self.used = task, self.used + 1

    def run(self) -> list[Experience]:
        self.misbehave()
        return [experience(0, s, used=self.used) for s in range(self.task.workflow_args.get("step_num", 1))]


class AsyncDummy(Dummy):
    """Async Dummy on the runner's event loop. `exit` ends the runner. The first run to take `slow_file` hangs."""

    can_repeat, is_async = False, True

    async def run_async(self) -> list[Experience]:
        args, error = self.task.workflow_args, (self.task.raw_task or {}).get("error_type", "")
        if "slow_file" in args:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(args["slow_file"], os.O_CREAT | os.O_EXCL))
                await asyncio.sleep(60)
        if error.startswith("timeout"):
            await asyncio.sleep(float(error.rpartition("_")[2]))
        else:
            self.misbehave()
        return [experience(0, s) for s in range(args.get("step_num", 1))]


def dummies(
    fine: int, *, timeout: int = 0, seconds: float = 60, exception: int = 0, exit: int = 0,
    workflow: type[Workflow] = Dummy, repeat_times: int = 1, **args: Any,
) -> list[Task]:
    """Return these numbers of tasks of each kind, in this order."""
    errors = [""] * fine + [f"timeout_{seconds}"] * timeout + ["exception"] * exception + ["exit"] * exit
    return [
        Task(workflow=workflow, raw_task={"error_type": e}, repeat_times=repeat_times, workflow_args=args)
        for e in errors
    ]


NewId = Callable[[], int]


def load(client: RolloutClient) -> int:
    return sum(r["load"] for r in client.status()["runners"])


def half_done(slow_file: Path) -> list[Task]:
    """Return two tasks of four runs each; a run of the second hangs."""
    slow = {"slow_file": str(slow_file)}
    return dummies(1, workflow=AsyncDummy, repeat_times=4) + dummies(1, workflow=AsyncDummy, repeat_times=4, **slow)

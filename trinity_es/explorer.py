"""The explorer: the loop that reads tasksets, submits each step as a batch, finalizes it and brings new weights in.

A step is a train batch whose id is its number, from 1. An eval of taskset `gsm8k` after step 12 is batch "12/gsm8k";
before the first step, "0/gsm8k". How far the taskset was read is recorded in the transaction of each batch.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from events.errors import ConfigError, LogNotFound
from events.experience import Experience
from events.values import BatchId
from projections.audit import open_log
from trinity_es.client import RolloutCoordinator
from trinity_es.config import Config
from trinity_es.tasksets import Cursor, Taskset

__all__ = ["Explorer", "Trainer"]


class Trainer(Protocol):
    """What the explorer needs of a trainer that runs beside it (`trainer.class`)."""

    def __init__(self, model_path: str, **args: Any) -> None: ...

    def step(self, experiences: list[Experience]) -> dict[str, float]:
        """Learn from one batch; returns metrics (loss, ...). Called in a thread."""

    def save(self, path: str) -> None:
        """Write a checkpoint in HF format that an engine can load."""


class Explorer:
    """Explores with a config: `prepare`, `explore`, `shutdown`.

    `on_step(step, result)` is called after each finalized train batch, with what finalize returned.
    """

    def __init__(self, config: Config, *, on_step: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        self.config = config
        self.on_step = on_step
        self.coordinator: RolloutCoordinator | None = None
        self.trainer: Trainer | None = None
        self.step = 0
        """The last train step that was submitted."""
        self.version = 0
        """The weights that the engines serve."""
        self.cursor = Cursor()

    async def prepare(self) -> None:
        """Check config and tasksets, start or find the system, wait for its engines. Raises before anything runs."""
        config = self.config
        inputs = config.buffer.explorer_input
        if len(inputs.tasksets) != 1:
            raise ConfigError(
                f"buffer.explorer_input.tasksets has {len(inputs.tasksets)} entries: the explorer reads exactly one"
            )
        self.taskset = Taskset(inputs.tasksets[0])
        self.eval_sets = [Taskset(c, is_eval=True) for c in inputs.eval_tasksets]
        self._require_new_store()
        self.coordinator = await RolloutCoordinator.get_actor(config)
        if config.mode == "both" and config.trainer.trainer_class is not None:
            self.trainer = await asyncio.to_thread(self._load_trainer)
        await self.coordinator.prepare()

    def _require_new_store(self) -> None:
        try:
            with open_log(self.config.store.url) as log:
                held = len(log.batches())
        except LogNotFound:
            return
        if held:
            raise ConfigError(
                f"the store {self.config.masked()['store']['url']} already holds a run ({held} batches): "
                "choose another `name` (or `--set name=...`), so that its log stays what it is"
            )

    def _load_trainer(self) -> Trainer:
        if self.config.code_path not in sys.path:
            sys.path.insert(0, self.config.code_path)
        assert self.config.trainer.trainer_class is not None
        module, _, name = self.config.trainer.trainer_class.partition(":")
        cls = getattr(importlib.import_module(module), name)
        trainer: Trainer = cls(self.config.model.model_path, **self.config.trainer.args)
        return trainer

    @property
    def rollouts(self) -> RolloutCoordinator:
        if self.coordinator is None:
            raise ConfigError("the explorer is not prepared: `await explorer.prepare()` first")
        return self.coordinator

    async def explore(self) -> str:
        """Explore until the taskset or `total_steps` ends; returns the explorer's name (P32).

        A period is `sync_interval` steps: all submitted, then finalized in order, trained, and the weights
        synchronised; evals before the first step, and after every `eval_interval` steps.
        """
        config = self.config
        if config.explorer.eval_on_startup:
            await self.evaluate()
        while steps := await self._submit_period():
            for step in steps:
                result = await self.rollouts.finalize_train_batch(step)
                if self.on_step is not None:
                    self.on_step(step, result)
                await self._train(step)
            await self.sync_weight()
            interval = config.explorer.eval_interval
            if interval and any(step % interval == 0 for step in steps):
                await self.evaluate()
        return config.explorer.name

    async def _submit_period(self) -> list[int]:
        steps: list[int] = []
        for _ in range(self.config.synchronizer.sync_interval):
            if self.config.total_steps is not None and self.step >= self.config.total_steps:
                break
            tasks, cursor = self.taskset.read(self.cursor, self.config.buffer.batch_size)
            if not tasks:
                break
            ratio = self.config.explorer.over_rollout.ratio
            await self.rollouts.submit_batch(
                batch_id=self.step + 1,
                tasks=tasks,
                batch_type="train",
                min_wait_num=None if ratio == 0 else math.ceil(round(len(tasks) * (1 - ratio), 9)),
                cursor={"taskset": self.taskset.config.name, "epoch": cursor.epoch, "offset": cursor.offset},
            )
            self.step, self.cursor = self.step + 1, cursor
            steps.append(self.step)
        return steps

    async def _train(self, step: int) -> None:
        if self.trainer is None:
            return
        experiences = await self.rollouts.experiences(step)
        metrics = await asyncio.to_thread(self.trainer.step, experiences)
        await self.rollouts.acknowledge(step, step, metrics)

    async def sync_weight(self) -> None:
        """Bring the trainer's weights into the engines, by a checkpoint (P34). Raises SyncError."""
        if self.trainer is None:
            return
        path = self.config.checkpoint_dir / f"global_step_{self.step}"
        await asyncio.to_thread(self.trainer.save, str(path))
        await self.rollouts.sync_weights(self.step, path)
        self.version = self.step
        self._forget_old(path.parent)

    def _forget_old(self, folder: Path) -> None:
        found = sorted(folder.glob("global_step_*"), key=lambda p: int(p.name.rsplit("_", 1)[1]))
        for old in found[: -self.config.trainer.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)

    async def evaluate(self) -> dict[str, float]:
        """Run every eval taskset on the weights as they are; returns their metrics."""
        metrics: dict[str, float] = {}
        ids: list[BatchId] = []
        for taskset in self.eval_sets:
            batch_id = f"{self.step}/{taskset.config.name}"
            await self.rollouts.submit_batch(batch_id=batch_id, tasks=taskset.all(), batch_type="eval")
            ids.append(batch_id)
        for submitted in ids:
            metrics |= (await self.rollouts.finalize_eval_batch(submitted))["metrics"]
        return metrics

    async def shutdown(self) -> None:
        """Let go of the system; end it if this explorer started it."""
        if self.coordinator is not None:
            await self.coordinator.shutdown()
            self.coordinator = None

"""The explorer: the loop that reads tasksets, submits each step as a batch, finalizes it and brings new weights in.

A step is a train batch whose id is its number, from 1. An eval of taskset `gsm8k` after step 12 is batch "12/gsm8k";
before the first step, "0/gsm8k". How far the taskset was read is recorded in the transaction of each batch.

On a store that holds its run it goes on, whatever died: the log says which steps were submitted, which evals ended and
which weights are current. The trainer starts again from the checkpoint of those weights, step k; batches after k that
were generated are delivered to it again, those that are open are finished, and then come new ones from where the
taskset was read to. So every prompt is used as often as in a run that nothing happened to.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from events.errors import AlreadyRunning, ConfigError, LogNotFound, NotALog
from events.experience import Experience
from events.values import BatchId, BatchLifecycleState, Task
from projections.audit import open_log
from projections.resuming import ResumePoint, resume_point, was_dropped_stale
from trinity_es import system
from trinity_es.client import RolloutCoordinator
from trinity_es.config import Config
from trinity_es.monitors import Monitors
from trinity_es.tasksets import Cursor, Taskset
from trinity_es.trained import TrainedWeights

if TYPE_CHECKING:
    from trinity_es.serve import Proxy

__all__ = ["Explorer", "Trainer"]


class Trainer(Protocol):
    """What the explorer needs of a trainer that runs beside it (`trainer.class`).

    It may also have `load(path)`. When a run is resumed, the trainer is built with its newest checkpoint as
    `model_path`, and then `load` is called with that folder, to bring back what is not weights: the optimizer, the
    step, random states.

    With `synchronizer.sync_method` memory or nccl it has `state_dict()`: a mapping from the names in a checkpoint to
    its tensors, torch (on any device) or numpy.
    """

    def __init__(self, model_path: str, **args: Any) -> None: ...

    def step(self, experiences: list[Experience]) -> dict[str, float]:
        """Learn from one batch; returns metrics (loss, ...). Called in a thread."""

    def save(self, path: str) -> None:
        """Write a checkpoint in HF format that an engine can load, and that this class can be built from."""


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
        self.done = 0
        """The last step of the last period that is over: finalized, trained, and its weights brought in."""
        self.version = 0
        """The weights that the engines serve."""
        self.cursor = Cursor()
        self.resumed = False
        """Whether the store held a run, which this explorer goes on with."""
        self.owns_system = False
        """Whether the actor system is here for this explorer alone: it started it, or the dead one before it did."""
        self.monitors: Monitors | None = None
        self._point: ResumePoint | None = None
        self._left: bool | None = None
        self._evals: dict[BatchId, bool] = {}
        """Evals that an earlier life submitted, and whether they ended."""
        self._read_from: dict[int, tuple[Cursor, int]] = {}
        """Where in the taskset the tasks of a step that is not done were read, and how many."""
        self._lock: IO[str] | None = None
        self._weights = TrainedWeights(config)

    # --- where to begin ---------------------------------------------------------------------------------------------
    def locate(self) -> bool:
        """Read tasksets and log: where does this run stand? False when it is complete. Starts nothing.

        From here until `shutdown` (or `release`) no other explorer can go on with it. Raises AlreadyRunning,
        TasksetError and ConfigError, also where the store holds something else than this run.
        """
        if self._left is None:
            self._take_lock()
            self._left = self._locate()
        return self._left

    def _locate(self) -> bool:
        inputs = self.config.buffer.explorer_input
        if len(inputs.tasksets) != 1:
            raise ConfigError(
                f"buffer.explorer_input.tasksets has {len(inputs.tasksets)} entries: the explorer reads exactly one"
            )
        self.taskset = Taskset(inputs.tasksets[0])
        self.eval_sets = [Taskset(c, is_eval=True) for c in inputs.eval_tasksets]
        self._point = point = self._read_point()
        self.resumed = bool(point.submitted or point.evals)
        self.step, self.version, self._evals = point.submitted, point.version, dict(point.evals)
        self.cursor = self._cursor_after(self.step)
        self.done = self._done(point)
        for step in range(self.done + 1, self.step + 1):
            self._read_from[step] = (self._cursor_after(step - 1), point.tasks[step])
        if not self.resumed or self.step > self.done or not all(self._evals.values()):
            return True
        return bool(self._next()[0]) or any(batch_id not in self._evals for batch_id in self._evals_due())

    def _cursor_after(self, step: int) -> Cursor:
        assert self._point is not None
        return Cursor(*self._point.cursors.get(step, (0, 0)))

    def _read_point(self) -> ResumePoint:
        config = self.config
        try:
            with open_log(config.store.url) as log:
                point = resume_point(log, self.taskset.config.name)
        except (LogNotFound, NotALog):  # NotALog: it was being made when its maker died
            return ResumePoint()
        if not self._trains or not point.path:
            return point
        if point.version > point.submitted:
            raise ConfigError(
                f"the weights of the run in {config.masked()['store']['url']} are version {point.version}, but it has "
                f"{point.submitted} steps: another trainer published them. Choose another `name`"
            )
        self._weights.require(point)
        return point

    @property
    def _trains(self) -> bool:
        return self.config.mode == "both" and self.config.trainer.trainer_class is not None

    def _done(self, point: ResumePoint) -> int:
        """The last step of the last period that is over; with a trainer the weights tell, without one the batches."""
        if self._trains:
            return point.version if point.path else 0
        if point.finished == point.submitted:
            return point.finished
        return point.finished - point.finished % self.config.synchronizer.sync_interval

    def _next(self) -> tuple[list[Task], Cursor]:
        """The tasks of the next new step, and the cursor after them; none when the run ends."""
        if self.config.total_steps is not None and self.step >= self.config.total_steps:
            return [], self.cursor
        return self.taskset.read(self.cursor, self.config.buffer.batch_size)

    # --- start ------------------------------------------------------------------------------------------------------
    async def prepare(self) -> None:
        """Check config and tasksets, start or find the system, wait for its engines. Raises before anything runs."""
        config = self.config
        try:
            if config.mode == "serve":  # reads no taskset, trains nothing, and is never complete
                self._take_lock()
                await (await self._connect(None)).prepare()
                return
            self.require_unfinished()
            retention = config.store.retention
            needed = self._weights.steps_needed
            if self._trains and retention is not None and retention < needed:
                raise ConfigError(
                    f"store.retention is {retention}: a trainer that starts again needs the experiences since its last "
                    f"checkpoint, up to {needed} steps (synchronizer.sync_interval, trainer.save_interval)"
                )
            behind = self.done if self._trains else math.inf  # a trainer elsewhere has trained what it has
            self.monitors = Monitors(config, after=behind if self.resumed else None)
            self.monitors.follow()
            point = self._point
            assert point is not None
            if self._trains and point.version > point.checkpoint_version:  # engines must find its weights
                self.trainer = await asyncio.to_thread(self._load_trainer)
            resumed_at = min(self.done, point.checkpoint_version) if self._trains and self.resumed else None
            coordinator = await self._connect(resumed_at)
            if self._trains and self.trainer is None:
                self.trainer = await asyncio.to_thread(self._load_trainer)
            await coordinator.prepare()
            if self._trains:
                await self._weights.caught_up(coordinator, self.trainer, point.version)
        except BaseException:
            self.release()
            raise

    async def _connect(self, resumed_at: int | None) -> RolloutCoordinator:
        self.coordinator = await RolloutCoordinator.get_actor(self.config, resumed_at=resumed_at)
        running = system.find(self.config)
        if self.owns_system and running is not None:
            self._write_lock(f"{os.getpid()} {running['pid']}")
        return self.coordinator

    def require_unfinished(self) -> None:
        """Raises ConfigError when the run is complete, and what `locate` raises."""
        if not self.locate():
            raise ConfigError(
                f"the store {self.config.masked()['store']['url']} already holds a run, and it is complete (step "
                f"{self.step}): choose another `name` (or `--set name=...`), so that its log stays what it is, or "
                "raise total_steps"
            )

    def _take_lock(self) -> None:
        """Two explorers on one run would train each step twice.

        The lock ends with its process. The file tells who has it and which actor system it started (its admin's pid);
        an orderly end leaves it empty.
        """
        beside = system.output_file(self.config)  # its name is this store's alone
        beside.parent.mkdir(parents=True, exist_ok=True)
        lock = beside.with_name(beside.name.replace("launch", "explorer")).with_suffix(".lock").open("a+")
        lock.seek(0)
        told = lock.read().split()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            where, pid = self.config.masked()["store"]["url"], "".join(told[:1])
            raise AlreadyRunning(f"an explorer runs on {where} already (pid {pid}): wait for it, or end it") from None
        running = system.find(self.config)
        self.owns_system = running is None or told[1:] == [str(running["pid"])]
        self._lock = lock
        self._write_lock(f"{os.getpid()}")

    def _write_lock(self, text: str) -> None:
        assert self._lock is not None
        self._lock.truncate(0)
        self._lock.write(text)
        self._lock.flush()

    def release(self) -> None:
        """Let others go on with the run; `shutdown` does it too."""
        if self._lock is not None:
            self._write_lock("")
            self._lock.close()
            self._lock = self._left = self._point = None
        if self.monitors is not None:
            self.monitors.close()
            self.monitors = None

    def _load_trainer(self) -> Trainer:
        if self.config.code_path not in sys.path:
            sys.path.insert(0, self.config.code_path)
        assert self.config.trainer.trainer_class is not None
        module, _, name = self.config.trainer.trainer_class.partition(":")
        cls = getattr(importlib.import_module(module), name)
        assert self._point is not None
        checkpoint = self._point.checkpoint
        self._weights.forget_unpublished(self._point)
        trainer: Trainer = cls(checkpoint or self.config.model.model_path, **self.config.trainer.args)
        load = getattr(trainer, "load", None)
        if checkpoint and load is not None:
            load(checkpoint)
        self._weights.catch_up(trainer, self._point)
        return trainer

    @property
    def rollouts(self) -> RolloutCoordinator:
        if self.coordinator is None:
            raise ConfigError("the explorer is not prepared: `await explorer.prepare()` first")
        return self.coordinator

    async def serve(self, on_ready: Callable[[Proxy], None] | None = None) -> None:
        """Mode `serve`: answer an OpenAI-compatible API with the engines until this is cancelled (P36).

        `on_ready` is told when the proxy answers (`trinity_es.serve.Proxy`: `base_url`, `api_key`). Raises
        StartupError.
        """
        from trinity_es.serve import Proxy  # here, since nobody else needs its imports

        proxy = Proxy(self.config, self.rollouts.client)
        try:
            await proxy.start()
            if on_ready is not None:
                on_ready(proxy)
            await proxy.finished()
        finally:
            await proxy.stop()

    # --- the loop ---------------------------------------------------------------------------------------------------
    async def explore(self) -> str:
        """Explore until the taskset or `total_steps` ends; returns the explorer's name (P32).

        A period is `sync_interval` steps: all submitted, then finalized in order, trained, and the weights
        synchronised; evals before the first step, and after every `eval_interval` steps.
        """
        await self._go_on_with_evals()
        while steps := await self._submit_period():
            for step in steps:
                await self._finish(step)
            await self.sync_weight()
            self.done = self.step
            self._read_from.clear()
            if self._evals_due(steps[0]):
                await self.evaluate()
        if self.trainer is not None:
            await self._weights.save(self.rollouts, self.trainer, self.step)
        return self.config.explorer.name

    async def _go_on_with_evals(self) -> None:
        """Evals that were submitted and did not end; then those that are due and were not submitted."""
        for batch_id in [b for b, ended in self._evals.items() if not ended]:
            await self.rollouts.finalize_eval_batch(batch_id)
        if self.step == self.done and self._evals_due():  # else the next period was begun, so they are over
            await self.evaluate()

    def _evals_due(self, first: int | None = None) -> list[BatchId]:
        """The evals that belong after the last period that is over; `first`: its first step."""
        explorer = self.config.explorer
        if first is None:
            first = self.done - (self.done - 1) % self.config.synchronizer.sync_interval
        interval = explorer.eval_interval
        due = explorer.eval_on_startup if self.done == 0 else (
            interval > 0 and any(step % interval == 0 for step in range(first, self.done + 1))
        )
        return [f"{self.done}/{taskset.config.name}" for taskset in self.eval_sets] if due else []

    async def _submit_period(self) -> list[int]:
        """Submit the steps of the next period, but for those that an earlier life submitted."""
        steps = list(range(self.done + 1, self.step + 1))
        while len(steps) < self.config.synchronizer.sync_interval:
            tasks, cursor = self._next()
            if not tasks:
                break
            taskset = {"taskset": self.taskset.config.name, "epoch": cursor.epoch, "offset": cursor.offset}
            await self._submit(self.step + 1, tasks, taskset)
            self._read_from[self.step + 1] = (self.cursor, len(tasks))
            self.step, self.cursor = self.step + 1, cursor
            steps.append(self.step)
        return steps

    async def _submit(self, step: int, tasks: list[Task], cursor: dict[str, Any] | None) -> None:
        ratio = self.config.explorer.over_rollout.ratio
        await self.rollouts.submit_batch(
            batch_id=step,
            tasks=tasks,
            batch_type="train",
            min_wait_num=None if ratio == 0 else math.ceil(round(len(tasks) * (1 - ratio), 9)),
            cursor=cursor,
        )

    async def _finish(self, step: int) -> None:
        """Finalize a step and train on it. One that a person aborted is passed over."""
        result = await self.rollouts.finalize_train_batch(step)
        while (await self.rollouts.batch(step)).state is BatchLifecycleState.ABORTED:
            if not await asyncio.to_thread(was_dropped_stale, self.rollouts.client.log, step):
                return
            cursor, tasks = self._read_from[step]  # its prompts again, on the weights that are current
            await self._submit(step, self.taskset.read(cursor, tasks)[0], None)
            result = await self.rollouts.finalize_train_batch(step)
        if self.on_step is not None:
            self.on_step(step, result)
        if self.trainer is not None:
            experiences = await self.rollouts.experiences(step)
            metrics = await asyncio.to_thread(self.trainer.step, experiences)
            await self.rollouts.acknowledge(step, step, metrics)

    async def sync_weight(self) -> None:
        """Bring the trainer's weights into the engines, by `synchronizer.sync_method` (P34). Raises SyncError."""
        if self.trainer is None:
            return
        await self._weights.bring(self.rollouts, self.trainer, self.step)
        self.version = self.step

    async def get_weight(self, name: str) -> np.ndarray[Any, Any]:
        """See RolloutClient.get_weight (P34)."""
        return await self.rollouts.get_weight(name)

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """See RolloutClient.setup_weight_sync_group (P34)."""
        return await self.rollouts.setup_weight_sync_group(master_address, master_port, state_dict_meta)

    async def evaluate(self) -> dict[str, float]:
        """Run every eval taskset on the weights as they are; returns their metrics. What an earlier life ran, stays."""
        metrics: dict[str, float] = {}
        ids: list[BatchId] = []
        for taskset in self.eval_sets:
            batch_id = f"{self.step}/{taskset.config.name}"
            if self._evals.pop(batch_id, None) is None:
                await self.rollouts.submit_batch(batch_id=batch_id, tasks=taskset.all(), batch_type="eval")
            ids.append(batch_id)
        for submitted in ids:
            metrics |= (await self.rollouts.finalize_eval_batch(submitted))["metrics"]
        return metrics

    async def shutdown(self) -> None:
        """Let go of the system; end it if this explorer started it."""
        try:
            if self.coordinator is not None:
                await self.coordinator.shutdown()
                self.coordinator = None
        finally:
            self.release()

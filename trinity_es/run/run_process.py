"""One process's part in a run: where the run stands, who else goes on with it, the actor system, the trainer.

In mode `both` one process explores and trains; in modes `explore` and `train` they are two, which know of each other
only what the log says. `Explorer` and `TrainerProcess` are the parts; this is what they share.

A part goes on with the run that its store holds, whatever died: the log says which steps were submitted, which evals
ended and which weights are current. The trainer starts again from the checkpoint of those weights, step k; batches
after k that were generated are delivered to it again, those that are open are finished, and then come new ones from
where the tasksets were read to. So every prompt is used as often as in a run that nothing happened to.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trinity_es.actors import plugins
from trinity_es.actors.config.buffer import TasksetConfig
from trinity_es.client.coordinator import RolloutCoordinator
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, LogNotFound, NotRunning, TasksetError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.reading.resume_point import ResumePoint, resume_point
from trinity_es.run.checkpointing import TrainerCheckpoints
from trinity_es.run.run_progress import RunProgress
from trinity_es.run.sync_policy import SyncPolicy
from trinity_es.run.trainer import Trainer
from trinity_es.run.wait_for_log import tell_trouble
from trinity_es.system import running_system
from trinity_es.system.other_settings import require_same_settings
from trinity_es.system.run_lock import Role, RunLock
from trinity_es.tasksets.mix import Mix
from trinity_es.tasksets.taskset import Cursor, Taskset
from trinity_es.telemetry.monitors import Monitors

__all__ = ["RunProcess"]


class RunProcess:
    """See the module. `trains`: whether the trainer is in this process."""

    roles: tuple[Role, ...]
    """The locks that it takes."""
    trains = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.coordinator: RolloutCoordinator | None = None
        self.trainer: Trainer | None = None
        self.policy = SyncPolicy.of(config)
        self.progress = RunProgress()
        self.monitors: Monitors | None = None
        self.cursors: dict[str, Cursor] = {}
        """How far the tasksets were read for the steps that were submitted."""
        self.version = 0
        """The weights that the engines serve."""
        self.resumed = False
        """Whether the store held a run, which this one goes on with."""
        self.owns_system = False
        """Whether the actor system is here for this process alone: it started it, or the dead one before it did."""
        self._point = ResumePoint()
        self.unrecorded: list[TasksetSource] = []
        """What tasksets were found to be that the log does not have yet: it is handed in with their first batch."""
        self._unfinished: bool | None = None
        self._trouble_log: asyncio.Task[None] | None = None
        self._locks: list[RunLock] = []
        self._weights = TrainerCheckpoints(config)

    @property
    def step(self) -> int:
        """The last train step that was submitted."""
        return self.progress.submitted

    @property
    def done(self) -> int:
        """The last step of the last period that is over: finalized, trained, and its weights brought in."""
        return self.progress.done

    @property
    def position(self) -> int:
        """The position of the log up to which all is known that is in `progress`."""
        return self._point.position

    @property
    def rollouts(self) -> RolloutCoordinator:
        if self.coordinator is None:
            raise ConfigError("the explorer is not prepared: `await explorer.prepare()` first")
        return self.coordinator

    # --- where to begin ---------------------------------------------------------------------------------------------
    def locate(self) -> bool:
        """Read tasksets and log: where does this run stand? False when it is complete. Starts nothing.

        From here until `shutdown` (or `release`) no other process can take this part in it. Raises AlreadyRunning,
        TasksetError and ConfigError, also where the store holds something else than this run.
        """
        if self._unfinished is None:
            self.unrecorded = []
            plugins.look_in(self.config.code_path, first=False)  # rows are checked against what their rewards take
            try:
                for role in self.roles:
                    self._locks.append(RunLock(self.config, role))
                self.owns_system = self.roles[0] == "explorer" and self._locks[0].owns_system
                self._unfinished = self._locate()
            except BaseException:
                self.release()
                raise
        return self._unfinished

    def _locate(self) -> bool:
        inputs = self.config.buffer.explorer_input
        if not inputs.tasksets:
            raise ConfigError("buffer.explorer_input.tasksets is empty: name a taskset to train on")
        point = self._read_point([taskset.name for taskset in inputs.tasksets])
        self.mix = Mix(self._open_tasksets(inputs.tasksets, point, is_eval=False), inputs.interleave)
        size = self.config.buffer.batch_size
        if inputs.drop_last and self.mix.left({}) < size:
            raise ConfigError(
                f"the tasksets have {self.mix.left({})} tasks in all, fewer than buffer.batch_size {size}, and "
                "buffer.explorer_input.drop_last leaves out the last step: there is none. Set one of them otherwise"
            )
        self.eval_sets = self._open_tasksets(inputs.eval_tasksets, point, is_eval=True)
        self._set_point(point)
        return self._is_unfinished()

    def _open_tasksets(self, configs: Sequence[TasksetConfig], point: ResumePoint, *, is_eval: bool) -> list[Taskset]:
        """Return tasksets as the run began with them. Raises TasksetError, also for one that was something else."""
        tasksets = []
        for number, config in enumerate(configs):
            recorded = point.sources.get((config.name, is_eval))
            if recorded is None and config.kind != "file" and point.submitted and not is_eval:
                raise TasksetError(
                    f"taskset {config.name}: its path is {config.path} in the config, and the run in this log began "
                    f"with a file: put that back, or, for a new run, {self.config.another_run}"
                )
            taskset = Taskset(config, is_eval=is_eval, number=number, recorded=recorded)
            tasksets.append(taskset)
            if recorded is None and taskset.source is not None:
                self.unrecorded.append(taskset.source)
        return tasksets

    def _set_point(self, point: ResumePoint) -> None:
        self._point = point
        self.resumed = bool(point.submitted or point.evals)
        self.version = point.version
        self.cursors = self.cursors_after(point.submitted)
        ended = not self.has_more(point.submitted, self.cursors)
        if self.has_trainer:  # it goes on from its checkpoint, so the weights tell
            done = point.version if point.path else 0
        else:
            done = self.policy.done_by(point.finished, ended=ended and point.finished == point.submitted)
        self.progress.note(submitted=point.submitted, ended=ended, generated=done, trained=done, done=done,
                           evals=point.evals)

    def _is_unfinished(self) -> bool:
        raise NotImplementedError

    @property
    def has_trainer(self) -> bool:
        """True if a trainer belongs to this run, here or in a process in mode `train`."""
        return self.config.trainer.trainer_class is not None and self.config.mode in ("both", "explore", "train")

    def cursors_after(self, step: int) -> dict[str, Cursor]:
        return {name: Cursor(*at) for name, at in self._point.cursors.get(step, {}).items()}

    def has_more(self, step: int, cursors: Mapping[str, Cursor]) -> bool:
        if self.config.total_steps is not None and step >= self.config.total_steps:
            return False
        least = self.config.buffer.batch_size if self.config.buffer.explorer_input.drop_last else 1
        return self.mix.left(cursors) >= least

    @property
    def last_step(self) -> int | None:
        """The step with which the run ends, by `total_steps` or its tasksets; None: it has no end."""
        left, size = self.mix.left(self.cursors), self.config.buffer.batch_size
        total = self.config.total_steps
        if math.isinf(left):
            return total
        whole = self.config.buffer.explorer_input.drop_last
        last = self.step + int(left // size if whole else math.ceil(left / size))
        return last if total is None else min(last, total)

    def said_of_end(self) -> str:
        """Return what is to be said where the tasksets end the run before `total_steps` does, else ""."""
        total, last = self.config.total_steps, self.last_step
        if total is None or last is None or last >= total:
            return ""
        return (f"the tasksets end after step {last}, before total_steps {total}: their `epochs` say how often they "
                "are read (null: without end)")

    def next_tasks(self, step: int, cursors: Mapping[str, Cursor], n: int) -> tuple[list[Any], dict[str, Cursor]]:
        """Return the tasks that come after this step and its cursors, and the cursors after them.

        There are none when the run ends.
        """
        return self.mix.read(cursors, n) if self.has_more(step, cursors) else ([], dict(cursors))

    def _read_point(self, tasksets: Sequence[str]) -> ResumePoint:
        config = self.config
        try:
            with open_log(config.store.url) as log:
                point = resume_point(log, tasksets)
                recorded = str((log.config(serve=False)[1].get("store") or {}).get("url", ""))
        except LogNotFound:
            point, recorded = ResumePoint(), ""
        if not self.has_trainer:
            return point
        if point.version > point.submitted:
            raise ConfigError(
                f"the weights of the run in {config.masked()['store']['url']} are version {point.version}, but it has "
                f"{point.submitted} steps: another trainer published them: {config.another_run}"
            )
        point = self._weights.of_this_run(point, recorded)
        if self.trains:
            self._weights.require_no_others(point)
        return point

    def require_unfinished(self) -> None:
        """Require a run that is not complete. Raises ConfigError, and what `locate` raises."""
        if not self.locate():
            raise ConfigError(
                f"the store {self.config.masked()['store']['url']} already holds a run, and it is complete (step "
                f"{self.step}): {self.config.another_run}, so that its log stays what it is, or "
                "raise total_steps, or the `epochs` of its tasksets where those end it"
            )

    # --- start and end ----------------------------------------------------------------------------------------------
    async def prepare(self) -> None:
        """Check config and tasksets, start or find the system, wait for its engines. Raises before anything runs."""
        config = self.config
        try:
            self.require_unfinished()
            retention, needed = config.store.retention, self._weights.steps_needed
            if self.trains and retention is not None and retention < needed:
                raise ConfigError(
                    f"store.retention is {retention}: a trainer that starts again needs the experiences since its last "
                    f"checkpoint, up to {needed} steps (synchronizer.sync_interval, trainer.save_interval)"
                )
            self._monitor()
            point = self._point
            if self.trains and point.version > point.checkpoint_version:  # engines must find its weights
                self.trainer = await asyncio.to_thread(self._load_trainer)
            resumed_at = min(self.done, point.checkpoint_version) if self.trains and self.resumed else None
            await self._system_up()
            self.coordinator = await RolloutCoordinator.get_actor(config, resumed_at=resumed_at)
            self._trouble_log = asyncio.create_task(tell_trouble(self.coordinator.status))
            running = running_system.find(config)
            if self.owns_system and running is not None:
                self._locks[0].write_system(config, running)
            if self.trains and self.trainer is None:
                self.trainer = await asyncio.to_thread(self._load_trainer)
            if self._weights.moved:
                await self.coordinator.weights_written_anew(point.version, point.path)
            await self.coordinator.prepare()
            if self.trains:
                await self._weights.record_catch_up(self.coordinator, self.trainer, point.version)
        except BaseException:
            self.release()
            raise

    async def _system_up(self) -> None:
        """Do what comes before the system is connected to, or started where none runs."""
        if not running_system.is_up(self.config):
            return
        try:
            await asyncio.to_thread(require_same_settings, self.config)
        except ConfigError:
            if not self.owns_system:
                raise
            await asyncio.to_thread(end_system, self.config)  # it is started again with the new ones

    def _monitor(self) -> None:
        """Have the metrics of the run written: by its explorer, so that they are written once."""
        if "explorer" in self.roles and self.config.mode != "serve":
            # Steps after the trainer's checkpoint are recorded again; a trainer elsewhere has trained what it has.
            behind = min(self.done, self._point.checkpoint_version) if self.trains else math.inf
            self.monitors = Monitors(self.config, after=behind if self.resumed else None)
            self.monitors.follow()

    def _load_trainer(self) -> Trainer:
        plugins.look_in(self.config.code_path)
        assert self.config.trainer.trainer_class is not None
        cls = plugins.load(self.config.trainer.trainer_class)
        checkpoint = self._point.checkpoint
        self._weights.forget_unpublished(self._point)
        trainer: Trainer = cls(checkpoint or self.config.model.model_path, **self.config.trainer.args)
        if retention_unsafe(self.config, trainer):
            raise ConfigError(
                f"store.retention is {self.config.store.retention}, and the trainer says itself when its weights are "
                "published (wants_sync): the experiences since its last checkpoint might be freed. Leave out "
                "store.retention, or take another sync_style"
            )
        load = getattr(trainer, "load", None)
        if checkpoint and load is not None:
            load(checkpoint)
        self._weights.catch_up(trainer, self._point)
        return trainer

    def require_system(self) -> None:
        """Raise NotRunning when the actor system is gone for good."""
        if running_system.find(self.config) is None and running_system.keeper(self.config) is None:
            raise NotRunning("the actor system is gone: start the explorer again, which goes on with the run")

    async def sync_weight(self, version: int | None = None) -> None:
        """Bring the trainer's weights into the engines as this version (default: the last step trained), by
        `synchronizer.sync_method`. Raises SyncError.
        """
        if self.trainer is None:
            return
        version = self.progress.trained if version is None else version
        await self._weights.bring(self.rollouts, self.trainer, version)
        self.version = version

    async def save_weights(self) -> None:
        """Save the trainer's last weights as a checkpoint, where they are on no disk yet."""
        if self.trainer is not None:
            await self._weights.save(self.rollouts, self.trainer, self.progress.trained)

    async def get_weight(self, name: str) -> np.ndarray[Any, Any]:
        return await self.rollouts.get_weight(name)

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        return await self.rollouts.setup_weight_sync_group(master_address, master_port, state_dict_meta)

    def release(self) -> None:
        """Let others go on with the run; `shutdown` does it too."""
        for lock in self._locks:
            lock.release()
        self._locks, self._unfinished = [], None
        if self.monitors is not None:
            self.monitors.close()
            self.monitors = None

    async def shutdown(self) -> None:
        """Let go of the system; end it if this process started it."""
        try:
            if self._trouble_log is not None:
                self._trouble_log.cancel()
            if self.coordinator is not None:
                await self.coordinator.shutdown()
                self.coordinator = None
        finally:
            self.release()


def retention_unsafe(config: Config, trainer: Any) -> bool:
    """Return True if nothing bounds the steps between two checkpoints, while their experiences are freed."""
    driven = config.synchronizer.sync_style == "trainer_driven" and hasattr(trainer, "wants_sync")
    return driven and config.store.retention is not None

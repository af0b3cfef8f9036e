"""Base class of `Explorer` and `TrainerProcess`: the run's state, its locks, the actor system, the trainer.

In mode `both` one process explores and trains. Modes `explore` and `train` are for two processes, which communicate
only through the log.

A process resumes the run in its store, whichever process died before: the log has the submitted steps, the ended evals
and the current weights. The trainer starts again from its newest checkpoint, of step k. It gets the generated batches
after k again, then the open batches when they are finished, then new ones. So every prompt is used as often as in a run
without interruptions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trinity_es.actors import plugin_lookup
from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.client.async_client import RolloutCoordinator
from trinity_es.client.teardown import end_system
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, LogNotFound, NotRunning, TasksetError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.reading.resume_point import ResumePoint, resume_point
from trinity_es.run.checkpointing import TrainerCheckpoints
from trinity_es.run.progress_signals import RunProgress
from trinity_es.run.sync_policy import SyncPolicy
from trinity_es.run.trainer import Trainer, call_trainer
from trinity_es.run.writable_log_wait import log_trouble
from trinity_es.system import running_system
from trinity_es.system.other_settings import require_same_settings
from trinity_es.system.run_lock import Role, RunLock
from trinity_es.tasksets.mix import Mix
from trinity_es.tasksets.taskset import Cursor, Taskset
from trinity_es.telemetry.monitors import Monitors

__all__ = ["RunProcess"]


class RunProcess:
    """Base class of a run's processes, which explore, train, or do both."""

    roles: tuple[Role, ...]
    """Roles (explorer, trainer) that this process locks, so that no other process takes them."""
    trains = False
    """True if the trainer is in this process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.coordinator: RolloutCoordinator | None = None
        self.trainer: Trainer | None = None
        self.policy = SyncPolicy.of(config)
        self.progress = RunProgress()
        self.monitors: Monitors | None = None
        self.cursors: dict[str, Cursor] = {}
        """Position up to which each taskset was read for the submitted steps."""
        self.version = 0
        """Version of the weights that the engines serve."""
        self.resumed = False
        """True if the store held a run, which this process resumes."""
        self.owns_system = False
        """True if this process, or a dead process that it replaces, started the actor system."""
        self._point = ResumePoint()
        self.unrecorded: list[TasksetSource] = []
        """Sources of tasksets that the log does not have yet; they are submitted with the first batch."""
        self._unfinished: bool | None = None
        self._trouble_log: asyncio.Task[None] | None = None
        self._locks: list[RunLock] = []
        self._weights = TrainerCheckpoints(config)

    @property
    def step(self) -> int:
        """Last train step that was submitted."""
        return self.progress.submitted

    @property
    def done(self) -> int:
        """Last step that is finalized and trained on and whose weights are published."""
        return self.progress.done

    @property
    def position(self) -> int:
        """Log position up to which the run's state was read at the start."""
        return self._point.position

    @property
    def rollouts(self) -> RolloutCoordinator:
        if self.coordinator is None:
            raise ConfigError("the explorer is not prepared: `await explorer.prepare()` first")
        return self.coordinator

    # --- where to begin ---------------------------------------------------------------------------------------------
    def locate(self) -> bool:
        """Read from the tasksets and the log how far the run got. Returns False if it is complete. Starts nothing.

        Locks this process's roles (explorer, trainer), so that no other process takes them, until `shutdown` or
        `release`. Raises AlreadyRunning, TasksetError, and ConfigError, for one if the store holds another run.
        """
        if self._unfinished is None:
            self.unrecorded = []
            # Opening a taskset checks its rows against the parameters of their rewards, whose code may be there.
            plugin_lookup.add_import_folders(self.config.code_path, first=False)
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
        """Open the tasksets, and set cursors and progress from the log. Returns False if the run is complete."""
        inputs = self.config.buffer.explorer_input
        if not inputs.tasksets:
            raise ConfigError("buffer.explorer_input.tasksets is empty: name a taskset to train on")
        point = self._read_point([taskset.name for taskset in inputs.tasksets])
        self.mix = Mix(self._open_tasksets(inputs.tasksets, point, is_eval=False), inputs.interleave)
        size = self.config.buffer.batch_size
        if inputs.drop_last and self.mix.left({}) < size:
            raise ConfigError(
                f"the tasksets have {self.mix.left({})} tasks, fewer than buffer.batch_size {size}, so with "
                "buffer.explorer_input.drop_last no step would run: lower batch_size, add tasks, or set drop_last to "
                "false"
            )
        self.eval_sets = self._open_tasksets(inputs.eval_tasksets, point, is_eval=True)
        self._set_point(point)
        return self._is_unfinished()

    def _open_tasksets(self, configs: Sequence[TasksetConfig], point: ResumePoint, *, is_eval: bool) -> list[Taskset]:
        """Open the tasksets from the sources in the log, and add other sources to `unrecorded`. Raises TasksetError."""
        tasksets = []
        for number, config in enumerate(configs):
            recorded = point.sources.get((config.name, is_eval))
            if recorded is None and config.kind != "file" and point.submitted and not is_eval:
                raise TasksetError(
                    f"taskset {config.name}: its path is {config.path} in the config, but the run in this log began "
                    f"with a file: restore the file's path, or, for a new run, {self.config.another_run}"
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
        self.cursors = {name: Cursor(*cursor) for name, cursor in point.cursors.get(point.submitted, {}).items()}
        ended = not self.has_more(point.submitted, self.cursors)
        if self.has_trainer:  # it resumes from its checkpoint, so the weights' version counts
            done = point.version if point.path else 0
        else:
            done = self.policy.done_by(point.finished, ended=ended and point.finished == point.submitted)
        self.progress.note(submitted=point.submitted, ended=ended, generated=done, trained=done, done=done,
                           evals=point.evals)

    def _is_unfinished(self) -> bool:
        """Return whether this process still has work to do in the run."""
        raise NotImplementedError

    @property
    def has_trainer(self) -> bool:
        """True if a trainer belongs to this run, here or in a process in mode `train`."""
        return self.config.trainer.trainer_class is not None and self.config.mode in ("both", "explore", "train")

    def has_more(self, step: int, cursors: Mapping[str, Cursor]) -> bool:
        """Return whether another step follows this one; `cursors`: positions in the tasksets after this step."""
        if self.config.total_steps is not None and step >= self.config.total_steps:
            return False
        min_task_count = self.config.buffer.batch_size if self.config.buffer.explorer_input.drop_last else 1
        return self.mix.left(cursors) >= min_task_count

    @property
    def last_step(self) -> int | None:
        """Step with which `total_steps` or the tasksets end the run; None for an endless run."""
        tasks_left, size = self.mix.left(self.cursors), self.config.buffer.batch_size
        total_steps = self.config.total_steps
        if math.isinf(tasks_left):
            return total_steps
        drop_last = self.config.buffer.explorer_input.drop_last
        steps_left = int(tasks_left // size if drop_last else math.ceil(tasks_left / size))
        last_step = self.step + steps_left
        return last_step if total_steps is None else min(last_step, total_steps)

    def end_note(self) -> str:
        """Return a note if the tasksets end the run before `total_steps` does, else ""."""
        total_steps, last_step = self.config.total_steps, self.last_step
        if total_steps is None or last_step is None or last_step >= total_steps:
            return ""
        return (f"the tasksets end after step {last_step}, before total_steps {total_steps}: raise their `epochs` "
                "(null: without end) to read them more often")

    def _read_point(self, tasksets: Sequence[str]) -> ResumePoint:
        """Return the resume point of the run in the log. Raises ConfigError if the weights are not its own, or gone."""
        config = self.config
        try:
            with open_log(config.store.url) as log:
                point = resume_point(log, tasksets)
                _, recorded_config = log.config(serve=False)
                recorded_store = str((recorded_config.get("store") or {}).get("url", ""))
        except LogNotFound:
            point, recorded_store = ResumePoint(), ""
        if not self.has_trainer:
            return point
        if point.version > point.submitted:
            raise ConfigError(
                f"the weights of the run in {config.masked()['store']['url']} are version {point.version}, but the run "
                f"has only {point.submitted} steps, so another trainer published them: {config.another_run}"
            )
        point = self._weights.with_current_path(point, recorded_store)
        if self.trains:
            self._weights.require_no_foreign_checkpoints(point)
        return point

    def require_unfinished(self) -> None:
        """Call `locate`, and raise ConfigError if the run is complete."""
        if not self.locate():
            raise ConfigError(
                f"the store {self.config.masked()['store']['url']} already holds a run, and the run is complete (step "
                f"{self.step}). For a new run, {self.config.another_run}; to continue this one raise total_steps, or "
                "the `epochs` of its tasksets if those end it"
            )

    # --- start and end ----------------------------------------------------------------------------------------------
    async def prepare(self) -> None:
        """Check config and tasksets, start or join the actor system, load the trainer, and wait for the engines."""
        config = self.config
        try:
            self.require_unfinished()
            retention, needed = config.store.retention, self._weights.steps_needed
            if self.trains and retention is not None and retention < needed:
                raise ConfigError(
                    f"store.retention is {retention}, but a restarted trainer needs the experiences since its last "
                    f"checkpoint, up to {needed} steps (see synchronizer.sync_interval and trainer.save_interval): set "
                    f"it to {needed} or more"
                )
            self._start_monitors()
            point = self._point
            if self.trains and point.version > point.checkpoint_version:  # engines need the weights that it restores
                self.trainer = await asyncio.to_thread(self._load_trainer)
            resumed_at = min(self.done, point.checkpoint_version) if self.trains and self.resumed else None
            await self._prepare_system()
            self.coordinator = await RolloutCoordinator.get_actor(config, resumed_at=resumed_at)
            self._trouble_log = asyncio.create_task(log_trouble(self.coordinator.status))
            running = running_system.find(config)
            if self.owns_system and running is not None:
                self._locks[0].write_system(config, running)
            if self.trains and self.trainer is None:
                self.trainer = await asyncio.to_thread(self._load_trainer)
            if self._weights.path_changed:
                await self.coordinator.weights_written_anew(point.version, point.path)
            await self.coordinator.prepare()
            if self.trains:
                await self._weights.record_catch_up(self.coordinator, self.trainer, point.version)
        except BaseException:
            self.release()
            raise

    async def _prepare_system(self) -> None:
        """End the actor system if it runs with other settings. Raises ConfigError if this run did not start it."""
        if not running_system.is_up(self.config):
            return
        try:
            await asyncio.to_thread(require_same_settings, self.config)
        except ConfigError:
            if not self.owns_system:
                raise
            await asyncio.to_thread(end_system, self.config)  # it is started again with the new settings

    def _start_monitors(self) -> None:
        """Start the run's monitors, unless this is only its trainer: metrics are written once."""
        if "explorer" in self.roles and self.config.mode != "serve":
            # A trainer in this process repeats the steps after its checkpoint, and their metrics are written again.
            after = min(self.done, self._point.checkpoint_version) if self.trains else math.inf
            self.monitors = Monitors(self.config, after=after if self.resumed else None)
            self.monitors.follow()

    def _load_trainer(self) -> Trainer:
        plugin_lookup.add_import_folders(self.config.code_path)
        assert self.config.trainer.trainer_class is not None
        trainer_class = plugin_lookup.load(self.config.trainer.trainer_class)
        checkpoint = self._point.checkpoint
        self._weights.remove_unpublished(self._point)
        model_path = checkpoint or self.config.model.model_path
        trainer: Trainer = call_trainer(trainer_class, model_path, **self.config.trainer.args)
        trainer_decides = self.config.synchronizer.sync_style == "trainer_driven" and hasattr(trainer, "wants_sync")
        if trainer_decides and self.config.store.retention is not None:  # any number of steps between checkpoints
            raise ConfigError(
                f"store.retention is {self.config.store.retention}, but the trainer decides when its weights are "
                "published (wants_sync), so experiences since its last checkpoint might be freed. Leave out "
                "store.retention, or take another sync_style"
            )
        load = getattr(trainer, "load", None)
        if checkpoint and load is not None:
            call_trainer(load, checkpoint)
        self._weights.catch_up(trainer, self._point)
        return trainer

    def require_system(self) -> None:
        """Raise NotRunning if the actor system is gone and no keeper restarts it."""
        if running_system.find(self.config) is None and running_system.keeper(self.config) is None:
            raise NotRunning("the actor system is gone: start the explorer again, which goes on with the run")

    async def sync_weight(self, version: int | None = None) -> None:
        """Publish the trainer's weights as this version (default: the last step trained). Raises SyncError."""
        if self.trainer is None:
            return
        version = self.progress.trained if version is None else version
        await self._weights.publish(self.rollouts, self.trainer, version)
        self.version = version

    async def save_weights(self) -> None:
        """Save the trainer's last weights as a checkpoint, unless they are on disk."""
        if self.trainer is not None:
            await self._weights.save(self.rollouts, self.trainer, self.progress.trained)

    async def get_weight(self, name: str) -> np.ndarray[Any, Any]:
        return await self.rollouts.get_weight(name)

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        return await self.rollouts.setup_weight_sync_group(master_address, master_port, state_dict_meta)

    def release(self) -> None:
        """Release the locks, so that another process can go on with the run, and end the monitors."""
        for lock in self._locks:
            lock.release()
        self._locks, self._unfinished = [], None
        if self.monitors is not None:
            self.monitors.close()
            self.monitors = None

    async def shutdown(self) -> None:
        """Disconnect from the system; end it if this process started it."""
        try:
            if self._trouble_log is not None:
                self._trouble_log.cancel()
            if self.coordinator is not None:
                await self.coordinator.shutdown()
                self.coordinator = None
        finally:
            self.release()

"""Publishing, saving and restoring of a trainer's weights.

With `sync_method: checkpoint` engines load the saved folder. With memory or nccl, engines get each version without a
disk. Every `trainer.save_interval` steps a version is also saved and published as a checkpoint, from which later
engines start. So the newest version in the log may be ahead of the newest checkpoint. A trainer that resumes starts
from the checkpoint and repeats the steps after it on the recorded experiences.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trinity_es.client.async_client import RolloutCoordinator
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, PayloadNotFound
from trinity_es.events.store.database.urls import file_of, place_of
from trinity_es.events.store.payloads.experiences import read_columns
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.reading.resume_point import ResumePoint
from trinity_es.run.trainer import call_trainer, learn
from trinity_es.weights.shared_memory import write_to_shared_memory

__all__ = ["Checkpoints", "TrainerCheckpoints"]


class Checkpoints:
    """The folders `global_step_N` of a run's checkpoints."""

    def __init__(self, config: Config) -> None:
        self.folder = config.checkpoint_dir

    def path(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    def steps(self) -> list[int]:
        names = [path.name.rsplit("_", 1)[1] for path in self.folder.glob("global_step_*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal())


class TrainerCheckpoints:
    """Publishes and saves the weights of one trainer. A weights version is the train step after which it was made."""

    def __init__(self, config: Config) -> None:
        self.config, self._checkpoints = config, Checkpoints(config)
        self.saved_step = 0
        """Step of the newest checkpoint."""
        self._unrecorded_folder = ""
        """Shared-memory folder of weights that `catch_up` wrote again and that the log does not name yet."""
        self._unrecorded_metrics: dict[int, dict[str, float]] = {}
        """Metrics of repeated steps that are not in the log yet."""
        self.path_changed = False
        """True if the run's folders were moved, so the log has an old path of the current weights."""
        self._unpublished_file = self._checkpoints.folder / "begun.json"
        """File that names the run which writes into this folder, and the step of its checkpoint that is being written;
        0 if none is."""

    @property
    def diskless(self) -> bool:
        """True if engines get weights through memory or NCCL, not from a checkpoint on disk."""
        return self.config.synchronizer.sync_method != "checkpoint"

    @property
    def steps_needed(self) -> int:
        """Maximum number of steps that a resumed trainer repeats, so their experiences must be kept."""
        steps_since_save = self.config.trainer.save_interval - 1 if self.diskless else 0
        return self.config.synchronizer.sync_interval + steps_since_save

    def with_current_path(self, point: ResumePoint, recorded_store: str) -> ResumePoint:
        """Return the resume point with the checkpoint's current path, if the run's folders were moved or copied.

        `recorded_store`: URL of the store as recorded in the log. Raises ConfigError if the checkpoint is gone.
        """
        own_path = self._checkpoints.path(point.checkpoint_version)
        if point.checkpoint and own_path.is_dir() and str(own_path) != point.checkpoint:
            file, recorded_file = file_of(self.config.store.url), file_of(recorded_store)
            moved_together = file is not None and recorded_file is not None and file != recorded_file and (
                os.path.relpath(own_path, file) == os.path.relpath(point.checkpoint, recorded_file))
            if moved_together or not Path(point.checkpoint).is_dir():
                path = str(own_path) if point.path == point.checkpoint else point.path
                point = replace(point, checkpoint=str(own_path), path=path)
                self.path_changed = point.path == str(own_path)
        if point.checkpoint and not Path(point.checkpoint).is_dir():
            raise ConfigError(
                f"the checkpoint {point.checkpoint} is gone, from which the run's engines and trainer start (weights "
                f"version {point.version}). Put it back there or into {own_path}; for a new run, "
                f"{self.config.another_run}"
            )
        return point

    def require_no_foreign_checkpoints(self, point: ResumePoint) -> None:
        """Raise ConfigError if the folder has newer checkpoints of another run, or this log is a copy of its run's log.

        Only the process that writes this run's checkpoints may call this. In another process, a checkpoint that the
        trainer is about to publish would look like another run's.
        """
        unpublished, newest = self._unpublished_step(), point.checkpoint_version
        foreign_steps = [step for step in self._checkpoints.steps() if step > newest and step != unpublished]
        if foreign_steps:
            names = ", ".join(f"global_step_{step}" for step in foreign_steps)
            raise ConfigError(f"{self._checkpoints.folder} holds checkpoints that this run did not make ({names}): "
                              "move them away, or choose another `name`")
        owner = self._checkpoints.folder / str(self._read_note().get("store", ""))  # relative, if it is a file
        if newest and owner.is_file() and unpublished is None:
            raise ConfigError(f"{self._checkpoints.folder} belongs to the run in {owner.resolve()}, of which this log "
                              "is a copy: choose another `name` or `checkpoint_root_dir`")

    # --- resume -----------------------------------------------------------------------------------------------------
    def remove_unpublished(self, point: ResumePoint) -> None:
        """Remove a checkpoint that was begun after `point`'s: it may be half written, and the run repeats it."""
        self.saved_step = point.checkpoint_version
        step = self._unpublished_step()
        if step is not None and step > self.saved_step:
            shutil.rmtree(self._checkpoints.path(step), ignore_errors=True)

    def _unpublished_step(self) -> int | None:
        """Return the step of a checkpoint that this run began to write and did not publish, if any."""
        note = self._read_note()
        return int(note["step"]) if note.get("store") == self._store_id() else None

    def _read_note(self) -> dict[str, Any]:
        """Return what the folder's file says about the run that writes into it; empty if there is no file."""
        try:
            return dict(json.loads(self._unpublished_file.read_bytes()))
        except (OSError, ValueError):
            return {}

    def _write_note(self, step: int) -> None:
        self._unpublished_file.parent.mkdir(parents=True, exist_ok=True)
        self._unpublished_file.write_text(json.dumps({"step": step, "store": self._store_id()}))

    def _store_id(self) -> str:
        """Return an id of this run: the address of its store, or a SQLite file's path relative to the checkpoints."""
        url = self.config.store.url
        return place_of(url) if file_of(url) is None else os.path.relpath(place_of(url), self._checkpoints.folder)

    def catch_up(self, trainer: Any, point: ResumePoint) -> None:
        """Repeat the trainer's steps after its checkpoint, up to the current weights, before any engine starts.

        If the weights in shared memory are gone, write them again. Raises PayloadNotFound if the experiences were
        deleted, ConfigError if the trainer has no `state_dict`.
        """
        if self.diskless:
            _state_dict_method(trainer)  # raises ConfigError now, not after the first step
        if point.version <= point.checkpoint_version:
            return
        with open_log(self.config.store.url) as log:
            payloads = log.payloads()
            try:
                for step in range(point.checkpoint_version + 1, point.version + 1):
                    batch = log.replay(step)
                    if batch.state is BatchLifecycleState.FINALIZED:  # else a person aborted it
                        experiences = read_columns(payloads, batch.experiences)
                        self._unrecorded_metrics[step] = learn(trainer, step, experiences)
            except PayloadNotFound as e:
                raise PayloadNotFound(
                    f"this run can't be resumed: the trainer's checkpoint is of step {point.checkpoint_version}, and "
                    f"experiences of the steps up to {point.version} were deleted. For a new run from the checkpoint, "
                    f"{self.config.another_run}; set store.retention to {self.steps_needed} or more in it",
                    **e.details,
                ) from e
            finally:
                payloads.close()
        if not Path(point.path).is_dir():
            state_dict = _state_dict_method(trainer)
            folder = write_to_shared_memory(self.config, point.version, state_dict(), Path(point.path))
            self._unrecorded_folder = str(folder)

    async def record_catch_up(self, rollouts: RolloutCoordinator, trainer: Any, version: int) -> None:
        """Record the folder and metrics from `catch_up`, now that the system runs; save a checkpoint if due."""
        if self._unrecorded_folder:
            await rollouts.weights_written_anew(version, self._unrecorded_folder)
            self._unrecorded_folder = ""
        for step, metrics in self._unrecorded_metrics.items():
            await rollouts.acknowledge(step, step, metrics)
        self._unrecorded_metrics = {}
        if version - self.saved_step >= self.config.trainer.save_interval:
            await self.save(rollouts, trainer, version)

    # --- publish and save -------------------------------------------------------------------------------------------
    async def publish(self, rollouts: RolloutCoordinator, trainer: Any, step: int) -> None:
        """Have the engines serve the trainer's weights of `step`, and save them if a save is due. Raises SyncError."""
        if self.diskless:
            await rollouts.sync_weights(step, await asyncio.to_thread(_state_dict_method(trainer)))
        if not self.diskless or step - self.saved_step >= self.config.trainer.save_interval:
            await self.save(rollouts, trainer, step)

    async def save(self, rollouts: RolloutCoordinator, trainer: Any, step: int) -> None:
        """Save and publish a checkpoint of `step`, unless one is saved, and remove old ones. Raises ConfigError."""
        if step <= self.saved_step:
            return
        path = self._checkpoints.path(step)
        if path.exists() and self._unpublished_step() != step:
            raise ConfigError(f"{path} exists already, but this run did not make it: move it away, then continue the "
                              "run with `resume`")
        self._write_note(step)
        await asyncio.to_thread(call_trainer, trainer.save, str(path), step=step)
        await rollouts.sync_weights(step, path)
        self._write_note(0)
        self.saved_step = step
        for old_step in self._checkpoints.steps()[: -self.config.trainer.keep_checkpoints]:
            shutil.rmtree(self._checkpoints.path(old_step), ignore_errors=True)


def _state_dict_method(trainer: Any) -> Callable[[], Any]:
    method: Callable[[], Any] | None = getattr(trainer, "state_dict", None)
    if method is None:
        raise ConfigError(
            f"trainer.class {type(trainer).__name__} has no method state_dict(), which synchronizer.sync_method memory "
            "and nccl need: add it (it returns tensors by their names in a checkpoint), or set sync_method to "
            "checkpoint"
        )
    return partial(call_trainer, method)

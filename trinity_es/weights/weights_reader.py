"""Reading the current weights version and its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from trinity_es.actors.engines.checkpoints import model_folder, read_tensor
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.projections.reading.log_reader import Log

__all__ = ["current_weights", "read_weight"]


def current_weights(log: Log) -> ev.WeightsPublished:
    """Return the event of the last published weights; version 0 with path "" if none were published."""
    last = log.last(ev.WeightsPublished.stream, "WeightsPublished")
    return ev.WeightsPublished(version=0, path="") if last is None else cast(ev.WeightsPublished, last.event)


def read_weight(config: Config, log: Log, version: int, name: str) -> np.ndarray[Any, Any]:
    """Return the tensor `name` of a weights version from its folder. Raises WeightNotFound, SyncError."""
    folders = [
        Path(recorded.event.path) for recorded in log.read(stream="weights")
        if isinstance(recorded.event, ev.WeightsPublished) and recorded.event.version == version
    ]
    if version == 0 and not folders:
        base_folder = model_folder(config.explorer.rollout_model.model_path)
        folders = [base_folder] if base_folder is not None else []
    folders.reverse()  # a version may be published again at another place: the newest one first
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        paths = ", ".join(map(str, folders)) or "model.model_path, which is not on this machine"
        raise SyncError(f"weights version {version} can't be read: nothing is at {paths}. Publish the version again")
    try:
        return read_tensor(folder, name)
    except (OSError, ValueError) as e:
        raise SyncError(f"weights version {version} can't be read: {folder}: {e}") from e

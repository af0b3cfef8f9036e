"""The current weights, and their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trinity_es.actors.engines.checkpoints import model_folder, read_tensor
from trinity_es.config.config import Config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.projections.reading.log_reader import Log

__all__ = ["current_weights", "read_weight"]


def current_weights(log: Log) -> ev.WeightsPublished:
    """Return the weights that were published last; version 0 at "" if there are none."""
    last = ev.WeightsPublished(version=0, path="")
    for recorded in log.read(stream="weights"):
        if isinstance(recorded.event, ev.WeightsPublished):
            last = recorded.event
    return last


def read_weight(config: Config, log: Log, version: int, name: str) -> np.ndarray[Any, Any]:
    """Return the tensor `name` of these weights from their folder. Raises WeightNotFound, SyncError."""
    paths = [
        recorded.event.path for recorded in log.read(stream="weights")
        if isinstance(recorded.event, ev.WeightsPublished) and recorded.event.version == version
    ]
    folders = [Path(path) for path in reversed(paths)]
    if version == 0 and not paths:
        model = config.explorer.rollout_model.model_path
        folders = [base] if (base := model_folder(model)) is not None else []
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None:
        places = ", ".join(map(str, folders)) or "model.model_path, which is not on this machine"
        raise SyncError(f"weights version {version} can't be read: nothing is at {places}")
    try:
        return read_tensor(folder, name)
    except (OSError, ValueError) as e:
        raise SyncError(f"weights version {version} can't be read: {folder}: {e}") from e

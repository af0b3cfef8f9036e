"""What a trainer is to a run: the protocol that users implement."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

from trinity_es.actors.commands.fields import is_storable
from trinity_es.events.experience import Experience
from trinity_es.events.values import MOST_METRICS, NAME_LENGTH, shown

__all__ = ["Trainer", "learn"]

_log = logging.getLogger("trinity_es.run")


class Trainer(Protocol):
    """What a run needs of a trainer (`trainer.class`).

    It may also have `load(path)`. When a run is resumed, the trainer is built with its newest checkpoint as
    `model_path`, and then `load` is called with that folder, to bring back what is not weights: the optimizer, the
    step, random states. And with `synchronizer.sync_style: trainer_driven` it may have `wants_sync(step) -> bool`: it
    is asked after each step whether its weights are to be published; without it they are, every `sync_interval` steps.

    With `synchronizer.sync_method` memory or nccl it has `state_dict()`: a mapping from the names in a checkpoint to
    its tensors, torch (on any device) or numpy.
    """

    def __init__(self, model_path: str, **args: Any) -> None: ...

    def step(self, experiences: list[Experience]) -> dict[str, float]:
        """Learn from one batch; returns metrics (loss, ...). Called in a thread, and not for a batch without any."""

    def save(self, path: str) -> None:
        """Write a checkpoint in HF format that an engine can load, and that this class can be built from."""


def learn(trainer: Trainer, step: int, experiences: list[Experience]) -> dict[str, float]:
    """Have the trainer learn from a batch, and return its metrics that can be recorded.

    The weights have changed by then, so no metric ends the run: the others are left out, with a warning. Of a batch
    that the pipeline's filters left nothing of, nothing is learnt.
    """
    said: Any = trainer.step(experiences) if experiences else {}
    if not isinstance(said, Mapping):
        if said is not None:
            _log.warning("step %d: the trainer's step() returned %.80r and not a dict of metrics: none is recorded",
                         step, said)
        return {}
    metrics: dict[str, float] = {}
    for name, value in said.items():
        try:
            number = float("nan") if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not math.isfinite(number):
            _log.warning("step %d: the trainer's metric %.200s is %s, which is no finite number: it is left out", step,
                         name, shown(value))
        elif len(str(name)) > NAME_LENGTH or not is_storable(str(name)):
            _log.warning("step %d: the trainer's metric %s has no name of at most %d characters, without NUL: it is "
                         "left out", step, shown(name), NAME_LENGTH)
        elif len(metrics) == MOST_METRICS:
            _log.warning("step %d: the trainer gave more than %d metrics: the others are left out", step, MOST_METRICS)
            break
        else:
            metrics[str(name)] = number
    return metrics

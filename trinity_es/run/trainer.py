"""The protocol of a trainer, which users implement."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trinity_es.actors.commands.fields import is_storable
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.values import MOST_METRICS, NAME_LENGTH, shown

__all__ = ["Trainer", "call_trainer", "learn"]

_log = logging.getLogger("trinity_es.run")


class Trainer(Protocol):
    """Trainer of a run (`trainer.class`).

    Optional methods:
    - `load(path)`: a resumed run builds the trainer with its newest checkpoint as `model_path`, then calls `load` with
      the same folder, to restore the optimizer, the step and random states.
    - `wants_sync(step) -> bool`, for `synchronizer.sync_style: trainer_driven`: called after each step; True publishes
      the step's weights. Without this method weights are published every `sync_interval` steps.
    - `state_dict()`, required by `synchronizer.sync_method` memory or nccl: a mapping from the names in a checkpoint to
      tensors of torch (on any device) or numpy.
    """

    def __init__(self, model_path: str, **args: Any) -> None: ...

    def step(self, experiences: ExperienceColumns) -> dict[str, float]:
        """Train on one batch, which is never empty, and return metrics (loss, ...). Called in a thread.

        Read the columns of `experiences`, or iterate over it to get `Experience` objects.
        """

    def save(self, path: str) -> None:
        """Write a checkpoint in HF format that an engine can load, and that this class can be built from."""


def call_trainer(function: Callable[..., Any], *args: Any, step: int | None = None, **keywords: Any) -> Any:
    """Call a trainer's class or method, and return its result. An error gets a note with the function's name and step.

    StopIteration and SystemExit become RuntimeError: a thread can't pass on StopIteration, so the run would wait
    forever, and SystemExit would end the process without a message.
    """
    try:
        return function(*args, **keywords)
    except (Exception, SystemExit) as e:
        name = f"{function.__module__}:{getattr(function, '__qualname__', function)}"
        in_step = "" if step is None else f" in step {step}"
        if isinstance(e, StopIteration | SystemExit):
            raise RuntimeError(f"{name} raised {e!r}{in_step}") from e
        e.add_note(f"{name} raised it{in_step}")
        raise


def learn(trainer: Trainer, step: int, experiences: ExperienceColumns) -> dict[str, float]:
    """Call `trainer.step`, unless filters emptied the batch, and return the metrics that the log can hold.

    Other metrics are dropped with a warning: the weights have changed by then, so a bad metric must not end the run.
    """
    step_result: Any = call_trainer(trainer.step, experiences, step=step) if experiences else {}
    if not isinstance(step_result, Mapping):
        if step_result is not None:
            _log.warning("step %d: the trainer's step() returned %.80r and not a dict of metrics: none is recorded",
                         step, step_result)
        return {}
    metrics: dict[str, float] = {}
    for name, value in step_result.items():
        try:
            number = float("nan") if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not math.isfinite(number):
            _log.warning("step %d: the trainer's metric %.200s is %s, which is no finite number: it is left out", step,
                         name, shown(value))
        elif len(str(name)) > NAME_LENGTH or not is_storable(str(name)):
            _log.warning("step %d: the trainer's metric %s needs a name of at most %d characters, without NUL: it is "
                         "left out", step, shown(name), NAME_LENGTH)
        elif len(metrics) == MOST_METRICS:
            _log.warning("step %d: the trainer gave more than %d metrics: the others are left out", step, MOST_METRICS)
            break
        else:
            metrics[str(name)] = number
    return metrics

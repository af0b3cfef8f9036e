"""What a trainer is to a run: the protocol that users implement."""

from __future__ import annotations

from typing import Any, Protocol

from trinity_es.events.experience import Experience

__all__ = ["Trainer", "learn"]


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


def learn(trainer: Trainer, experiences: list[Experience]) -> dict[str, float]:
    """Have the trainer learn from a batch; of one that the pipeline's filters left nothing of, nothing is learnt."""
    return trainer.step(experiences) if experiences else {}

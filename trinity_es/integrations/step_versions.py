"""Weights versions for trainers that count steps, and publishing of a step's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_es.client.rollout_client import RolloutClient
from trinity_es.weights.shared_memory import write_to_shared_memory
from trinity_es.weights.weights_reader import current_weights

__all__ = ["missing_version", "publish_tensors", "step_of", "step_version"]

STEPS = 10**6
"""More steps than a run has."""


def step_version(step: int, current: int) -> int:
    """Return the version under which the weights of a step are served.

    It is the step itself. Versions never decrease, so if the version `current` is higher, it is the smallest number
    from `current` on that ends with the step's six digits.
    """
    return current + (step - current) % STEPS


def step_of(version: int) -> int:
    return version % STEPS


def missing_version(client: RolloutClient, step: int) -> int | None:
    """Return the version under which to publish a step's weights; None if the engines have them already."""
    weights = current_weights(client.log)
    version = step_version(step, weights.version)
    exists = not weights.path or Path(weights.path).is_dir()  # without a path: the model of the config
    return None if version == weights.version and exists else version


def publish_tensors(client: RolloutClient, version: int, state: Mapping[str, Any]) -> None:
    """Publish these tensors to the engines. If `version` is the current one, write its lost files again."""
    weights = current_weights(client.log)
    if version == weights.version:
        write_to_shared_memory(client.config, version, state, Path(weights.path))
        client.weights_written_anew(version, weights.path)
    else:
        client.sync_weights(version, state)

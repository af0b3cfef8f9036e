"""Weights of a trainer that counts its steps: under which version engines serve those of a step, and since when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_es.client.rollout_client import RolloutClient
from trinity_es.weights.published import current_weights
from trinity_es.weights.shared_memory import write_memory

__all__ = ["missing_version", "publish_tensors", "step_of", "step_version"]

STEPS = 10**6
"""More steps than a run has."""


def step_version(step: int, current: int) -> int:
    """Return the version under which the weights of a step are served: the step, or where the engines are beyond it,
    the smallest number from `current` on that ends with the step's six digits, since versions never go back.
    """
    return current + (step - current) % STEPS


def step_of(version: int) -> int:
    """Return the step whose weights these are."""
    return version % STEPS


def missing_version(client: RolloutClient, step: int) -> int | None:
    """Return the version as which a step's weights have to be published now; None where they are the current ones."""
    now = current_weights(client.log)
    version = step_version(step, now.version)
    there = not now.path or Path(now.path).is_dir()
    return None if version == now.version and there else version


def publish_tensors(client: RolloutClient, version: int, state: Mapping[str, Any]) -> None:
    """Have the engines serve these tensors; those of the current version, which lay in memory and are lost, anew."""
    now = current_weights(client.log)
    if version == now.version:
        write_memory(client.config, version, state, Path(now.path))
        client.weights_written_anew(version, now.path)
    else:
        client.sync_weights(version, state)

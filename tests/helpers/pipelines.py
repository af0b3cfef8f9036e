"""Experiences for a pipeline, and its results."""

from __future__ import annotations

from typing import Any

import numpy as np

from trinity_es.actors.coordinator.delivery.pipeline import Pipeline, PipelineResult, StalenessLimit
from trinity_es.events.experience import EID, Experience


def experience(task: int, run: int, reward: float | None, **more: Any) -> Experience:
    eid = EID(1, task, run, 0, f"s{task}-{run}")
    return Experience(eid=eid, tokens=[1, 2, 3, 4], prompt_length=2, reward=reward, **more)


def group(*rewards: float, task: int = 0) -> list[Experience]:
    return [experience(task, run, reward) for run, reward in enumerate(rewards)]


def run(
    operators: list[dict[str, Any]], experiences: list[Experience], limit: StalenessLimit | None = None
) -> PipelineResult:
    return Pipeline(operators).run(experiences, Ticks(), limit)


def first(array: np.ndarray[Any, Any] | None) -> float:
    return float(array[0])


class Ticks:
    """Clock that advances by one second at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now

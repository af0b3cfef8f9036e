"""A runner as its events tell it, the weights that all are to serve, and the folds that lead there.

Pure: no clock, no database, no actor. The coordinator decides on these states (`actors/coordinator/decisions`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from trinity_es.events import vocabulary as ev

__all__ = [
    "Lives", "RunnerEvent", "RunnerLife", "RunnerState", "Weights", "evolve_lives", "evolve_weights", "newest_life",
]


class RunnerState(StrEnum):
    """Where a life of a runner is, from its first word to its end."""

    STARTED = "started"
    """Its process answered; its engine is loading."""
    READY = "ready"
    """Its engine serves: units may be given to it."""
    FAILED = "failed"
    """Its engine could not be loaded, or died, or lacks a LoRA adapter; the process is there and gets no units."""
    RETIRED = "retired"
    """It was stopped on purpose."""
    LOST = "lost"
    """Its process is gone; another life follows."""
    QUARANTINED = "quarantined"
    """Its process is gone, and none follows until a person wants it."""

    @property
    def gone(self) -> bool:
        """The process has ended, and not in order."""
        return self in (RunnerState.LOST, RunnerState.QUARANTINED)


@dataclass(slots=True, kw_only=True)
class RunnerLife:
    """One life of a runner: one process, from its start to its end."""

    name: str
    incarnation: int
    state: RunnerState = RunnerState.STARTED
    pid: int = 0
    model: str = "rollout"
    """The model that its engine serves: units and weights are for those of the rollout model."""
    reason: str = ""
    places: int = 0
    """Maximum of the units that it runs at the same time; 0 until it is ready."""
    model_version: int = 0
    served: bool = False
    """It has had what was the current version: where a newer one can't be loaded it goes on with that."""
    refused: tuple[int, str] | None = None
    """The version that it could not load when it tried last, and why."""

    def refuses(self, weights: Weights) -> str:
        """Return why it could not load these weights; empty: it has them, or has not tried."""
        version, why = self.refused or (None, "")
        return why if version == weights.version != self.model_version else ""


@dataclass(frozen=True, slots=True)
class Weights:
    """The current weights. Version 0 is the model as it was given, which nobody publishes."""

    version: int = 0
    path: str = ""
    method: str = ""

    @property
    def in_memory_only(self) -> bool:
        """No disk has a copy of them."""
        return self.method in ("memory", "nccl")


RunnerEvent = (
    ev.RunnerStarted | ev.RunnerReady | ev.RunnerFailed | ev.RunnerLost | ev.RunnerQuarantined | ev.RunnerRetired
    | ev.ConcurrencyChanged | ev.WeightsLoaded | ev.WeightsFailed
)


Lives = dict[tuple[str, int], RunnerLife]


def newest_life(lives: Lives, name: str) -> RunnerLife | None:
    """Return the life of this runner with the highest incarnation. Where two systems fought for the log it need not be
    the one that serves.
    """
    return max((life for (of, _), life in lives.items() if of == name), key=lambda life: life.incarnation, default=None)


def evolve_lives(lives: Lives, event: ev.Event, weights: Weights) -> None:
    """Change the life that one more event of a runner's stream is about; `weights`: the current ones at that event.

    A life that is told for the first time by its end alone never spoke. A coordinator that takes over records again how
    the runners are, so a life may start twice.
    """
    told = cast(RunnerEvent, event)
    key = told.runner, told.incarnation
    life = lives.setdefault(key, RunnerLife(name=told.runner, incarnation=told.incarnation))
    match told:
        case ev.RunnerStarted():
            life.state, life.reason, life.pid, life.model = RunnerState.STARTED, "", told.pid, told.model
        case ev.RunnerReady():
            life.state, life.reason, life.places = RunnerState.READY, "", told.places
            life.model_version = told.model_version
            life.served |= told.model_version == weights.version or not weights.path
        case ev.ConcurrencyChanged():
            life.places = told.places
        case ev.RunnerFailed():
            life.state, life.reason = RunnerState.FAILED, told.reason
        case ev.RunnerLost():
            life.state, life.reason = RunnerState.LOST, told.reason
        case ev.RunnerQuarantined():
            life.state, life.reason = RunnerState.QUARANTINED, told.reason
        case ev.RunnerRetired():
            life.state = RunnerState.RETIRED
        case ev.WeightsLoaded():
            life.model_version, life.served, life.refused = told.version, True, None
        case ev.WeightsFailed():
            life.refused = told.version, told.error  # it goes on with what it had


def evolve_weights(weights: Weights, event: ev.WeightsPublished) -> Weights:
    return Weights(event.version, event.path, event.method)

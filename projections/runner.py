"""Folds of runners' lives (incarnations of their processes) and of the current weights. Pure.

The coordinator's decisions on these states are in `actors/coordinator/decisions`.
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
    STARTED = "started"
    """The process has answered, and its engine is loading."""
    READY = "ready"
    """The engine has loaded, and the runner may get units."""
    FAILED = "failed"
    """The engine did not load, died, or lacks a LoRA adapter. The process lives but gets no units."""
    RETIRED = "retired"
    LOST = "lost"
    """The process is gone, and the guardian starts another."""
    QUARANTINED = "quarantined"
    """The process is gone, and no other is started until a person asks for it."""

    @property
    def gone(self) -> bool:
        """True if the process ended unintentionally."""
        return self in (RunnerState.LOST, RunnerState.QUARANTINED)


@dataclass(slots=True, kw_only=True)
class RunnerLife:
    """One life of a runner, from the start of its process to the end."""

    name: str
    incarnation: int
    state: RunnerState = RunnerState.STARTED
    pid: int = 0
    model: str = "rollout"
    """Model that its engine serves. Only runners of the rollout model get units and weights."""
    reason: str = ""
    places: int = 0
    """Maximum number of concurrent units; 0 until it is ready."""
    model_version: int = 0
    was_current: bool = False
    """True if it ever had the weights that were current then. If so, it keeps getting units if a newer version fails to
    load."""
    refused: tuple[int, str] | None = None
    """(version, error) of its last load of weights, if that failed."""

    def refuses(self, weights: Weights) -> str:
        """Return the error with which the runner failed to load these weights; "" if it has them or did not try."""
        version, error = self.refused or (None, "")
        return error if version == weights.version != self.model_version else ""


@dataclass(frozen=True, slots=True)
class Weights:
    """Current weights. Version 0 is the original model, which is never published."""

    version: int = 0
    path: str = ""
    method: str = ""

    @property
    def in_memory_only(self) -> bool:
        """True if the weights are in memory and not on a disk."""
        return self.method in ("memory", "nccl")


RunnerEvent = (
    ev.RunnerStarted | ev.RunnerReady | ev.RunnerFailed | ev.RunnerLost | ev.RunnerQuarantined | ev.RunnerRetired
    | ev.ConcurrencyChanged | ev.WeightsLoaded | ev.WeightsFailed
)


Lives = dict[tuple[str, int], RunnerLife]
"""(runner, incarnation) -> life."""


def newest_life(lives: Lives, name: str) -> RunnerLife | None:
    """Return the runner's life with the highest incarnation; None if `lives` has none of it.

    If two systems compete for the log, an earlier life may be the one that runs.
    """
    return max((life for (runner, _), life in lives.items() if runner == name), key=lambda life: life.incarnation,
               default=None)


def evolve_lives(lives: Lives, event: ev.Event, weights: Weights) -> None:
    """Apply one event of a runner's stream to `lives`, in place. `weights`: those that were current at the event.

    The first event of a life may be its end. A life may have several starts, because a new coordinator records the
    states of all runners again.
    """
    event = cast(RunnerEvent, event)
    key = event.runner, event.incarnation
    life = lives.setdefault(key, RunnerLife(name=event.runner, incarnation=event.incarnation))
    match event:
        case ev.RunnerStarted():
            life.state, life.reason, life.pid, life.model = RunnerState.STARTED, "", event.pid, event.model
        case ev.RunnerReady():
            life.state, life.reason, life.places = RunnerState.READY, "", event.places
            life.model_version = event.model_version
            life.was_current |= event.model_version == weights.version or not weights.path
        case ev.ConcurrencyChanged():
            life.places = event.places
        case ev.RunnerFailed():
            life.state, life.reason = RunnerState.FAILED, event.reason
        case ev.RunnerLost():
            life.state, life.reason = RunnerState.LOST, event.reason
        case ev.RunnerQuarantined():
            life.state, life.reason = RunnerState.QUARANTINED, event.reason
        case ev.RunnerRetired():
            life.state = RunnerState.RETIRED
        case ev.WeightsLoaded():
            life.model_version, life.was_current, life.refused = event.version, True, None
        case ev.WeightsFailed():
            life.refused = event.version, event.error  # it keeps its present weights


def evolve_weights(weights: Weights, event: ev.WeightsPublished) -> Weights:
    return Weights(event.version, event.path, event.method)

"""The runners that the coordinator knows, by name: what it knows of each beyond the log, and the way to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import MessageSender

__all__ = ["GONE", "RunnerRecord", "RunnerRegistry"]

GONE = ("lost", "quarantined")
"""States in which a life of a runner has ended."""


@dataclass(slots=True)
class RunnerRecord:
    """What the coordinator knows of a runner beyond the log: its address, and how fast it is."""

    name: str
    incarnation: int
    address: Any
    pid: int
    state: str = ""
    places: int = 0
    model_version: int = 0
    unit_seconds: float | None = None
    """Moving mean of the time of a unit."""
    reason: str = ""
    loading: int | None = None
    """The version that it is loading now; until it has it, it gets no units."""
    loading_since: float = 0.0
    """When it was told to, monotonic seconds."""
    seen: float = 0.0
    """Unix seconds of its last sign of life."""
    progressed: float = 0.0
    """Unix seconds when it last finished a unit, or came up."""
    silent: float = 0.0
    """Seconds that its engine's loop had not answered, at the last sign of life."""
    trouble: str = ""
    """Why it could not store what it finished, at the last sign of life."""
    endpoint: str = ""
    """URL of its engine's OpenAI-compatible endpoint; empty while it serves none."""
    model: str = "rollout"
    """Which model it serves: units and weights are for those of the rollout model."""
    served: bool = False
    """It has had what was the current version: when a newer one can't be loaded it goes on with that."""
    could_not_load: int | None = None
    """The version that it could not load when it tried last."""


class RunnerRegistry:
    """Runners by name. What is sent to them goes out when the live state is durable."""

    def __init__(self, live: LiveState, sender: MessageSender) -> None:
        self.live, self.sender = live, sender
        self.runners: dict[str, RunnerRecord] = {}

    def rollout(self) -> list[RunnerRecord]:
        """Return the runners of the rollout model."""
        return [r for r in self.runners.values() if r.model == "rollout"]

    def send_later(self, address: Any, message: Any) -> None:
        """Send when everything that was recorded so far is durable."""
        self.live.then(lambda: self.sender.send(address, message))

"""The runners that the coordinator knows, by name, and the way to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import MessageSender
from trinity_es.events.store.records.clock import steady_clock
from trinity_es.projections.host_states import host_of
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["RunnerRecord", "RunnerRegistry"]


@dataclass(slots=True)
class RunnerRecord:
    """What the coordinator knows of a runner: its life as it was folded, and what no event tells."""

    life: RunnerLife
    address: Any = None
    """Of its actor; None for one that has not spoken to this coordinator."""
    model_version: int = 0
    """The weights that it serves, at its last word."""
    unit_seconds: float | None = None
    """Moving mean of the time of a unit."""
    loading: int | None = None
    """The version that it is loading now; until it has it, it gets no units."""
    loading_since: float = 0.0
    """When it was told to, monotonic seconds."""
    could_not_load: int | None = None
    """The version that it could not load when it tried last."""
    up: bool = False
    """Its engine serves, at its last word; one that lacks adapters is `failed` all the same."""
    seen: float = 0.0
    """Unix seconds of its last sign of life."""
    progressed: float = 0.0
    """Unix seconds when it last finished a unit, or came up."""
    finished: float = 0.0
    """Unix seconds when it last finished a unit, as far as this coordinator knows; 0 before."""
    silent: float = 0.0
    """Seconds that its engine's loop had not answered, at the last sign of life."""
    trouble: str = ""
    """Why it could not store what it finished, at the last sign of life."""
    adapters: dict[str, int] = field(default_factory=dict)
    """The LoRA adapters that it serves, at its last word."""
    has_adapters: bool = False
    """It has served every adapter at once: until then it gets no units."""
    adapters_order: int | None = None
    """The order to load adapters that it has not answered."""
    adapters_since: float = 0.0
    """When that was sent, monotonic seconds."""
    adapters_failures: int = 0
    """How many such orders in a row it could not carry out, of what is to be served now."""
    waits_for: str = ""
    """What its engine waited for before it can start, at the last sign of life."""
    runs_wait: str = ""
    """What some of its runs waited for outside of the system, at the last sign of life."""
    endpoint: str = ""
    """URL of its engine's OpenAI-compatible endpoint; empty while it serves none."""

    @property
    def name(self) -> str:
        return self.life.name

    @property
    def incarnation(self) -> int:
        return self.life.incarnation

    @property
    def state(self) -> RunnerState:
        return self.life.state


class RunnerRegistry:
    """Runners by name. What is sent to them goes out when the live state is durable."""

    def __init__(self, live: LiveState, sender: MessageSender, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives unix seconds, for what people are told; by default one that no step of the machine's moves."""
        self.live, self.sender, self.clock = live, sender, clock or steady_clock()
        self.runners: dict[str, RunnerRecord] = {}
        self.leaving: frozenset[str] = frozenset()
        """Runners that get nothing new: their servers were taken away."""

    def rollout(self) -> list[RunnerRecord]:
        """Return the runners of the rollout model."""
        return [r for r in self.runners.values() if r.life.model == "rollout"]

    def up(self) -> list[RunnerRecord]:
        """Return the runners of the rollout model whose engines run, those that failed for want of weights too."""
        return [r for r in self.rollout() if r.up or r.state is RunnerState.READY]

    def ready(self) -> list[RunnerRecord]:
        """Return the runners of the rollout model whose engines serve."""
        return [r for r in self.rollout() if r.state is RunnerState.READY]

    def staying(self) -> list[RunnerRecord]:
        """Return those of them that may be given something new."""
        return [r for r in self.ready() if not self.is_leaving(r.name)]

    def is_leaving(self, name: str) -> bool:
        """Return True if a runner gets nothing new: its server was taken away, or its host is to leave."""
        host = self.live.hosts.get(host_of(name))
        return name in self.leaving or (host is not None and host.state == "draining")

    def changed(self, name: str) -> None:
        """Have the dispatcher look at a runner again, which may be given more now, or other weights' units."""
        self.live.in_flight.changed[name] = None

    def send_later(self, address: Any, message: Any) -> None:
        """Send when everything that was recorded so far is durable."""
        self.live.then(lambda: self.sender.send(address, message))

    def status(self) -> list[dict[str, Any]]:
        """Return every runner at a glance, as plain JSON; not those of hosts that are gone."""
        gone = {host.name for host in self.live.hosts.values() if not host.there}
        load = self.live.in_flight.loads
        now, monotonic = self.clock(), self.sender.now()
        return [
            {
                "runner": r.name,
                "host": host_of(r.name),
                "model": r.life.model,
                "incarnation": r.incarnation,
                "state": r.state,
                "pid": r.life.pid,
                "places": r.life.places,
                "load": load.get((r.name, r.incarnation), 0),
                "model_version": r.model_version,
                "loading": r.loading,
                "loading_since": None if r.loading is None else now - (monotonic - r.loading_since),
                "refused": r.life.refuses(self.live.weights),
                "adapters": dict(r.adapters),
                "reason": r.life.reason,
                "seen": r.seen,
                "progressed": r.progressed,
                "finished": r.finished,
                "silent": r.silent,
                "trouble": r.trouble,
                "waits_for": r.waits_for,
                "runs_wait": r.runs_wait,
                "endpoint": r.endpoint,
            }
            for r in sorted(self.runners.values(), key=lambda r: r.name)
            if host_of(r.name) not in gone
        ]

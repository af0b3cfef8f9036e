"""Registry of the runners, with the state that is in no event, such as addresses and heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.events.store.records.clock import steady_clock
from trinity_es.projections.host_states import host_of
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["RunnerRecord", "RunnerRegistry"]


@dataclass(slots=True)
class RunnerRecord:
    """A runner's state in the coordinator: its present process as in the log (`life`), and facts that are in no event.
    Fields that the runner reports have the value of its last status or heartbeat."""

    life: RunnerLife
    address: Any = None
    """Address of the runner's actor; None until it reports to this coordinator."""
    model_version: int = 0
    """Version of the weights that the runner serves."""
    unit_seconds: float | None = None
    """Moving mean of the seconds per unit."""
    loading: int | None = None
    """Version of the weights that the runner is loading. It gets no units meanwhile."""
    loading_since: float = 0.0
    """Time of the order to load that version, in monotonic seconds."""
    could_not_load: int | None = None
    """Version that the runner failed to load at its last attempt."""
    up: bool = False
    """True if the engine serves, also while the runner's state is `failed` because it lacks adapters."""
    seen: float = 0.0
    """Time of the runner's last message, in unix seconds."""
    progressed: float = 0.0
    """Time at which the runner last finished a unit, or started, in unix seconds."""
    finished: float = 0.0
    """Time at which the runner last finished a unit under this coordinator, in unix seconds; 0 before."""
    silent: float = 0.0
    """Seconds since the engine's loop last answered."""
    trouble: str = ""
    """Error that prevents the runner from storing its outcomes; "" without one."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Version of each LoRA adapter that the runner serves."""
    has_adapters: bool = False
    """True once the runner has served all adapters at the same time. It gets no units before."""
    adapters_order: int | None = None
    """Number of the unanswered order to load adapters."""
    adapters_since: float = 0.0
    """Time at which that order was sent, in monotonic seconds."""
    adapters_failures: int = 0
    """Number of orders in a row, for the current adapters, that the runner could not carry out."""
    waits_for: str = ""
    """External action that the engine waits for before it can start."""
    runs_wait: str = ""
    """External action that some of the runner's runs wait for."""
    endpoint: str = ""
    """URL of the engine's OpenAI-compatible endpoint; "" while it serves none."""

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
    """Runners by name, and the sending of messages to them once the live state is durable."""

    def __init__(self, live: LiveState, actor: TimerHost, clock: Callable[[], float] | None = None) -> None:
        """`clock` returns unix seconds to show to users. The default one does not jump if that clock is set."""
        self.live, self.actor, self.clock = live, actor, clock or steady_clock()
        self.runners: dict[str, RunnerRecord] = {}
        self.leaving: frozenset[str] = frozenset()
        """Runners that get no new units because their servers were removed."""

    def rollout_runners(self) -> list[RunnerRecord]:
        """Return the runners of the rollout model, in any state."""
        return [r for r in self.runners.values() if r.life.model == "rollout"]

    def up_runners(self) -> list[RunnerRecord]:
        """Return rollout runners whose engines run, including `failed` ones that lack weights or adapters."""
        return [r for r in self.rollout_runners() if r.up or r.state is RunnerState.READY]

    def ready_runners(self) -> list[RunnerRecord]:
        """Return rollout runners whose engines serve."""
        return [r for r in self.rollout_runners() if r.state is RunnerState.READY]

    def staying_runners(self) -> list[RunnerRecord]:
        """Return ready rollout runners that are not leaving."""
        return [r for r in self.ready_runners() if not self.is_leaving(r.name)]

    def living_processes(self) -> set[tuple[str, int]]:
        """Return (name, incarnation) of each runner whose process still runs, as far as the coordinator knows."""
        return {(r.name, r.incarnation) for r in self.runners.values() if not r.state.gone}

    def is_leaving(self, name: str) -> bool:
        """Return True if a runner gets no new units, because its server was removed or its host is draining."""
        host = self.live.hosts.get(host_of(name))
        return name in self.leaving or (host is not None and host.state == "draining")

    def mark_changed(self, name: str) -> None:
        """Have the dispatcher check again how many units a runner can take."""
        self.live.in_flight.changed_runners[name] = None

    def send_later(self, address: Any, message: Any) -> None:
        """Send a message when everything recorded so far is durable."""
        self.live.when_durable(lambda: self.actor.send(address, message))

    def status(self) -> list[dict[str, Any]]:
        """Return a row of plain JSON for each runner, except runners of hosts that are gone."""
        absent_hosts = {host.name for host in self.live.hosts.values() if not host.is_present}
        loads = self.live.in_flight.loads
        now, monotonic = self.clock(), self.actor.now()
        return [
            {
                "runner": r.name, "host": host_of(r.name), "model": r.life.model, "incarnation": r.incarnation,
                "state": r.state, "pid": r.life.pid, "places": r.life.places,
                "load": loads.get((r.name, r.incarnation), 0), "model_version": r.model_version, "loading": r.loading,
                "loading_since": None if r.loading is None else now - (monotonic - r.loading_since),
                "refused": r.life.refuses(self.live.weights), "adapters": dict(r.adapters), "reason": r.life.reason,
                "seen": r.seen, "progressed": r.progressed, "finished": r.finished, "silent": r.silent,
                "trouble": r.trouble, "waits_for": r.waits_for, "runs_wait": r.runs_wait, "endpoint": r.endpoint,
            }
            for r in sorted(self.runners.values(), key=lambda r: r.name)
            if host_of(r.name) not in absent_hosts
        ]

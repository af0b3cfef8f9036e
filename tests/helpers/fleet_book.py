"""The live state as the coordinator's fleet needs it, without a log."""

from __future__ import annotations

from typing import Any

from trinity_es.actors.coordinator.units_in_flight import UnitsInFlight
from trinity_es.events import vocabulary as ev
from trinity_es.projections.adapter_versions import Adapters
from trinity_es.projections.host_states import Hosts, evolve_hosts
from trinity_es.projections.runner import Lives, Weights, evolve_lives, evolve_weights


class Book:
    """What is recorded is durable at once, unless `writes` is false."""

    def __init__(self) -> None:
        self.writes = True
        self.weights, self.in_flight = Weights(), UnitsInFlight()
        self.batches: dict[Any, Any] = {}
        self.adapters: Adapters = {}
        self.hosts: Hosts = {}
        self.lives: Lives = {}
        self.recorded: list[ev.Event] = []

    def record(self, *events: ev.Event) -> None:
        self.recorded += events
        for event in events:
            if isinstance(event, ev.WeightsPublished):
                self.weights = evolve_weights(self.weights, event)
            elif isinstance(event, ev.HostJoined | ev.HostLost | ev.HostLeft | ev.HostDraining):
                evolve_hosts(self.hosts, event)
            else:
                evolve_lives(self.lives, event, self.weights)

    def when_durable(self, call: Any) -> None:
        if self.writes:
            call()

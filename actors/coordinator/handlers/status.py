"""What a coordinator tells of itself, from memory: it is asked most where the log can't be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_es.actors.commands import CommandRequest, GetStatus
from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.fleet.leases import LeaseFleet
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.servers import ServerFleet
from trinity_es.actors.coordinator.handlers.batches import BatchHandlers
from trinity_es.actors.coordinator.handlers.experiences import ExperienceQueue
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.handlers.serve_routes import RouteHandlers
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import Responder
from trinity_es.events.values import sort_batch_id
from trinity_es.projections.adapters import current_adapters

__all__ = ["StatusHandlers"]


class StatusHandlers:
    """Tells how everything is."""

    def __init__(
        self, live: LiveState, registry: RunnerRegistry, outputs: Outputs, router: Responder, *, batches: BatchHandlers,
        queue: ExperienceQueue, routes: RouteHandlers, epoch: int, trouble: Callable[[], str | None],
        refuses: Callable[[], bool], servers: ServerFleet, leases: LeaseFleet,
        hosts: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """`trouble` says what keeps the log from being written now; `refuses`, whether who wants something written is
        refused for that, and not left waiting; `hosts`, how the hosts are that joined."""
        self._live, self._registry, self._outputs, self._router = live, registry, outputs, router
        self._batches, self._queue, self._routes = batches, queue, routes
        self._epoch, self._trouble, self._refuses, self._servers = epoch, trouble, refuses, servers
        self._leases, self._hosts = leases, hosts

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [handled(GetStatus, self.status)]

    def status(self, request: CommandRequest[GetStatus]) -> None:
        """Tell it now: that changes nothing."""
        batches = [
            {
                "batch_id": b.batch_id,
                "batch_type": b.batch_type,
                "state": b.state.value,
                "tasks": b.expected_task_count,
                "settled": b.completed_task_count,
                "running_units": len(b.flights),
                "pending_units": len(b.pending),
                "failed_attempts": b.failed_attempts,
                "waited_for": len(self._batches.waiters.get(b.batch_id, [])),
            }
            for b in sorted(self._live.batches.values(), key=lambda b: sort_batch_id(b.batch_id))
        ]
        self._router.answer(
            request,
            {
                "weights_version": self._live.weights.version,
                "adapters": {name: e.version for name, e in current_adapters(self._live.adapters).items()},
                "batches": batches,
                "runners": self._registry.status(),
                "clock": self._registry.clock(),
                "recovered": self._batches.recovered,
                "outputs": self._outputs.status(),
                "queue": self._queue.status(),
                "epoch": self._epoch,
                "trouble": self._trouble(),
                "refuses": self._refuses(),
                "proxies": self._routes.urls(),
                "servers": self._servers.status(),
                "server_list": self._servers.trouble,
                "leases": self._leases.status(),
                "hosts": self._hosts(),
            },
        )

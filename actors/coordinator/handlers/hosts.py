"""What is asked about the hosts of a run."""

from __future__ import annotations

from collections.abc import Callable

from trinity_es.actors.commands import CommandRequest, DrainHost, DrainingHost
from trinity_es.actors.coordinator.fleet.hosts import HostFleet
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.ports import Responder
from trinity_es.events.errors import HostNotFound

__all__ = ["HostHandlers"]


class HostHandlers:
    """Handles what is asked about hosts."""

    def __init__(self, fleet: Callable[[], HostFleet | None], router: Responder) -> None:
        """`fleet`: the hosts, where this head takes any."""
        self.fleet, self.router = fleet, router

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [handled(DrainHost, self.drain)]

    def drain(self, request: CommandRequest[DrainHost]) -> None:
        """Have a host leave."""
        name, fleet = request.command.host, self.fleet()
        there = {} if fleet is None else {host.name: host for host in fleet.there()}
        if fleet is None or name not in there:
            known = ", ".join(sorted(there)) or "none besides the head's own"
            raise HostNotFound(f"no host {name!r} takes part: there is {known}")
        fleet.drain(name, request.command.reason)
        self.router.reply(request, DrainingHost(host=name, epoch=there[name].epoch, units=fleet.units_of(name)))

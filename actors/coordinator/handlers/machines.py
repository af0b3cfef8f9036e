"""What is asked about the machines under the engines: which servers of others there are, which host is to leave."""

from __future__ import annotations

from collections.abc import Callable

from trinity_es.actors.addresses import checked_url
from trinity_es.actors.commands import CommandRequest, DrainHost, DrainingHost, ScaledServers, ScaleServers
from trinity_es.actors.coordinator.fleet.host_fleet import HostFleet
from trinity_es.actors.coordinator.fleet.server_fleet import ServerFleet
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.ports import Responder
from trinity_es.events.errors import DataError, HostNotFound

__all__ = ["MachineHandlers"]


class MachineHandlers:
    """Handles what is asked about servers and hosts."""

    def __init__(self, servers: ServerFleet, hosts: Callable[[], HostFleet | None], router: Responder) -> None:
        """`hosts`: those that joined, where this head takes any."""
        self.servers, self.hosts, self.router = servers, hosts, router

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [handled(ScaleServers, self.scale), handled(DrainHost, self.drain)]

    def scale(self, request: CommandRequest[ScaleServers]) -> None:
        """Add servers, and take others away."""
        command = request.command
        if not self.servers.enabled:
            raise DataError("the engines of this run are no servers that come and go: set "
                            "explorer.rollout_model.engine_type to http")
        self.servers.scale(_urls("add", command.add), _urls("remove", command.remove))
        self.router.reply(request, ScaledServers(servers=[*self.servers.status()]))  # type: ignore[list-item]

    def drain(self, request: CommandRequest[DrainHost]) -> None:
        """Have a host leave."""
        name, fleet = request.command.host, self.hosts()
        there = {} if fleet is None else {host.name: host for host in fleet.there()}
        if fleet is None or name not in there:
            known = ", ".join(sorted(there)) or "none besides the head's own"
            raise HostNotFound(f"no host {name!r} takes part: there is {known}")
        fleet.drain(name, request.command.reason)
        self.router.reply(request, DrainingHost(host=name, epoch=there[name].epoch, units=fleet.units_of(name)))


def _urls(what: str, given: list[str]) -> list[str]:
    try:
        return [checked_url(url) for url in given]
    except ValueError as e:
        raise DataError(f"{what}: a server {e}") from None

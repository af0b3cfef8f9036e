"""Handlers of commands about external servers and hosts."""

from __future__ import annotations

from collections.abc import Callable

from trinity_es.actors.commands import CommandRequest, DrainHost, DrainingHost, ScaledServers, ScaleServers
from trinity_es.actors.coordinator.fleet.external_servers import ServerFleet
from trinity_es.actors.coordinator.fleet.host_fleet import HostFleet
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.actors.server_addresses import checked_url
from trinity_es.events.errors import DataError, HostNotFound

__all__ = ["MachineHandlers"]


class MachineHandlers:

    def __init__(self, servers: ServerFleet, hosts: Callable[[], HostFleet | None], router: CommandRouter) -> None:
        """`hosts` returns the hosts that joined, or None if hosts can't join this run."""
        self.servers, self.hosts, self.router = servers, hosts, router

    def handlers(self) -> list[HandlerRow]:
        return [handler_row(ScaleServers, self.scale), handler_row(DrainHost, self.drain)]

    def scale(self, request: CommandRequest[ScaleServers]) -> None:
        """Add and remove external servers, and answer with all of them. Raises DataError."""
        command = request.command
        if not self.servers.enabled:
            raise DataError("servers can't be added to this run or removed: set explorer.rollout_model.engine_type "
                            "to http")
        self.servers.scale(_checked_urls("add", command.add), _checked_urls("remove", command.remove))
        self.router.reply(request, ScaledServers(servers=[*self.servers.status()]))  # type: ignore[list-item]

    def drain(self, request: CommandRequest[DrainHost]) -> None:
        """Give a host no new units, so that it can leave. Answer with the number of units that it still has."""
        name, fleet = request.command.host, self.hosts()
        hosts_by_name = {} if fleet is None else {host.name: host for host in fleet.present()}
        if fleet is None or name not in hosts_by_name:
            names = ", ".join(sorted(hosts_by_name)) or "none besides the head's own"
            raise HostNotFound(f"no host {name!r} has joined; joined hosts: {names}")
        fleet.drain(name, request.command.reason)
        epoch, units = hosts_by_name[name].epoch, fleet.unit_counts().get(name, 0)
        self.router.reply(request, DrainingHost(host=name, epoch=epoch, units=units))


def _checked_urls(field: str, urls: list[str]) -> list[str]:
    """Return the URLs in their normal form. Raises DataError for an invalid URL; it names `field` of the command."""
    try:
        return [checked_url(url) for url in urls]
    except ValueError as e:
        raise DataError(f"{field}: the URL of a server {e}") from None

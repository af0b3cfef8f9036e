"""What is asked about the servers of others that are engines: which there are to be."""

from __future__ import annotations

from trinity_es.actors.addresses import checked_url
from trinity_es.actors.commands import CommandRequest, ScaledServers, ScaleServers
from trinity_es.actors.coordinator.fleet.servers import ServerFleet
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.ports import Responder
from trinity_es.events.errors import DataError

__all__ = ["ServerHandlers"]


class ServerHandlers:
    """Handles what is asked about servers."""

    def __init__(self, fleet: ServerFleet, router: Responder) -> None:
        self.fleet, self.router = fleet, router

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [handled(ScaleServers, self.scale)]

    def scale(self, request: CommandRequest[ScaleServers]) -> None:
        """Add servers, and take others away."""
        command = request.command
        if not self.fleet.enabled:
            raise DataError("the engines of this run are no servers that come and go: set "
                            "explorer.rollout_model.engine_type to http")
        self.fleet.scale(_urls("add", command.add), _urls("remove", command.remove))
        self.router.reply(request, ScaledServers(servers=[*self.fleet.status()]))  # type: ignore[list-item]


def _urls(what: str, given: list[str]) -> list[str]:
    try:
        return [checked_url(url) for url in given]
    except ValueError as e:
        raise DataError(f"{what}: a server {e}") from None

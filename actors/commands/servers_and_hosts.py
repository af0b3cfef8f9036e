"""Commands about external servers that are engines (`engine_type: http`), and about hosts other than the head."""

from __future__ import annotations

from typing import TypedDict

from trinity_es.actors.commands.base import Command
from trinity_es.actors.commands.fields import Text

__all__ = ["DrainHost", "DrainingHost", "ScaleServers", "ScaledServers", "ServerState"]


# --- external servers -------------------------------------------------------------------------------------------------
class ServerState(TypedDict):
    """State of an external server, also of a removed one."""

    url: str
    runner: str
    by: str
    """The source of the last change: `list` (the configured list of servers) or `scale`."""
    wanted: bool
    """False for a server that was removed."""
    state: str
    """State of the server's runner."""
    waits_for: str
    """External condition that the runner waits for; empty: none."""
    problem: str
    """A fault of the server, and its remedy; empty: none."""


class ScaledServers(TypedDict):
    """All servers, including those that are being removed."""

    servers: list[ServerState]


class ScaleServers(Command[ScaledServers], name="scale", writes=True):
    """Add servers, and remove others. A removed server gets no more units and leaves when it has none.

    The answer comes when the change is recorded. Raises DataError for an invalid URL, for the removal of an unknown
    server, and if the engines are not external servers.
    """

    add: list[Text]
    remove: list[Text]


# --- hosts ------------------------------------------------------------------------------------------------------------
class DrainingHost(TypedDict):
    """A host that was ordered to leave."""

    host: str
    epoch: int
    units: int
    """Number of units that the host's runners have now."""


class DrainHost(Command[DrainingHost], name="drain_host", writes=True):
    """Make a host leave: its runners get no more units, finish those that they have, and its system ends. The answer
    comes when the order is recorded. Raises HostNotFound."""

    host: Text
    reason: Text

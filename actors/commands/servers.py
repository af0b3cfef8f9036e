"""Commands about the servers of others that are engines (`engine_type: http`), and about hosts besides the head's."""

from __future__ import annotations

from typing import TypedDict

from trinity_es.actors.commands.base import Command
from trinity_es.actors.commands.fields import Text

__all__ = ["DrainHost", "DrainingHost", "ScaleServers", "ScaledServers", "ServerState"]


# --- engines that others run ------------------------------------------------------------------------------------------
class ServerState(TypedDict):
    """A server that is an engine, or leaves: `wanted` is false then; `by`: whose word that was, `list` or `scale`;
    `state`: that of its runner; `waits_for`: what keeps that from starting, or from being answered, and passes;
    `problem`: what is wrong with it, and the way out."""

    url: str
    runner: str
    by: str
    wanted: bool
    state: str
    waits_for: str
    problem: str


class ScaledServers(TypedDict):
    """Every server that is there now, or leaves."""

    servers: list[ServerState]


class ScaleServers(Command[ScaledServers], name="scale", writes=True):
    """Add servers, and take others away: those get no more units, and are let go when they have none.

    Answered when that is recorded. Raises DataError for a URL that is none, for a server that never was one, and where
    engines are no servers.
    """

    add: list[Text]
    remove: list[Text]


# --- hosts ------------------------------------------------------------------------------------------------------------
class DrainingHost(TypedDict):
    """A host that is to leave; `units`: what its runners have now."""

    host: str
    epoch: int
    units: int


class DrainHost(Command[DrainingHost], name="drain_host", writes=True):
    """Have a host leave: its runners get no more units, end those that they have, and its system ends.

    Answered when that is recorded. Raises HostNotFound.
    """

    host: Text
    reason: Text

"""The servers of others that are engines of the rollout model (`engine_type: http`), and the fold that leads there.

Pure: no clock, no database, no actor. The coordinator decides on this state
(`actors/coordinator/decisions/server_decisions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trinity_es.events import vocabulary as ev

__all__ = ["Server", "Servers", "evolve_servers", "leaving"]


@dataclass(frozen=True, slots=True)
class Server:
    """One server, and whose word made it what it is."""

    url: str
    runner: str
    wanted: bool
    """It is to be an engine; else its runner retires, or has."""
    by: Literal["list", "scale"]
    """Who added it, or took it away."""


Servers = dict[str, Server]
"""Every server that ever was one, by its URL."""


def evolve_servers(servers: Servers, event: ev.ServerAdded | ev.ServerRemoved) -> None:
    wanted = isinstance(event, ev.ServerAdded)
    servers[event.url] = Server(event.url, event.runner, wanted, event.by)


def leaving(servers: Mapping[str, Server]) -> frozenset[str]:
    """Return the runners that get no more units."""
    return frozenset(s.runner for s in servers.values() if not s.wanted)

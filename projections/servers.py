"""Fold of the external servers that are engines of the rollout model (`engine_type: http`). Pure.

The coordinator's decisions on this state are in `actors/coordinator/decisions/server_decisions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trinity_es.events import vocabulary as ev

__all__ = ["Server", "Servers", "evolve_servers", "leaving_runners"]


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    runner: str
    wanted: bool
    """True if the server should be an engine. False after its removal, when its runner retires or has retired."""
    by: Literal["list", "scale"]
    """Source of the last change: the config's server list or `trinity-es scale`."""


Servers = dict[str, Server]
"""URL -> server, removed servers included."""


def evolve_servers(servers: Servers, event: ev.ServerAdded | ev.ServerRemoved) -> None:
    servers[event.url] = Server(event.url, event.runner, isinstance(event, ev.ServerAdded), event.by)


def leaving_runners(servers: Mapping[str, Server]) -> frozenset[str]:
    """Return the runners of removed servers, which get no more units."""
    return frozenset(s.runner for s in servers.values() if not s.wanted)

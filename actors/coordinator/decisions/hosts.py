"""Whether a host is taken in, and what its loss means. Pure: the hosts as they were folded, what came in -> events."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.events import vocabulary as ev
from trinity_es.projections.hosts import Hosts

__all__ = ["Hello", "Refusal", "drained", "hello", "lost"]


@dataclass(frozen=True, slots=True)
class Hello:
    """What a host says of itself, and where it says it from."""

    name: str
    life: str
    address: str
    pid: int
    places: dict[str, int]
    build: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host is not taken in. `for_good`: this life of it never will be."""

    reason: str
    for_good: bool


def hello(hosts: Hosts, said: Hello, *, build: str, connected: bool) -> list[ev.Event] | Refusal:
    """Decide on a host that wants to take part; no events for one that comes back after its connection broke.

    `build`: this software's. `connected`: a host of this name is connected now.
    """
    if said.build != build:
        return Refusal(f"it runs trinity-es {said.build}, the head runs {build}: install the same on both", True)
    known = hosts.get(said.name)
    if known is not None and known.life == said.life:
        if known.there:
            return []
        return Refusal(f"its epoch {known.epoch} is over ({known.reason}): it starts anew", True)
    if known is not None and known.there and connected:
        return Refusal(
            f"a host named {said.name} is here already (pid {known.pid}, from {known.address}): choose another --name, "
            "or end that one", False,
        )
    events: list[ev.Event] = []
    if known is not None and known.there:
        events += lost(hosts, said.name, "it was started anew")
    joined = ev.HostJoined(
        host=said.name, epoch=1 if known is None else known.epoch + 1, life=said.life, address=said.address,
        pid=said.pid, places=dict(said.places),
    )
    return [*events, joined]


def lost(hosts: Hosts, name: str, reason: str) -> list[ev.Event]:
    """Return what is news in the loss of a host: nothing where it was gone before."""
    known = hosts.get(name)
    if known is None or not known.there:
        return []
    return [ev.HostLost(host=name, epoch=known.epoch, reason=reason)]


def drained(hosts: Hosts, name: str, reason: str) -> list[ev.Event]:
    """Return what is news where a host is to leave."""
    known = hosts.get(name)
    if known is None or known.state != "joined":
        return []
    return [ev.HostDraining(host=name, epoch=known.epoch, reason=reason)]

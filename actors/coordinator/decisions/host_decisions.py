"""Whether a host is taken in, and what its loss means. Pure: the hosts as they were folded, what came in -> events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.projections.adapter_versions import Adapters, current_adapters
from trinity_es.projections.host_states import Hosts
from trinity_es.projections.runner import Weights

__all__ = ["Hello", "Refusal", "drained", "folder_of", "hello", "lost"]


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


def folder_of(
    asked: Mapping[str, Any], build: str, *, own_build: str, weights: Weights, adapters: Adapters,
    models: Mapping[str, str],
) -> str | Refusal:
    """Return which of the head's folders a host gets that asks for one, by what it holds: it never names a path.

    `models`: where each model lies that the config names by a path.
    """
    if build != own_build:
        return Refusal(f"it runs trinity-es {build}, the head runs {own_build}: install the same on both", True)
    kind, name, version = asked.get("kind"), asked.get("name"), asked.get("version")
    match kind:
        case "weights" if weights.path and version == weights.version:
            return weights.path
        case "adapter" if (known := current_adapters(adapters).get(str(name))) and known.version == version:
            return known.path
        case "model" if models.get(str(name), "").startswith("/"):
            return models[str(name)]
        case "weights":
            now = f"version {weights.version} is" if weights.path else "none was published yet"
            return Refusal(f"version {version!r} of the weights is not the current one: {now}", False)
        case "adapter":
            return Refusal(f"version {version!r} of adapter {name!r} is not current", False)
        case "model":
            return Refusal(f"the head's config has no model {name!r} in a folder", False)
    return Refusal(f"there are no folders of kind {kind!r}", False)

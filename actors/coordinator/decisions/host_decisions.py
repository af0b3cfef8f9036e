"""Decisions about hosts that join, leave or are lost. Pure: folded hosts and a message in, events out."""

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
    """Request of a host to join."""

    name: str
    life: str
    address: str
    pid: int
    places: dict[str, int]
    build: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a host can't join; `for_good` means that its current process never can."""

    reason: str
    for_good: bool


def hello(hosts: Hosts, offer: Hello, *, build: str, connected: bool) -> list[ev.Event] | Refusal:
    """Decide on a host that wants to join; one that reconnects causes no events.

    `build` is this software's version; `connected` means that a host of this name is connected now.
    """
    if offer.build != build:
        return Refusal(f"it runs trinity-es {offer.build}, the head runs {build}: install the same on both", True)
    previous = hosts.get(offer.name)
    if previous is not None and previous.life == offer.life:
        if previous.there:
            return []
        return Refusal(f"its epoch {previous.epoch} is over ({previous.reason}): it starts again", True)
    if previous is not None and previous.there and connected:
        return Refusal(
            f"a host named {offer.name} has already joined (pid {previous.pid}, from {previous.address}): "
            "choose another --name or end that one", False,
        )
    events: list[ev.Event] = []
    if previous is not None and previous.there:
        events += lost(hosts, offer.name, "it was restarted")
    joined = ev.HostJoined(
        host=offer.name, epoch=1 if previous is None else previous.epoch + 1, life=offer.life, address=offer.address,
        pid=offer.pid, places=dict(offer.places),
    )
    return [*events, joined]


def lost(hosts: Hosts, name: str, reason: str) -> list[ev.Event]:
    """Record the loss of a host; nothing if it was gone before."""
    host = hosts.get(name)
    if host is None or not host.there:
        return []
    return [ev.HostLost(host=name, epoch=host.epoch, reason=reason)]


def drained(hosts: Hosts, name: str, reason: str) -> list[ev.Event]:
    """Record that a host has to leave; nothing if it leaves or is gone already."""
    host = hosts.get(name)
    if host is None or host.state != "joined":
        return []
    return [ev.HostDraining(host=name, epoch=host.epoch, reason=reason)]


def folder_of(
    wanted: Mapping[str, Any], build: str, *, own_build: str, weights: Weights, adapters: Adapters,
    models: Mapping[str, str],
) -> str | Refusal:
    """Return the head's folder for a host's request, which names its content and never a path.

    `models` has the path of each model that the config names by a path.
    """
    if build != own_build:
        return Refusal(f"it runs trinity-es {build}, the head runs {own_build}: install the same on both", True)
    kind, name, version = wanted.get("kind"), wanted.get("name"), wanted.get("version")
    match kind:
        case "weights" if weights.path and version == weights.version:
            return weights.path
        case "adapter" if (adapter := current_adapters(adapters).get(str(name))) and adapter.version == version:
            return adapter.path
        case "model" if models.get(str(name), "").startswith("/"):
            return models[str(name)]
        case "weights":
            current = f"version {weights.version} is" if weights.path else "none was published yet"
            return Refusal(f"version {version!r} of the weights is not the current one: {current}", False)
        case "adapter":
            return Refusal(f"version {version!r} of adapter {name!r} is not current", False)
        case "model":
            return Refusal(f"the head's config has no model {name!r} in a folder", False)
    return Refusal(f"there are no folders of kind {kind!r}", False)

"""Decisions about hosts that join, leave or are lost. Pure functions from folded hosts and a message to events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.projections.adapter_versions import Adapters, current_adapters
from trinity_es.projections.host_states import Hosts
from trinity_es.projections.runner import Weights

__all__ = ["Hello", "Refusal", "admit", "drain", "find_folder", "lose"]


@dataclass(frozen=True, slots=True)
class Hello:
    """Request of a host to join."""

    name: str
    life: str
    """Id of the host's current process tree."""
    address: str
    pid: int
    places: dict[str, int]
    build: str
    """Version of the host's software."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a host's request is refused. `for_good` means that the head would refuse it every time."""

    reason: str
    for_good: bool


def admit(hosts: Hosts, hello: Hello, *, build: str, connected: bool) -> list[ev.Event] | Refusal:
    """Return the events that admit a host, or why it is refused. A host that only reconnects causes no events. `build`
    is this software's version. `connected` means that a host of this name is connected now."""
    if hello.build != build:
        return Refusal(
            f"the host runs trinity-es {hello.build}, the head runs {build}: install the same on both", for_good=True)
    host = hosts.get(hello.name)
    if host is not None and host.life == hello.life:
        if host.is_present:
            return []
        reason = f"its epoch {host.epoch} is over ({host.reason}): the host starts again by itself"
        return Refusal(reason, for_good=True)
    if host is not None and host.is_present and connected:
        return Refusal(
            f"a host named {hello.name} has already joined (pid {host.pid}, from {host.address}): "
            "choose another --name or end that one", for_good=False,
        )
    events: list[ev.Event] = []
    if host is not None and host.is_present:
        events += lose(hosts, hello.name, "it was restarted")
    joined = ev.HostJoined(
        host=hello.name, epoch=1 if host is None else host.epoch + 1, life=hello.life, address=hello.address,
        pid=hello.pid, places=dict(hello.places),
    )
    return [*events, joined]


def lose(hosts: Hosts, name: str, reason: str) -> list[ev.Event]:
    """Return the event that a host is lost; none if it has left or is lost already."""
    host = hosts.get(name)
    if host is None or not host.is_present:
        return []
    return [ev.HostLost(host=name, epoch=host.epoch, reason=reason)]


def drain(hosts: Hosts, name: str, reason: str) -> list[ev.Event]:
    """Return the event that a host has to leave; none if it is leaving or gone already."""
    host = hosts.get(name)
    if host is None or host.state != "joined":
        return []
    return [ev.HostDraining(host=name, epoch=host.epoch, reason=reason)]


def find_folder(
    wanted: Mapping[str, Any], build: str, *, own_build: str, weights: Weights, adapters: Adapters,
    models: Mapping[str, str],
) -> str | Refusal:
    """Return the path of the head's folder that a host requests, or why it is refused.

    `wanted` is the request (`kind`, `name`, `version`) of a host whose software has the version `build`. `models` has
    the path of each model in the config.
    """
    if build != own_build:
        return Refusal(
            f"the host runs trinity-es {build}, the head runs {own_build}: install the same on both", for_good=True)
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
            reason = f"version {version!r} of the weights is not the current one: {current}"
        case "adapter":
            reason = f"version {version!r} of adapter {name!r} is not current"
        case "model":
            reason = f"the head's config has no model {name!r} in a folder"
        case _:
            reason = f"there are no folders of kind {kind!r}"
    return Refusal(reason, for_good=False)

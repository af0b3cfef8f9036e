"""Fold of the hosts that joined the head's own. Pure.

The coordinator decides on this state in `actors/coordinator/decisions/host_decisions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trinity_es.events import vocabulary as ev

__all__ = ["HOST_STATES", "Host", "HostEvent", "Hosts", "evolve_hosts", "host_of", "left_reason", "lost_reason",
           "went_with_host"]

HostEvent = ev.HostJoined | ev.HostDraining | ev.HostLost | ev.HostLeft


HostState = Literal["joined", "draining", "lost", "left"]
HOST_STATES: dict[type[HostEvent], HostState] = {
    ev.HostJoined: "joined", ev.HostDraining: "draining", ev.HostLost: "lost", ev.HostLeft: "left"}


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    epoch: int
    life: str
    state: HostState
    address: str
    pid: int
    places: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    """Why the host is lost, is draining, or left."""

    @property
    def there(self) -> bool:
        return self.state in ("joined", "draining")


Hosts = dict[str, Host]
"""Every host that ever joined, by its name."""


def evolve_hosts(hosts: Hosts, event: HostEvent) -> None:
    if isinstance(event, ev.HostJoined):
        hosts[event.host] = Host(
            event.host, event.epoch, event.life, "joined", event.address, event.pid, dict(event.places)
        )
    elif (host := hosts.get(event.host)) is not None and host.epoch == event.epoch:
        hosts[event.host] = replace(host, state=HOST_STATES[type(event)], reason=event.reason)


def host_of(runner: str) -> str:
    """Return the runner's host; empty for the head's own."""
    return runner.rpartition("@")[2] if "@" in runner else ""


def lost_reason(host: str, why: str) -> str:
    return f"host {host} is lost: {why}"


def left_reason(host: str, why: str) -> str:
    return f"host {host} left: {why}"


def went_with_host(runner: str, reason: str) -> bool:
    """Return whether a runner that ended for this reason went with its host, so that the runner is not at fault."""
    host = host_of(runner)
    return bool(host) and reason.startswith((lost_reason(host, ""), left_reason(host, "")))

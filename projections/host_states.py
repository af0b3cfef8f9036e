"""Fold of the hosts that joined the head's own. Pure.

The coordinator decides on this state in `actors/coordinator/decisions/host_decisions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trinity_es.events import vocabulary as ev

__all__ = ["Host", "HostEvent", "Hosts", "evolve_hosts", "host_of", "left_reason", "lost_reason", "went_with_host"]

HostEvent = ev.HostJoined | ev.HostDraining | ev.HostLost | ev.HostLeft


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    epoch: int
    life: str
    state: Literal["joined", "draining", "lost", "left"]
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
        return
    host = hosts.get(event.host)
    if host is None or host.epoch != event.epoch:
        return
    match event:
        case ev.HostDraining():
            hosts[event.host] = replace(host, state="draining", reason=event.reason)
        case ev.HostLost():
            hosts[event.host] = replace(host, state="lost", reason=event.reason)
        case ev.HostLeft():
            hosts[event.host] = replace(host, state="left", reason=event.reason)


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

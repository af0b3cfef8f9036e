"""Folds of the hosts that joined a run: their current states, and each host's lives (from a join to its end). Pure.

The coordinator's decisions on this state are in `actors/coordinator/decisions/host_decisions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.records.log_values import Recorded

__all__ = [
    "HOST_STATES", "Host", "HostEvent", "HostLife", "Hosts", "evolve_hosts", "host_lives", "host_of", "last_lives",
    "left_reason", "lost_reason", "went_with_host",
]

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
    def is_present(self) -> bool:
        return self.state in ("joined", "draining")


Hosts = dict[str, Host]
"""Host name -> state of each host that ever joined."""


def evolve_hosts(hosts: Hosts, event: HostEvent) -> None:
    """Apply one event to `hosts`, in place. An event about an earlier epoch of a host changes nothing."""
    if isinstance(event, ev.HostJoined):
        hosts[event.host] = Host(
            event.host, event.epoch, event.life, "joined", event.address, event.pid, dict(event.places)
        )
    elif (host := hosts.get(event.host)) is not None and host.epoch == event.epoch:
        hosts[event.host] = replace(host, state=HOST_STATES[type(event)], reason=event.reason)


def host_of(runner: str) -> str:
    """Return the name of the host of a runner `<name>@<host>`; "" for a runner of the head's own host."""
    return runner.rpartition("@")[2] if "@" in runner else ""


def lost_reason(host: str, why: str) -> str:
    return f"host {host} is lost: {why}"


def left_reason(host: str, why: str) -> str:
    return f"host {host} left: {why}"


def went_with_host(runner: str, reason: str) -> bool:
    """Return True if a runner that ended for this reason ended because its host was lost or left."""
    host = host_of(runner)
    return bool(host) and reason.startswith((lost_reason(host, ""), left_reason(host, "")))


@dataclass(slots=True, kw_only=True)
class HostLife:
    """One life (epoch) of a host, from join to end."""

    host: str
    epoch: int
    state: str
    """`joined`, `draining`, `lost` or `left`."""
    since: float
    """Unix seconds at which this state began. Fields that end in `_at` are unix seconds too."""
    joined_at: float
    draining_at: float | None = None
    ended_at: float | None = None
    address: str = ""
    pid: int = 0
    places: dict[str, int] = field(default_factory=dict)
    """Numbers of `gpus` and `cores`."""
    reason: str = ""

    @property
    def is_present(self) -> bool:
        return self.ended_at is None


def host_lives(recorded: Iterable[Recorded]) -> list[HostLife]:
    """Fold the events of stream `hosts` into the lives of all hosts, in the order in which they began."""
    lives: dict[tuple[str, int], HostLife] = {}
    hosts: Hosts = {}
    for item in recorded:
        event = cast(HostEvent, item.event)
        evolve_hosts(hosts, event)
        host = hosts.get(event.host)
        if host is None or host.epoch != event.epoch:  # the event is about an earlier life
            continue
        life = lives.setdefault((host.name, host.epoch), HostLife(
            host=host.name, epoch=host.epoch, state=host.state, since=item.recorded_at, joined_at=item.recorded_at,
            address=host.address, pid=host.pid, places=dict(host.places),
        ))
        if host.state != life.state:
            life.state, life.since = host.state, item.recorded_at
        life.reason = host.reason
        if host.state == "draining" and life.draining_at is None:
            life.draining_at = item.recorded_at
        elif not host.is_present and life.ended_at is None:
            life.ended_at = item.recorded_at
    return list(lives.values())


def last_lives(lives: Iterable[HostLife]) -> dict[str, HostLife]:
    return {life.host: life for life in lives}

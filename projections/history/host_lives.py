"""Fold of stream `hosts` into the lives of each host: when it joined, drained, was lost or left. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from trinity_es.events.store.records.log_values import Recorded
from trinity_es.projections.host_states import Host, HostEvent, Hosts, evolve_hosts

__all__ = ["HostLife", "host_lives", "last_lives"]


@dataclass(slots=True, kw_only=True)
class HostLife:
    """One life (epoch) of a host, from join to end."""

    host: str
    epoch: int
    state: str
    """`joined`, `draining`, `lost` or `left`."""
    since: float
    """When this state began: unix seconds, like all fields that end in `_at`."""
    joined_at: float
    draining_at: float | None = None
    ended_at: float | None = None
    address: str = ""
    pid: int = 0
    places: dict[str, int] = field(default_factory=dict)
    """Numbers of `gpus` and `cores`."""
    reason: str = ""

    @property
    def there(self) -> bool:
        return self.ended_at is None


def host_lives(recorded: Iterable[Recorded]) -> list[HostLife]:
    """Return the lives of all hosts, in the order in which they began."""
    lives: dict[tuple[str, int], HostLife] = {}
    hosts: Hosts = {}
    for item in recorded:
        event = cast(HostEvent, item.event)
        evolve_hosts(hosts, event)
        host: Host | None = hosts.get(event.host)
        if host is None or host.epoch != event.epoch:  # the event is about a life that is over
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
        elif not host.there and life.ended_at is None:
            life.ended_at = item.recorded_at
    return list(lives.values())


def last_lives(lives: Iterable[HostLife]) -> dict[str, HostLife]:
    return {life.host: life for life in lives}

"""Hosts' lives: when each joined, drained, was lost or left. Pure: a fold of the stream `hosts`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from trinity_es.events.store.records.recorded import Recorded
from trinity_es.projections.host_states import Host, HostEvent, Hosts, evolve_hosts

__all__ = ["HostLife", "host_lives", "last_lives"]


@dataclass(slots=True, kw_only=True)
class HostLife:
    """One life of a host, from its joining to its end: an epoch."""

    host: str
    epoch: int
    state: str
    """`joined`, `draining`, `lost` or `left`."""
    since: float
    """When it came into this state: unix seconds, as all that end in `_at`."""
    joined_at: float
    draining_at: float | None = None
    ended_at: float | None = None
    address: str = ""
    pid: int = 0
    places: dict[str, int] = field(default_factory=dict)
    """What it has: `gpus` and `cores`."""
    reason: str = ""

    @property
    def there(self) -> bool:
        return self.ended_at is None


def host_lives(recorded: Iterable[Recorded]) -> list[HostLife]:
    """Return all lives of all hosts from the events of the stream `hosts`, in the order in which they began."""
    lives: dict[tuple[str, int], HostLife] = {}
    hosts: Hosts = {}
    for item in recorded:
        event = cast(HostEvent, item.event)
        evolve_hosts(hosts, event)
        now: Host | None = hosts.get(event.host)
        if now is None or now.epoch != event.epoch:  # of a life that is over
            continue
        life = lives.setdefault((now.name, now.epoch), HostLife(
            host=now.name, epoch=now.epoch, state=now.state, since=item.recorded_at, joined_at=item.recorded_at,
            address=now.address, pid=now.pid, places=dict(now.places),
        ))
        if now.state != life.state:
            life.state, life.since = now.state, item.recorded_at
        life.reason = now.reason
        if now.state == "draining" and life.draining_at is None:
            life.draining_at = item.recorded_at
        elif not now.there and life.ended_at is None:
            life.ended_at = item.recorded_at
    return list(lives.values())


def last_lives(lives: Iterable[HostLife]) -> dict[str, HostLife]:
    return {life.host: life for life in lives}

"""Events of the hosts that join a run. The head, which runs the coordinator, has none."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.events.vocabulary.base import Event

__all__ = ["HostDraining", "HostJoined", "HostLeft", "HostLost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined(Event, stream="hosts"):
    """A host joined the run. Its runners are called `<name>@<host>`."""

    host: str
    epoch: int
    """Number of times that a host of this name has joined. Messages from an earlier epoch are refused."""
    life: str
    """Random id of its actor system. Only the actor system with this id may resume a broken connection."""
    address: str
    """Address from which it connected."""
    pid: int
    """Process id of its actor system's first process."""
    places: dict[str, int]
    """Its resources: `gpus` and `cores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDraining(Event, stream="hosts"):
    """A host is about to leave, so its runners get no more units."""

    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost(Event, stream="hosts"):
    """A host was silent for too long, or restarted. Its runners' units run elsewhere; this is no failed attempt."""

    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeft(Event, stream="hosts"):
    """A host left as planned."""

    host: str
    epoch: int
    reason: str

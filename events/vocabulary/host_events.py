"""What happens to the hosts of a run besides the one where its head is."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.events.vocabulary.base import Event

__all__ = ["HostDraining", "HostJoined", "HostLeft", "HostLost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined(Event, stream="hosts"):
    """A host takes part from here on; its runners are `<name>@<host>`."""

    host: str
    epoch: int
    """Counts the times that a host of this name joined. What comes of an earlier one is refused."""
    life: str
    """Of its actor system, drawn by itself: a connection that broke is taken up again by the same life alone."""
    address: str
    """Where it connected from."""
    pid: int
    """Of its actor system's first process."""
    places: dict[str, int]
    """What it has: `gpus` and `cores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDraining(Event, stream="hosts"):
    """A host is to leave; its runners get no more units."""

    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost(Event, stream="hosts"):
    """A host was not heard of for too long, or was started anew. Its runners are gone: what they had is attempted
    again, and is blamed for nothing."""

    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeft(Event, stream="hosts"):
    """A host left in order."""

    host: str
    epoch: int
    reason: str

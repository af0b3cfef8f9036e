"""Events of the hosts of a run, besides the host of its head."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_es.events.vocabulary.base import Event

__all__ = ["HostDraining", "HostJoined", "HostLeft", "HostLost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJoined(Event, stream="hosts"):
    """A host takes part from here on; its runners are called `<name>@<host>`."""

    host: str
    epoch: int
    """Number of times that a host of this name has joined. Messages from an earlier epoch are refused."""
    life: str
    """Random id of its actor system: only the same life may resume a broken connection."""
    address: str
    """Address it connected from."""
    pid: int
    """Process id of its actor system's first process."""
    places: dict[str, int]
    """Its resources: `gpus` and `cores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDraining(Event, stream="hosts"):
    """A host is about to leave; its runners get no more units."""

    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLost(Event, stream="hosts"):
    """A host was silent for too long, or started again. Its runners are gone; their units run elsewhere, unblamed."""

    host: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeft(Event, stream="hosts"):
    """A host left as planned."""

    host: str
    epoch: int
    reason: str

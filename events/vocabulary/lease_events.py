"""What a run holds open outside of the system, a sandbox or a session: taken, renewed, released."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trinity_es.events.values import BatchId
from trinity_es.events.vocabulary.base import Event, Unit

__all__ = ["LeaseHeld", "LeaseOrphaned", "LeaseReleaseFailed", "LeaseReleased", "LeaseRenewed", "LeaseTaken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(Event, stream="leases"):
    """An attempt is about to have something made: from here on it is released, whatever becomes of the attempt."""

    lease: str
    """Its key, chosen before the thing exists: the provider labels it so, and finds it by that."""
    batch_id: BatchId
    submission: str
    unit: Unit
    """The attempt that it belongs to; it ends with that at the latest."""
    run: int
    """Of that unit; the first, where the workflow does several itself."""
    runner: str
    incarnation: int
    provider: str
    """As "module:Class": what makes and releases it."""
    args: dict[str, Any] = field(default_factory=dict)
    """With which the provider is built."""
    ttl: float
    """Seconds that it may live without being renewed."""
    expires: float
    """Unix seconds: `ttl` after it was taken."""
    creation_timeout: float
    """Seconds after which nothing comes of making it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeld(Event, stream="leases"):
    """The provider made it, and says what it is."""

    lease: str
    handle: Any
    """The provider's own name for it, as plain JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event, stream="leases"):
    """Its owner had the provider prolong it."""

    lease: str
    expires: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOrphaned(Event, stream="leases"):
    """Its owner releases it no more: the coordinator has it released from here on."""

    lease: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleaseFailed(Event, stream="leases"):
    """The provider could not release it; it is tried again. Recorded when the error changes, and ever more rarely."""

    lease: str
    error: str
    tries: int
    """Since it was orphaned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(Event, stream="leases"):
    """It is there no more."""

    lease: str
    by: Literal["owner", "coordinator"]
    """The run that took it, or the coordinator, which has it released for an owner that can't. In a copy of a store:
    the owner, to whom it is left, since that run belongs to the original.
    """

"""Events of leases: sandboxes or sessions that a run holds open outside of the system."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trinity_es.events.values import BatchId
from trinity_es.events.vocabulary.base import Event, Unit

__all__ = ["LeaseHeld", "LeaseOrphaned", "LeaseReleaseFailed", "LeaseReleased", "LeaseRenewed", "LeaseTaken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(Event, stream="leases"):
    """An attempt is about to create a resource, which the system releases whatever happens to the attempt."""

    lease: str
    """Key, chosen before the resource exists. The provider labels the resource with it, and finds it by it."""
    batch_id: BatchId
    submission: str
    unit: Unit
    """The attempt that it belongs to; it ends with the attempt at the latest."""
    run: int
    """Run in the unit; the first one if the workflow plays several runs itself."""
    runner: str
    incarnation: int
    provider: str
    """Class that creates and releases the resource, as "module:Class"."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the provider's constructor."""
    ttl: float
    """Seconds after which the resource expires unless the owner renews it."""
    expires: float
    """Unix seconds: `ttl` after it was taken."""
    creation_timeout: float
    """Seconds after which the provider can no longer create it."""
    attachable: bool = False
    """True if the provider has `attach`: should its runner be lost, the next attempt at the run may take it over."""
    number: int = 0
    """Number of leases that the run took before it with the same provider and arguments."""
    attaches: str = ""
    """Lease of an earlier, lost attempt at the run, whose resource this one takes over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeld(Event, stream="leases"):
    """The provider created the resource."""

    lease: str
    handle: Any
    """The provider's own name for the resource, as plain JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event, stream="leases"):
    """The owner had the provider prolong the lease."""

    lease: str
    expires: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOrphaned(Event, stream="leases"):
    """The owner can no longer release the resource; the coordinator does from here on."""

    lease: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleaseFailed(Event, stream="leases"):
    """The provider could not release it and tries again. Recorded if the error changes, otherwise ever more rarely."""

    lease: str
    error: str
    tries: int
    """Attempts to release it since it was orphaned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(Event, stream="leases"):
    """The resource is gone, or belongs to another lease."""

    lease: str
    by: Literal["owner", "coordinator", "successor"]
    """`owner`: the run that took it; `coordinator`: on behalf of an owner that can't. `successor`: the resource lives
    on under a lease of the run's next attempt. Always `owner` in a copy of a store, since the run belongs to the
    original, which releases it."""

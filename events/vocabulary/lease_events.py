"""Events of leases on external resources that a run uses, such as sandboxes and sessions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trinity_es.events.values import BatchId
from trinity_es.events.vocabulary.base import Event, Unit

__all__ = ["LeaseHeld", "LeaseOrphaned", "LeaseReleaseFailed", "LeaseReleased", "LeaseRenewed", "LeaseTaken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken(Event, stream="leases"):
    """An attempt is about to create a resource. The system will release it, whatever happens to the attempt."""

    lease: str
    """Key of the lease, chosen before the resource exists. The provider labels the resource with it."""
    batch_id: BatchId
    submission: str
    unit: Unit
    """Unit and attempt that own the lease. It ends with the attempt at the latest."""
    run: int
    """Run that took the lease; the unit's first one if the workflow plays several runs itself."""
    runner: str
    incarnation: int
    provider: str
    """Class that creates and releases the resource, as "module:Class"."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the provider's constructor."""
    ttl: float
    """Seconds after which the resource expires unless the owner renews it."""
    expires: float
    """Unix seconds, `ttl` after the lease was taken."""
    creation_timeout: float
    """Seconds after which the provider can no longer create it."""
    attachable: bool = False
    """True if the provider has `attach`. Then the run's next attempt may take the resource over if the runner dies."""
    number: int = 0
    """Number of earlier leases of the run with the same provider and arguments."""
    attaches: str = ""
    """Lease of an earlier, lost attempt at the run, whose resource this lease takes over; "" for a new resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHeld(Event, stream="leases"):
    """The provider created the resource."""

    lease: str
    handle: Any
    """The provider's own id of the resource, as plain JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed(Event, stream="leases"):
    """The provider extended the lease for its owner."""

    lease: str
    expires: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOrphaned(Event, stream="leases"):
    """The owner can no longer release the resource, so the coordinator will."""

    lease: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleaseFailed(Event, stream="leases"):
    """The provider failed to release the resource and is called again. Recorded when the error changes, and otherwise
    less and less often."""

    lease: str
    error: str
    tries: int
    """Number of attempts to release the resource since it was orphaned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(Event, stream="leases"):
    """The resource is gone, or belongs to another lease."""

    lease: str
    by: Literal["owner", "coordinator", "successor"]
    """`owner`: the run that took the lease released it. `coordinator`: the coordinator did so in the owner's place.
    `successor`: the run's next attempt took the resource over under another lease. In a copy of a store it is always
    `owner`, since the system on the original store releases the resource."""

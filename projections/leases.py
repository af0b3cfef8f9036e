"""Fold of stream `leases`: the leases on external resources (sandboxes, sessions) that runs use. Pure.

The coordinator's decisions on this state are in `actors/coordinator/decisions/lease_decisions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogCorrupt

__all__ = ["OpenLease", "OpenLeases", "check_attachment", "evolve_leases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    taken: ev.LeaseTaken
    held: bool = False
    """True if the provider created the resource and returned its handle."""
    handle: Any = None
    expires: float = 0.0
    """Unix seconds."""
    orphaned: str = ""
    """Why the owner can no longer release the resource; empty while the owner can."""
    error: str = ""
    tries: int = 0
    """Number of failed releases, from the last recorded failure."""

    @property
    def taken_at(self) -> float:
        """Unix seconds."""
        return self.taken.expires - self.taken.ttl

    @property
    def creation_deadline(self) -> float:
        """Unix seconds after which the provider can no longer create the resource."""
        return self.taken_at + self.taken.creation_timeout

    @property
    def state(self) -> str:
        """`taken` (the provider still makes it), `held`, or `orphaned`."""
        return "orphaned" if self.orphaned else "held" if self.held else "taken"

    def as_dict(self) -> dict[str, Any]:
        taken = self.taken
        return {
            "lease": taken.lease, "state": self.state, "provider": taken.provider, "handle": self.handle,
            "batch_id": taken.batch_id, "task": taken.unit.task, "run": taken.run, "attempt": taken.unit.attempt,
            "runner": taken.runner, "incarnation": taken.incarnation, "taken_at": self.taken_at,
            "expires": self.expires, "orphaned": self.orphaned, "error": self.error, "tries": self.tries,
        }


_ADVICE = ": `trinity-es verify` lists all problems of this log"

OpenLeases = dict[str, OpenLease]
"""Key -> lease, of leases that are not released, in the order in which they were taken."""


def evolve_leases(leases: OpenLeases, event: ev.Event) -> None:
    """Apply one event to `leases`, in place. Raises LogCorrupt if the event can't follow the earlier ones."""
    if isinstance(event, ev.LeaseTaken):
        if event.lease in leases:
            raise LogCorrupt(f"lease {event.lease} is taken twice{_ADVICE}")
        leases[event.lease] = OpenLease(taken=event, expires=event.expires)
        return
    key = event.lease  # type: ignore[attr-defined]  # every event of this stream has it
    lease = leases.get(key)
    if lease is None:
        raise LogCorrupt(f"{type(event).__name__} is of lease {key}, which no LeaseTaken before it opened{_ADVICE}")
    match event:
        case ev.LeaseHeld() if not lease.held:
            leases[key] = replace(lease, held=True, handle=event.handle)
        case ev.LeaseRenewed() if not lease.orphaned:
            leases[key] = replace(lease, expires=event.expires)
        case ev.LeaseOrphaned() if not lease.orphaned:
            leases[key] = replace(lease, orphaned=event.reason)
        case ev.LeaseReleaseFailed() if lease.orphaned:
            leases[key] = replace(lease, error=event.error, tries=event.tries)
        case ev.LeaseReleased() if event.by != "coordinator" or lease.orphaned:
            del leases[key]
        case _:
            raise LogCorrupt(f"{type(event).__name__} does not fit lease {key}, which is {lease.state}{_ADVICE}")


def check_attachment(leases: OpenLeases, event: ev.Event) -> None:
    """Raise LogCorrupt if a new lease takes over a resource that no earlier attempt at its run holds."""
    if isinstance(event, ev.LeaseTaken) and event.attaches:
        earlier_lease, run = leases.get(event.attaches), (event.submission, event.unit.task, event.run)
        if earlier_lease is None or not earlier_lease.held or earlier_lease.orphaned or run != (
            earlier_lease.taken.submission, earlier_lease.taken.unit.task, earlier_lease.taken.run
        ):
            raise LogCorrupt(f"lease {event.lease} takes over {event.attaches}, which is not held by its run{_ADVICE}")

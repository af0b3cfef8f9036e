"""What runs hold open outside of the system, and the fold of the stream `leases` that leads there.

Pure: no clock, no database, no actor. The coordinator decides on this state
(`actors/coordinator/decisions/lease_decisions.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogCorrupt

__all__ = ["OpenLease", "OpenLeases", "evolve_leases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    """One that was taken and is not released."""

    taken: ev.LeaseTaken
    held: bool = False
    """The provider said what it made."""
    handle: Any = None
    expires: float = 0.0
    """Unix seconds."""
    orphaned: str = ""
    """Why its owner releases it no more; empty while that may."""
    error: str = ""
    """Of the last try at releasing it, where that failed."""
    tries: int = 0
    """Tries at releasing it that failed, as far as they are recorded."""

    @property
    def taken_at(self) -> float:
        """Unix seconds."""
        return self.taken.expires - self.taken.ttl

    @property
    def made_by(self) -> float:
        """When nothing comes of making it any more, unix seconds."""
        return self.taken_at + self.taken.creation_timeout

    @property
    def state(self) -> str:
        """`taken` (nothing is known of what was made), `held`, or `orphaned`."""
        return "orphaned" if self.orphaned else "held" if self.held else "taken"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, as `trinity-es leases` and `status` tell it."""
        taken = self.taken
        return {
            "lease": taken.lease, "state": self.state, "provider": taken.provider, "handle": self.handle,
            "batch_id": taken.batch_id, "task": taken.unit.task, "run": taken.run, "attempt": taken.unit.attempt,
            "runner": taken.runner, "incarnation": taken.incarnation, "taken_at": self.taken_at,
            "expires": self.expires, "orphaned": self.orphaned, "error": self.error, "tries": self.tries,
        }


OpenLeases = dict[str, OpenLease]
"""Those that are not released, by key, in the order in which they were taken."""


def evolve_leases(leases: OpenLeases, event: ev.Event) -> None:
    """Change the leases by one more event. Raises LogCorrupt for one that can't follow."""
    if isinstance(event, ev.LeaseTaken):
        if event.lease in leases:
            raise LogCorrupt(f"lease {event.lease} is taken twice")
        leases[event.lease] = OpenLease(taken=event, expires=event.expires)
        return
    key = event.lease  # type: ignore[attr-defined]  # every event of this stream has it
    lease = leases.get(key)
    if lease is None:
        raise LogCorrupt(f"{type(event).__name__} of lease {key}, which is not taken")
    match event:
        case ev.LeaseHeld() if not lease.held:
            leases[key] = replace(lease, held=True, handle=event.handle)
        case ev.LeaseRenewed() if not lease.orphaned:
            leases[key] = replace(lease, expires=event.expires)
        case ev.LeaseOrphaned() if not lease.orphaned:
            leases[key] = replace(lease, orphaned=event.reason)
        case ev.LeaseReleaseFailed() if lease.orphaned:
            leases[key] = replace(lease, error=event.error, tries=event.tries)
        case ev.LeaseReleased() if event.by == "owner" or lease.orphaned:
            del leases[key]
        case _:
            raise LogCorrupt(f"{type(event).__name__} of lease {key}, which is {lease.state}")

"""Decisions about leases: changes that runs report, ends of attempts, releases and their results.

Pure: folded leases and batches, and the time in; events out. A lease lives no longer than the attempt that took it. The
coordinator records an orphaned lease before it releases it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping

from trinity_es.actors.messages import LeaseChange
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import WorkflowError
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState
from trinity_es.projections.leases import OpenLease
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["GRACE_SECONDS", "SPLIT", "changed", "due", "left", "orphans", "over", "released"]

GRACE_SECONDS = 30.0
"""Time for runners, once they know the coordinator, to report renewals again before expiries count; it is several times
the interval at which they repeat a group."""
SPLIT = 8
"""Number of groups into which leases are divided after a process did not report them: one of them may have ended it."""


def over(batch: BatchState | None, life: RunnerLife | None, change: LeaseChange | ev.LeaseTaken) -> str:
    """Return why the attempt of a lease is over; empty while it runs. `batch` is the open one of its id, if any."""
    unit = change.unit
    if life is None or life.state.gone or life.state is RunnerState.RETIRED:
        return "its runner is gone"
    if batch is None or batch.submission != change.submission:
        return "its batch ended"
    flight = batch.flights.get((unit.task, unit.run_id_base))
    if flight is None or (flight.runner, flight.incarnation, flight.unit) != (life.name, life.incarnation, unit):
        return "its attempt is over"
    return ""


def changed(
    lease: OpenLease | None, change: LeaseChange, runner: str, incarnation: int, ended: str, now: float
) -> list[ev.Event]:
    """Record a run's change of a lease (None: no such lease is open); a repeated or late one does nothing.

    `ended` is the reason from `over`; `now` is unix seconds. Raises WorkflowError for a lease that may not be taken.
    """
    key = change.lease
    match change.what:
        case "taken" if lease is None:
            if ended:
                raise WorkflowError(f"no lease for a run that is over: {ended}")
            return [ev.LeaseTaken(
                lease=key, batch_id=change.batch_id, submission=change.submission, unit=change.unit, run=change.run,
                runner=runner, incarnation=incarnation, provider=change.provider, args=change.args, ttl=change.ttl,
                expires=now + change.ttl, creation_timeout=change.creation_timeout,
            )]
        case "held" if lease is not None and not lease.held:
            return [ev.LeaseHeld(lease=key, handle=change.handle)]
        case "renewed" if lease is not None and not lease.orphaned:
            return [ev.LeaseRenewed(lease=key, expires=now + change.ttl)]
        case "released" if lease is not None:
            return [ev.LeaseReleased(lease=key, by="owner")]
        case "left" if lease is not None and not lease.orphaned:
            return [ev.LeaseOrphaned(lease=key, reason=change.reason)]
    return []


def orphans(
    leases: Iterable[OpenLease], batches: Mapping[BatchId, BatchState],
    lives: Mapping[tuple[str, int], RunnerLife], now: float, announced_at: float,
) -> list[ev.Event]:
    """Record the leases that no owner will release: their attempt is over, or they were not renewed in time.

    `batches` are the open ones. `announced_at` is when runners learned of this coordinator, unix seconds, infinite
    before: they report earlier renewals after it.
    """
    events: list[ev.Event] = []
    for lease in leases:
        taken = lease.taken
        if lease.orphaned:
            continue
        reason = over(batches.get(taken.batch_id), lives.get((taken.runner, taken.incarnation)), taken)
        if not reason and max(lease.expires, announced_at + GRACE_SECONDS) < now:
            reason = "it expired: it was not renewed"
        if reason:
            events.append(ev.LeaseOrphaned(lease=taken.lease, reason=reason))
    return events


def due(
    leases: Iterable[OpenLease], at: Mapping[str, float], most: Mapping[str, int], busy: Container[str], now: float
) -> dict[str, list[OpenLease]]:
    """Return the orphaned leases to release now, in one process per provider that is not `busy`.

    `at` is when each is due, unix seconds; the longest due go first. `most` limits the group of each lease that an
    earlier process did not report.
    """
    groups: dict[str, list[OpenLease]] = {}
    room: dict[str, float] = {}
    for lease in sorted((e for e in leases if e.orphaned), key=lambda e: at[e.taken.lease]):
        key, provider = lease.taken.lease, lease.taken.provider
        fits = min(room.get(provider, math.inf), most.get(key, math.inf))
        if at[key] <= now and provider not in busy and len(groups.get(provider, ())) < fits:
            groups.setdefault(provider, []).append(lease)
            room[provider] = fits
    return groups


def left(leases: Iterable[OpenLease]) -> list[ev.Event]:
    """Leave leases to their owners, since this store is a copy and runs of its original may still hold them."""
    return [ev.LeaseReleased(lease=lease.taken.lease, by="owner") for lease in leases]


def released(lease: OpenLease | None, before: OpenLease, begun: float, error: str, tries: int) -> list[ev.Event]:
    """Record the result of a try to release an orphaned lease; `tries` counts the failed ones, with this one.

    `before` is the lease at the start of the try, `begun` (unix seconds). A repeated error is recorded only if the
    number of tries is a power of two. A success without a handle is not recorded while the creation may still come
    through, since it proves nothing.
    """
    if lease is None:
        return []  # its owner released it first
    key = lease.taken.lease
    if error:
        news = error != lease.error or tries & (tries - 1) == 0
        return [ev.LeaseReleaseFailed(lease=key, error=error, tries=tries)] if news else []
    if not before.held and begun < before.creation_deadline:
        return []
    return [ev.LeaseReleased(lease=key, by="coordinator")]

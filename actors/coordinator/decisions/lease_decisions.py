"""Decisions about leases: changes that runs report, ends of attempts, releases and their results.

Pure: folded leases and batches, and the time in; events out. A lease lives no longer than the attempt that took it,
unless that was lost: the next attempt at the run may take over its resource, under a lease of its own (`attachable`).
The coordinator records an orphaned lease before it releases it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping

from trinity_es.actors.messages import LeaseChange
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import WorkflowError
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState
from trinity_es.projections.leases import OpenLease, OpenLeases
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["GRACE_SECONDS", "SPLIT", "Reads", "attachable", "changed", "due", "left", "orphans", "over", "released"]

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


Reads = Callable[[BatchState, tuple[int, int]], bool]
"""Function that returns True while the journal of a lost unit is being read."""


def _goes_on(batch: BatchState | None, taken: ev.LeaseTaken, reads: Reads) -> bool:
    """Return True if the run of a lost attempt goes on, or may, from what its journal has."""
    if batch is None or batch.submission != taken.submission:
        return False

    def has_run(unit: ev.Unit | None) -> bool:
        return unit is not None and unit.task == taken.unit.task and 0 <= taken.run - unit.run_id_base < unit.runs

    kept = [record for key, record in batch.kept.items() if has_run(batch.pending.get(key))]
    kept += [f.kept for f in batch.flights.values() if f.kept is not None and has_run(f.unit)]
    if any(k.attempt >= taken.unit.attempt and not k.possibly_delivered for k in kept):
        return True
    return any(has_run(batch.pending.get(key)) and reads(batch, key) for key in batch.lost)


def attachable(leases: OpenLeases, batch: BatchState | None, change: LeaseChange, reads: Reads) -> OpenLease | None:
    """Return the lease of an earlier attempt whose resource a new lease may take over."""
    if not change.attachable:
        return None
    claimed = {lease.taken.attaches for lease in leases.values()}
    sought = change.batch_id, change.unit.task, change.run, change.provider, change.args, change.number
    for lease in leases.values():
        taken = lease.taken
        of = taken.batch_id, taken.unit.task, taken.run, taken.provider, taken.args, taken.number
        if (
            of == sought and taken.attachable and taken.unit.attempt < change.unit.attempt and lease.held
            and lease.handle is not None and not lease.orphaned and taken.lease not in claimed
            and _goes_on(batch, taken, reads)
        ):
            return lease
    return None


def _orphaned(leases: OpenLeases, lease: OpenLease, reason: str) -> list[ev.LeaseOrphaned]:
    """Orphan a lease, and the one whose resource it was about to take over: either may have the resource."""
    earlier = None if lease.held else leases.get(lease.taken.attaches)
    both = [lease] if earlier is None or earlier.orphaned else [lease, earlier]
    return [ev.LeaseOrphaned(lease=one.taken.lease, reason=reason) for one in both]


def changed(
    leases: OpenLeases, change: LeaseChange, runner: str, incarnation: int, ended: str, now: float,
    earlier: OpenLease | None = None,
) -> list[ev.Event]:
    """Record a run's change of a lease; a repeated or late one does nothing.

    `ended` is the reason from `over`; `now` is unix seconds; `earlier` is from `attachable`. Raises WorkflowError for a
    lease that may not be taken.
    """
    key = change.lease
    lease = leases.get(key)
    match change.what:
        case "taken" if lease is None:
            if ended:
                raise WorkflowError(f"no lease for a run that is over: {ended}")
            return [ev.LeaseTaken(
                lease=key, batch_id=change.batch_id, submission=change.submission, unit=change.unit, run=change.run,
                runner=runner, incarnation=incarnation, provider=change.provider, args=change.args, ttl=change.ttl,
                expires=now + change.ttl, creation_timeout=change.creation_timeout, attachable=change.attachable,
                number=change.number, attaches="" if earlier is None else earlier.taken.lease,
            )]
        case "held" if lease is not None and not lease.held:
            held, earlier_key = ev.LeaseHeld(lease=key, handle=change.handle), lease.taken.attaches
            return [held, ev.LeaseReleased(lease=earlier_key, by="successor")] if earlier_key in leases else [held]
        case "renewed" if lease is not None and not lease.orphaned:
            return [ev.LeaseRenewed(lease=key, expires=now + change.ttl)]
        case "released" if lease is not None:
            return [ev.LeaseReleased(lease=key, by="owner")]
        case "left" if lease is not None and not lease.orphaned:
            return [*_orphaned(leases, lease, change.reason)]
    return []


def orphans(
    leases: OpenLeases, batches: Mapping[BatchId, BatchState],
    lives: Mapping[tuple[str, int], RunnerLife], now: float, announced_at: float, reads: Reads,
) -> list[ev.Event]:
    """Record the leases that no owner will release: their attempt is over, or they were not renewed in time.

    `batches` are the open ones. `announced_at` is when runners learned of this coordinator, unix seconds, infinite
    before: they report earlier renewals after it. A lease that waits for the next attempt is not recorded.
    """
    events: dict[str, ev.Event] = {}
    for lease in leases.values():
        taken = lease.taken
        if lease.orphaned or taken.lease in events:
            continue
        batch = batches.get(taken.batch_id)
        reason = over(batch, lives.get((taken.runner, taken.incarnation)), taken)
        if reason and taken.attachable and lease.held and _goes_on(batch, taken, reads):
            reason = ""
        if not reason and max(lease.expires, announced_at + GRACE_SECONDS) < now:
            reason = "it expired: it was not renewed"
        if reason:
            events |= {event.lease: event for event in _orphaned(leases, lease, reason)}
    return [*events.values()]


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

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

__all__ = ["GRACE_SECONDS", "SPLIT", "apply_change", "due", "end_of_attempt", "give_up", "orphans", "released"]

GRACE_SECONDS = 30.0
"""Time for runners, once they know the coordinator, to report renewals again before expiries count; it is several times
the interval at which they repeat a group."""
SPLIT = 8
"""Number of groups into which leases are divided after a process did not report them: one of them may have ended it."""


def end_of_attempt(batch: BatchState | None, life: RunnerLife | None, holder: LeaseChange | ev.LeaseTaken) -> str:
    """Return why the attempt that holds a lease is over; empty while it runs. `batch` is the open one of its id, if
    any; `life` is that of its runner."""
    unit = holder.unit
    if life is None or life.state.gone or life.state is RunnerState.RETIRED:
        return "its runner is gone"
    if batch is None or batch.submission != holder.submission:
        return "its batch ended"
    flight = batch.flights.get((unit.task, unit.run_id_base))
    if flight is None or (flight.runner, flight.incarnation, flight.unit) != (life.name, life.incarnation, unit):
        return "its attempt is over"
    return ""


def apply_change(
    lease: OpenLease | None, change: LeaseChange, runner: str, incarnation: int, end_reason: str, now: float
) -> list[ev.Event]:
    """Record a run's change of a lease (None: no such lease is open); a repeated or late one does nothing.

    `end_reason` is that of `end_of_attempt`; `now` is unix seconds. Raises WorkflowError if the run is over and so may
    take no lease.
    """
    lease_id = change.lease
    match change.what:
        case "taken" if lease is None:
            if end_reason:
                raise WorkflowError(f"no lease for a run that is over: {end_reason}")
            return [ev.LeaseTaken(
                lease=lease_id, batch_id=change.batch_id, submission=change.submission, unit=change.unit,
                run=change.run, runner=runner, incarnation=incarnation, provider=change.provider, args=change.args,
                ttl=change.ttl, expires=now + change.ttl, creation_timeout=change.creation_timeout,
            )]
        case "held" if lease is not None and not lease.held:
            return [ev.LeaseHeld(lease=lease_id, handle=change.handle)]
        case "renewed" if lease is not None and not lease.orphaned:
            return [ev.LeaseRenewed(lease=lease_id, expires=now + change.ttl)]
        case "released" if lease is not None:
            return [ev.LeaseReleased(lease=lease_id, by="owner")]
        case "left" if lease is not None and not lease.orphaned:
            return [ev.LeaseOrphaned(lease=lease_id, reason=change.reason)]
    return []


def orphans(
    leases: OpenLeases, batches: Mapping[BatchId, BatchState],
    lives: Mapping[tuple[str, int], RunnerLife], now: float, announced_at: float, reads: Reads,
) -> list[ev.Event]:
    """Record the leases that no owner will release: their attempt is over, or they were not renewed in time.

    `batches` are the open ones. `announced_at` is when runners learned of this coordinator, unix seconds, infinite
    before. They report earlier renewals only after it, so a lease expires GRACE_SECONDS after it at the earliest.
    """
    events: dict[str, ev.Event] = {}
    for lease in leases.values():
        taken = lease.taken
        if lease.orphaned or taken.lease in events:
            continue
        reason = end_of_attempt(batches.get(taken.batch_id), lives.get((taken.runner, taken.incarnation)), taken)
        if not reason and max(lease.expires, announced_at + GRACE_SECONDS) < now:
            reason = "it expired: it was not renewed"
        if reason:
            events |= {event.lease: event for event in _orphaned(leases, lease, reason)}
    return [*events.values()]


def due(
    leases: Iterable[OpenLease], due_at: Mapping[str, float], max_group_sizes: Mapping[str, int],
    busy_providers: Container[str], now: float,
) -> dict[str, list[OpenLease]]:
    """Return the orphaned leases to release now, by provider: one process will release those of one provider.

    `due_at` is when each lease is due, unix seconds; the longest due go first. `max_group_sizes` limits the group that
    holds a lease which an earlier process did not report.
    """
    groups: dict[str, list[OpenLease]] = {}
    max_sizes: dict[str, float] = {}
    for lease in sorted((e for e in leases if e.orphaned), key=lambda e: due_at[e.taken.lease]):
        lease_id, provider = lease.taken.lease, lease.taken.provider
        max_size = min(max_sizes.get(provider, math.inf), max_group_sizes.get(lease_id, math.inf))
        is_due = due_at[lease_id] <= now and provider not in busy_providers
        if is_due and len(groups.get(provider, ())) < max_size:
            groups.setdefault(provider, []).append(lease)
            max_sizes[provider] = max_size
    return groups


def give_up(leases: Iterable[OpenLease]) -> list[ev.Event]:
    """Leave leases to their owners, since this store is a copy and runs of its original may still hold them."""
    return [ev.LeaseReleased(lease=lease.taken.lease, by="owner") for lease in leases]


def released(
    lease: OpenLease | None, lease_before: OpenLease, began_at: float, error: str, tries: int
) -> list[ev.Event]:
    """Record the result of a try to release an orphaned lease; `tries` counts the failed ones, with this one.

    `lease_before` is the lease at the start of the try, `began_at` (unix seconds). A repeated error is recorded only if
    the number of tries is a power of two. A success without a handle is not recorded while the creation may still come
    through, since it proves nothing.
    """
    if lease is None:
        return []  # its owner released it first
    lease_id = lease.taken.lease
    if error:
        is_power_of_two = tries & (tries - 1) == 0
        if error == lease.error and not is_power_of_two:
            return []
        return [ev.LeaseReleaseFailed(lease=lease_id, error=error, tries=tries)]
    if not lease_before.held and began_at < lease_before.made_by:
        return []
    return [ev.LeaseReleased(lease=lease_id, by="coordinator")]

"""Decisions about leases: changes that runs report, ends of attempts, releases and their results.

The functions are pure, from folded leases and batches and the time to events. A lease ends with the attempt that took
it. If that attempt was lost, the next attempt at the run may take over its resource, under a lease of its own
(`find_attachable`). A lease that its run will not release is orphaned: the coordinator records that, then releases it.
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

__all__ = [
    "GRACE_SECONDS", "SPLIT", "IsBeingRead", "apply_change", "apply_release", "end_of_attempt", "find_attachable",
    "find_due", "new_orphan_events",
]

GRACE_SECONDS = 30.0
"""How long runners may take to report renewals to a new coordinator before leases expire; several times the interval at
which they repeat a report."""
SPLIT = 8
"""Number of groups into which leases are divided after a release process did not report them: one may have ended it."""


def end_of_attempt(batch: BatchState | None, life: RunnerLife | None, holder: LeaseChange | ev.LeaseTaken) -> str:
    """Return why the attempt that holds a lease is over; "" while it runs. `batch` is the open batch with its id, if
    any; `life` is the process of its runner."""
    unit = holder.unit
    if life is None or life.state.gone or life.state is RunnerState.RETIRED:
        return "its runner is gone"
    if batch is None or batch.submission != holder.submission:
        return "its batch ended"
    flight = batch.flights.get((unit.task, unit.run_id_base))
    if flight is None or (flight.runner, flight.incarnation, flight.unit) != (life.name, life.incarnation, unit):
        return "its attempt is over"
    return ""


IsBeingRead = Callable[[BatchState, tuple[int, int]], bool]
"""Function that returns True while the journal of a lost unit is being read."""


def _may_go_on(batch: BatchState | None, taken: ev.LeaseTaken, is_being_read: IsBeingRead) -> bool:
    """Return True if a next attempt goes on from the journal of the lost attempt that took a lease, or may do so."""
    if batch is None or batch.submission != taken.submission:
        return False

    def has_run(unit: ev.Unit | None) -> bool:
        return unit is not None and unit.task == taken.unit.task and 0 <= taken.run - unit.run_id_base < unit.runs

    kept = [record for key, record in batch.kept.items() if has_run(batch.pending.get(key))]
    kept += [f.kept for f in batch.flights.values() if f.kept is not None and has_run(f.unit)]
    if any(k.attempt >= taken.unit.attempt and not k.possibly_delivered for k in kept):
        return True
    return any(has_run(batch.pending.get(key)) and is_being_read(batch, key) for key in batch.lost)


def find_attachable(
    leases: OpenLeases, batch: BatchState | None, change: LeaseChange, is_being_read: IsBeingRead
) -> OpenLease | None:
    """Return the lease of an earlier attempt whose resource the new lease in `change` may take over, if any."""
    if not change.attachable:
        return None
    claimed_ids = {lease.taken.attaches for lease in leases.values()}
    wanted = change.batch_id, change.unit.task, change.run, change.provider, change.args, change.number
    for lease in leases.values():
        taken = lease.taken
        identity = taken.batch_id, taken.unit.task, taken.run, taken.provider, taken.args, taken.number
        if (
            identity == wanted and taken.attachable and taken.unit.attempt < change.unit.attempt and lease.held
            and lease.handle is not None and not lease.orphaned and taken.lease not in claimed_ids
            and _may_go_on(batch, taken, is_being_read)
        ):
            return lease
    return None


def _orphan_events(leases: OpenLeases, lease: OpenLease, reason: str) -> list[ev.LeaseOrphaned]:
    """Return the events that orphan a lease, and with it the lease whose resource it was about to take over."""
    earlier_lease = None if lease.held else leases.get(lease.taken.attaches)
    to_orphan = [lease] if earlier_lease is None or earlier_lease.orphaned else [lease, earlier_lease]
    return [ev.LeaseOrphaned(lease=each.taken.lease, reason=reason) for each in to_orphan]


def apply_change(
    leases: OpenLeases, change: LeaseChange, runner: str, incarnation: int, end_reason: str, now: float,
    attachable: OpenLease | None = None,
) -> list[ev.Event]:
    """Return the events that record a run's change of a lease; none if the change is repeated or late.

    `end_reason` is the result of `end_of_attempt`, `attachable` that of `find_attachable`; `now` is unix seconds.
    Raises WorkflowError if a run that is over takes a lease.
    """
    lease_id = change.lease
    lease = leases.get(lease_id)
    match change.what:
        case "taken" if lease is None:
            if end_reason:
                raise WorkflowError(f"this run is over and can't take a lease: {end_reason}")
            return [ev.LeaseTaken(
                lease=lease_id, batch_id=change.batch_id, submission=change.submission, unit=change.unit,
                run=change.run, runner=runner, incarnation=incarnation, provider=change.provider, args=change.args,
                ttl=change.ttl, expires=now + change.ttl, creation_timeout=change.creation_timeout,
                attachable=change.attachable, number=change.number,
                attaches="" if attachable is None else attachable.taken.lease,
            )]
        case "held" if lease is not None and not lease.held:
            held, earlier_id = ev.LeaseHeld(lease=lease_id, handle=change.handle), lease.taken.attaches
            return [held, ev.LeaseReleased(lease=earlier_id, by="successor")] if earlier_id in leases else [held]
        case "renewed" if lease is not None and not lease.orphaned:
            return [ev.LeaseRenewed(lease=lease_id, expires=now + change.ttl)]
        case "released" if lease is not None:
            return [ev.LeaseReleased(lease=lease_id, by="owner")]
        case "left" if lease is not None and not lease.orphaned:
            return [*_orphan_events(leases, lease, change.reason)]
    return []


def new_orphan_events(
    leases: OpenLeases, batches: Mapping[BatchId, BatchState],
    lives: Mapping[tuple[str, int], RunnerLife], now: float, announced_at: float, is_being_read: IsBeingRead,
) -> list[ev.Event]:
    """Return an event for each lease that becomes an orphan: its attempt is over, or it was not renewed in time.

    The end of its attempt makes no orphan of a lease that the next attempt may take over. `batches` are the open ones.
    `announced_at` is when runners learned of this coordinator (unix seconds; infinite before). They renew only after
    that, so a lease expires GRACE_SECONDS later at the earliest.
    """
    events: dict[str, ev.Event] = {}
    for lease in leases.values():
        taken = lease.taken
        if lease.orphaned or taken.lease in events:
            continue
        batch = batches.get(taken.batch_id)
        reason = end_of_attempt(batch, lives.get((taken.runner, taken.incarnation)), taken)
        if reason and taken.attachable and lease.held and _may_go_on(batch, taken, is_being_read):
            reason = ""
        if not reason and max(lease.expires, announced_at + GRACE_SECONDS) < now:
            reason = "it expired: it was not renewed"
        if reason:
            events |= {event.lease: event for event in _orphan_events(leases, lease, reason)}
    return [*events.values()]


def find_due(
    leases: Iterable[OpenLease], due_at: Mapping[str, float], max_group_sizes: Mapping[str, int],
    busy_providers: Container[str], now: float,
) -> dict[str, list[OpenLease]]:
    """Return the orphaned leases to release now, by provider. One process will release the leases of a provider.

    `due_at` has the time at which each lease is due, in unix seconds; the longest due come first. `max_group_sizes`:
    how many leases may be released together with a lease that an earlier process failed to release.
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


def apply_release(
    lease: OpenLease | None, lease_before: OpenLease, began_at: float, error: str, tries: int
) -> list[ev.Event]:
    """Return the event that records an attempt to release an orphaned lease, or none.

    `lease_before` is the lease when the attempt began, at `began_at` (unix seconds). `tries` is the number of failed
    attempts, including this one. A repeated error is recorded only if `tries` is a power of two. A success without a
    handle is not recorded while the resource may still be created, since it proves nothing.
    """
    if lease is None:
        return []  # its owner released it first
    lease_id = lease.taken.lease
    if error:
        is_power_of_two = tries & (tries - 1) == 0
        if error == lease.error and not is_power_of_two:
            return []
        return [ev.LeaseReleaseFailed(lease=lease_id, error=error, tries=tries)]
    if not lease_before.held and began_at < lease_before.creation_deadline:
        return []
    return [ev.LeaseReleased(lease=lease_id, by="coordinator")]

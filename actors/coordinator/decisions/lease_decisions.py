"""The decisions about leases: what a run tells, what its end makes of them, what is released when, and what came of it.

Pure: leases and batches as they were folded, and the time -> events. A lease lives no longer than the attempt that took
it; who released it, or has to, is in the log before anything is done about it.
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
"""How long runners have, once they know the coordinator, to tell of renewals that nobody took, before expiries count.
It is some times longer than they wait until they send a group again."""
SPLIT = 8
"""Into how many processes leases are divided that one process said nothing of: any of them may have ended it."""


def over(batch: BatchState | None, life: RunnerLife | None, change: LeaseChange | ev.LeaseTaken) -> str:
    """Return why the attempt of a lease is over; empty while it plays.

    `batch`: the open one of its id, if any; `life`: of its runner.
    """
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
    """Take what a run tells of a lease (None: none of its key is open). What comes twice, or late, changes nothing.

    `ended`: why its attempt is over (`over`); `now`: unix seconds. Raises WorkflowError for one that may not be taken.
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
    lives: Mapping[tuple[str, int], RunnerLife], now: float, known_since: float,
) -> list[ev.Event]:
    """Return which of these leases nobody will release: their attempt is over, or they were not renewed in time.

    `batches`: the open ones, by id. `known_since`: when runners were told of this coordinator, unix seconds; infinite
    where they were not yet. What they renewed before, they tell after that.
    """
    events: list[ev.Event] = []
    for lease in leases:
        taken = lease.taken
        if lease.orphaned:
            continue
        reason = over(batches.get(taken.batch_id), lives.get((taken.runner, taken.incarnation)), taken)
        if not reason and max(lease.expires, known_since + GRACE_SECONDS) < now:
            reason = "it expired: it was not renewed"
        if reason:
            events.append(ev.LeaseOrphaned(lease=taken.lease, reason=reason))
    return events


def due(
    leases: Iterable[OpenLease], at: Mapping[str, float], most: Mapping[str, int], busy: Container[str], now: float
) -> dict[str, list[OpenLease]]:
    """Return the orphaned leases that one process each is to release now, by provider; none of a provider in `busy`.

    `at`: when each is due, unix seconds: they take turns, the longest due first. `most`: how many leases its process
    may have, of those that a process said nothing of.
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
    """Leave these leases to their owners: runs of the store that this one is a copy of, which may still play."""
    return [ev.LeaseReleased(lease=lease.taken.lease, by="owner") for lease in leases]


def released(lease: OpenLease | None, given: OpenLease, begun: float, error: str, tries: int) -> list[ev.Event]:
    """Take what came of a try at releasing an orphaned lease; `tries`: of those that failed, with this one.

    `given`: the lease as it was when the try began, at `begun` (unix seconds): what it was not given, it can't have
    released. Nothing is recorded where it has to be tried again and there is no news: a failure that is known, whose
    number of tries is no power of two; or a success that proves nothing, for a creation that nobody had heard the end
    of when the try began may still have come through.
    """
    if lease is None:
        return []  # its owner was faster
    key = lease.taken.lease
    if error:
        news = error != lease.error or tries & (tries - 1) == 0
        return [ev.LeaseReleaseFailed(lease=key, error=error, tries=tries)] if news else []
    if not given.held and begun < given.made_by:
        return []
    return [ev.LeaseReleased(lease=key, by="coordinator")]

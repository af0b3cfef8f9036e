"""Leases that runs take. The coordinator records them, and releases a lease if its run can't do so.

An attempt ends with an event of its batch or its runner. The turn that records that event also records the attempt's
leases as orphaned, except leases whose resources the next attempt may take over. Once this is durable, separate
processes release them (`lease_releases.py`). A failed release is retried after pauses that double. A second release by
a run that is still alive does no harm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from trinity_es.actors.coordinator.decisions import lease_decisions as decisions
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.messages import LeaseReply, LeaseReport
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import InvalidEvent, WorkflowError
from trinity_es.projections.leases import OpenLease, OpenLeases

__all__ = ["LeaseTracker", "Release"]

LOOK_SECONDS = 1.0
"""Interval between two checks for expired leases and due releases."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 300.0
"""First and longest pause before a failed release is retried. Each pause is twice the previous one."""
MOST_SHOWN = 5
"""Maximum number of failing leases that `status` lists."""


Release = Callable[[Sequence[OpenLease], Callable[[dict[str, str], str], None]], None]
"""Function that has a process release leases of one provider. Then it calls its second argument with each lease's
error, "" if it was released, and with one error for leases that the process did not report."""


class LeaseTracker:
    """Open leases of a run, their expiry and their release."""

    def __init__(
        self, registry: RunnerRegistry, release: Release,
        is_being_read: decisions.IsBeingRead = lambda batch, key: False,
    ) -> None:
        """`is_being_read` returns True while the journal of a lost unit is being read."""
        self._is_being_read = is_being_read
        self._registry, self._live, self._actor, self._release = registry, registry.live, registry.actor, release
        self._busy_providers: set[str] = set()
        """Providers whose leases a process is releasing now."""
        self._tries: dict[str, int] = {}
        """Lease -> number of failed releases, for each lease whose release was tried."""
        self._due_at: dict[str, float] = {}
        """Orphaned lease -> unix seconds at which its release is due."""
        self._max_group_sizes: dict[str, int] = {}
        """Lease that an earlier process did not report -> maximum size of the next group with it."""
        self._announced_at = math.inf
        """Time at which runners learned of this coordinator, in unix seconds; infinite before."""

    def begin(self) -> None:
        """Let leases expire from now on, after a grace time in which runners report renewals."""
        self._announced_at = self._registry.clock()

    def forget(self) -> None:
        """Let no lease expire until `begin`, since the coordinator misses renewals meanwhile."""
        self._announced_at = math.inf

    def give_up_all(self) -> None:
        """End all open leases without a release, for a copied store: runs of the original may hold them."""
        self._live.record(*[ev.LeaseReleased(lease=lease_id, by="owner") for lease_id in self._live.leases])

    # --- reports of runs --------------------------------------------------------------------------------------------
    def on_report(self, message: LeaseReport, address: Any) -> None:
        """Record the changes in a runner's report, and answer when they are durable."""
        live = self._live
        refusals: dict[str, str] = {}
        handles: dict[str, Any] = {}
        for change in message.changes:
            batch, life = live.batches.get(change.batch_id), live.lives.get((message.name, message.incarnation))
            end_reason, is_taken = decisions.end_of_attempt(batch, life, change), change.what == "taken"
            attachable = None
            if is_taken:
                attachable = decisions.find_attachable(live.leases, batch, change, self._is_being_read)
            try:
                live.record(*decisions.apply_change(
                    live.leases, change, message.name, message.incarnation, end_reason, self._registry.clock(),
                    attachable,
                ))
            except (WorkflowError, InvalidEvent) as e:
                refusals[change.lease] = e.message
            lease = live.leases.get(change.lease)
            if is_taken and lease is not None and (attached := live.leases.get(lease.taken.attaches)) is not None:
                handles[change.lease] = attached.handle  # also if the change was sent twice
        self._registry.send_later(address, LeaseReply(message.incarnation, message.number, refusals, handles))
        live.when_durable(self.release_due)

    # --- releases ---------------------------------------------------------------------------------------------------
    def record_orphans_of_turn(self) -> None:
        """At the end of a turn, record the leases that its events orphaned, and start the timer for expiries."""
        if not self._live.leases:
            return
        turn = self._live.turn
        has_runner_events = any(write.stream.startswith("runner/") for write in turn.writes)
        if has_runner_events or turn.batches:
            self._record_orphans({
                i: e for i, e in self._live.leases.items() if has_runner_events or e.taken.batch_id in turn.batches
            })
        if not self._actor.has_timer("leases"):
            self._actor.after(LOOK_SECONDS, "leases", self._check_all)

    def _record_orphans(self, leases: OpenLeases) -> None:
        live = self._live
        events = decisions.new_orphan_events(
            leases, live.batches, live.lives, self._registry.clock(), self._announced_at, self._is_being_read
        )
        live.record(*events)
        if events:
            live.when_durable(self.release_due)

    def _check_all(self) -> None:
        self._record_orphans(self._live.leases)
        self._live.when_durable(self.release_due)

    def release_due(self) -> None:
        """Start one process per provider that releases its due leases."""
        now, leases = self._registry.clock(), self._live.leases
        self._tries = {i: n for i, n in self._tries.items() if i in leases}  # forget closed leases
        self._max_group_sizes = {i: n for i, n in self._max_group_sizes.items() if i in leases}
        self._due_at = {i: self._due_at.get(i, now) for i, lease in leases.items() if lease.orphaned}
        groups = decisions.find_due(leases.values(), self._due_at, self._max_group_sizes, self._busy_providers, now)
        for provider, group in groups.items():
            self._busy_providers.add(provider)
            self._release(group, functools.partial(self._on_released, provider, group, now))

    def _on_released(
        self, provider: str, group: Sequence[OpenLease], began_at: float, errors: dict[str, str], trouble: str
    ) -> None:
        """Record the results of a release process, and plan the next attempts.

        `group` are the leases as they were when the process began, at `began_at` (unix seconds). `errors` has the error
        of each lease that it reported, `trouble` is the error of the others.
        """
        self._busy_providers.discard(provider)
        now = self._registry.clock()
        for lease_before in group:
            lease_id = lease_before.taken.lease
            error = errors.get(lease_id, trouble)
            lease = self._live.leases.get(lease_id)
            tries = max(self._tries.get(lease_id, 0), lease.tries if lease is not None else 0) + bool(error)
            self._live.record(*decisions.apply_release(lease, lease_before, began_at, error, tries))
            self._tries[lease_id] = tries
            if error:
                pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(tries - 1, 30))
                self._due_at[lease_id] = now + pause
            elif lease is not None:  # if it is still open, its creation may have succeeded since, or may yet
                self._due_at[lease_id] = now if lease.held else lease.creation_deadline
            if lease_id in errors:
                self._max_group_sizes.pop(lease_id, None)
            else:
                self._max_group_sizes[lease_id] = max(1, len(group) // decisions.SPLIT)
        self._live.when_durable(self.release_due)

    def is_busy(self) -> bool:
        """Return True while a release runs, or the release of an orphaned lease was not attempted yet."""
        untried_ids = (i for i, lease in self._live.leases.items() if lease.orphaned and i not in self._tries)
        return bool(self._busy_providers) or any(untried_ids)

    # --- status -----------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Return the numbers of leases, and the first leases that could not be released, as plain JSON."""
        leases = self._live.leases.values()
        failing = [lease for lease in leases if lease.error]
        return {
            "open": len(leases), "orphaned": sum(bool(lease.orphaned) for lease in leases), "failing": len(failing),
            "first_failing": [lease.as_dict() for lease in failing[:MOST_SHOWN]],
        }

"""Leases that runs take: the coordinator records them, and releases those whose runs can't.

An attempt ends with an event of its batch or its runner. The turn that records that event also records its leases as
orphaned (`look`), except those that wait for the next attempt at a lost run, which attaches to them. Once this is
durable, separate processes release them (`lease_releases.py`). A failed release is retried after pauses that double. A
second release by an owner that is still alive does no harm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trinity_es.actors.coordinator.decisions import lease_decisions as decisions
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.messages import LeaseReply, LeaseReport
from trinity_es.events.errors import InvalidEvent, WorkflowError
from trinity_es.projections.leases import OpenLease, OpenLeases

__all__ = ["LeaseFleet", "Releases"]

LOOK_SECONDS = 1.0
"""Interval between two checks for expired leases and due releases."""
PAUSE_SECONDS = 1.0, 300.0
"""First and longest pause before a failed release is retried."""
MOST_SHOWN = 5
"""Maximum number of failing leases that `status` lists."""


class Releases(Protocol):
    """Interface through which the coordinator has leases released, in processes of their own."""

    def start(self, leases: Sequence[OpenLease], done: Callable[[dict[str, str], str], None]) -> None:
        """Release leases of one provider in a process.

        `done` gets each lease's error, "" if it was released, and one error for leases that the process did not report.
        """


class LeaseFleet:
    """Open leases of a run, their expiry and their release."""

    def __init__(
        self, registry: RunnerRegistry, actor: TimerHost, releases: Releases,
        reads: decisions.Reads = lambda batch, key: False,
    ) -> None:
        """Take `reads`, which returns True while the journal of a lost unit is being read."""
        self._reads = reads
        self._registry, self._live, self._actor, self._releases = registry, registry.live, actor, releases
        self._busy: set[str] = set()
        """Providers whose leases a process is releasing now."""
        self._tries: dict[str, int] = {}
        """Number of failed releases of each tried lease."""
        self._due: dict[str, float] = {}
        """When each orphaned lease is due for release, unix seconds."""
        self._most: dict[str, int] = {}
        """Maximum size of the next group of each lease that an earlier process did not report."""
        self._announced_at = math.inf
        """When runners learned of this coordinator, unix seconds; infinite before."""

    def begin(self) -> None:
        """Start to count expiries; runners have a grace time from now on."""
        self._announced_at = self._registry.clock()

    def forget(self) -> None:
        """Stop counting expiries until `begin`, since the coordinator misses renewals meanwhile."""
        self._announced_at = math.inf

    def leave(self) -> None:
        """Give up all open leases, since they belong to the store from which this one was copied."""
        self._live.record(*decisions.left(list(self._live.leases.values())))

    # --- reports of runs --------------------------------------------------------------------------------------------
    def on_report(self, message: LeaseReport, address: Any) -> None:
        """Record a group of changes, and answer when it is durable."""
        live, refused, attaches = self._live, dict[str, str](), dict[str, Any]()
        for change in message.changes:
            batch, life = live.batches.get(change.batch_id), live.lives.get((message.name, message.incarnation))
            ended, taking = decisions.over(batch, life, change), change.what == "taken"
            earlier = decisions.attachable(live.leases, batch, change, self._reads) if taking else None
            try:
                live.record(*decisions.changed(
                    live.leases, change, message.name, message.incarnation, ended, self._registry.clock(), earlier
                ))
            except (WorkflowError, InvalidEvent) as e:
                refused[change.lease] = e.message
            lease = live.leases.get(change.lease)
            if taking and lease is not None and (attached := live.leases.get(lease.taken.attaches)) is not None:
                attaches[change.lease] = attached.handle  # also if the change was sent twice
        self._registry.send_later(address, LeaseReply(message.incarnation, message.number, refused, attaches))
        live.then(self.release_due)

    # --- releases ---------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Record, at the end of a turn, the leases that it orphaned."""
        if not self._live.leases:
            return
        turn = self._live.turn
        of_runners = any(write.stream.startswith("runner/") for write in turn.writes)
        if of_runners or turn.batches:
            self.look_at({
                k: e for k, e in self._live.leases.items() if of_runners or e.taken.batch_id in turn.batches
            })
        if not self._actor.has_timer("leases"):
            self._actor.after(LOOK_SECONDS, "leases", self._tick)

    def look_at(self, leases: OpenLeases) -> None:
        """Record which of these leases are orphaned, and release those once that is durable."""
        live = self._live
        events = decisions.orphans(
            leases, live.batches, live.lives, self._registry.clock(), self._announced_at, self._reads
        )
        live.record(*events)
        if events:
            live.then(self.release_due)

    def _tick(self) -> None:
        self.look_at(self._live.leases)
        self._live.then(self.release_due)

    def release_due(self) -> None:
        """Start to release due leases, in one process per provider."""
        now, live = self._registry.clock(), self._live.leases
        self._tries = {key: n for key, n in self._tries.items() if key in live}  # without closed leases
        self._most = {key: n for key, n in self._most.items() if key in live}
        self._due = {key: self._due.get(key, now) for key, lease in live.items() if lease.orphaned}
        for provider, leases in decisions.due(live.values(), self._due, self._most, self._busy, now).items():
            self._busy.add(provider)
            self._releases.start(leases, functools.partial(self._released, provider, leases, now))

    def _released(
        self, provider: str, leases: Sequence[OpenLease], begun: float, errors: dict[str, str], trouble: str
    ) -> None:
        """Record what a process released and plan the next tries; `begun` is its start, unix seconds."""
        self._busy.discard(provider)
        now = self._registry.clock()
        for lease_before in leases:
            key = lease_before.taken.lease
            error = errors.get(key, trouble)
            lease = self._live.leases.get(key)
            tries = max(self._tries.get(key, 0), lease.tries if lease is not None else 0) + bool(error)
            self._live.record(*decisions.released(lease, lease_before, begun, error, tries))
            self._tries[key] = tries
            if error:
                first, longest = PAUSE_SECONDS
                self._due[key] = now + min(longest, first * 2.0 ** min(tries - 1, 30))
            elif lease is not None:  # if it is still open, its creation may have succeeded since, or may yet
                self._due[key] = now if lease.held else lease.creation_deadline
            if key in errors:
                self._most.pop(key, None)
            else:
                self._most[key] = max(1, len(leases) // decisions.SPLIT)
        self._live.then(self.release_due)

    def is_busy(self) -> bool:
        """Return True while a release runs, or an orphaned lease has not been tried yet."""
        untried = (key for key, lease in self._live.leases.items() if lease.orphaned and key not in self._tries)
        return bool(self._busy) or any(untried)

    # --- status -----------------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Return the number of open leases, and some that could not be released, as plain JSON."""
        leases = self._live.leases.values()
        failing = [lease for lease in leases if lease.error]
        return {
            "open": len(leases), "orphaned": sum(bool(lease.orphaned) for lease in leases), "failing": len(failing),
            "first_failing": [lease.as_dict() for lease in failing[:MOST_SHOWN]],
        }

"""The leases that runs took: recorded, and released for runs that can't.

Whatever ends an attempt is an event of its batch, or of its runner; the turn that records it records as well which
leases nobody will release (`look`). When that is durable, processes of their own release them (`lease_releases.py`),
again after pauses that double, until the providers are content. An owner that is still there after all, and releases
its lease too, does no harm.
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
from trinity_es.projections.leases import OpenLease

__all__ = ["LeaseFleet", "Releases"]

LOOK_SECONDS = 1.0
"""Interval between two looks at what expired and what is to be released."""
PAUSE_SECONDS = 1.0, 300.0
"""Pause before a release that failed is tried again: the first, and the longest."""
MOST_TOLD = 5
"""Maximum of leases that could not be released and are told one by one."""


class Releases(Protocol):
    """Releases leases of one provider in a process, and tells an error, or "", of each, and what to say of those that
    the process said nothing of."""

    def start(self, leases: Sequence[OpenLease], done: Callable[[dict[str, str], str], None]) -> None: ...


class LeaseFleet:
    """See the module."""

    def __init__(self, registry: RunnerRegistry, actor: TimerHost, releases: Releases) -> None:
        self._registry, self._live, self._actor, self._releases = registry, registry.live, actor, releases
        self._busy: set[str] = set()
        """Providers that have a process now."""
        self._tries: dict[str, int] = {}
        """Tries that failed, of leases that were tried and are to be tried again."""
        self._due: dict[str, float] = {}
        """When orphaned leases are to be released, unix seconds."""
        self._most: dict[str, int] = {}
        """How many leases a process may have beside one that a process said nothing of, with itself."""
        self._known_since = math.inf
        """When runners were told of this coordinator, unix seconds."""

    def begin(self) -> None:
        """Count expiries from now on, after a time for runners: they are told of this coordinator."""
        self._known_since = self._registry.clock()

    def forget(self) -> None:
        """Count no expiries until runners are told again: what they told meanwhile is lost."""
        self._known_since = math.inf

    def leave(self) -> None:
        """Release none of those that are open: they belong to another store, which this one is a copy of."""
        self._live.record(*decisions.left(list(self._live.leases.values())))

    # --- what runs tell ---------------------------------------------------------------------------------------------
    def on_report(self, message: LeaseReport, address: Any) -> None:
        """Record a group of changes; answered when it is durable."""
        live, refused = self._live, dict[str, str]()
        for change in message.changes:
            life = live.lives.get((message.name, message.incarnation))
            ended = decisions.over(live.batches.get(change.batch_id), life, change)
            try:
                live.record(*decisions.changed(
                    live.leases.get(change.lease), change, message.name, message.incarnation, ended,
                    self._registry.clock(),
                ))
            except (WorkflowError, InvalidEvent) as e:
                refused[change.lease] = e.message
        self._registry.send_later(address, LeaseReply(message.incarnation, message.number, refused))
        live.then(self.release_due)

    # --- what is to be released -------------------------------------------------------------------------------------
    def look(self) -> None:
        """Record, at the end of a turn, which leases nobody will release since what it did."""
        if not self._live.leases:
            return
        turn = self._live.turn
        of_runners = any(write.stream.startswith("runner/") for write in turn.writes)
        if of_runners or turn.batches:
            self.look_at([
                e for e in self._live.leases.values() if of_runners or e.taken.batch_id in turn.batches
            ])
        if not self._actor.has_timer("leases"):
            self._actor.after(LOOK_SECONDS, "leases", self._tick)

    def look_at(self, leases: Any) -> None:
        """Record which of these leases nobody will release, and have them released when that is durable."""
        live = self._live
        found = decisions.orphans(list(leases), live.batches, live.lives, self._registry.clock(), self._known_since)
        live.record(*found)
        if found:
            live.then(self.release_due)

    def _tick(self) -> None:
        self.look_at(self._live.leases.values())
        self._live.then(self.release_due)

    def release_due(self) -> None:
        """Begin to release what is due, a process for each provider that has none."""
        now, live = self._registry.clock(), self._live.leases
        self._tries = {key: n for key, n in self._tries.items() if key in live}  # the others' owners released them
        self._most = {key: n for key, n in self._most.items() if key in live}
        self._due = {key: self._due.get(key, now) for key, lease in live.items() if lease.orphaned}
        for provider, leases in decisions.due(live.values(), self._due, self._most, self._busy, now).items():
            self._busy.add(provider)
            self._releases.start(leases, functools.partial(self._released, provider, leases, now))

    def _released(
        self, provider: str, leases: Sequence[OpenLease], begun: float, found: dict[str, str], trouble: str
    ) -> None:
        """Take what came of a process that was begun with these leases."""
        self._busy.discard(provider)
        now = self._registry.clock()
        for given in leases:
            key = given.taken.lease
            error = found.get(key, trouble)
            lease = self._live.leases.get(key)
            tries = max(self._tries.get(key, 0), lease.tries if lease is not None else 0) + bool(error)
            self._live.record(*decisions.released(lease, given, begun, error, tries))
            self._tries[key] = tries
            if error:
                first, most = PAUSE_SECONDS
                self._due[key] = now + min(most, first * 2.0 ** min(tries - 1, 30))
            elif lease is not None:  # where it is still open, a creation may have come through, or may still
                self._due[key] = now if lease.held else lease.made_by
            if key in found:
                self._most.pop(key, None)
            else:
                self._most[key] = max(1, len(leases) // decisions.SPLIT)
        self._live.then(self.release_due)

    def is_busy(self) -> bool:
        """Return True while something is released, or is about to be for the first time."""
        waiting = (key for key, lease in self._live.leases.items() if lease.orphaned and key not in self._tries)
        return bool(self._busy) or any(waiting)

    # --- what is told -----------------------------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Return how many are open, and some of those that could not be released, as plain JSON."""
        leases = self._live.leases.values()
        failing = [lease for lease in leases if lease.error]
        return {
            "open": len(leases), "orphaned": sum(bool(lease.orphaned) for lease in leases), "failing": len(failing),
            "first_failing": [lease.as_dict() for lease in failing[:MOST_TOLD]],
        }

"""Lease changes of runs, on their way into the log.

Changes go out in numbered groups, in order. A runner keeps a group and sends it again until the coordinator confirms
that the log has it. A run that takes a lease waits for this confirmation, so the runner sends that change at once, with
all earlier ones. Other changes wait 0.1 s, so that one group carries several. `UnitLeases` cleans texts and checks
values when a run reports them, because a later error could not be raised in the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import orjson

from trinity_es.actors.lease_providers import recordable_json
from trinity_es.actors.message_sizes import grouped, shortened
from trinity_es.actors.messages import LeaseChange, LeaseReply, LeaseReport, UnitAssignment
from trinity_es.actors.runner.outbox import NumberedGroups
from trinity_es.events.errors import WorkflowError
from trinity_es.events.secrets import SecretFile, masked_text
from trinity_es.events.store.checks.log_end import Mark

__all__ = ["LeaseReports", "UnitLeases"]


class LeaseReports(NumberedGroups[LeaseReport]):
    """Groups of lease changes. Pure, with the time as an argument."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation)
        self._waiting: list[LeaseChange] = []
        self._futures: dict[str, Future[Any]] = {}
        """Changes for leases that were taken and are not in the log yet."""

    def put(self, change: LeaseChange, recorded: Future[Any]) -> None:
        """Add a change to the next group. `recorded` ends when the log has the lease, with the handle that it takes
        over, if any; at once if none is taken.
        """
        if change.what in ("released", "left") and change.lease in self._futures:
            self._take_back(change.lease)
        self._waiting.append(change)
        if change.what == "taken":
            self._futures[change.lease] = recorded
        else:
            recorded.set_result(None)

    def _take_back(self, lease: str) -> None:
        """Drop the taking of a lease that was left before the log confirmed it: nothing was created for it.

        The log may have the lease, and the coordinator may have released it: sent again, it would be taken once more.
        """

        def without_taking(changes: list[LeaseChange]) -> list[LeaseChange]:
            return [c for c in changes if (c.lease, c.what) != (lease, "taken")]

        self._waiting = without_taking(self._waiting)
        self.unacked = {n: replace(group, changes=without_taking(group.changes)) for n, group in self.unacked.items()}
        self._futures.pop(lease).set_exception(WorkflowError("the lease was left before it was in the log"))

    def gathered(self, known: Mark | None, now: float) -> list[LeaseReport]:
        """Return the lease changes that were not sent yet, in groups that fit a message. `known`: end of the log that
        this runner has seen.
        """
        if not self._waiting:
            return []
        parts = grouped(self._waiting, lambda c: 400 + len(orjson.dumps([c.provider, c.args, c.handle, c.reason])))
        self._waiting = []
        groups = []
        for part in parts:
            self.number += 1
            groups.append(self.keep(LeaseReport(self.name, self.incarnation, self.number, part, known), now))
        return groups

    def acknowledge(self, reply: LeaseReply) -> None:
        """Forget a confirmed group, and end the waiting of its runs. A second confirmation does nothing."""
        group = self.drop(reply.number)
        if group is None:
            return
        for change in group.changes:
            future = self._futures.pop(change.lease, None) if change.what == "taken" else None
            if future is None:
                continue
            if change.lease in reply.refused:
                future.set_exception(WorkflowError(reply.refused[change.lease]))
            else:
                future.set_result(reply.attaches.get(change.lease))


class UnitLeases:
    """Reporter of the leases of one attempt's runs (a `LeaseRecorder`), usable from any thread."""

    def __init__(
        self, changed: Callable[[LeaseChange, Future[Any]], None], item: UnitAssignment, secrets: SecretFile
    ) -> None:
        """Call `changed` with each change, from any thread. `secrets`: of tasks; the log must not have them."""
        self._changed, self._item, self._secrets = changed, item, secrets

    def report(self, *, lease: str, what: Any, run: int, **more: Any) -> Future[Any]:
        """Report a change to the coordinator. Raises WorkflowError for values that can't or must not be recorded."""
        for name in more.keys() & {"args", "handle"}:
            self._require_recordable(f"the {name} of a lease", more[name])
        if "reason" in more:
            more["reason"] = shortened(masked_text(self._secrets.scrubbed(more["reason"]), os.environ))
        item = self._item
        change = LeaseChange(
            lease=lease, what=what, batch_id=item.batch_id, submission=item.submission, unit=item.unit, run=run, **more
        )
        recorded: Future[Any] = Future()
        recorded.set_running_or_notify_cancel()  # so that no caller can cancel it, and setting its result never fails
        self._changed(change, recorded)
        return recorded

    def _require_recordable(self, what: str, value: Any) -> None:
        try:
            recordable_json(what, value)
        except ValueError as e:
            raise WorkflowError(str(e)) from None
        if self._secrets.holds_secret(value):
            raise WorkflowError(f"{what} holds a secret of a task, which the log must not have: let the provider read "
                                "it from the environment")

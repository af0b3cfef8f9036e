"""Changes of leases (sandboxes or sessions that runs hold), which a runner keeps until they are in the log.

Changes are sent in numbered groups, in order. A runner keeps a group and sends it again until the coordinator confirms
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
from trinity_es.actors.message_sizes import shorten_error, split_by_size
from trinity_es.actors.messages import LeaseChange, LeaseReply, LeaseReport, UnitAssignment
from trinity_es.actors.runner.outbox import NumberedGroups
from trinity_es.events.errors import WorkflowError
from trinity_es.events.secrets import SecretFile, masked_text
from trinity_es.events.store.checks.log_end import Mark

__all__ = ["LeaseReports", "UnitLeases"]


class LeaseReports(NumberedGroups[LeaseReport]):
    """Groups of lease changes that are not confirmed yet. Pure, with the time as an argument."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation)
        self._unsent: list[LeaseChange] = []
        self._futures: dict[str, Future[Any]] = {}
        """Futures that runs wait for, by lease id. Each resolves when the log has the lease that the run takes."""

    def put(self, change: LeaseChange, when_recorded: Future[Any]) -> None:
        """Add a change to the next group.

        If the change takes a lease, `when_recorded` resolves when the log has it. The result is the handle that the
        lease takes over from an earlier one, None without one. For other changes `when_recorded` resolves at once.
        """
        if change.what in ("released", "left") and change.lease in self._futures:
            self._withdraw_taking(change.lease)
        self._unsent.append(change)
        if change.what == "taken":
            self._futures[change.lease] = when_recorded
        else:
            when_recorded.set_result(None)

    def _withdraw_taking(self, lease: str) -> None:
        """Drop the unconfirmed "taken" report of a lease that its run no longer wants. No sandbox was created for it.

        The coordinator may already have recorded and released it. If the change was sent again, it would be taken
        once more.
        """

        def without_taking(changes: list[LeaseChange]) -> list[LeaseChange]:
            return [c for c in changes if (c.lease, c.what) != (lease, "taken")]

        self._unsent = without_taking(self._unsent)
        for number, group in self.unconfirmed.items():
            self.unconfirmed[number] = replace(group, changes=without_taking(group.changes))
        self._futures.pop(lease).set_exception(WorkflowError(f"lease {lease} was given up before the log had it"))

    def next_groups(self, known: Mark | None, now: float) -> list[LeaseReport]:
        """Return the unsent changes as groups to send now. `known`: last position of the log known to this runner."""
        if not self._unsent:
            return []
        parts = split_by_size(self._unsent, lambda c: 400 + len(orjson.dumps([c.provider, c.args, c.handle, c.reason])))
        self._unsent = []
        groups = []
        for part in parts:
            self.number += 1
            groups.append(self.keep(LeaseReport(self.name, self.incarnation, self.number, part, known), now))
        return groups

    def acknowledge(self, reply: LeaseReply) -> None:
        """Drop a confirmed group, and resolve the futures of its "taken" changes. Ignore a repeated confirmation."""
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
    """`LeaseRecorder` for one attempt at a unit (some runs of one task), usable from any thread."""

    def __init__(
        self, send: Callable[[LeaseChange, Future[Any]], None], item: UnitAssignment, secrets: SecretFile
    ) -> None:
        """`send` gets each change, in the caller's thread. `secrets`: secrets of tasks, which the log must not hold."""
        self._send, self._item, self._secrets = send, item, secrets

    def report(self, *, lease: str, what: Any, run: int, **fields: Any) -> Future[Any]:
        """Report a lease change to the coordinator. The future resolves as `LeaseReports.put` says.

        `fields`: further fields of `LeaseChange`. Raises WorkflowError for values that can't or must not be recorded.
        """
        for name in fields.keys() & {"args", "handle"}:
            try:
                recordable_json(f"the {name} of a lease", fields[name])
            except ValueError as e:
                raise WorkflowError(str(e)) from None
            if self._secrets.holds_secret(fields[name]):
                raise WorkflowError(f"a secret of a task is in the {name} of a lease, which would be written to the "
                                    "log: let the provider read it from the environment")
        if "reason" in fields:
            fields["reason"] = shorten_error(masked_text(self._secrets.scrubbed(fields["reason"]), os.environ))
        item = self._item
        change = LeaseChange(
            lease=lease, what=what, batch_id=item.batch_id, submission=item.submission, unit=item.unit, run=run,
            **fields,
        )
        when_recorded: Future[Any] = Future()
        when_recorded.set_running_or_notify_cancel()  # so no caller can cancel it, and setting its result never fails
        self._send(change, when_recorded)
        return when_recorded

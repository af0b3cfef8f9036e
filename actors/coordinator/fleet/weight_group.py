"""The group over which a trainer sends weights to the engines: who is in it. The coordinator's side.

A group is whole while every life of a runner that joined it is the one that serves now. Where it is not (a runner died,
another coordinator took over, which knows of no group), weights are loaded from their place in shared memory, and the
trainer makes a new group before its next version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_es.actors.commands import JoinWeightGroup
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.messages import GroupJoinResult, JoinGroup
from trinity_es.events.errors import SyncError

__all__ = ["GroupWaiter", "WeightGroup"]


@dataclass(slots=True)
class GroupWaiter:
    """Somebody who waits for every runner to be in a group."""

    id: str
    members: dict[str, int]
    """Runner -> incarnation."""
    waiting_on: set[str]
    errors: dict[str, str] = field(default_factory=dict)

    def error(self, timed_out: str = "") -> SyncError | None:
        """Return what went wrong, when it is over."""
        errors = self.errors | (dict.fromkeys(self.waiting_on, timed_out) if timed_out else {})
        if not errors:
            return None
        what = "; ".join(f"{name}: {error}" for name, error in sorted(errors.items()))
        return SyncError(f"there is no group to send weights over ({what}); engines serve what they had")


class WeightGroup:
    """Who is in the group, and who is asked to join one."""

    def __init__(self, registry: RunnerRegistry) -> None:
        self.registry = registry
        self.members: dict[str, int] = {}
        self.waiter: GroupWaiter | None = None

    def whole(self) -> bool:
        """Return True if the runners that serve are the group, and none of them is busy with other weights."""
        serving = {r.name: r.incarnation for r in self.registry.ready()}
        busy = any(r.loading is not None for r in self.registry.ready())
        return bool(serving) and serving == self.members and not busy

    def join(self, request_id: str, command: JoinWeightGroup) -> GroupWaiter:
        """Ask every runner into a new group. Raises SyncError when not all `engines` serve."""
        serving = sorted(self.registry.ready(), key=lambda r: r.name)
        if len(serving) != command.engines:
            raise SyncError(f"{len(serving)} of {command.engines} engines serve: a group needs all of them")
        self.members = {}
        waiter = GroupWaiter(request_id, {r.name: r.incarnation for r in serving}, {r.name for r in serving})
        self.waiter = waiter
        for number, runner in enumerate(serving):
            message = JoinGroup(
                runner.incarnation, request_id, command.address, command.port, 1 + number * command.workers,
                1 + len(serving) * command.workers,
            )
            self.registry.send_later(runner.address, message)
        return waiter

    def on_join_result(self, message: GroupJoinResult) -> None:
        """Take note that a runner is in, or could not join."""
        waiter = self.waiter
        if waiter is None or waiter.id != message.id or waiter.members.get(message.name) != message.incarnation:
            return
        waiter.waiting_on.discard(message.name)
        if message.error is not None:
            waiter.errors[message.name] = message.error
        elif not waiter.waiting_on and not waiter.errors:
            self.members = waiter.members

    def on_left(self, name: str, reason: str) -> None:
        """Give the group up where a runner ended, or left after a transfer that failed: it is needed to go on."""
        if name in self.members:
            self.members = {}
        if self.waiter is not None and name in self.waiter.waiting_on:
            self.waiter.waiting_on.discard(name)
            self.waiter.errors[name] = reason

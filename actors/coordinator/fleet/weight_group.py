"""The group over which a trainer sends weights to the engines: who is in it. The coordinator's side.

A group is whole while every life of a runner that joined it is the one that serves now. Where it is not (a runner died,
another coordinator took over, which knows of no group), weights are loaded from their place in shared memory, and the
trainer makes a new group before its next version.
"""

from __future__ import annotations

from trinity_es.actors.commands import JoinWeightGroup
from trinity_es.actors.coordinator.fleet.awaited import Awaited
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.messages import GroupJoinResult, JoinGroup
from trinity_es.events.errors import SyncError

__all__ = ["WeightGroup"]


class WeightGroup:
    """Who is in the group, and who is asked to join one."""

    def __init__(self, registry: RunnerRegistry) -> None:
        self.registry = registry
        self.members: dict[str, int] = {}
        """Runner -> incarnation."""
        self._asked: tuple[str, dict[str, int], Awaited] = "", {}, Awaited("", set())
        """Who was asked last: the group's id, its members to be, who of them has not answered."""

    def whole(self) -> bool:
        """Return True if the runners that serve are the group, and none of them is busy with other weights."""
        serving = {r.name: r.incarnation for r in self.registry.ready()}
        busy = any(r.loading is not None for r in self.registry.ready())
        return bool(serving) and serving == self.members and not busy

    def join(self, request_id: str, command: JoinWeightGroup) -> Awaited:
        """Ask every runner into a new group. Raises SyncError when not all `engines` serve."""
        serving = sorted(self.registry.ready(), key=lambda r: r.name)
        if len(serving) != command.engines:
            raise SyncError(f"{len(serving)} of {command.engines} engines serve: a group needs all of them")
        self.members = {}
        asked = {r.name: r.incarnation for r in serving}
        awaited = Awaited(
            "there is no group to send weights over ({what}); engines serve what they had", {*asked}
        )
        self._asked = request_id, asked, awaited
        for number, runner in enumerate(serving):
            message = JoinGroup(
                runner.incarnation, request_id, command.address, command.port, 1 + number * command.workers,
                1 + len(serving) * command.workers,
            )
            self.registry.send_later(runner.address, message)
        return awaited

    def on_join_result(self, message: GroupJoinResult) -> None:
        """Take note that a runner is in, or could not join."""
        group_id, asked, awaited = self._asked
        if group_id != message.id or asked.get(message.name) != message.incarnation:
            return
        awaited.done(message.name, message.error)
        if not awaited.waiting_on and not awaited.errors:
            self.members = asked

    def on_left(self, name: str, reason: str) -> None:
        """Give the group up where a runner ended, or left after a transfer that failed: it is needed to go on."""
        if name in self.members:
            self.members = {}
        self._asked[2].done(name, reason)

"""Coordinator's side of the group through which a trainer sends weights to the engines.

A group is whole while exactly the incarnations that joined it serve. If a runner dies, or another coordinator takes
over, runners load weights from shared memory, and the trainer forms a new group before its next version.
"""

from __future__ import annotations

from trinity_es.actors.commands import JoinWeightGroup
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.wait_for_runners import Awaited
from trinity_es.actors.messages import GroupJoinResult, JoinGroup
from trinity_es.events.errors import SyncError

__all__ = ["WeightGroup"]


class WeightGroup:
    """Members of the current group, and the invitation to the next."""

    def __init__(self, registry: RunnerRegistry) -> None:
        self.registry = registry
        self.members: dict[str, int] = {}
        """Runner -> incarnation."""
        self._invitation: tuple[str, dict[str, int], Awaited] = "", {}, Awaited("", set())
        """Last invitation: the group's id, the invited runners and incarnations, the answers."""

    def whole(self) -> bool:
        """Return True if exactly the members serve, and none of them is loading weights."""
        serving = {r.name: r.incarnation for r in self.registry.ready()}
        busy = any(r.loading is not None for r in self.registry.ready())
        return bool(serving) and serving == self.members and not busy

    def join(self, request_id: str, command: JoinWeightGroup) -> Awaited:
        """Invite every runner to a new group. Raises SyncError unless all `command.engines` engines serve."""
        serving = sorted(self.registry.ready(), key=lambda r: r.name)
        if len(serving) != command.engines:
            raise SyncError(f"{len(serving)} of {command.engines} engines serve: a group needs all of them")
        self.members = {}
        invited = {r.name: r.incarnation for r in serving}
        awaited = Awaited("no group to send weights was formed ({what}); engines keep their weights", {*invited})
        self._invitation = request_id, invited, awaited
        for number, runner in enumerate(serving):
            message = JoinGroup(
                runner.incarnation, request_id, command.address, command.port, 1 + number * command.workers,
                1 + len(serving) * command.workers,
            )
            self.registry.send_later(runner.address, message)
        return awaited

    def on_join_result(self, message: GroupJoinResult) -> None:
        """Note that a runner joined, or could not join."""
        group_id, invited, awaited = self._invitation
        if group_id != message.id or invited.get(message.name) != message.incarnation:
            return
        awaited.done(message.name, message.error)
        if not awaited.waiting_on and not awaited.errors:
            self.members = invited

    def on_left(self, name: str, reason: str) -> None:
        """Give the group up if a member ended, or left after a failed transfer."""
        if name in self.members:
            self.members = {}
        self._invitation[2].done(name, reason)

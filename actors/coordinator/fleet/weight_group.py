"""Coordinator's side of the process group over which a trainer sends weights to the engines.

A group is whole while the serving runners are exactly the processes that joined it. If a runner dies, or another
coordinator takes over, runners load weights from shared memory until the trainer forms a new group."""

from __future__ import annotations

from trinity_es.actors.commands import JoinWeightGroup
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.wait_for_runners import Awaited
from trinity_es.actors.messages import GroupJoinResult, JoinGroup
from trinity_es.events.errors import SyncError

__all__ = ["WeightGroup"]


class WeightGroup:
    """Members of the current process group, and the invitation to the next one."""

    def __init__(self, registry: RunnerRegistry) -> None:
        self.registry = registry
        self.members: dict[str, int] = {}
        """Incarnation of each runner in the group; empty if the group can't be used."""
        self._group_id = ""
        """Id of the last group to which runners were invited."""
        self._invited: dict[str, int] = {}
        """Incarnation of each runner that was invited to that group."""
        self._answers = Awaited("", set())

    def is_whole(self) -> bool:
        """Return True if the serving runners are exactly the members, and none of them is loading weights."""
        serving = {r.name: r.incarnation for r in self.registry.ready_runners()}
        is_loading = any(r.loading is not None for r in self.registry.ready_runners())
        return bool(serving) and serving == self.members and not is_loading

    def join(self, request_id: str, command: JoinWeightGroup) -> Awaited:
        """Invite every serving runner to a new group, and return the wait for their answers. Raises SyncError unless
        `command.engines` runners serve."""
        serving = sorted(self.registry.ready_runners(), key=lambda r: r.name)
        if len(serving) != command.engines:
            raise SyncError(f"only {len(serving)} of {command.engines} engines are ready, and the weight group needs "
                            "all: try again when they are ready")
        self.members = {}
        self._group_id, self._invited = request_id, {r.name: r.incarnation for r in serving}
        self._answers = Awaited(
            "no group to send weights was formed ({what}); engines keep their weights", {*self._invited})
        for index, runner in enumerate(serving):
            first_rank, world_size = 1 + index * command.workers, 1 + len(serving) * command.workers  # 0: the trainer
            message = JoinGroup(
                runner.incarnation, request_id, command.address, command.port, first_rank, world_size)
            self.registry.send_later(runner.address, message)
        return self._answers

    def on_join_result(self, message: GroupJoinResult) -> None:
        """Note a runner's answer to its invitation. Once all have joined, they become the members."""
        if self._group_id != message.id or self._invited.get(message.name) != message.incarnation:
            return
        self._answers.mark_done(message.name, message.error)
        if not self._answers.waiting_on and not self._answers.errors:
            self.members = self._invited

    def on_left(self, name: str, reason: str) -> None:
        """Dissolve the group if this runner is a member. Its process ended, or a transfer to it failed."""
        if name in self.members:
            self.members = {}
        self._answers.mark_done(name, reason)

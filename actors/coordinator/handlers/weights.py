"""What is asked about weights: who waits until every runner has a version, or is in the trainer's group."""

from __future__ import annotations

from trinity_es.actors.commands import (
    CheckWeightGroup,
    CommandRequest,
    JoinedRunners,
    JoinWeightGroup,
    SyncedWeights,
    SyncWeights,
)
from trinity_es.actors.coordinator.fleet.weight_group import GroupWaiter
from trinity_es.actors.coordinator.fleet.weights import SyncWaiter, WeightLoading
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.ports import Responder, TimerHost
from trinity_es.events.errors import SyncError

__all__ = ["WeightHandlers"]


class WeightHandlers:
    """Handles what is asked about weights."""

    def __init__(self, weights: WeightLoading, router: Responder, actor: TimerHost) -> None:
        self.weights, self.router, self.actor = weights, router, actor
        self._syncs: list[tuple[CommandRequest[SyncWeights], SyncWaiter]] = []
        self._joining: tuple[CommandRequest[JoinWeightGroup], GroupWaiter] | None = None

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [
            handled(SyncWeights, self.sync),
            handled(CheckWeightGroup, self.check),
            handled(JoinWeightGroup, self.join),
        ]

    def sync(self, request: CommandRequest[SyncWeights]) -> None:
        """Publish weights; answered when every runner has them."""
        command, timeout = request.command, request.command.timeout
        self.actor.after(timeout, f"sync:{request.id}", lambda: self._end_sync(request, f"no answer in {timeout} s"))
        waiter = self.weights.publish(command.version, command.path, command.method, command.again)
        self._syncs.append((request, waiter))
        self.check_syncs()

    def check_syncs(self) -> None:
        """Answer who waited for weights that are everywhere now."""
        for request, waiter in list(self._syncs):
            if not waiter.waiting_on:
                self._end_sync(request, "")

    def _end_sync(self, request: CommandRequest[SyncWeights], timed_out: str) -> None:
        for entry in [s for s in self._syncs if s[0].id == request.id]:
            self._syncs.remove(entry)
            self.weights.sync_waiters.remove(entry[1])
            self.actor.cancel(f"sync:{request.id}")
            error: SyncError | None = entry[1].error(timed_out)
            version = entry[1].version
            have = sorted(r.name for r in self.weights.registry.rollout() if r.model_version == version)
            synced = SyncedWeights(version=version, runners=have, from_group=entry[1].from_group)
            self.router.reply(request, synced, error)

    def check(self, request: CommandRequest[CheckWeightGroup]) -> None:
        """Tell whether the group is whole."""
        self.router.answer(request, self.weights.group.whole())

    def join(self, request: CommandRequest[JoinWeightGroup]) -> None:
        """Ask every runner into the trainer's group; answered when all are in it."""
        timeout = request.command.timeout
        waiter = self.weights.group.join(request.id, request.command)
        self.check_group(timed_out="another group is being made")
        self._joining = (request, waiter)
        self.actor.after(timeout, "weight group", lambda: self.check_group(waiter, f"no answer in {timeout} s"))

    def check_group(self, waiter: GroupWaiter | None = None, timed_out: str = "") -> None:
        """Answer who waited for a group that is there now, or will not be."""
        if self._joining is None or waiter not in (None, self._joining[1]):
            return
        request, mine = self._joining
        if timed_out or not mine.waiting_on:
            self._joining = None
            self.actor.cancel("weight group")
            self.router.reply(request, JoinedRunners(runners=sorted(mine.members)), mine.error(timed_out))

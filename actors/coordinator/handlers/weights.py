"""The desk for weights: who waits until every runner has a version, or is in the trainer's group."""

from __future__ import annotations

from trinity_es.actors.coordinator.fleet.weight_group import GroupWaiter
from trinity_es.actors.coordinator.fleet.weights import SyncWaiter, WeightLoading
from trinity_es.actors.coordinator.ports import Answers, Timers
from trinity_es.actors.messages import Request
from trinity_es.events.errors import SyncError

__all__ = ["WeightDesk"]


class WeightDesk:
    """Commands are methods `do_<command>(request)`, as the desk's."""

    def __init__(self, weights: WeightLoading, desk: Answers, actor: Timers) -> None:
        self.weights, self.desk, self.actor = weights, desk, actor
        self._syncs: list[tuple[Request, SyncWaiter]] = []
        self._joining: tuple[Request, GroupWaiter] | None = None

    def do_sync_weights(self, request: Request) -> None:
        timeout = request.args["timeout"]
        self.actor.after(timeout, f"sync:{request.id}", lambda: self._end_sync(request, f"no answer in {timeout} s"))
        how = {key: request.args[key] for key in ("method", "again") if key in request.args}
        waiter = self.weights.publish(request.args["version"], request.args["path"], **how)
        self._syncs.append((request, waiter))
        self.check_syncs()

    def check_syncs(self) -> None:
        """Answer who waited for weights that are everywhere now."""
        for request, waiter in list(self._syncs):
            if not waiter.waiting_on:
                self._end_sync(request, "")

    def _end_sync(self, request: Request, timed_out: str) -> None:
        for entry in [s for s in self._syncs if s[0].id == request.id]:
            self._syncs.remove(entry)
            self.weights.sync_waiters.remove(entry[1])
            self.actor.cancel(f"sync:{request.id}")
            error: SyncError | None = entry[1].error(timed_out)
            version = entry[1].version
            have = sorted(r.name for r in self.weights.roster.rollout() if r.model_version == version)
            self.desk.reply(request, {"version": version, "runners": have, "from_group": entry[1].from_group}, error)

    def do_weight_group(self, request: Request) -> None:
        self.desk.answer(request, {"whole": self.weights.group.whole()})

    def do_join_weight_group(self, request: Request) -> None:
        timeout = request.args["timeout"]
        waiter = self.weights.group.join(request.id, request.args)
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
            self.desk.reply(request, {"runners": sorted(mine.members)}, mine.error(timed_out))

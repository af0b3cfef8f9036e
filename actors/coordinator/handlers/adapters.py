"""What is asked about LoRA adapters: who waits until every runner has a version of one."""

from __future__ import annotations

from trinity_es.actors.commands import CommandRequest, RemoveAdapter, SyncAdapter, SyncedAdapter
from trinity_es.actors.coordinator.fleet.adapters import AdapterLoading, AdapterWaiter
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.ports import Responder, TimerHost
from trinity_es.events import vocabulary as ev

__all__ = ["AdapterHandlers"]


class AdapterHandlers:
    """Handles what is asked about adapters."""

    def __init__(self, adapters: AdapterLoading, router: Responder, actor: TimerHost) -> None:
        self.adapters, self.router, self.actor = adapters, router, actor
        self._syncs: list[tuple[CommandRequest[SyncAdapter], AdapterWaiter]] = []

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [handled(SyncAdapter, self.sync), handled(RemoveAdapter, self.remove)]

    def sync(self, request: CommandRequest[SyncAdapter]) -> None:
        """Publish a version; answered when every runner has it."""
        command = request.command
        waiter = self.adapters.publish(ev.AdapterPublished(
            adapter=command.adapter, version=command.version, path=command.path, rank=command.rank, size=command.size,
            digest=command.digest,
        ))
        timed_out = f"no answer in {command.timeout} s"
        self.actor.after(command.timeout, f"adapter:{request.id}", lambda: self._end(request, timed_out))
        self._syncs.append((request, waiter))
        self.check()

    def remove(self, request: CommandRequest[RemoveAdapter]) -> None:
        """Take an adapter back; answered when that is in the log."""
        self.adapters.remove(request.command.adapter)
        self.router.reply(request)
        self.check()

    def check(self) -> None:
        """Answer who waited for a version that is everywhere now."""
        for request, waiter in list(self._syncs):
            if not waiter.waiting_on:
                self._end(request, "")

    def _end(self, request: CommandRequest[SyncAdapter], timed_out: str) -> None:
        for entry in [s for s in self._syncs if s[0].id == request.id]:
            self._syncs.remove(entry)
            waiter = entry[1]
            self.adapters.waiters.remove(waiter)
            self.actor.cancel(f"adapter:{request.id}")
            runners = self.adapters.registry.rollout()
            have = sorted(r.name for r in runners if r.adapters.get(waiter.adapter) == waiter.version)
            synced = SyncedAdapter(adapter=waiter.adapter, version=waiter.version, runners=have)
            self.router.reply(request, synced, waiter.error(timed_out))

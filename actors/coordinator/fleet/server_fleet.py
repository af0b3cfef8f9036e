"""The servers of others that are engines (`engine_type: http`): which there are, who comes, who goes and when.

What is decided (`server_decisions.py`) is in the log; the guardian is told again and again which runners there are to
be, so nothing is lost where a message, or either of the two, is. A runner whose server was taken away gets no units
any more. When it has none, and loads no weights, it is retired; after `drain_timeout` those that it still has are given
to others. What proxies have asked of it (mode `serve`) nobody here knows: one that serves is retired after
`drain_timeout`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trinity_es.actors.config.schema import ServersConfig
from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.decisions import server_decisions as servers
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.server_list import ServerList
from trinity_es.actors.messages import CancelUnits, Servers
from trinity_es.events.values import BatchId
from trinity_es.projections.runner import RunnerLife, RunnerState, newest_life
from trinity_es.projections.servers import leaving
from trinity_es.projections.why.answer import mend_weights

__all__ = ["LOOK_SECONDS", "ServerFleet"]

LOOK_SECONDS = 0.5
"""Interval between two looks at who is to come and to go."""
TELL_SECONDS = 5.0
"""Interval between two messages to the guardian that say the same."""


class ServerFleet:
    """See the module. Without `settings` there are no such servers, and nothing is done."""

    def __init__(
        self, settings: ServersConfig | None, registry: RunnerRegistry, guardian: Any, *, proxied: bool = False
    ) -> None:
        """`proxied`: proxies send requests to the runners."""
        self._settings, self._registry, self._guardian = settings, registry, guardian
        self._live, self._proxied = registry.live, proxied
        self._reader: ServerList | None = None
        self._list: list[str] = list(settings.urls) if settings is not None else []
        self._before: list[str] | None = None
        """The list at the last look at it."""
        self._since: dict[str, float] = {}
        """When a runner was first seen leaving, monotonic seconds."""
        self._told: tuple[Servers | None, float] = None, float("-inf")

    def start_reading(self) -> None:
        """Begin to read the list, where it may change."""
        if self._settings is not None and not self._settings.urls:
            self._reader = ServerList(self._settings, self.list_read)
            self._reader.start()

    def list_read(self, urls: list[str]) -> None:
        """Take the list as it is now; from any thread. The next look acts on it."""
        self._list = urls

    def look(self) -> None:
        """Record what the list changed, see to those that leave, and tell the guardian who is to be there."""
        if self._settings is None:
            return
        urls = self._list
        self._live.record(*servers.listed(self._live.servers, urls, self._before))
        self._before = urls or self._before
        before, self._registry.leaving = self._registry.leaving, leaving(self._live.servers)
        for name in before - self._registry.leaving:  # it was added again
            self._registry.changed(name)
        there, retire = dict[str, str](), dict[str, int]()
        for server in self._live.servers.values():
            if server.wanted:
                self._since.pop(server.runner, None)
                there[server.runner] = server.url
                continue
            life = newest_life(self._live.lives, server.runner)
            if life is None or servers.has_retired(life):
                continue
            if self._is_drained(life, self._live.in_flight.loads.get((life.name, life.incarnation), 0)):
                retire[server.runner] = life.incarnation
            else:
                there[server.runner] = server.url
        current = self._live.weights
        self._tell(Servers(there, retire, (current.version, current.path)))

    def scale(self, add: Iterable[str], remove: Iterable[str]) -> None:
        """Record what a person changes. Raises DataError for what can't be."""
        self._live.record(*servers.scaled(self._live.servers, add, remove))
        self.look()

    @property
    def enabled(self) -> bool:
        """There are such servers in this run."""
        return self._settings is not None

    @property
    def trouble(self) -> str | None:
        """Return what is wrong with the list that is read; empty: nothing; None: no such servers are in this run."""
        if not self.enabled:
            return None
        return "" if self._reader is None else self._reader.trouble

    def status(self) -> list[dict[str, Any]]:
        """Return every server that is there, or leaves, as plain JSON."""
        there = self._registry.runners
        return [
            {
                "url": s.url, "runner": s.runner, "by": s.by, "wanted": s.wanted,
                "state": there[s.runner].state if s.runner in there else "unknown",
                "waits_for": there[s.runner].waits_for if s.runner in there else "",
                "problem": self._problem(there[s.runner], s.url) if s.runner in there else "",
            }
            for s in sorted(self._live.servers.values(), key=lambda s: s.runner)
            if s.wanted or not servers.has_retired(newest_life(self._live.lives, s.runner))
        ] if self.enabled else []

    def _problem(self, runner: RunnerRecord, url: str) -> str:
        """Return what is wrong with a runner, and the way out where its weights are; empty: nothing."""
        said, why = runner.life.reason, runner.life.refuses(self._live.weights)
        if why and runner.state is RunnerState.READY:
            version = self._live.weights.version
            said = f"goes on with weights version {runner.model_version}: it can't load version {version}: {why}"
        return f"{said}; {mend_weights(url)}" if why else said

    def _is_drained(self, life: RunnerLife, units: int) -> bool:
        assert self._settings is not None
        now = self._registry.sender.now()
        waited = now - self._since.setdefault(life.name, now)
        known = self._registry.runners.get(life.name)
        loads = known is not None and known.state is RunnerState.READY and known.loading is not None
        asked = self._proxied and life.state is RunnerState.READY
        if not servers.is_drained(units + loads, waited, self._settings.drain_timeout, asked=asked):
            return False
        if units:
            self._give_back(life.name, life.incarnation)
        return True

    def _give_back(self, runner: str, incarnation: int) -> None:
        """Have others attempt what a runner had no more time for."""
        known = self._registry.runners.get(runner)
        reason = "its server was taken away, and it had its time to end"
        for batch in list(self._live.batches.values()):
            had = self._live.in_flight.of(batch.batch_id, runner, incarnation)
            if had:
                lost = batches.runner_lost(batch, runner, incarnation, reason, blamed=False, had=had)
                batch_id: BatchId = batch.batch_id
                self._live.record_batch(batch_id, lost)
                if known is not None and known.address is not None:
                    cancel = CancelUnits(incarnation, batch_id, batch.submission, had)
                    self._registry.send_later(known.address, cancel)

    def _tell(self, message: Servers) -> None:
        before, at = self._told
        now = self._registry.sender.now()
        if message == before and now - at < (LOOK_SECONDS if message.retire else TELL_SECONDS):
            return
        self._told = message, now
        self._live.then(lambda: self._registry.sender.send(self._guardian, message))

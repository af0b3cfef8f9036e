"""External vLLM servers that serve as engines (`engine_type: http`), added and removed while the run goes on.

The coordinator repeats the list of wanted runners to the guardian, so a lost message or a restart of either loses
nothing. A runner whose server was removed gets no new units. It retires once it has no units and loads no weights;
after `drain_timeout` its remaining units go to other runners. In mode `serve` the coordinator does not see the requests
of proxies, so there a ready runner retires after `drain_timeout`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trinity_es.actors.config.models import ServersConfig
from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.decisions import server_decisions as servers
from trinity_es.actors.coordinator.fleet.polled_server_list import ServerList
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.messages import CancelUnits, Servers
from trinity_es.projections.runner import RunnerLife, RunnerState, newest_life
from trinity_es.projections.servers import leaving_runners
from trinity_es.projections.why.answer import weights_advice

__all__ = ["LOOK_SECONDS", "ServerFleet"]

LOOK_SECONDS = 0.5
"""Interval between two checks for added and removed servers."""
REPEAT_SECONDS = 5.0
"""Interval between two repetitions of an unchanged message to the guardian."""


class ServerFleet:
    """External servers of a run; without `settings` there are none, and its methods do nothing."""

    def __init__(
        self, settings: ServersConfig | None, registry: RunnerRegistry, guardian: Any, *, proxied: bool = False
    ) -> None:
        """Pass `proxied` if proxies send requests to the runners."""
        self._settings, self._registry, self._guardian = settings, registry, guardian
        self._live, self._proxied = registry.live, proxied
        self._reader: ServerList | None = None
        self._list: list[str] = list(settings.urls) if settings is not None else []
        self._last_list: list[str] | None = None
        """Last list that was not empty; None before the first."""
        self._leaving_since: dict[str, float] = {}
        """When each runner began to leave, monotonic seconds."""
        self._sent: tuple[Servers | None, float] = None, float("-inf")
        """Last message to the guardian, and when it was sent, monotonic seconds."""

    def start_reading(self) -> None:
        """Start to read the list, unless the config has fixed URLs."""
        if self._settings is not None and not self._settings.urls:
            self._reader = ServerList(self._settings, self.list_read)
            self._reader.start()

    def list_read(self, urls: list[str]) -> None:
        """Store a list that was read, from any thread; the next `look` acts on it."""
        self._list = urls

    def look(self) -> None:
        """Record changes of the list, retire drained runners, and send the guardian the wanted runners."""
        if self._settings is None:
            return
        urls = self._list
        self._live.record(*servers.listed(self._live.servers, urls, self._last_list))
        self._last_list = urls or self._last_list
        before, self._registry.leaving = self._registry.leaving, leaving_runners(self._live.servers)
        for name in before - self._registry.leaving:  # it was added again
            self._registry.changed(name)
        urls_by_runner, retired = dict[str, str](), dict[str, int]()
        for server in self._live.servers.values():
            if server.wanted:
                self._leaving_since.pop(server.runner, None)
                urls_by_runner[server.runner] = server.url
                continue
            life = newest_life(self._live.lives, server.runner)
            if life is None or servers.has_retired(life):
                continue
            if self._is_drained(life, self._live.in_flight.loads.get((life.name, life.incarnation), 0)):
                retired[server.runner] = life.incarnation
            else:
                urls_by_runner[server.runner] = server.url
        current = self._live.weights
        self._send_to_guardian(Servers(urls_by_runner, retired, (current.version, current.path)))

    def scale(self, add: Iterable[str], remove: Iterable[str]) -> None:
        """Record an operator's change. Raises DataError if it can't be made."""
        self._live.record(*servers.scaled(self._live.servers, add, remove))
        self.look()

    @property
    def enabled(self) -> bool:
        """True if the engines of this run are external servers."""
        return self._settings is not None

    @property
    def trouble(self) -> str | None:
        """Problem with the list of servers, empty if there is none; None if this run has no external servers."""
        if not self.enabled:
            return None
        return "" if self._reader is None else self._reader.trouble

    def status(self) -> list[dict[str, Any]]:
        """Return every wanted or leaving server as plain JSON."""
        runners = self._registry.runners
        return [
            {
                "url": s.url, "runner": s.runner, "by": s.by, "wanted": s.wanted,
                "state": runners[s.runner].state if s.runner in runners else "unknown",
                "waits_for": runners[s.runner].waits_for if s.runner in runners else "",
                "problem": self._problem(runners[s.runner], s.url) if s.runner in runners else "",
            }
            for s in sorted(self._live.servers.values(), key=lambda s: s.runner)
            if s.wanted or not servers.has_retired(newest_life(self._live.lives, s.runner))
        ] if self.enabled else []

    def _problem(self, runner: RunnerRecord, url: str) -> str:
        """Return a runner's problem, with the remedy if it concerns weights; empty if it has none."""
        problem, refusal = runner.life.reason, runner.life.refuses(self._live.weights)
        if refusal and runner.state is RunnerState.READY:
            version = self._live.weights.version
            problem = f"goes on with weights version {runner.model_version}: it can't load version {version}: {refusal}"
        return f"{problem}; {weights_advice(url)}" if refusal else problem

    def _is_drained(self, life: RunnerLife, units: int) -> bool:
        assert self._settings is not None
        now = self._registry.sender.now()
        waited = now - self._leaving_since.setdefault(life.name, now)
        record = self._registry.runners.get(life.name)
        loads = record is not None and record.state is RunnerState.READY and record.loading is not None
        proxied = self._proxied and life.state is RunnerState.READY
        if not servers.is_drained(units + loads, waited, self._settings.drain_timeout, proxied=proxied):
            return False
        if units:
            self._take_units(life.name, life.incarnation)
        return True

    def _take_units(self, runner: str, incarnation: int) -> None:
        """Take the units that a runner did not finish within `drain_timeout`, for others to attempt."""
        record = self._registry.runners.get(runner)
        reason = "its server was removed, and its time to finish is over"
        for batch in list(self._live.batches.values()):
            units = self._live.in_flight.of(batch.batch_id, runner, incarnation)
            if units:
                lost = batches.runner_lost(batch, runner, incarnation, reason, blamed=False, had=units)
                self._live.record_batch(batch.batch_id, lost)
                if record is not None and record.address is not None:
                    cancel = CancelUnits(incarnation, batch.batch_id, batch.submission, units)
                    self._registry.send_later(record.address, cancel)

    def _send_to_guardian(self, message: Servers) -> None:
        previous, at = self._sent
        now = self._registry.sender.now()
        if message == previous and now - at < (LOOK_SECONDS if message.retire else REPEAT_SECONDS):
            return
        self._sent = message, now
        self._live.then(lambda: self._registry.sender.send(self._guardian, message))

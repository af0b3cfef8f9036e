"""External vLLM servers that serve as engines (`engine_type: http`), added and removed while the run goes on.

The coordinator repeats the list of wanted runners to the guardian, so that a lost message or a restart does no harm. A
runner whose server was removed gets no new units. It retires once it is without units and loads no weights. After
`drain_timeout` it retires in any case, and its remaining units go to other runners. In mode `serve` the coordinator
does not see the requests of proxies, so there a ready runner retires only after `drain_timeout`.
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
    """External servers of a run. Without `settings` there are none, and the methods do nothing."""

    def __init__(
        self, settings: ServersConfig | None, registry: RunnerRegistry, guardian: Any, *, proxied: bool = False
    ) -> None:
        """Pass `proxied` if proxies send requests to the runners."""
        self._settings, self._registry, self._guardian = settings, registry, guardian
        self._live, self._proxied = registry.live, proxied
        self._reader: ServerList | None = None
        self._urls: list[str] = list(settings.urls) if settings is not None else []
        """The list as it was last read."""
        self._urls_before: list[str] | None = None
        """Last list that was not empty; None before the first."""
        self._leaving_since: dict[str, float] = {}
        """Leaving runner -> monotonic seconds at which it began to leave."""
        self._last_message: Servers | None = None
        """Last message to the guardian."""
        self._sent_at = float("-inf")
        """Time of the last message, in monotonic seconds."""

    def start_reading(self) -> None:
        """Start to read the list of servers, unless the config has fixed URLs."""
        if self._settings is not None and not self._settings.urls:
            self._reader = ServerList(self._settings, self.store_list)
            self._reader.start()

    def store_list(self, urls: list[str]) -> None:
        """Store a list of URLs, on which the next `update` acts. Any thread may call this."""
        self._urls = urls

    def update(self) -> None:
        """Record changes in the list of servers, retire drained runners, and tell the guardian which runners to run."""
        if self._settings is None:
            return
        urls = self._urls
        self._live.record(*servers.apply_list(self._live.servers, urls, self._urls_before))
        self._urls_before = urls or self._urls_before
        leaving_before = self._registry.leaving
        self._registry.leaving = leaving_runners(self._live.servers)
        for name in leaving_before - self._registry.leaving:  # it was added again
            self._registry.mark_changed(name)
        urls_by_runner, incarnations_to_retire = dict[str, str](), dict[str, int]()
        for server in self._live.servers.values():
            if server.wanted:
                self._leaving_since.pop(server.runner, None)
                urls_by_runner[server.runner] = server.url
                continue
            life = newest_life(self._live.lives, server.runner)
            if life is None or servers.has_retired(life):
                continue
            if self._is_drained(life, self._live.in_flight.loads.get((life.name, life.incarnation), 0)):
                self._take_units(life.name, life.incarnation)
                incarnations_to_retire[server.runner] = life.incarnation
            else:
                urls_by_runner[server.runner] = server.url
        current = self._live.weights
        self._send_to_guardian(Servers(urls_by_runner, incarnations_to_retire, (current.version, current.path)))

    def scale(self, add: Iterable[str], remove: Iterable[str]) -> None:
        """Add and remove servers on an operator's command. Raises DataError if that is not possible."""
        self._live.record(*servers.apply_scale(self._live.servers, add, remove))
        self.update()

    @property
    def enabled(self) -> bool:
        """True if the engines of this run are external servers."""
        return self._settings is not None

    @property
    def trouble(self) -> str | None:
        """Problem with the list of servers; "" without one, None if this run has no external servers."""
        if not self.enabled:
            return None
        return "" if self._reader is None else self._reader.trouble

    def status(self) -> list[dict[str, Any]]:
        """Return a row of plain JSON for each wanted or leaving server."""
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
        """Return a runner's problem, with advice if it concerns weights; "" if it has none."""
        problem, refusal = runner.life.reason, runner.life.refuses(self._live.weights)
        if refusal and runner.state is RunnerState.READY:
            version = self._live.weights.version
            problem = f"goes on with weights version {runner.model_version}: it can't load version {version}: {refusal}"
        return f"{problem}; {weights_advice(url)}" if refusal else problem

    def _is_drained(self, life: RunnerLife, unit_count: int) -> bool:
        """Return True if a leaving runner lacks units and loads no weights, or if `drain_timeout` has passed since the
        first call."""
        assert self._settings is not None
        now = self._registry.actor.now()
        waited_seconds = now - self._leaving_since.setdefault(life.name, now)
        record = self._registry.runners.get(life.name)
        is_loading = record is not None and record.state is RunnerState.READY and record.loading is not None
        proxied = self._proxied and life.state is RunnerState.READY
        work_count = unit_count + is_loading
        return servers.is_drained(work_count, waited_seconds, self._settings.drain_timeout, proxied=proxied)

    def _take_units(self, runner: str, incarnation: int) -> None:
        """Cancel a runner's remaining units, and have other runners attempt them."""
        record = self._registry.runners.get(runner)
        reason = "its server was removed, and its time to finish is over"
        for batch in list(self._live.batches.values()):
            units = self._live.in_flight.units_of(batch.batch_id, runner, incarnation)
            if units:
                events = batches.lose_runner(batch, runner, incarnation, reason, blamed=False, keys=units)
                self._live.record_batch(batch.batch_id, events)
                if record is not None and record.address is not None:
                    cancel = CancelUnits(incarnation, batch.batch_id, batch.submission, units)
                    self._registry.send_later(record.address, cancel)

    def _send_to_guardian(self, message: Servers) -> None:
        """Send a message once this turn is durable, unless the same message was sent a short time ago."""
        now = self._registry.actor.now()
        interval = LOOK_SECONDS if message.retire else REPEAT_SECONDS
        if message == self._last_message and now - self._sent_at < interval:
            return
        self._last_message, self._sent_at = message, now
        self._live.when_durable(lambda: self._registry.actor.send(self._guardian, message))

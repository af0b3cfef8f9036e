"""Routes to the engines in mode `serve`.

A proxy polls the table of serving engines and is answered when it changes, or after `POLL_SECONDS`. Before an engine
loads weights it leaves the table; it loads once every proxy has polled again, and so knows the new table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trinity_es.actors.commands import CommandRequest, EngineRoute, GetRoutes, RouteTable
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.handlers.router import Handled, handled
from trinity_es.actors.coordinator.ports import Responder, TimerHost

__all__ = ["RouteHandlers"]

POLL_SECONDS = 2.0
"""Maximum time that a poll waits for a change."""
GONE_SECONDS = 5.0
"""Silence after which a proxy counts as gone."""
TAKEN_OUT_SECONDS = 1.0
"""Maximum time until every proxy counts as knowing that an engine was taken out."""


@dataclass(slots=True)
class _Proxy:
    """A proxy that asks for routes."""

    url: str
    knows: int = -1
    """Number of its newest table."""
    asked_at: float = 0.0
    request: CommandRequest[GetRoutes] | None = None
    """Its open poll."""


class RouteHandlers:
    """Table of serving engines for the proxies; engines leave it before they load weights."""

    def __init__(self, registry: RunnerRegistry, router: Responder, actor: TimerHost) -> None:
        self._registry, self._router, self._actor = registry, router, actor
        self._table: list[EngineRoute] = []
        self._number = int(self._actor.now() * 1e6)  # larger than any number of an earlier coordinator
        self._proxies: dict[str, _Proxy] = {}
        self._leaving: list[tuple[int, Callable[[], None]]] = []
        """Number of the table that no longer has an engine, and the engine's load, to call when every proxy has it."""

    def handlers(self) -> list[Handled]:
        return [handled(GetRoutes, self.routes)]

    def routes(self, request: CommandRequest[GetRoutes]) -> None:
        """Answer a proxy with the table, at once if it has an older one, else when it changes."""
        command = request.command
        proxy = self._proxies.setdefault(command.proxy, _Proxy(command.url))
        self.look()
        proxy.knows, proxy.asked_at, proxy.request = command.knows, self._actor.now(), request
        self._actor.after(POLL_SECONDS, f"routes:{command.proxy}", lambda: self._tell(proxy))
        if proxy.knows != self._number:
            self._tell(proxy)
        self._start_loads()

    def _tell(self, proxy: _Proxy) -> None:
        request, proxy.request = proxy.request, None
        if request is not None:
            self._actor.cancel(f"routes:{request.command.proxy}")
            self._router.answer(request, RouteTable(number=self._number, engines=self._table))

    def look(self) -> None:
        """Send the proxies, at the end of a turn, a table that has changed."""
        if not self._proxies:
            return
        table = [_route(r) for r in self._registry.staying() if r.life.served]
        if table != self._table:
            self._table, self._number = table, self._number + 1
            for proxy in self._proxies.values():
                self._tell(proxy)

    def urls(self) -> list[str]:
        """Return the URLs of the proxies that are alive."""
        now = self._actor.now()
        return sorted(p.url for p in self._proxies.values() if p.url and now - p.asked_at < GONE_SECONDS)

    def take_out(self, load: Callable[[], None]) -> None:
        """Call `load` once no proxy sends new requests to a runner that was marked as loading."""
        self.look()
        number = self._number
        self._leaving.append((number, load))
        self._actor.after(TAKEN_OUT_SECONDS, f"taken out:{number}", lambda: self._start_loads(number))
        self._start_loads()

    def _start_loads(self, overdue: int = -1) -> None:
        """Start the loads of engines whose absence every proxy knows of, or that left the table long enough ago."""
        now = self._actor.now()
        self._proxies = {name: p for name, p in self._proxies.items() if now - p.asked_at < GONE_SECONDS}
        known = min((p.knows for p in self._proxies.values()), default=self._number)
        due = [load for number, load in self._leaving if number <= max(known, overdue)]
        self._leaving = [(number, load) for number, load in self._leaving if number > max(known, overdue)]
        for load in due:
            load()


def _route(runner: RunnerRecord) -> EngineRoute:
    return EngineRoute(
        runner=runner.name, incarnation=runner.incarnation, endpoint=runner.endpoint,
        model_version=runner.model_version, serving=runner.loading is None and runner.has_adapters,
    )

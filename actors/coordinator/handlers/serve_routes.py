"""The ways to the engines in mode `serve`.

A proxy asks which engines serve, and is answered when that changes, or after `POLL_SECONDS`. An engine that is to load
weights is taken out first: it is told to load when every proxy has asked again, and so knows.
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
"""How long a proxy waits for news of the engines before it asks again."""
GONE_SECONDS = 5.0
"""How long a proxy may ask nothing before it is gone."""
TAKEN_OUT_SECONDS = 1.0
"""How long every proxy may take to know that an engine is taken out."""


@dataclass(slots=True)
class _Proxy:
    """A proxy that asks for routes."""

    url: str
    knows: int = -1
    """The newest table that it has."""
    asked_at: float = 0.0
    request: CommandRequest[GetRoutes] | None = None
    """Its question, where it waits for news."""


class RouteHandlers:
    """Tells proxies where engines are asked, and takes engines out that are to load weights."""

    def __init__(self, registry: RunnerRegistry, router: Responder, actor: TimerHost) -> None:
        self._registry, self._router, self._actor = registry, router, actor
        self._table: list[EngineRoute] = []
        self._number = int(self._actor.now() * 1e6)  # none that a proxy has of an earlier coordinator
        self._proxies: dict[str, _Proxy] = {}
        self._leaving: list[tuple[int, Callable[[], None]]] = []
        """(table in which an engine is taken out, what to do when every proxy has it)."""

    def handlers(self) -> list[Handled]:
        """Return what is handled here."""
        return [handled(GetRoutes, self.routes)]

    def routes(self, request: CommandRequest[GetRoutes]) -> None:
        """Tell a proxy where engines are asked, at once or when it is not as it knows it."""
        command = request.command
        proxy = self._proxies.setdefault(command.proxy, _Proxy(command.url))
        self.look()
        proxy.knows, proxy.asked_at, proxy.request = command.knows, self._actor.now(), request
        self._actor.after(POLL_SECONDS, f"routes:{command.proxy}", lambda: self._tell(proxy))
        if proxy.knows != self._number:
            self._tell(proxy)
        self._let_go()

    def _tell(self, proxy: _Proxy) -> None:
        request, proxy.request = proxy.request, None
        if request is not None:
            self._actor.cancel(f"routes:{request.command.proxy}")
            self._router.answer(request, RouteTable(number=self._number, engines=self._table))

    def look(self) -> None:
        """Tell the proxies, at the end of a turn, what has changed."""
        if not self._proxies:
            return
        table = [_route(r) for r in self._registry.staying() if r.life.served]
        if table != self._table:
            self._table, self._number = table, self._number + 1
            for proxy in self._proxies.values():
                self._tell(proxy)

    def urls(self) -> list[str]:
        """Return where proxies serve now."""
        now = self._actor.now()
        return sorted(p.url for p in self._proxies.values() if p.url and now - p.asked_at < GONE_SECONDS)

    def take_out(self, load: Callable[[], None]) -> None:
        """Call `load` when no proxy sends anything new to a runner that was marked as loading."""
        self.look()
        number = self._number
        self._leaving.append((number, load))
        self._actor.after(TAKEN_OUT_SECONDS, f"taken out:{number}", lambda: self._let_go(number))
        self._let_go()

    def _let_go(self, overdue: int = -1) -> None:
        """Have those load that every proxy knows of, and those that were taken out long enough ago."""
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

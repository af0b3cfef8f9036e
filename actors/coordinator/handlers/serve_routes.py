"""Routes from proxies to the engines in mode `serve`.

A proxy polls the table of serving engines, and gets an answer when the table changes, or after `POLL_SECONDS`. An
engine leaves the table before it loads weights. It loads once every proxy has polled again and so has the new table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trinity_es.actors.commands import CommandRequest, EngineRoute, GetRoutes, RouteTable
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row

__all__ = ["RouteHandlers"]

POLL_SECONDS = 2.0
"""Maximum time that a poll waits for a change."""
GONE_SECONDS = 5.0
"""Silence after which a proxy counts as ended."""
TAKEN_OUT_SECONDS = 1.0
"""Time after which an engine that left the table loads in any case, even if a proxy has not polled again."""


@dataclass(slots=True)
class _Proxy:
    """Proxy and its last poll."""

    url: str
    table_number: int = -1
    """Number of the table that the proxy has."""
    polled_at: float = 0.0
    open_poll: CommandRequest[GetRoutes] | None = None


class RouteHandlers:
    def __init__(self, registry: RunnerRegistry, router: CommandRouter) -> None:
        self._registry, self._router, self._actor = registry, router, registry.actor
        self._table: list[EngineRoute] = []
        self._table_number = int(self._actor.now() * 1e6)  # larger than any number of an earlier coordinator
        self._proxies: dict[str, _Proxy] = {}
        self._waiting_loads: list[tuple[int, Callable[[], None]]] = []
        """(number of the first table without an engine, function that starts its load)."""

    def handlers(self) -> list[HandlerRow]:
        return [handler_row(GetRoutes, self.routes)]

    def routes(self, request: CommandRequest[GetRoutes]) -> None:
        """Answer a proxy's poll with the table: at once if the proxy has an older table, otherwise when it changes."""
        command = request.command
        proxy = self._proxies.setdefault(command.proxy, _Proxy(command.url))
        self.update()
        proxy.table_number, proxy.polled_at, proxy.open_poll = command.knows, self._actor.now(), request
        self._actor.after(POLL_SECONDS, f"routes:{command.proxy}", lambda: self._answer(proxy))
        if proxy.table_number != self._table_number:
            self._answer(proxy)
        self._start_loads()

    def _answer(self, proxy: _Proxy) -> None:
        request, proxy.open_poll = proxy.open_poll, None
        if request is not None:
            self._actor.cancel_timer(f"routes:{request.command.proxy}")
            self._router.answer(request, RouteTable(number=self._table_number, engines=self._table))

    def update(self) -> None:
        """At the end of a turn, answer the open polls if the table has changed."""
        if not self._proxies:
            return
        table = [_route_row(r) for r in self._registry.staying_runners() if r.life.was_current]
        if table != self._table:
            self._table, self._table_number = table, self._table_number + 1
            for proxy in self._proxies.values():
                self._answer(proxy)

    def urls(self) -> list[str]:
        now = self._actor.now()
        return sorted(p.url for p in self._proxies.values() if p.url and now - p.polled_at < GONE_SECONDS)

    def take_out(self, load: Callable[[], None]) -> None:
        """Call `load` once no proxy sends new requests to a runner that was marked as loading."""
        self.update()
        number = self._table_number
        self._waiting_loads.append((number, load))
        self._actor.after(TAKEN_OUT_SECONDS, f"taken out:{number}", lambda: self._start_loads(number))
        self._start_loads()

    def _start_loads(self, overdue_number: int = -1) -> None:
        """Start the loads of engines that are in no living proxy's table. Loads with a table number up to
        `overdue_number` start in any case."""
        now = self._actor.now()
        self._proxies = {name: p for name, p in self._proxies.items() if now - p.polled_at < GONE_SECONDS}
        oldest_number = min((p.table_number for p in self._proxies.values()), default=self._table_number)
        last_due = max(oldest_number, overdue_number)
        due_loads = [load for number, load in self._waiting_loads if number <= last_due]
        self._waiting_loads = [(number, load) for number, load in self._waiting_loads if number > last_due]
        for load in due_loads:
            load()


def _route_row(runner: RunnerRecord) -> EngineRoute:
    """Return a runner's row in the table. `serving` is False if its engine loads weights or lacks adapters."""
    return EngineRoute(
        runner=runner.name, incarnation=runner.incarnation, endpoint=runner.endpoint,
        model_version=runner.model_version, serving=runner.loading is None and runner.has_adapters,
    )

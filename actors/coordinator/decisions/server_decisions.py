"""Decisions about which external servers are engines, by a list or `trinity-es scale`. Pure: servers in, events out.

`scale` wins over the list: a server added by `scale` stays even if the list lacks it. A server removed by `scale` stays
removed until it has left the list and come back, or until `scale` adds it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError
from trinity_es.projections.runner import RunnerLife, RunnerState
from trinity_es.projections.servers import Server

__all__ = ["has_retired", "is_drained", "listed", "scaled"]


def listed(servers: Mapping[str, Server], urls: Iterable[str], before: Iterable[str] | None) -> list[ev.Event]:
    """Record what a new reading of the list changes; `before` is the previous reading, None for the first.

    An empty list changes nothing, since a file is also empty while it is being rewritten.
    """
    now = list(dict.fromkeys(urls))
    if not now:
        return []
    new = set(now) if before is None else set(now) - set(before)
    events: list[ev.Event] = []
    runners = {s.runner for s in servers.values()}
    for url in now:
        server = servers.get(url)
        if server is not None and (server.wanted or (server.by == "scale" and (before is None or url not in new))):
            continue
        events.append(_added(servers, url, runners, "list"))
    for server in servers.values():
        if server.wanted and server.by == "list" and server.url not in now:
            events.append(ev.ServerRemoved(url=server.url, runner=server.runner, by="list"))
    return events


def scaled(servers: Mapping[str, Server], add: Iterable[str], remove: Iterable[str]) -> list[ev.Event]:
    """Record what `trinity-es scale` changes, also for servers that the list has already added or removed.

    Raises DataError for an unknown server to remove, and for one that is both added and removed.
    """
    added, removed = list(dict.fromkeys(add)), list(dict.fromkeys(remove))
    if both := sorted(set(added) & set(removed)):
        raise DataError(f"{both[0]} can't be added and removed at once")
    events: list[ev.Event] = []
    runners = {s.runner for s in servers.values()}
    for url in added:
        server = servers.get(url)
        if server is None or not server.wanted or server.by != "scale":
            events.append(_added(servers, url, runners, "scale"))
    for url in removed:
        server = servers.get(url)
        if server is None:
            wanted = ", ".join(sorted(s.url for s in servers.values() if s.wanted)) or "none"
            raise DataError(f"{url} can't be removed: it is no server of this run; there are {wanted}")
        if server.wanted or server.by != "scale":
            events.append(ev.ServerRemoved(url=url, runner=server.runner, by="scale"))
    return events


def _added(servers: Mapping[str, Server], url: str, runners: set[str], by: str) -> ev.Event:
    server = servers.get(url)
    runner = server.runner if server is not None else f"runner-{len(runners)}"
    runners.add(runner)
    return ev.ServerAdded(url=url, runner=runner, by="list" if by == "list" else "scale")


def is_drained(units: int, waited: float, timeout: float, *, proxied: bool = False) -> bool:
    """Return True if a runner whose server was removed has no units left, or its time is over.

    `proxied` means that it may have requests of proxies, which the coordinator does not count.
    """
    return (units == 0 and not proxied) or waited >= timeout


def has_retired(life: RunnerLife | None) -> bool:
    """Return True if a runner whose server was removed has ended."""
    return life is None or life.state is RunnerState.RETIRED or life.state.gone

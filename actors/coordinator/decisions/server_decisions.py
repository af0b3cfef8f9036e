"""Decisions about which servers of others are engines, by a list or `trinity-es scale`. Pure: servers in, events out.

`scale` wins over the list: a server added by `scale` stays although no list has it. A server removed by `scale` stays
removed until it has left the list and come back, or is added again.
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
        known = servers.get(url)
        if known is not None and (known.wanted or (known.by == "scale" and (before is None or url not in new))):
            continue
        events.append(_added(servers, url, runners, "list"))
    for server in servers.values():
        if server.wanted and server.by == "list" and server.url not in now:
            events.append(ev.ServerRemoved(url=server.url, runner=server.runner, by="list"))
    return events


def scaled(servers: Mapping[str, Server], add: Iterable[str], remove: Iterable[str]) -> list[ev.Event]:
    """Record what `trinity-es scale` changes, also for servers that the list has added or removed already.

    Raises DataError for a server that never was one, and for one that is both added and removed.
    """
    coming, going = list(dict.fromkeys(add)), list(dict.fromkeys(remove))
    if both := sorted(set(coming) & set(going)):
        raise DataError(f"{both[0]} can't be added and removed at once")
    events: list[ev.Event] = []
    runners = {s.runner for s in servers.values()}
    for url in coming:
        known = servers.get(url)
        if known is None or not known.wanted or known.by != "scale":
            events.append(_added(servers, url, runners, "scale"))
    for url in going:
        known = servers.get(url)
        if known is None:
            there = ", ".join(sorted(s.url for s in servers.values() if s.wanted)) or "none"
            raise DataError(f"{url} can't be removed: it is no server of this run; there are {there}")
        if known.wanted or known.by != "scale":
            events.append(ev.ServerRemoved(url=url, runner=known.runner, by="scale"))
    return events


def _added(servers: Mapping[str, Server], url: str, runners: set[str], by: str) -> ev.Event:
    known = servers.get(url)
    runner = known.runner if known is not None else f"runner-{len(runners)}"
    runners.add(runner)
    return ev.ServerAdded(url=url, runner=runner, by="list" if by == "list" else "scale")


def is_drained(units: int, waited: float, timeout: float, *, asked: bool = False) -> bool:
    """Return True if a runner whose server was removed has no units left, or its time is over.

    `asked` means that it may have requests that nothing counts.
    """
    return (units == 0 and not asked) or waited >= timeout


def has_retired(life: RunnerLife | None) -> bool:
    """Return True if nothing is left of a runner whose server was removed."""
    return life is None or life.state is RunnerState.RETIRED or life.state.gone

"""Decisions about which external servers are engines. Pure functions from folded servers to events.

Servers come from a list and from `trinity-es scale`, which wins over the list. A server added by `scale` stays even if
the list lacks it. A server removed by `scale` stays removed until it has left the list and come back, or until `scale`
adds it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError
from trinity_es.projections.runner import RunnerLife, RunnerState
from trinity_es.projections.servers import Server

__all__ = ["apply_list", "apply_scale", "has_retired", "is_drained"]


def apply_list(servers: Mapping[str, Server], urls: Iterable[str], urls_before: Iterable[str] | None) -> list[ev.Event]:
    """Return the events that bring `servers` in line with `urls`, the list of external servers. `urls_before`: its
    previous reading, None for the first. An empty list gives no events: a file is also empty while it is rewritten."""
    current_urls = list(dict.fromkeys(urls))
    if not current_urls:
        return []
    returned_urls = set[str]() if urls_before is None else set(current_urls) - set(urls_before)
    events: list[ev.Event] = []
    runners = {s.runner for s in servers.values()}
    for url in current_urls:
        server = servers.get(url)
        stays_removed = server is not None and server.by == "scale" and url not in returned_urls
        if server is None or not (server.wanted or stays_removed):
            events.append(_server_added(servers, url, runners, by="list"))
    for server in servers.values():
        if server.wanted and server.by == "list" and server.url not in current_urls:
            events.append(ev.ServerRemoved(url=server.url, runner=server.runner, by="list"))
    return events


def apply_scale(servers: Mapping[str, Server], add: Iterable[str], remove: Iterable[str]) -> list[ev.Event]:
    """Return the events by which `trinity-es scale` adds and removes servers, even if the config's list did so.
    Raises DataError for an unknown server to remove, and for one that is both added and removed."""
    urls_to_add, urls_to_remove = list(dict.fromkeys(add)), list(dict.fromkeys(remove))
    if both := sorted(set(urls_to_add) & set(urls_to_remove)):
        raise DataError(f"server {both[0]} can't be added and removed in one command: leave it out of one list")
    events: list[ev.Event] = []
    runners = {s.runner for s in servers.values()}
    for url in urls_to_add:
        server = servers.get(url)
        if server is None or not server.wanted or server.by != "scale":
            events.append(_server_added(servers, url, runners, by="scale"))
    for url in urls_to_remove:
        server = servers.get(url)
        if server is None:
            wanted_urls = ", ".join(sorted(s.url for s in servers.values() if s.wanted)) or "none"
            raise DataError(f"{url} can't be removed, as it is not a server of this run; its servers: {wanted_urls}")
        if server.wanted or server.by != "scale":
            events.append(ev.ServerRemoved(url=url, runner=server.runner, by="scale"))
    return events


def _server_added(
    servers: Mapping[str, Server], url: str, runners: set[str], *, by: Literal["list", "scale"]
) -> ev.ServerAdded:
    """Return the event that adds a server. A new server gets a new runner's name, which is added to `runners`."""
    server = servers.get(url)
    runner = server.runner if server is not None else f"runner-{len(runners)}"
    runners.add(runner)
    return ev.ServerAdded(url=url, runner=runner, by=by)


def is_drained(unit_count: int, waited_seconds: float, timeout: float, *, proxied: bool = False) -> bool:
    """Return True if a runner whose server was removed can end: it has no units left, or `timeout` is over.

    `proxied` means that it may have requests of proxies, which are no units, so only the time counts.
    """
    return (unit_count == 0 and not proxied) or waited_seconds >= timeout


def has_retired(life: RunnerLife | None) -> bool:
    """Return True if the process of a runner whose server was removed has ended (None: it has none)."""
    return life is None or life.state is RunnerState.RETIRED or life.state.gone

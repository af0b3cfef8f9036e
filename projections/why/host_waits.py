"""Waits of a batch that a host causes, because it is away (not connected), draining or lost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trinity_es.events.values import local_time
from trinity_es.projections.event_texts import counted
from trinity_es.projections.host_states import host_of
from trinity_es.projections.why.answer import Waiting, span
from trinity_es.projections.why.system_state import HostSnapshot, RunnerSnapshot, SystemSnapshot

__all__ = ["current_hosts", "hosts_without_units", "with_host_state"]

SHOWN_SECONDS = 600.0
"""Seconds for which a lost host is reported, if other hosts work."""


def current_hosts(snapshot: SystemSnapshot, live: Mapping[str, Any] | None, now: float) -> dict[str, HostSnapshot]:
    """Return the hosts of the log, updated from the running system's status."""
    hosts = {name: replace(host) for name, host in snapshot.hosts.items()}
    for row in (live or {}).get("hosts", []):
        host = hosts.setdefault(row["host"], HostSnapshot(name=row["host"], state=row["state"]))
        if host.state != row["state"]:  # log and status are from different moments
            host.state, host.since = row["state"], None
        host.reason = row.get("reason") or host.reason
        if host.is_present and not row["connected"]:
            host.heard, host.why_away = now - float(row.get("away_for") or 0.0), row.get("why_away") or ""
    return hosts


def with_host_state(waiting: Waiting, host: HostSnapshot | None, now: float, timeout: float | None) -> Waiting:
    """Return the `Waiting` of a unit on a runner. If the runner's host is lost, silent or drains, its text says so.

    `host` is None for the head. `timeout`: seconds of silence after which a host is lost; None if unknown.
    """
    if host is None or waiting.cause == "interrupted":
        return waiting
    waiting = replace(waiting, host=host.name)
    unit = waiting.text.partition(": ")[0]
    if not host.is_present:
        end = "is lost" if host.state == "lost" else "left"
        text = f"{unit}: its host {host.name} {end}{_since_and_reason(host)}, so it is attempted again"
        return replace(waiting, cause="lost", text=text)
    if host.heard is not None:
        deadline_text = " in the end" if timeout is None else f" after {span(timeout)}"
        reason = host.why_away and f" ({host.why_away})"
        text = (f"{unit}: host {host.name} has not been heard of for {span(now - host.heard)}, since "
                f"{local_time(host.heard)}{reason}; it is lost{deadline_text}, and this is attempted elsewhere then")
        return replace(waiting, cause="away", text=text, since=host.heard)
    if host.state == "draining":
        return replace(waiting, text=f"{waiting.text}; its host {host.name} drains{_since_and_reason(host)}")
    return waiting


def hosts_without_units(
    hosts: Iterable[HostSnapshot], lives: Mapping[str, RunnerSnapshot], now: float, others: bool
) -> Iterator[Waiting]:
    """Yield a `Waiting` for each host that gets no units. `others`: True if other runners can get them."""
    for host in hosts:
        runners = sum(host_of(name) == host.name for name in lives)
        if host.state == "draining":
            gets = "its runner gets" if runners == 1 else f"its {counted(runners, 'runner')} get"
            cause, text = "draining", f"drains{_since_and_reason(host)}: {gets} no more units"
        elif host.state == "lost" and not (others and now - (host.since or 0.0) > SHOWN_SECONDS):
            cause, text = "host_lost", f"is lost{_since_and_reason(host)}: its runners come back with it"
        else:
            continue
        name = f"host {host.name}"
        yield Waiting(cause=cause, what=name, text=f"{name} {text}", host=host.name, since=host.since, person=True)


def _since_and_reason(host: HostSnapshot) -> str:
    since = "" if host.since is None else f" since {local_time(host.since)}"
    return since + (host.reason and f" ({host.reason})")

"""Folds of the LoRA adapters' events: the current adapters, and the history of every version. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.records.log_values import Recorded

__all__ = [
    "ADAPTER_EVENTS", "AdapterVersion", "Adapters", "adapter_history", "current_adapters", "evolve_adapters",
    "evolve_loaded",
]

ADAPTER_EVENTS = ("AdapterPublished", "AdapterRemoved", "AdapterLoaded", "AdapterFailed")

Adapters = dict[str, ev.AdapterPublished | ev.AdapterRemoved]
"""The newest event of each adapter, removed ones included, by adapter name."""


def evolve_adapters(adapters: Adapters, event: ev.AdapterPublished | ev.AdapterRemoved) -> None:
    adapters[event.adapter] = event


def current_adapters(adapters: Adapters) -> dict[str, ev.AdapterPublished]:
    """Return the newest version of each adapter that is not removed, by name."""
    return {name: event for name, event in sorted(adapters.items()) if isinstance(event, ev.AdapterPublished)}


def evolve_loaded(loaded: set[str], event: ev.Event, adapters: Adapters) -> None:
    """Update `loaded`, the names of the current adapters that at least one engine has loaded."""
    match event:
        case ev.AdapterLoaded():
            loaded |= {event.adapter} & current_adapters(adapters).keys()
        case ev.RunnerReady():
            loaded |= event.adapters.keys() & current_adapters(adapters).keys()
        case ev.AdapterRemoved():
            loaded.discard(event.adapter)


@dataclass(slots=True, kw_only=True)
class AdapterVersion:
    adapter: str
    version: int
    path: str
    rank: int
    size: int
    published_at: float
    removed_at: float | None = None
    """When the adapter was removed, if this was then its current version."""
    loads: list[tuple[str, int, float, float]] = field(default_factory=list)
    """(runner, incarnation, time, seconds that loading took) of each engine that loaded it."""
    failures: list[tuple[str, int, float, str]] = field(default_factory=list)
    """(runner, incarnation, time, error) of each engine that failed to load it."""


def adapter_history(recorded: Iterable[Recorded]) -> list[AdapterVersion]:
    """Return every published version of the adapters, in order, with its loads and its removal."""
    versions: dict[tuple[str, int], AdapterVersion] = {}
    for item in recorded:
        event, at = item.event, item.recorded_at
        match event:
            case ev.AdapterPublished():
                versions[event.adapter, event.version] = AdapterVersion(
                    adapter=event.adapter, version=event.version, path=event.path, rank=event.rank, size=event.size,
                    published_at=at,
                )
            case ev.AdapterRemoved() if (version := versions.get((event.adapter, event.version))) is not None:
                version.removed_at = at
            case ev.AdapterLoaded() if (version := versions.get((event.adapter, event.version))) is not None:
                version.loads.append((event.runner, event.incarnation, at, event.seconds))
            case ev.AdapterFailed() if (version := versions.get((event.adapter, event.version))) is not None:
                version.failures.append((event.runner, event.incarnation, at, event.error))
    return list(versions.values())

"""Folds of the events of LoRA adapters: the current adapters, and the history of every version. Pure."""

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
"""Adapter name -> its newest event, removed adapters included."""


def evolve_adapters(adapters: Adapters, event: ev.AdapterPublished | ev.AdapterRemoved) -> None:
    adapters[event.adapter] = event


def current_adapters(adapters: Adapters) -> dict[str, ev.AdapterPublished]:
    """Return {name: newest published version} of the adapters that are not removed."""
    return {name: event for name, event in sorted(adapters.items()) if isinstance(event, ev.AdapterPublished)}


def evolve_loaded(loaded: set[str], event: ev.Event, adapters: Adapters) -> None:
    """Apply one event to `loaded`, in place: the names of the current adapters that any engine has loaded."""
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
    """Unix seconds at which the adapter was removed, if this was its version then."""
    loads: list[tuple[str, int, float, float]] = field(default_factory=list)
    """(runner, incarnation, time, duration in seconds) of each load by an engine."""
    failures: list[tuple[str, int, float, str]] = field(default_factory=list)
    """(runner, incarnation, time, error) of each failed load."""


def adapter_history(recorded: Iterable[Recorded]) -> list[AdapterVersion]:
    """Return every published version of every adapter, in order, with its loads and its removal."""
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

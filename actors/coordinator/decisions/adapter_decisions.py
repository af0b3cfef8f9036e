"""Which LoRA adapters are to be served, and what a runner's answer to them means. Pure."""

from __future__ import annotations

from collections.abc import Collection

from trinity_es.actors.messages import AdaptersLoadResult
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.projections.adapter_versions import Adapters, current_adapters
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["excused", "has_all", "lacks", "load_result", "publish", "remove", "too_many"]


def publish(
    adapters: Adapters, new: ev.AdapterPublished, most: int, models: Collection[str] = ()
) -> list[ev.Event]:
    """Decide on a publication. `most`: adapters that engines have room for; `models`: the names that models have.

    The same files again change nothing, or tell where they lie now. Raises SyncError for the name of a model, for an
    older version, for one that was published with other files, and for one adapter too many.
    """
    if most == 0:
        raise SyncError(
            f"adapter {new.adapter!r} was not published: engines serve no adapters; set "
            "explorer.rollout_model.lora (max_adapters, max_rank) and start the system again"
        )
    if new.adapter in models:
        raise SyncError(
            f"adapter {new.adapter!r} was not published: a model is called so, and a request names one or the other: "
            "give the adapter another name"
        )
    known = adapters.get(new.adapter)
    current = current_adapters(adapters)
    if known is not None and new.version < known.version:
        raise SyncError(
            f"version {new.version} of adapter {new.adapter!r} is older than the current one, {known.version}"
        )
    if known is not None and new.version == known.version:
        if known == new:
            return []
        if isinstance(known, ev.AdapterRemoved) or known.digest != new.digest:
            what = "removed" if isinstance(known, ev.AdapterRemoved) else "published with other contents"
            raise SyncError(f"version {new.version} of adapter {new.adapter!r} was {what}: give it a new version")
    if new.adapter not in current and len(current) >= most:
        raise SyncError(
            f"adapter {new.adapter!r} was not published: there are {', '.join(current)} already, and engines have room "
            f"for {most}: remove_adapter one, or raise explorer.rollout_model.lora.max_adapters, which takes a restart"
        )
    return [new]


def remove(adapters: Adapters, name: str) -> list[ev.Event]:
    """Decide to take an adapter back; one that is removed already stays so. Raises SyncError for an unknown one."""
    known = adapters.get(name)
    if known is None:
        there = ", ".join(current_adapters(adapters)) or "none"
        raise SyncError(f"there is no adapter {name!r}: there are {there}")
    return [] if isinstance(known, ev.AdapterRemoved) else [ev.AdapterRemoved(adapter=name, version=known.version)]


def too_many(adapters: Adapters, most: int) -> str:
    """Return why engines with room for `most` adapters can't serve these; empty: they can, or are to serve none."""
    current = current_adapters(adapters)
    if most == 0 or len(current) <= most:
        return ""
    return (
        f"the adapters {', '.join(current)} are to be served, and engines have room for {most}: raise "
        "explorer.rollout_model.lora.max_adapters, which takes a restart, or remove_adapter some"
    )


def has_all(adapters: Adapters, has: Collection[str]) -> bool:
    """Return True if an engine that has these serves some version of every adapter."""
    return current_adapters(adapters).keys() <= set(has)


def lacks(adapters: Adapters, has: Collection[str], most: int) -> str:
    """Return why an engine that has these can't serve yet; empty: it can. `most`: adapters that it has room for."""
    missing = sorted(current_adapters(adapters).keys() - set(has)) if most else []
    if not missing:
        return ""
    what = f"{'adapter' if len(missing) == 1 else 'adapters'} {', '.join(missing)}"
    return too_many(adapters, most) or f"it has not loaded {what} yet, and tries again"


def excused(result: AdaptersLoadResult, loaded: Collection[str]) -> set[str]:
    """Return the adapters that neither this runner could load nor any other. `loaded`: those that some engine had."""
    return {adapter for adapter, _, _ in result.errors} - set(loaded)


def load_result(
    life: RunnerLife, result: AdaptersLoadResult, adapters: Adapters, loaded: Collection[str], *, had_all: bool
) -> list[ev.Event]:
    """Return what became of an order to load. `had_all`: this life has served every adapter before.
    `loaded`: adapters that some engine had.

    A runner that could not load a version goes on with the one it had. One that came up and has none of some adapter
    fails: better no runner than one that refuses what others answer. An adapter that nobody ever had is not worth that.
    """
    name, incarnation = life.name, life.incarnation
    events: list[ev.Event] = [
        ev.AdapterLoaded(runner=name, incarnation=incarnation, adapter=adapter, version=version, seconds=seconds)
        for adapter, version, seconds in result.loaded
    ]
    events += [
        ev.AdapterFailed(runner=name, incarnation=incarnation, adapter=adapter, version=version, error=error)
        for adapter, version, error in result.errors
    ]
    lacks = current_adapters(adapters).keys() - result.adapters.keys() - excused(result, loaded)
    errors = [error for error in result.errors if error[0] in lacks]
    if errors and not had_all:
        what = "; ".join(f"version {v} of adapter {a!r}: {error}" for a, v, error in errors)
        reason = f"it could not load {what}; publish a new version (sync_adapter), or remove_adapter it"
        if (life.state, life.reason) != (RunnerState.FAILED, reason):  # else it is said already
            events.append(ev.RunnerFailed(runner=name, incarnation=incarnation, reason=reason))
    return events

"""Decisions about publications of LoRA adapters and results of loads. Pure."""

from __future__ import annotations

from collections.abc import Collection

from trinity_es.actors.messages import AdaptersLoadResult
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.projections.adapter_versions import Adapters, current_adapters
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["excess", "excused", "has_all", "lacks", "load_result", "publish", "remove"]


def publish(
    adapters: Adapters, new: ev.AdapterPublished, room: int, models: Collection[str] = ()
) -> list[ev.Event]:
    """Decide on a publication; of the same version and files, only a new path is recorded.

    `room` is the number of adapters that engines can hold. Raises SyncError for a name in `models`, for an older
    version, for a version published with other files, and for one adapter too many.
    """
    if room == 0:
        raise SyncError(
            f"adapter {new.adapter!r} was not published: engines serve no adapters; set "
            "explorer.rollout_model.lora (max_adapters, max_rank) and start the system again"
        )
    if new.adapter in models:
        raise SyncError(
            f"adapter {new.adapter!r} was not published: a model has that name. Give the adapter another name, "
            "since requests name adapters like models"
        )
    latest = adapters.get(new.adapter)
    current = current_adapters(adapters)
    if latest is not None and new.version < latest.version:
        raise SyncError(
            f"version {new.version} of adapter {new.adapter!r} is older than the current one, {latest.version}"
        )
    if latest is not None and new.version == latest.version:
        if latest == new:
            return []
        if isinstance(latest, ev.AdapterRemoved) or latest.digest != new.digest:
            fate = "removed" if isinstance(latest, ev.AdapterRemoved) else "published with other contents"
            raise SyncError(f"version {new.version} of adapter {new.adapter!r} was {fate}: publish a higher version")
    if new.adapter not in current and len(current) >= room:
        raise SyncError(
            f"adapter {new.adapter!r} was not published: engines have room for {room} adapters and serve "
            f"{', '.join(current)}. Call remove_adapter, or raise explorer.rollout_model.lora.max_adapters and restart"
        )
    return [new]


def remove(adapters: Adapters, name: str) -> list[ev.Event]:
    """Decide to remove an adapter; nothing if it is removed already. Raises SyncError for an unknown one."""
    latest = adapters.get(name)
    if latest is None:
        names = ", ".join(current_adapters(adapters)) or "none"
        raise SyncError(f"there is no adapter {name!r}; current adapters: {names}")
    return [] if isinstance(latest, ev.AdapterRemoved) else [ev.AdapterRemoved(adapter=name, version=latest.version)]


def excess(adapters: Adapters, room: int) -> str:
    """Return why engines with room for `room` adapters can't serve these; empty if they can, or if `room` is 0."""
    current = current_adapters(adapters)
    if room == 0 or len(current) <= room:
        return ""
    return (
        f"there are adapters {', '.join(current)}, and engines have room for {room}: raise "
        "explorer.rollout_model.lora.max_adapters and restart, or remove_adapter some"
    )


def has_all(adapters: Adapters, of_engine: Collection[str]) -> bool:
    """Return True if an engine with the adapters `of_engine` serves some version of every current adapter."""
    return current_adapters(adapters).keys() <= set(of_engine)


def lacks(adapters: Adapters, of_engine: Collection[str], room: int) -> str:
    """Return why an engine with the adapters `of_engine` and room for `room` can't serve yet; empty if it can."""
    missing = sorted(current_adapters(adapters).keys() - set(of_engine)) if room else []
    if not missing:
        return ""
    names = f"{'adapter' if len(missing) == 1 else 'adapters'} {', '.join(missing)}"
    return excess(adapters, room) or f"it has not loaded {names} yet, and tries again"


def excused(result: AdaptersLoadResult, loaded_once: Collection[str]) -> set[str]:
    """Return the adapters that this runner could not load, except those that some engine loaded (`loaded_once`). A new
    runner may serve without these, since no engine answers requests for them."""
    return {adapter for adapter, _, _ in result.errors} - set(loaded_once)


def load_result(
    life: RunnerLife, result: AdaptersLoadResult, adapters: Adapters, loaded_once: Collection[str], *, had_all: bool
) -> list[ev.Event]:
    """Return the events that record the result of a load order.

    `loaded_once` are adapters that some engine has had; `had_all` means that this life served every adapter before.
    A runner that could not load a version goes on with its old one. A new runner that lacks an adapter fails, since it
    would refuse requests that others answer. It does not fail for an adapter that no engine ever loaded.
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
    missing = current_adapters(adapters).keys() - result.adapters.keys() - excused(result, loaded_once)
    fatal_errors = [error for error in result.errors if error[0] in missing]
    if fatal_errors and not had_all:
        failures = "; ".join(f"version {v} of adapter {a!r}: {error}" for a, v, error in fatal_errors)
        reason = f"it could not load {failures}; publish a new version (sync_adapter), or remove_adapter it"
        if (life.state, life.reason) != (RunnerState.FAILED, reason):
            events.append(ev.RunnerFailed(runner=name, incarnation=incarnation, reason=reason))
    return events

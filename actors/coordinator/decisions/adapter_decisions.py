"""Decisions about publishing LoRA adapters and about the results of loading them. Pure functions."""

from __future__ import annotations

from collections.abc import Collection

from trinity_es.actors.messages import AdaptersLoadResult
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.projections.adapter_versions import Adapters, current_adapters
from trinity_es.projections.runner import RunnerLife, RunnerState

__all__ = ["apply_load_result", "excess_error", "excused_adapters", "has_all", "missing_error", "publish", "remove"]


def publish(
    adapters: Adapters, new: ev.AdapterPublished, room: int, models: Collection[str] = ()
) -> list[ev.Event]:
    """Return the event that publishes a version of an adapter; none if it is published already with the same path.

    `room` is the number of adapters that engines can hold. Raises SyncError for a name in `models`, for an older
    version, for a version published with other files, and if there would be more than `room` adapters.
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
            f"version {new.version} of adapter {new.adapter!r} is older than the current one, {latest.version}: "
            "publish a higher version"
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
    """Return the event that removes an adapter; none if it is removed already. Raises SyncError for an unknown one."""
    latest = adapters.get(name)
    if latest is None:
        names = ", ".join(current_adapters(adapters)) or "none"
        raise SyncError(f"there is no adapter {name!r}; current adapters: {names}")
    return [] if isinstance(latest, ev.AdapterRemoved) else [ev.AdapterRemoved(adapter=name, version=latest.version)]


def excess_error(adapters: Adapters, room: int) -> str:
    """Return the error if there are more than `room` current adapters; "" if there are not, or if `room` is 0."""
    current = current_adapters(adapters)
    if room == 0 or len(current) <= room:
        return ""
    return (
        f"there are adapters {', '.join(current)}, and engines have room for {room}: raise "
        "explorer.rollout_model.lora.max_adapters and restart, or remove_adapter some"
    )


def has_all(adapters: Adapters, of_engine: Collection[str]) -> bool:
    """Return True if `of_engine`, the adapters of an engine, include every current adapter, in any version."""
    return current_adapters(adapters).keys() <= set(of_engine)


def missing_error(adapters: Adapters, of_engine: Collection[str], room: int) -> str:
    """Return which current adapters an engine lacks, as a reason why it can't serve yet; "" if it lacks none.
    `of_engine` are the adapters that it has, `room` is the number that it can hold."""
    missing = sorted(current_adapters(adapters).keys() - set(of_engine)) if room else []
    if not missing:
        return ""
    names = f"{'adapter' if len(missing) == 1 else 'adapters'} {', '.join(missing)}"
    return excess_error(adapters, room) or f"it has not loaded {names} yet, and tries again"


def excused_adapters(result: AdaptersLoadResult, loaded_once: Collection[str]) -> set[str]:
    """Return the adapters that a runner failed to load and that no engine ever loaded (`loaded_once`). A new runner may
    serve without them, since no engine answers requests for them."""
    return {adapter for adapter, _, _ in result.errors} - set(loaded_once)


def apply_load_result(
    life: RunnerLife, result: AdaptersLoadResult, adapters: Adapters, loaded_once: Collection[str], *, had_all: bool
) -> list[ev.Event]:
    """Return the events that record a runner's result of an order to load adapters.

    A runner that could not load a version goes on with its old one. A new runner that lacks an adapter fails, since it
    would refuse requests that others answer. It does not fail for an adapter that no engine ever loaded (`loaded_once`
    are the others). `had_all` means that this process has served every adapter before.
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
    missing = current_adapters(adapters).keys() - result.adapters.keys() - excused_adapters(result, loaded_once)
    fatal_errors = [error for error in result.errors if error[0] in missing]
    if fatal_errors and not had_all:
        failures = "; ".join(f"version {v} of adapter {a!r}: {error}" for a, v, error in fatal_errors)
        reason = f"it could not load {failures}; publish a new version (sync_adapter), or remove_adapter it"
        if (life.state, life.reason) != (RunnerState.FAILED, reason):
            events.append(ev.RunnerFailed(runner=name, incarnation=incarnation, reason=reason))
    return events

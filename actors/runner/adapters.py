"""Loading of LoRA adapters into a runner's engine, on the engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from trinity_es.actors.engines.adapter_checks import checked_adapter, require_unchanged
from trinity_es.actors.engines.interface import Engine, ServesAdapters
from trinity_es.events.errors import SyncError
from trinity_es.events.vocabulary import AdapterPublished

__all__ = ["AdaptersLoaded", "serve_adapters"]


@dataclass(slots=True)
class AdaptersLoaded:
    """Result of one LoadAdapters message. Adapters that the engine already served are in neither list."""

    loaded: list[tuple[str, int, float]] = field(default_factory=list)
    """(adapter, version, seconds)."""
    errors: list[tuple[str, int, str]] = field(default_factory=list)
    """(adapter, version, error)."""


async def serve_adapters(
    engine: Engine | None, adapters: Sequence[AdapterPublished], report_error: Callable[[str, BaseException], str]
) -> AdaptersLoaded:
    """Have the engine serve exactly these adapters. `report_error(what, error)` logs an error and returns its text."""
    result = AdaptersLoaded()
    serving = cast(ServesAdapters, engine)
    names = {event.adapter for event in adapters}
    for name in [name for name in getattr(engine, "adapters", {}) if name not in names]:
        await serving.remove_adapter(name)
    for event in adapters:
        name, version = event.adapter, event.version
        if getattr(engine, "adapters", {}).get(name, -1) >= version:
            continue  # the engine has this version, or a later message loaded a newer one
        started_at = time.monotonic()
        try:
            if not hasattr(engine, "load_adapter"):
                raise SyncError(f"engine {type(engine).__name__} can't serve LoRA adapters: use engine_type vllm")
            require_unchanged(event.path, event.digest, await asyncio.to_thread(checked_adapter, event.path))
            await serving.load_adapter(name, version, event.path, event.digest)
        except BaseException as e:
            result.errors.append((name, version, report_error(f"adapter {name} not loaded", e)))
        else:
            result.loaded.append((name, version, time.monotonic() - started_at))
    return result

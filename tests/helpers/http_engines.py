"""Engines over HTTP for tests, which are started and stopped."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.helpers.servers import ServerProcess, ended, stand_in
from trinity_es.actors.engines.http.engine import HTTPEngine
from trinity_es.actors.engines.interface import EngineConfig, Sampling

EIGHT = Sampling(max_tokens=8, ignore_eos=True)


@contextlib.asynccontextmanager
async def met(
    server: ServerProcess, model: Path, prepare: Callable[[HTTPEngine], None] = lambda engine: None, **options: Any
) -> AsyncIterator[HTTPEngine]:
    """Yield a started engine. `prepare` is called with the engine before."""
    engine = HTTPEngine(EngineConfig(model_path=str(model), options={"url": server.url, **options}))
    prepare(engine)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def stood_in(
    model: Path, folder: Path, *arguments: str, **options: Any
) -> AsyncIterator[tuple[ServerProcess, HTTPEngine]]:
    """Yield a stand-in server with these arguments, and a started engine that uses it."""
    server = stand_in(model, folder / "log", *arguments).start()
    with ended(server):
        async with met(server.ready(), model, **options) as engine:
            yield server, engine

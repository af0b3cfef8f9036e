"""Engines over HTTP for tests, which are started and stopped."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.helpers.servers import ServerProcess
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

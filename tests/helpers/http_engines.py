"""Engines over HTTP for tests, connected and closed again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.helpers.servers import ServerProcess
from trinity_es.actors.engines.http.engine import HTTPEngine
from trinity_es.actors.engines.interface import EngineConfig, Sampling

EIGHT = Sampling(max_tokens=8, ignore_eos=True)


@contextlib.asynccontextmanager
async def met(server: ServerProcess, model: Path, **options: Any) -> AsyncIterator[HTTPEngine]:
    engine = HTTPEngine(EngineConfig(model_path=str(model), options={"url": server.url, **options}))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()

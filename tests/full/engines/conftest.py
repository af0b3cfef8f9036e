"""One real vLLM engine for all tests of this folder: to start it takes half a minute. Its loop has a thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engines import Live, SharedEngine
from trinity_es.actors.engines.interface import EngineConfig, LoRASettings


@pytest.fixture(scope="package")
def shared_engine(tiny: Path) -> Iterator[SharedEngine]:
    lora = LoRASettings(max_adapters=2, max_rank=8)
    engine = SharedEngine(EngineConfig(model_path=str(tiny), seed=0, weight_transfer=True, lora=lora))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared_live(shared_engine: SharedEngine) -> Live:
    return shared_engine.get()


@pytest.fixture
def live(shared_engine: SharedEngine, tiny: Path) -> Iterator[Live]:
    """The shared engine, serving the tiny model as version 0 and no adapter; what a test loads into it is undone."""
    live = shared_engine.get()
    yield live
    engine = live.engine
    if engine.dead:
        return
    for name in engine.adapters:
        live.run(engine.remove_adapter(name))
    if engine.model_version != 0:
        live.run(engine.load_weights(0, str(tiny)))
    assert not live.run(engine._llm.list_loras()), "what no request uses is removed"

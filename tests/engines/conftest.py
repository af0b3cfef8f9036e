"""One real vLLM engine for all tests here: it costs half a minute. Its loop is in a thread, as in a runner."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.engines.vllm_engine import VLLMEngine

T = TypeVar("T")

START_SECONDS = 600.0  # 15 on a quiet machine, minutes where others build and test beside us


class Live:
    """An engine on an event loop in a thread, called from the test's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine = VLLMEngine(config)  # raises before it starts anything
        try:
            self.run(self.engine.start(), timeout=START_SECONDS)
        except BaseException:
            self.close()
            raise

    def spawn(self, work: Coroutine[Any, Any, T]) -> Any:
        """A future that can be cancelled, as a runner cancels a unit."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        found: T = self.spawn(work).result(timeout)
        return found

    def close(self) -> None:
        self.run(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        gc.collect()  # vLLM leaves a ZMQ context to the collector: its warning belongs to this test, which ignores it


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.grpo.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the same shape."""
    from examples.grpo.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "other", seed=1)


@pytest.fixture(scope="session")
def shared_live(tiny: Path) -> Iterator[Live]:
    live = Live(EngineConfig(model_path=str(tiny), seed=0, weight_transfer=True))
    yield live
    live.close()


@pytest.fixture
def live(shared_live: Live, tiny: Path) -> Iterator[Live]:
    """The shared engine, serving the tiny model as version 0; what a test loads into it is undone."""
    yield shared_live
    if shared_live.engine.model_version != 0:
        shared_live.run(shared_live.engine.load_weights(0, str(tiny)))

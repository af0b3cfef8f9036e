"""One real vLLM engine for all tests here: it costs half a minute. Its loop is in a thread, as in a runner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engines import Live
from trinity_es.actors.engines.interface import EngineConfig


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

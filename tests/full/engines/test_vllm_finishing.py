"""`synchronizer.in_flight: finish` around a real vLLM engine: an answer has tokens of one version alone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.endpoint import CHAT, TOKEN, posted, until
from tests.helpers.engines import Live
from trinity_es.actors.engines.draining_engine import FinishingEngine
from trinity_es.actors.engines.interface import Engine
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.events.experience import Experience

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

LENGTH = 200


async def by_the_model(server: EngineServer) -> list[Experience]:
    return await Model(server.engine).generate_async("c=", max_tokens=LENGTH, ignore_eos=True)


async def over_http(server: EngineServer) -> list[Experience]:
    session = server.open(model := Model(server.engine))
    body = {**CHAT, "max_tokens": LENGTH, "ignore_eos": True}
    answer = await posted(server, body, f"/s/{session}/v1/chat/completions")
    assert answer.status_code == 200, answer.text
    return model.extract_experience_from_history()


@pytest.mark.parametrize("ask", [by_the_model, over_http])
def test_an_answer_in_flight_ends_with_the_old_weights_and_the_next_waits_for_the_new(
    ask: Callable[[EngineServer], Coroutine[Any, Any, list[Experience]]], live: Live, tiny: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "same")
    before = live.engine.model_version

    async def play() -> tuple[Experience, Experience]:
        engine = cast(Engine, FinishingEngine(live.engine, 60.0))
        server = EngineServer(engine, name="tiny", token=TOKEN)
        await server.start()
        try:
            first = asyncio.ensure_future(ask(server))
            await until(lambda: live.engine._request_tasks, "the first request")
            load = asyncio.ensure_future(engine.load_weights(before + 1, str(tmp_path / "same")))
            await asyncio.sleep(0)
            [new] = await ask(server)
            await load
            [old] = await first
        finally:
            await server.stop()
        return old, new

    old, new = live.run(play())
    assert old.info["version_spans"] == [[before, 0, LENGTH]]
    assert new.info["version_spans"] == [[before + 1, 0, LENGTH]]

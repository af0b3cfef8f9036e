"""What clients of an engine's endpoint are told where something goes wrong, each API in its own words."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest

from tests.helpers.endpoint import CHAT, HELLO, TOKEN, Recorder, client, posted, serving
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.result import classify
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.events.errors import EngineError


class EndsInTheMiddle(Recorder):
    """Has an application of its own, whose streams break off after two events."""

    async def application(self, name: str, recording: Any) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            kind = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": kind})
            for number in range(2):
                told = b'event: x\ndata: {"type": "x", "sequence_number": %d}\n\n' % number
                await send({"type": "http.response.body", "body": told, "more_body": True})
            raise EngineError("it burns")

        return answer


async def test_an_error_is_told_as_the_routes_api_tells_it() -> None:
    async with serving(EndsInTheMiddle()) as server, client(server) as ask:
        broken = await posted(server, {"messages": HELLO, "model": "tiny", "stream": True}, "/v1/messages")
        *_, name, data = broken.text.strip().splitlines()
        assert name == "event: error"  # else Anthropic's client takes it for no event at all
        assert orjson.loads(data.removeprefix("data: ")) == {
            "type": "error", "error": {"type": "api_error", "message": "it burns"}}
        broken = await posted(server, {"input": "hello", "model": "tiny", "stream": True}, "/v1/responses")
        *_, name, data = broken.text.strip().splitlines()
        told = orjson.loads(data.removeprefix("data: "))
        assert (name, told["type"], told["message"], told["sequence_number"]) == (
            "event: error", "error", "it burns", 1)  # the last before it was held back
        with pytest.raises(openai.APIError, match="it burns"):
            [_ async for _ in await ask.responses.create(model="tiny", input="hello", stream=True)]
        refused = await posted(server, {}, "/v1/messages", headers={})
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        assert refused.json()["error"]["type"] == "authentication_error"
        refused = await posted(server, {}, "/s/gone/v1/messages")
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")


class Broken(Recorder):
    """Its logprobs are no numbers."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        return [replace(c, logprobs=[math.nan] * len(c.token_ids)) for c in await super().generate(prompt, sampling)]

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        for whole in await self.generate(prompt, sampling):
            yield whole


async def test_an_answer_that_can_not_be_kept_says_why_and_is_the_engines_failure() -> None:
    said, engine = "logprobs[0] is nan", Broken()
    model = Model(engine)
    with pytest.raises(EngineError, match=re.escape(said)) as failed:
        await model.generate_async("x")
    assert classify(failed.value)[0] == "infra", "weights or a GPU, not the task"
    async with serving(engine) as server:
        session = server.open(model)
        for stream in (False, True):
            model.engine_error = None
            told = await posted(server, {**CHAT, "stream": stream}, f"/s/{session}/v1/chat/completions")
            assert said in told.text
            assert "response already started" not in told.text
            assert stream or told.status_code == 500
            assert isinstance(model.engine_error, EngineError)
            assert said in str(model.engine_error)


async def test_who_asks_for_another_model_is_told_the_names_that_are_served() -> None:
    engine = EndsInTheMiddle()
    engine.adapters["math"] = 1
    server = EngineServer(engine, name="/models/tiny", token=TOKEN)  # vLLM does not name what looks like a path
    await server.start()
    try:
        answer = await posted(server, {**CHAT, "model": "gpt-4o"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (404, "model", 404)
        assert "'gpt-4o'" in error["message"]
        assert "GET /v1/models" in error["message"]
        assert error["message"].endswith("'/models/tiny', 'math'")
    finally:
        await server.stop()

"""Sessions of the OpenAI-compatible endpoint: every answer is kept as an experience (P15)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from tests.helpers.endpoint import CHAT, HELLO, TEXT, Recorder, client, posted, serving, until
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.events.errors import WorkflowError
from trinity_es.testing import ScriptedEngine


async def test_p15_a_session_keeps_every_answer_as_an_experience() -> None:
    engine = Recorder(response="fine", rules=[{"prompt": "slow", "latency_seconds": 0.3, "response": "late"}])
    async with serving(engine) as server:
        model = Model(engine, defaults={"max_tokens": 3, "temperature": 0.25})
        session = server.open(model)
        slow = [{"role": "user", "content": "slow"}]
        async with client(server, session) as ask:
            first = asyncio.create_task(ask.chat.completions.create(model="tiny", messages=slow))
            await until(lambda: engine.asked, "the first request")
            await ask.chat.completions.create(model="tiny", messages=HELLO, n=2, tools=[])
            await first
            stream = await ask.chat.completions.create(model="tiny", messages=HELLO, stream=True, max_tokens=9)
            assert len([chunk async for chunk in stream]) == 4
            await ask.completions.create(model="tiny", prompt="and")
            with pytest.raises(openai.BadRequestError):
                await ask.chat.completions.create(model="tiny", messages=HELLO, n=0)
        assert {s.temperature for _, s in engine.asked} == {0.25}
        found = model.extract_experience_from_history(clear_history=False)
        assert [(e.eid.step, e.prompt_text, e.response_text) for e in found] == [
            (0, "slow\n", "late"[:3]), (1, "hello\n", "fin"), (1, "hello\n", "fin"), (2, "hello\n", "fine"),
            (3, "and", "fin"),
        ]
        (own,) = await Model(engine, defaults={"max_tokens": 9, "temperature": 0.25}).chat_async(HELLO)
        streamed = found[3]
        assert streamed.tokens.tolist() == own.tokens.tolist() == list(b"hello\nfine")
        np.testing.assert_array_equal(streamed.logprobs, own.logprobs)
        np.testing.assert_array_equal(streamed.action_mask, own.action_mask)
        assert streamed.prompt_length == 6
        assert streamed.messages == own.messages == [*HELLO, {"role": "assistant", "content": "fine"}]
        assert streamed.info == {**own.info, "model_version": 0}
        assert streamed.info["version_spans"] == [[0, 0, 4]]
        assert streamed.info["sampling"] == {
            "temperature": 0.25, "top_p": 1.0, "top_k": -1, "max_tokens": 9, "logprobs": True, "seed": None, "n": 1,
            "stop": [], "ignore_eos": False, "choice": 0,
        }
        assert [e.info["sampling"]["choice"] for e in found] == [0, 0, 1, 0, 0], "which of the n answers it is"
        assert found[0].truncate_status == "response_truncated"
        assert len({e.eid.uid for e in found}) == 5
        assert (model.usage.requests, model.usage.response_tokens) == (4, 3 + 6 + 4 + 3)
        assert model.extract_experience_from_history() == found
        assert model.extract_experience_from_history() == []


async def test_an_experience_says_which_weights_made_which_token(tmp_path: Any) -> None:
    class Changing(Recorder):
        async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
            [whole] = await ScriptedEngine.generate(self, prompt, sampling)
            yield replace(whole, token_ids=[97], logprobs=[-1.0], text="a", finish_reason="")
            await self.load_weights(1, str(tmp_path))
            yield Completion(
                prompt_token_ids=whole.prompt_token_ids, token_ids=[98], logprobs=[-2.0], text="b",
                finish_reason="stop", version_spans=((0, 0, 1), (1, 1, 2)),
            )

    engine = Changing()
    async with serving(engine) as server:
        session = server.open(model := Model(engine))
        async with client(server, session) as ask:
            async for _ in await ask.completions.create(model="tiny", prompt="x", stream=True):
                pass
        (e,) = model.extract_experience_from_history()
    assert (e.info["version_spans"], e.info["model_version"]) == ([[0, 0, 1], [1, 1, 2]], 0)
    assert e.logprobs.tolist() == [-1.0, -2.0]
    assert e.response_text == "ab"


async def test_a_session_that_is_forgotten_takes_its_requests_along() -> None:
    engine = Recorder(rules=[{"prompt": "hello", "hang": True}])
    async with serving(engine) as server:
        model, kept = (Model(engine, server=server) for _ in range(2))
        session, other = (m.openai_endpoint().base_url.split("/")[-2] for m in (model, kept))
        mine = asyncio.create_task(posted(server, CHAT, f"/s/{session}/v1/chat/completions"))
        await until(lambda: engine.asked, "the request")
        await model.aclose()
        server.forget(session)
        assert (await mine).status_code == 503
        await until(lambda: engine.aborted == 1, "the end of the request in the engine")
        assert (await posted(server, CHAT, f"/s/{session}/v1/chat/completions")).status_code == 404
        with pytest.raises(WorkflowError, match="its run is over"):
            model.extract_experience_from_history()
        assert (await posted(server, TEXT, f"/s/{other}/v1/completions")).status_code == 200
        assert len(kept.extract_experience_from_history()) == 1

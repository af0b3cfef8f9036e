"""Streams of a real vLLM engine, by themselves and through its endpoint."""

from __future__ import annotations

import math
from contextlib import aclosing

import httpx
import pytest

from tests.helpers.engines import Live
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


async def collected(live: Live, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
    async with aclosing(live.engine.stream(prompt, sampling)) as stream:
        return [part async for part in stream]


def unfinished(live: Live) -> int:
    return int(live.engine._llm.get_num_unfinished_requests())


def test_the_parts_of_a_stream_are_the_answer(live: Live) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    parts = live.run(collected(live, "c=", sampling))
    (whole,) = live.run(live.engine.generate("c=", sampling))
    assert len(parts) > 1
    assert [p.finish_reason for p in parts] == [""] * (len(parts) - 1) + ["length"]
    assert all(p.prompt_token_ids == whole.prompt_token_ids for p in parts)
    assert [t for p in parts for t in p.token_ids] == whole.token_ids
    assert "".join(p.text for p in parts) == whole.text
    logprobs = [lp for p in parts for lp in p.logprobs or []]
    assert whole.logprobs is not None
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert all(math.isfinite(lp) for lp in logprobs)
    assert getattr(parts[-1], "version_spans", ()) in ((), ((0, 0, 12),))


def test_a_stop_text_in_a_stream_is_not_sent(live: Live) -> None:
    text = "".join(p.text for p in live.run(collected(live, "c=", Sampling(temperature=0.0, max_tokens=12))))
    stopped = live.run(collected(live, "c=", Sampling(temperature=0.0, max_tokens=12, stop=(text[3:5],))))
    assert "".join(p.text for p in stopped) == text[: text.index(text[3:5])]
    assert stopped[-1].finish_reason == "stop"


def test_p15_the_endpoint_gives_the_engines_own_tokens_and_logprobs(live: Live) -> None:
    import openai

    async def served() -> EngineServer:
        server = EngineServer(live.engine, name="tiny", token="secret")
        await server.start()
        return server

    server = live.run(served())
    try:
        session = server.open(model := Model(live.engine))
        # On the test's thread: the engine's loop is another's, as it is for a sync workflow.
        client = openai.OpenAI(base_url=f"{server.url}/s/{session}/v1", api_key="secret", max_retries=0)
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "c="}], "temperature": 0.0}
        more = {"max_tokens": 12, "logprobs": True, "extra_body": {"ignore_eos": True}}
        with client:
            answer = client.chat.completions.create(**asked, **more)
            chunks = list(client.chat.completions.create(**asked, **more, stream=True))
        (choice,) = answer.choices
        sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
        (own,) = live.run(live.engine.generate(answer.prompt_token_ids, sampling))
        assert choice.token_ids == own.token_ids
        assert choice.message.content == own.text
        assert [c.logprob for c in choice.logprobs.content] == pytest.approx(own.logprobs, abs=1e-4)
        assert [t for c in chunks for t in getattr(c.choices[0], "token_ids", None) or []] == own.token_ids
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == own.text
        assert chunks[0].prompt_token_ids == answer.prompt_token_ids
        whole, streamed = model.extract_experience_from_history()
        assert whole.tokens.tolist() == streamed.tokens.tolist() == [*own.prompt_token_ids, *own.token_ids]
        assert whole.info == streamed.info
        with httpx.Client() as leaving:
            head = {"Authorization": "Bearer secret"}
            ask = {"prompt": "c=", "max_tokens": 250, "ignore_eos": True, "stream": True}
            for _ in range(20):  # on a busy machine the whole answer may be there before its first bytes are read
                with leaving.stream("POST", f"{server.url}/v1/completions", json=ask, headers=head) as response:
                    next(response.iter_bytes())
                    running = unfinished(live)
                if running:
                    break
            assert running == 1
        wait_until(lambda: unfinished(live) == 0, "the request of a client that left to be aborted")
    finally:
        live.run(server.stop())

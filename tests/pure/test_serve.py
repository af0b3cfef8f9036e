"""The proxy's choice of an engine, and what it makes of engines' responses; no process, no socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trinity_es.actors.load_balancing import SLACK_REQUESTS
from trinity_es.events.errors import EngineError
from trinity_es.serve.engines import BackendPool, conversation_keys
from trinity_es.serve.recorder import StreamedAnswer, given
from trinity_es.testing import ManualClock


def row(name: str, *, serving: bool = True, incarnation: int = 1) -> dict[str, Any]:
    return {"runner": name, "incarnation": incarnation, "endpoint": f"http://{name}", "model_version": 0,
            "serving": serving}


def chosen(engines: BackendPool, *keys: str) -> str | None:
    way = engines.choose(keys)
    return None if way is None else way.runner


def test_p36_the_least_busy_engine_is_chosen_of_those_that_serve() -> None:
    engines = BackendPool(clock := ManualClock())
    assert chosen(engines) is None
    engines.update([row("a"), row("b"), row("c", serving=False)])
    a, b, _ = engines.all()
    a.busy = 1
    assert chosen(engines) == "b"
    b.busy = 2
    assert chosen(engines) == "a"
    engines.update([row("a", serving=False), row("b")])
    assert chosen(engines) == "b"
    engines.update([row("a"), row("b", incarnation=2)])
    assert chosen(engines) == "b"  # another life, with nothing to do
    assert engines.all()[0] is a  # the same life, with what it does
    engines.shun(engines.all()[1], 5.0)
    assert chosen(engines) == "a"
    clock.advance(6.0)
    assert chosen(engines) == "b"
    assert [w and w.runner for w in (engines.choose([], ["b"]), engines.choose([], ["a", "b"]))] == ["a", "b"]
    engines.update([])
    assert chosen(engines) is None


def test_p36_a_conversation_stays_with_its_engine_unless_that_is_much_busier() -> None:
    engines = BackendPool(ManualClock())
    engines.update([row("a"), row("b")])
    a, b = engines.all()
    first: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    known, later = conversation_keys(first, None)
    assert known == []
    engines.remember(later, b)
    second = {"messages": [*first["messages"], {"role": "assistant", "content": "hi"},
                           {"role": "tool", "content": "7"}, {"role": "user", "content": "more"}]}
    known, _ = conversation_keys(second, None)
    b.busy = SLACK_REQUESTS
    assert chosen(engines, *known) == "b"
    b.busy += 1
    assert chosen(engines, *known) == "a"
    b.busy = 0
    a.answered = 0
    other = {"messages": [{"role": "user", "content": "else"}, *second["messages"][1:]]}
    b.busy = 1
    assert chosen(engines, *conversation_keys(other, None)[0]) == "a"
    assert conversation_keys(other, "mine") == (["session/mine"], ["session/mine"])


def test_p36_a_request_waits_for_an_engine() -> None:
    async def wait() -> tuple[str | None, str | None]:
        engines = BackendPool()
        nobody = await engines.wait([], 0.01)
        waiting = asyncio.create_task(engines.wait([], 30.0))
        await asyncio.sleep(0)
        engines.update([row("a")])
        way = await waiting
        return (nobody and nobody.runner), (way and way.runner)

    assert asyncio.run(wait()) == (None, "a")


WAY = BackendPool()
WAY.update([row("a")])


def test_p36_a_stream_is_recorded_as_the_whole_response_would_be() -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}]}
    head = {"id": "chatcmpl-1", "model_version": 3}
    logprobs: Any = {"content": [{"token": "x", "logprob": -0.5}]}
    chunks: list[dict[str, Any]] = [
        {**head, "prompt_token_ids": [1, 2], "choices": [
            {"delta": {"role": "assistant", "content": "x"}, "token_ids": [7], "logprobs": logprobs}]},
        {**head, "choices": [
            {"delta": {"content": "y"}, "token_ids": [8], "logprobs": logprobs, "finish_reason": "stop",
             "version_spans": [[3, 0, 1], [4, 1, 2]]}]},
    ]
    answer = StreamedAnswer()
    assert [answer.add(chunk) for chunk in chunks] == [False, True]
    [way] = WAY.all()
    found = given(answer.whole(), asked, way)
    assert (found.answer.model_version, found.answer.model_version_end, found.answer.response_tokens) == (3, 4, 2)
    [e] = found.experiences
    assert e.tokens.tolist() == [1, 2, 7, 8]
    assert e.logprobs is not None
    assert e.logprobs.tolist() == [-0.5, -0.5]
    assert e.messages == [*asked["messages"], {"role": "assistant", "content": "xy"}]
    assert (e.info["model_version"], e.info["model_version_drift"]) == (3, 1)


@pytest.mark.parametrize("change", [{"prompt_token_ids": None}, {"choices": [{"text": "x"}]}, {"model_version": None}])
def test_p36_what_an_engine_says_that_cannot_be_recorded_is_its_error(change: dict[str, Any]) -> None:
    response = {"id": "cmpl-1", "model_version": 0, "prompt_token_ids": [1],
                "choices": [{"text": "x", "token_ids": [2], "logprobs": None, "finish_reason": "length"}]}
    [way] = WAY.all()
    [experience] = given(response, {"prompt": "p"}, way).experiences
    assert experience.truncate_status == "response_truncated"
    nothing = {**response, "choices": [{"text": "", "token_ids": [], "logprobs": None}]}
    assert given(nothing, {"prompt": "p"}, way).experiences == []
    with pytest.raises(EngineError, match="can't be recorded"):
        given({**response, **change}, {"prompt": "p"}, way)

"""The proxy's choice of an engine, and what it makes of engines' responses; no process, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from trinity_es.actors.engines.http.pool import SLACK_REQUESTS, EnginePool
from trinity_es.actors.serving.errors import ApiError, StreamPlace
from trinity_es.actors.serving.recorded_answer_frames import Framed, Record, read_frames
from trinity_es.events.errors import EngineError
from trinity_es.events.experience import Experience
from trinity_es.serve.http_messages import conversation_keys, read_object
from trinity_es.serve.proxy import Proxy
from trinity_es.serve.recorder import recorded_completion
from trinity_es.testing import ManualClock


def row(name: str, *, serving: bool = True, incarnation: int = 1) -> dict[str, Any]:
    return {"runner": name, "incarnation": incarnation, "endpoint": f"http://{name}", "model_version": 0,
            "serving": serving}


def chosen(engines: EnginePool, *keys: str) -> str | None:
    way = engines.choose(keys)
    return None if way is None else way.runner


def test_p36_the_least_busy_engine_is_chosen_of_those_that_serve() -> None:
    engines = EnginePool(clock := ManualClock())
    assert chosen(engines) is None
    engines.update([row("a"), row("b"), row("c", serving=False)])
    a, b, _ = engines.all()
    a.open_count = 1
    assert chosen(engines) == "b"
    b.open_count = 2
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
    engines = EnginePool(ManualClock())
    engines.update([row("a"), row("b")])
    a, b = engines.all()
    first: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
    known, later = conversation_keys(first, None)
    assert known == []
    engines.remember(later, b)
    second = {"messages": [*first["messages"], {"role": "assistant", "content": "hi"},
                           {"role": "tool", "content": "7"}, {"role": "user", "content": "more"}]}
    known, _ = conversation_keys(second, None)
    b.open_count = SLACK_REQUESTS
    assert chosen(engines, *known) == "b"
    b.open_count += 1
    assert chosen(engines, *known) == "a"
    b.open_count = 0
    a.answer_count = 0
    other = {"messages": [{"role": "user", "content": "else"}, *second["messages"][1:]]}
    b.open_count = 1
    assert chosen(engines, *conversation_keys(other, None)[0]) == "a"
    assert conversation_keys(other, "mine") == (["session/mine"], ["session/mine"])
    long = [conversation_keys({}, text * 60_000)[0] for text in "abab"]
    assert long[0] == long[2] != long[1] == long[3]
    assert len(long[0][0]) < 200, "so many are remembered"


async def test_p36_a_request_waits_for_an_engine() -> None:
    engines = EnginePool()
    assert await engines.wait([], 0.01) is None
    waiting = asyncio.create_task(engines.wait([], 30.0))
    await asyncio.sleep(0)
    engines.update([row("a")])
    way = await waiting
    assert way.runner == "a"


WAY = EnginePool()
WAY.update([row("a")])


def test_p36_what_an_engines_server_tells_beside_an_answer_is_recorded() -> None:
    [way] = WAY.all()
    spans = {"version_spans": [[3, 0, 1], [4, 1, 2]], "model_version": 3}
    made = Experience(tokens=[1, 2, 7, 8], prompt_length=2, logprobs=[-0.5, -0.5], info=spans)
    record = Record(message="chatcmpl-1", versions=[3, 3, 4], prompt_tokens=2, response_tokens=2, choices=[1])
    found = recorded_completion(record, Experience.serialize_many([made]), way)
    assert (found.answer.message, found.answer.runner, found.answer.response_tokens) == ("chatcmpl-1", "a", 2)
    assert (found.answer.model_version, found.answer.model_version_end) == (3, 4)
    [e] = found.experiences
    assert (e.tokens.tolist(), e.eid.suffix) == ([1, 2, 7, 8], "chatcmpl-1-1")
    assert (e.info["model_version"], e.info["model_version_drift"]) == (3, 1)
    assert recorded_completion({**record, "choices": []}, b"", way).experiences == []
    with pytest.raises(EngineError, match="can't be recorded"):
        recorded_completion(record, b"no experiences", way)


async def test_p36_an_engine_that_ends_in_a_stream_is_an_error_of_the_routes_api() -> None:
    [way] = WAY.all()

    async def parts() -> AsyncGenerator[bytes]:
        yield b'event: x\ndata: {"type": "x", "sequence_number": 4}\n\n'
        raise EOFError

    async def last(path: str) -> list[bytes]:
        proxy, whole = Proxy.__new__(Proxy), asyncio.Event()
        *_, last = [part async for part in proxy._stream_parts(b"", parts(), way, StreamPlace(path), whole)]
        assert not whole.is_set()
        return last.strip().splitlines()

    name, data = await last("/v1/messages")
    assert (name, orjson.loads(data[6:])["error"]["type"]) == (b"event: error", "api_error")
    name, data = await last("/v1/responses")
    assert (name, orjson.loads(data[6:])["sequence_number"]) == (b"event: error", 5)
    [data] = await last("/v1/chat/completions")
    assert orjson.loads(data[6:])["error"]["code"] == "engine_failed"


async def test_p36_frames_are_what_was_put_into_them_however_they_are_cut() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    framed = Framed(send)
    await framed({"type": "http.response.start", "status": 404, "headers": [(b"x", b"y")]})
    await framed({"type": "http.response.body", "body": b"one", "more_body": True})
    await framed({"type": "http.response.body", "body": b""})
    whole = b"".join(m.get("body", b"") for m in sent)

    async def cut(size: int, end: int | None = None) -> AsyncGenerator[bytes]:
        for i in range(0, len(whole[:end]), size):
            yield whole[:end][i : i + size]

    assert (sent[0]["status"], sent[0]["headers"]) == (404, [(b"x", b"y"), (b"x-trinity-record", b"1")])
    for size in (1, 3, 7, 1000):
        assert [kind async for kind, _ in read_frames(cut(size))] == ["b", "b"]
        assert b"".join([data async for kind, data in read_frames(cut(size)) if kind == "b"]) == b"one"
    with pytest.raises(EOFError, match="in the middle"):
        _ = [frame async for frame in read_frames(cut(5, -1))]
    assert [m.get("more_body", False) for m in sent[1:]] == [True, False]


def test_feedback_with_two_rewards_is_refused() -> None:
    assert read_object(b'{"reward": 1}', {"reward"}) == {"reward": 1}
    with pytest.raises(ApiError, match="the key 'reward' appears twice"):
        read_object(b'{"reward": 1, "reward": 0}', {"reward"})

"""What an engine is not asked, and what its endpoint does not keep: absurd numbers, huge bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import psutil
import pytest

from tests.helpers.endpoint import HELLO, TOKEN, Recorder, connected, posted, serving
from trinity_es.actors.engines.http.auxiliary_engine import RemoteEngine
from trinity_es.actors.engines.sampling_checks import MOST_PROMPTS, MOST_TOKENS
from trinity_es.actors.engines.schema_limits import exceeded_limit
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving import http_server, uvicorn_server
from trinity_es.events.errors import DataError, EngineError, WorkflowError
from trinity_es.testing import ByteTokenizer

ABSURD: list[dict[str, Any]] = [
    {"max_tokens": 10**9}, {"n": 10**6}, {"max_tokens": 10**400}, {"n": 0}, {"seed": 2**64}, {"top_k": 2**31},
    {"stop": ["x"] * 1001}, {"stop": "x" * 10_000}, {"temperature": 1e300},
]


@pytest.mark.parametrize("asked", ABSURD, ids=lambda a: next(iter(a)))
async def test_absurd_numbers_are_refused_before_the_engine_sees_them(asked: dict[str, Any]) -> None:
    engine = Recorder()
    [name] = asked
    model = Model(engine)
    for call in (lambda: model.chat_async(HELLO, **asked), lambda: model.generate_async("x", **asked)):
        with pytest.raises(WorkflowError, match=f"{name} is .*: give"):
            await call()
    with pytest.raises(DataError, match=f"rollout_args: {name} is"):
        Model(engine, defaults=asked)
    if name == "max_tokens" and asked[name] > 2**64:
        return  # no JSON holds it
    async with serving(engine) as server:
        for path, said in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})):
            refused = await posted(server, {**said, **asked}, path)
            assert refused.status_code == 400, refused.text
            assert name in refused.json()["error"]["message"]
    assert engine.asked == []


@pytest.mark.parametrize("asked", [{"max_completion_tokens": 10**9}, {"best_of": 10**6}])
async def test_absurd_numbers_by_other_names_are_refused_too(asked: dict[str, Any]) -> None:
    engine = Recorder()
    path = "/v1/completions" if "best_of" in asked else "/v1/chat/completions"
    async with serving(engine) as server:
        refused = await posted(server, {**({"messages": HELLO} if "chat" in path else {"prompt": "x"}), **asked}, path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(asked))
    assert engine.asked == []


MANY = 10_001
SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "minItems": MANY}, {"type": "array", "maxItems": 1e9}, {"type": "string", "minLength": MANY},
    {"properties": {"a": {"type": "string", "maxLength": MANY}}}, {"anyOf": [{"minProperties": MANY}]},
    {"type": "string", "pattern": "^a{1001}$"}, {"type": "string", "pattern": "a{0,99999999999999999999}"},
    {"patternProperties": {"a{2000}": {}}}, {"allOf": [{"type": "array", "maxItems": 9999}] * 11},
    {"description": "x" * 2**20},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: str(s)[:40])
async def test_a_schema_that_would_cost_gigabytes_is_refused_whichever_way_it_comes(schema: dict[str, Any]) -> None:
    engine = Recorder()
    with pytest.raises(WorkflowError, match=r"json_schema: .* the limit is"):
        await Model(engine).generate_async("x", json_schema=schema)
    with pytest.raises(DataError, match=r"rollout_args: json_schema: .* the limit is"):
        Model(engine, defaults={"json_schema": schema})
    chat, text, generate = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
    told = orjson.dumps(schema).decode()
    given: list[tuple[str, dict[str, Any]]] = [
        (chat, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
        (chat, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}),
        (text, {"prompt": "x", "structured_outputs": {"json": schema}}),
        (text, {"prompt": "x", "structured_outputs": {"json": told}}),
        (generate, {"token_ids": [1], "sampling_params": {"structured_outputs": {"json": told}}}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/v1/messages", {"messages": HELLO, "tools": [{"name": "f", "input_schema": schema}]}),
    ]
    async with serving(engine) as server:
        for path, body in given:
            refused = await posted(server, body, path)
            assert refused.status_code == 400, refused.text
            assert "the limit is" in refused.json()["error"]["message"]
    assert engine.asked == []


@pytest.mark.parametrize(
    "outputs", [{"regex": "a{2000}"}, {"grammar": 'root ::= "a"{1,2000}'}, {"grammar": '"a"~2000'}]
)
async def test_so_is_a_regex_or_a_grammar(outputs: dict[str, Any]) -> None:
    async with serving(Recorder()) as server:
        refused = await posted(server, {"prompt": "x", "structured_outputs": outputs}, "/v1/completions")
    assert refused.status_code == 400
    assert "the limit is 1,000" in refused.json()["error"]["message"]


def test_an_ordinary_schema_is_taken() -> None:
    date = {"type": "string", "pattern": r"^\d{4}-\d{2}$", "description": "as {2024}"}
    for schema in ({"properties": {"minItems": date, "pattern": date}}, {"type": "array", "maxItems": 10_000}):
        assert exceeded_limit(schema) is None


@pytest.mark.parametrize("n", ["4096", 4096.0])
async def test_answers_are_counted_however_n_is_written(n: Any) -> None:
    engine = Recorder()
    async with serving(engine) as server:
        refused = await posted(server, {"prompt": ["x"] * 17, "n": n}, "/v1/completions")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert "65,536 answers, not 69,632" in refused.json()["error"]["message"]
        refused = await posted(server, {"prompt": "x", "n": "5000"}, "/v1/completions")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert engine.asked == []


async def test_prompts_that_no_engine_has_room_for_are_refused() -> None:
    engine = Recorder()
    model = Model(engine)
    with pytest.raises(WorkflowError, match="prompts in one call"):
        await model.generate_async(["x"] * (MOST_PROMPTS + 1))
    with pytest.raises(WorkflowError, match=r"10,000,001 tokens: the limit is 10,000,000"):
        await model.logprobs_async(range(MOST_TOKENS + 1))
    with pytest.raises(WorkflowError, match="characters"):
        await model.generate_async("x" * 80_000_001)
    assert engine.asked == []


async def test_an_engine_asked_from_afar_refuses_the_same() -> None:
    engine = Recorder()
    async with serving(engine, exact=True) as server:
        for sampling in ({"max_tokens": 10**9}, {"n": 10**6}, {"what": 1}):
            body = {"prompt": "x", "sampling": {"stop": [], **sampling}}
            told = (await posted(server, body, "/engine/generate")).json()
            assert next(iter(sampling)) in told["error"]["message"]
        remote = RemoteEngine("judge", ByteTokenizer(), token="the token")
        remote.update({"judge-0": server.url})
        with pytest.raises(EngineError, match=r"the body has .* the limit is") as refused:
            await remote.logprobs([1234567] * 5_000_000)
        assert refused.value.details["refused"] is True
        await remote.stop()
    assert engine.asked == []


@pytest.mark.parametrize("name", ["messages", "tools"])
async def test_what_could_not_be_recorded_is_refused_before_it_is_answered(name: str) -> None:
    deep: Any = "x"
    for _ in range(205):
        deep = {"a": deep}
    engine = Recorder()
    async with serving(engine) as server:
        session = server.open(Model(engine, server=server))
        asked = {"messages": HELLO, name: [{"role": "user", "content": "hi", "more": deep}]}
        refused = await posted(server, asked, f"/s/{session}/v1/chat/completions")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"{name}: is nested too deeply"
    assert engine.asked == []


async def test_many_answers_to_a_large_request_are_refused_where_each_is_recorded_with_it() -> None:
    engine = Recorder()
    async with serving(engine) as server:
        session, few = (server.open(Model(engine, server=server, defaults={"n": n})) for n in (64, 1))
        asked = {"messages": [{"role": "user", "content": "x" * 2**22}]}
        for path, body in (
            (f"/s/{few}/v1/chat/completions", {**asked, "n": 64}), (f"/s/{session}/v1/chat/completions", asked),
            (f"/s/{few}/v1/completions", {"prompt": ["x" * 2**21] * 2, "n": 64}),
        ):
            refused = await posted(server, body, path)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
            assert "64 answers would each be recorded with this request of 4,19" in refused.json()["error"]["message"]
        assert engine.asked == []
        assert (await posted(server, {**asked, "max_tokens": 1}, f"/s/{few}/v1/chat/completions")).status_code == 200
        assert (await posted(server, {"messages": HELLO}, f"/s/{session}/v1/chat/completions")).status_code == 200


async def test_several_answers_share_their_prompt_in_memory() -> None:
    first, *others = await Model(Recorder()).chat_async(HELLO, n=3)
    for other in others:
        assert other.prompt_text is first.prompt_text
        assert other.messages[0] is first.messages[0]


# --- bodies -----------------------------------------------------------------------------------------
async def test_a_huge_body_is_refused_and_not_kept() -> None:
    whole = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal whole
        for _ in range(160):
            whole += 2**20
            yield b"x" * 2**20

    async with serving(Recorder()) as server:
        await posted(server, {"messages": HELLO})
        process = psutil.Process()
        before = process.memory_info().rss
        long = {"Authorization": "Bearer the token", "content-length": str(160 * 2**20)}
        for more in ({"content": endless()}, {"content": endless(), "headers": long}):
            refused = await posted(server, None, **{"json": None, **more})  # type: ignore[arg-type]
            assert refused.status_code == 413
            assert "the limit is 33,554,432" in refused.json()["error"]["message"]
        assert process.memory_info().rss - before < 100 * 2**20
        assert (await posted(server, {"messages": HELLO})).status_code == 200


async def test_a_body_without_the_token_is_not_read() -> None:
    async with serving(Recorder()) as server, httpx.AsyncClient(timeout=30) as http:
        refused = await http.post(server.url + "/v1/completions", content=b"x" * (64 * 2**20))
        assert refused.status_code == 401


async def test_a_body_that_does_not_end_is_answered_and_its_connection_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.5)
    async with serving(Recorder()) as server:
        reader, writer = await connected(server)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"1\r\n{\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        told = await asyncio.wait_for(reader.readuntil(b"body_too_slow"), 20)
        assert told.startswith(b"HTTP/1.1 408")
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 20)
        trickling.cancel()
        writer.close()


async def test_an_endpoint_ends_as_soon_as_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does nothing while nobody asks, but for a look now and then, for which nobody waits."""
    monkeypatch.setattr(uvicorn_server, "DATE_SECONDS", 3600.0)
    async with serving(Recorder()) as server:
        assert (await posted(server, {"messages": HELLO})).status_code == 200
        await asyncio.wait_for(server.stop(), 30)

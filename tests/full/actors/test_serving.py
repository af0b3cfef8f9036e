"""An engine's OpenAI endpoint, its sessions, and the clients that workflows get of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.helpers.endpoint import CHAT, HELLO, TEXT, TOKEN, Fails, Recorder, client, posted, serving, until
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.actors.serving.http_server import listen
from trinity_es.events.errors import StartupError
from trinity_es.testing import ByteTokenizer

IDS = {"return_token_ids": True}


# --- answers --------------------------------------------------------------------------------------------------------
async def test_p15_a_chat_is_the_engines_own_answer() -> None:
    engine = Recorder()
    async with serving(engine) as server, client(server) as ask:
        told = await ask.chat.completions.with_raw_response.create(
            model="tiny", messages=HELLO, n=2, logprobs=True, seed=3, extra_body=IDS
        )
    answer = told.parse()
    own = await engine.generate(list(b"hello\n"), Sampling(max_tokens=6, n=2, seed=3))
    assert answer.prompt_token_ids == list(b"hello\n")
    assert told.headers["x-model-version"] == "0"
    assert [c.index for c in answer.choices] == [0, 1]
    for choice, completion in zip(answer.choices, own, strict=True):
        assert choice.token_ids == completion.token_ids
        assert choice.message.content == completion.text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "length"
        assert [c.logprob for c in choice.logprobs.content] == completion.logprobs
        assert "".join(c.token for c in choice.logprobs.content) == completion.text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 12, 18)


async def test_p15_the_chunks_of_a_stream_are_the_whole_answer() -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logprobs": True, "extra_body": IDS}
    async with serving(Recorder(response="añb")) as server, client(server) as ask:
        whole = await ask.chat.completions.create(**asked)
        stream = await ask.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        *chunks, last = [chunk async for chunk in stream]
    choices = [c.choices[0] for c in chunks]
    assert len(chunks) == 4  # a byte is a token
    assert [t for c in choices for t in c.token_ids] == whole.choices[0].token_ids
    assert "".join(c.delta.content for c in choices) == whole.choices[0].message.content == "añb"
    logprobs = [lp.logprob for c in choices for lp in c.logprobs.content]
    assert logprobs == [lp.logprob for lp in whole.choices[0].logprobs.content]
    assert [c.finish_reason for c in choices] == [None, None, None, "stop"]
    assert choices[0].delta.role == "assistant"
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert len({c.id for c in [*chunks, last]}) == 1
    assert last.choices == []
    assert last.usage == whole.usage


async def test_p15_a_completion_continues_a_text_or_token_ids() -> None:
    engine = Recorder(response="yes")
    async with serving(engine) as server, client(server) as ask:
        asked: dict[str, Any] = {"model": "tiny", "extra_body": IDS}
        text = await ask.completions.create(prompt="ab", logprobs=0, **asked)
        ids = await ask.completions.create(prompt=[97, 98], **asked)
        stream = [c async for c in await ask.completions.create(prompt=["ab"], stream=True, logprobs=1, **asked)]
    (own,) = await engine.generate("ab", Sampling(max_tokens=6))
    for answer in (text, ids):
        assert answer.choices[0].prompt_token_ids == [97, 98]
        assert answer.choices[0].text == "yes"
        assert answer.choices[0].token_ids == list(b"yes")
    assert text.choices[0].logprobs.token_logprobs == own.logprobs
    assert text.choices[0].logprobs.tokens == ["y", "e", "s"]
    assert text.choices[0].logprobs.text_offset == [0, 1, 2]
    assert ids.choices[0].logprobs is None
    assert "".join(c.choices[0].text for c in stream) == "yes"
    assert [t for c in stream for t in c.choices[0].token_ids] == list(b"yes")
    assert [lp for c in stream for lp in c.choices[0].logprobs.token_logprobs] == own.logprobs
    assert [o for c in stream for o in c.choices[0].logprobs.text_offset] == [0, 1, 2]
    assert stream[0].choices[0].prompt_token_ids == [97, 98]
    assert stream[-1].choices[0].finish_reason == "stop"


async def test_the_sampling_is_the_requests_else_the_servers() -> None:
    engine = Recorder()
    async with serving(engine, defaults={"max_tokens": 6, "temperature": 0.5, "top_k": 7}) as server:
        await posted(server, {"messages": HELLO, "temperature": None})
        given = {"temperature": 0, "top_p": 0.5, "top_k": 3, "max_tokens": 9, "max_completion_tokens": 2, "n": 2}
        await posted(server, {"messages": HELLO, **given, "stop": "x", "seed": 5, "ignore_eos": True, "user": "me"})
        await posted(server, {"messages": HELLO, "stream": True, "stop": ["x", "y"], "logprobs": True})
    plain = Sampling(temperature=0.5, top_k=7, max_tokens=6)
    asked = Sampling(temperature=0, top_p=0.5, top_k=3, max_tokens=2, n=2, stop=("x",), seed=5, ignore_eos=True)
    assert [s for _, s in engine.asked] == [plain, asked, replace(plain, stop=("x", "y"))]


async def test_messages_and_tools_reach_the_chat_template_as_it_expects_them() -> None:
    seen: list[Any] = []

    class Spy(ByteTokenizer):
        def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            seen.append((messages, kwargs.get("tools")))
            return super().apply_chat_template(messages, **kwargs)

    engine = Recorder()
    engine.tokenizer = Spy()
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+ 1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    async with serving(engine) as server:
        assert (await posted(server, {"messages": messages, "tools": [tool]})).status_code == 200
        assert (await posted(server, {"messages": HELLO, "tools": [tool], "tool_choice": "none"})).status_code == 200
    (given, tools), (_, none) = seen[0], seen[-1]
    assert given[0]["content"] == "1\n+ 1", "vLLM's server has a newline there"
    assert given[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert given[1]["content"] == ""
    assert tools == [tool]
    assert none is None


async def asked_of(server: EngineServer, path: str) -> Any:
    async with httpx.AsyncClient() as http:
        return (await http.get(server.url + path, headers={"Authorization": f"Bearer {TOKEN}"})).json()


async def test_an_adapter_answers_who_asks_for_it_as_a_model_or_by_its_runs_sampling(tmp_path: Path) -> None:
    engine = Recorder()
    await engine.load_adapter("math", 3, str(tmp_path))
    async with serving(engine) as server:
        plain = server.open(model := Model(engine, defaults={"max_tokens": 3}))
        for name, status in (("tiny", 200), ("math", 200), ("law", 404)):
            asked = {"model": name, "messages": HELLO}
            assert (await posted(server, asked, f"/s/{plain}/v1/chat/completions")).status_code == status
        named = server.open(of_a_task := Model(engine, defaults={"max_tokens": 3, "adapter": "math"}))
        await posted(server, {"prompt": "x"}, f"/s/{named}/v1/completions")
        law = (await posted(server, {"model": "law", "messages": HELLO})).json()["error"]["message"]
        listed = [(m["id"], m["parent"]) for m in (await asked_of(server, "/v1/models"))["data"]]
        unknown = server.open(Model(engine, defaults={"adapter": "law"}))
        told = (await posted(server, {"prompt": "x"}, f"/s/{unknown}/v1/completions")).json()["error"]["message"]
    assert "no adapter 'law': this engine serves math" in told
    assert law == "the model 'law' does not exist; GET /v1/models lists those that do: 'tiny', 'math'"
    assert listed == [("tiny", None), ("math", "tiny")]
    spans = [e.info.get("adapter_spans") for m in (model, of_a_task) for e in m.extract_experience_from_history()]
    assert spans == [None, [["math", 3, 0, 3]], [["math", 3, 0, 3]]]


async def test_a_conversation_says_of_each_answer_which_adapter_made_it(tmp_path: Path) -> None:
    engine = Recorder()
    await engine.load_adapter("math", 3, str(tmp_path))
    model = Model(engine, defaults={"max_tokens": 3, "adapter": "math"})
    said: list[dict[str, Any]] = [*HELLO]
    for version in (4, None):
        [answer] = await model.chat_async(said)
        said += [answer.messages[-1], {"role": "user", "content": "on"}]
        if version:
            await engine.load_adapter("math", version, str(tmp_path))
    [whole] = model.extract_experience_from_history()
    assert whole.info["version_spans"] == [[0, 0, 3], [0, 7, 10]]
    assert whole.info["adapter_spans"] == [["math", 3, 0, 3], ["math", 4, 7, 10]]


async def test_the_model_is_listed() -> None:
    async with serving(Recorder()) as server, client(server) as ask:
        assert [m.id async for m in ask.models.list()] == ["tiny"]
        async with httpx.AsyncClient() as http:
            assert (await http.get(server.url + "/health")).json() == {"status": "ok"}


# --- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/v1/completions", "/s/x/v1/models"])
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN])
async def test_p15_without_the_token_it_is_401(path: str, header: str | None) -> None:
    engine = Recorder()
    async with serving(engine) as server, httpx.AsyncClient() as http:
        method = "GET" if path.endswith("models") else "POST"
        headers = {"Authorization": header} if header is not None else {}
        answer = await http.request(method, server.url + path, headers=headers, content=b'{"messages": []}')
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert engine.asked == []


class Template(ByteTokenizer):
    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        thinking = {"role": "system", "content": f"thinking: {kwargs.get('enable_thinking', 'unsaid')}"}
        kwargs.pop("enable_thinking", None)
        return super().apply_chat_template([thinking, *messages], **kwargs)


async def test_p55_what_changes_the_sampling_reaches_the_engine() -> None:
    engine = Recorder()
    engine.tokenizer = Template()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    more = {"top_k": 5, "min_tokens": 3, "min_p": 0.1, "repetition_penalty": 1.2}
    async with serving(engine) as server, client(server) as ask:
        chat = ask.chat.completions.create
        await chat(
            model="tiny", messages=HELLO, presence_penalty=0.5, frequency_penalty=-0.5, logprobs=True, top_logprobs=2,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            extra_body={**more, "chat_template_kwargs": {"enable_thinking": False}},
        )
        await chat(model="tiny", messages=HELLO, response_format={"type": "json_object"})
        neutral = {"skip_special_tokens": True, "priority": 0, "stop_token_ids": [], "chat_template_kwargs": {},
                   "what_nobody_knows": 1}
        await chat(
            model="tiny", messages=HELLO, presence_penalty=0, frequency_penalty=0.0, top_logprobs=0,
            response_format={"type": "text"}, extra_body={**neutral, "logprobs": 0},
        )
        await ask.completions.create(model="tiny", prompt="x", presence_penalty=1.5, extra_body=more)
    (prompt, first), (_, second), (plain, third), (_, fourth) = engine.asked
    assert bytes(prompt).startswith(b"thinking: False\n")  # type: ignore[arg-type]
    assert bytes(plain).startswith(b"thinking: unsaid\n")  # type: ignore[arg-type]
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert replace(first, json_schema="") == Sampling(max_tokens=6, top_logprobs=2, **penalties, **more)
    assert orjson.loads(first.json_schema) == schema
    assert second.json_schema == "{}"
    assert third == Sampling(max_tokens=6)
    assert fourth == Sampling(max_tokens=6, presence_penalty=1.5, **more)


async def test_p55_the_likeliest_tokens_are_told_beside_the_sampled_ones() -> None:
    async with serving(Recorder(response="yes")) as server, client(server) as ask:
        asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
        chat = await ask.chat.completions.create(**asked)
        chunks = [c async for c in await ask.chat.completions.create(**asked, stream=True)]
        text = await ask.completions.create(model="tiny", prompt="a", logprobs=2)
        bare = await ask.completions.create(model="tiny", prompt="a", logprobs=0)
    content = chat.choices[0].logprobs.content
    assert [[(t.token, t.logprob) for t in c.top_logprobs] for c in content] == [
        [(letter, 0.0), ("\x01", -9.0)] for letter in "yes"]
    streamed = [t for c in chunks if c.choices for t in c.choices[0].logprobs.content]
    assert [t.top_logprobs for t in streamed] == [t.top_logprobs for t in content]
    assert text.choices[0].logprobs.top_logprobs == [{letter: 0.0, "\x01": -9.0} for letter in "yes"]
    assert bare.choices[0].logprobs.top_logprobs is None


WRONG: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (CHAT, [
        {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"n": 0}, {"max_tokens": 0},
        {"max_completion_tokens": 1.5}, {"stop": [1]}, {"seed": "a"}, {"logprobs": 5}, {"top_logprobs": 5},
        {"stream": "yes"}, {"stream_options": []}, {"top_logprobs": 21, "logprobs": True}, {"presence_penalty": 3},
        {"frequency_penalty": "much"}, {"repetition_penalty": 0}, {"min_tokens": -1}, {"min_p": 2},
        {"response_format": "json"}, {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, {"chat_template_kwargs": True},
        {"chat_template_kwargs": {"tokenize": False}}, {"logit_bias": {"1": 5}}, {"tools": "hammer"},
        {"tool_choice": "required"}, {"use_beam_search": True}, {"stop_token_ids": [3]}, {"adapter": "code"},
    ]),
    (TEXT, [
        {"logprobs": 21}, {"prompt": ""}, {"prompt": [-1]}, {"prompt": [["a"]]}, {"prompt": ["a"] * 1000, "n": 100},
        {"prompt": [2**31]}, {"echo": True}, {"adapter": ""},
    ]),
    ({}, [
        {}, {"messages": []}, {"messages": ["hello"]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
    ]),
]
"""Requests, and what is wrong with each when it is put into them: its first field, or that it has no messages."""


@pytest.mark.parametrize(("body", "field"), [
    ({**whole, **wrong}, next(iter(wrong), "messages")) for whole, some in WRONG for wrong in some
])
async def test_p15_a_bad_request_is_400_and_names_the_field(body: dict[str, Any], field: str) -> None:
    engine = Recorder()
    async with serving(engine) as server:
        answer = await posted(server, body, "/v1/completions" if "prompt" in body else "/v1/chat/completions")
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert engine.asked == []


async def test_what_is_no_request_is_told_in_openais_json() -> None:
    async with serving(Recorder()) as server:
        for content, status in ((b"{", 400), (b"[]", 400), (b'{"model": "other", "messages": []}', 404)):
            answer = await posted(server, None, content=content, json=None)
            assert (answer.status_code, "message" in answer.json()["error"]) == (status, True)
        assert "other" in answer.json()["error"]["message"]
        unknown = await posted(server, CHAT, "/v1/embeddings")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "invalid_request_error")
        for path, meant in (("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages"),
                            ("/v1/tokenize", "/tokenize")):
            missed = await posted(server, CHAT, path)
            assert (missed.status_code, f"(POST {meant} is one)" in missed.json()["error"]["message"]) == (404, True)
        method = await posted(server, CHAT, "/v1/models")
        assert (method.status_code, "takes GET only" in method.json()["error"]["message"]) == (405, True)
        over = await posted(server, CHAT, "/s/gone/v1/chat/completions")
        assert over.status_code == 404
        assert "its run is over" in over.json()["error"]["message"]


async def test_what_is_nested_without_end_and_a_model_that_is_no_name_are_told_so() -> None:
    engine = Recorder()
    engine.adapters["math"] = 1
    async with serving(engine) as server:
        for content in (b'{"messages": ' + b"[" * 400 + b"]" * 400 + b"}", b'{"model": ["x"], "prompt": "a"}'):
            answer = await posted(server, None, "/v1/completions", content=content, json=None)
            assert answer.status_code in (400, 404), answer.text


async def test_what_comes_when_its_run_is_over_is_neither_played_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder()
    async with serving(engine) as server:
        session = server.open(model := Model(engine))
        app = server._app

        async def slow() -> Any:
            server.forget(session)  # while the application is made
            return await app()

        monkeypatch.setattr(server, "_app", slow)
        answer = await posted(server, CHAT, f"/s/{session}/v1/chat/completions")
        assert (answer.status_code, engine.asked) == (503, [])
        other = Model(engine, server=server)
        await other.aclose()
        assert other.openai_endpoint().base_url.endswith("/s/over/v1")
        assert server.sessions == {}
    assert model.extract_experience_from_history() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("details", "status"), [({}, 500), ({"dead": True}, 503), ({"refused": True}, 400)])
async def test_an_error_of_the_engine_has_its_status(details: dict[str, Any], status: int, stream: bool) -> None:
    async with serving(Fails(**details)) as server, client(server) as ask:
        with pytest.raises(openai.APIStatusError, match="it burns") as error:
            await ask.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert error.value.status_code == status


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_told_to_whoever_has_to_replace_it(stream: bool) -> None:
    dead: list[str] = []
    for engine in (Fails(), Fails(refused=True), Fails(dead=True)):
        async with serving(engine, on_dead=dead.append) as server:
            await posted(server, {**CHAT, "stream": stream})
    assert dead == ["it burns"]


async def test_a_stream_that_breaks_off_says_so_and_is_no_experience() -> None:
    engine = Fails(late=True)
    async with serving(engine) as server:
        session = server.open(model := Model(engine))
        async with client(server, session) as ask:
            stream = await ask.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            await anext(stream)
            with pytest.raises(openai.APIError, match="it burns"):
                await anext(stream)
        assert model.extract_experience_from_history() == []
        assert str(model.served_error()) == "it burns"


# --- clients that go, and servers -----------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [{"rules": [{"hang": True}]}, {"token_seconds": 1.0}])
async def test_p15_a_client_that_goes_aborts_its_request(stream: bool, script: dict[str, Any]) -> None:
    engine = Recorder(**script)
    async with serving(engine) as server:
        asking = asyncio.create_task(posted(server, {**CHAT, "stream": stream, "max_tokens": 1000}))
        await until(lambda: engine.asked, "the request")
        asking.cancel()
        await until(lambda: engine.aborted == 1, "its end in the engine")


async def test_a_client_that_goes_in_the_middle_of_a_stream_aborts_it() -> None:
    engine = Recorder(token_seconds=0.01)
    async with serving(engine) as server:
        session = server.open(model := Model(engine))
        async with client(server, session) as ask:
            stream = await ask.chat.completions.create(model="tiny", messages=HELLO, stream=True, max_tokens=10_000)
            await anext(aiter(stream))
            await stream.close()
        await until(lambda: engine.aborted == 1, "its end in the engine")
        assert model.extract_experience_from_history() == []


async def test_a_server_that_stops_aborts_what_it_does() -> None:
    engine = Recorder(rules=[{"hang": True}])
    server = EngineServer(engine, name="tiny", token=TOKEN)
    await server.start()
    asking = [asyncio.create_task(posted(server, {**CHAT, "stream": stream})) for stream in (False, True)]
    await until(lambda: len(engine.asked) == 2, "the requests")
    await asyncio.wait_for(server.stop(), 20)
    await server.stop()
    assert engine.aborted == 2
    assert [a.status_code for a in await asyncio.gather(*asking)] == [503, 503]
    with pytest.raises(httpx.ConnectError):
        await posted(server, CHAT)


async def test_an_address_that_is_taken_is_a_startup_error() -> None:
    async with serving(Recorder()) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(StartupError, match=f"port {port}"):
            listen("127.0.0.1", port)


async def test_many_clients_are_answered_at_once() -> None:
    async with serving(Recorder(latency_seconds=0.2)) as server, client(server) as ask:
        one = ask.chat.completions.create
        before = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(
            one(model="tiny", messages=[{"role": "user", "content": str(i)}], extra_body=IDS) for i in range(50)
        ))
        took = asyncio.get_running_loop().time() - before
    assert [bytes(a.prompt_token_ids) for a in answers] == [f"{i}\n".encode() for i in range(50)]
    assert took < 50 * 0.2

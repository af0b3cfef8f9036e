"""Connections to an engine's endpoint as no good client has them: they end, wait and pipeline where they like."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import re
import resource
import socket
import weakref
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.helpers.endpoint import CHAT, HELLO, TOKEN, Recorder, client, connected, posted, serving, until
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.result import classify
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.actors.serving.uvicorn_server import most_connections
from trinity_es.events.errors import EngineError
from trinity_es.events.store.database.disk_errors import is_out_of_files


def asked(path: str, body: object = CHAT) -> bytes:
    raw = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Recorder()) as server:
        _, writer = await connected(server)
        writer.write(asked("/v1/chat/completions")[:-5])
        await until(lambda: server._server.server_state.tasks, "the request")
        writer.transport.abort()
        await until(lambda: not server._server.server_state.tasks, "the end of the request")
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_client_that_goes_aborts_what_is_answered_though_it_asked_for_more() -> None:
    engine = Recorder(rules=[{"prompt": "hello", "hang": True}])
    async with serving(engine) as server:
        _, writer = await connected(server)
        writer.write(asked("/v1/chat/completions") * 2)
        await until(lambda: engine.asked, "the request")
        writer.transport.abort()
        await until(lambda: engine.aborted == 1, "its end in the engine")
        assert len(engine.asked) == 1


@pytest.mark.parametrize("reset", [False, True], ids=["idle", "reset"])
async def test_a_connection_whose_request_is_over_does_not_hold_its_run(reset: bool) -> None:
    engine = Recorder()
    async with serving(engine) as server:
        model = Model(engine, server=server)
        session = server.open(model)
        reader, writer = await connected(server)
        writer.write(asked(f"/s/{session}/v1/chat/completions"))
        await asyncio.wait_for(reader.readuntil(b"}]"), 20)
        server.forget(session)
        await until(lambda: not server._server.server_state.tasks, "the end of the request")
        if reset:
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            await until(lambda: not server._server.server_state.connections, "the end of the connection")
        held = weakref.ref(model)
        del model
        gc.collect()
        assert held() is None
        writer.close()


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream; charset=utf-8"])
async def test_an_answer_that_fails_in_its_middle_is_broken_off_unless_it_is_a_stream(kind: bytes) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": b"{}\n\n", "more_body": True})
        raise RuntimeError("it burns")

    class Own(Recorder):
        async def application(self, name: str, request: Any) -> Any:
            return application

    async with serving(Own()) as server:
        if kind.startswith(b"text"):
            assert "it burns" in (await posted(server, CHAT)).text
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await posted(server, CHAT)


@pytest.mark.parametrize("framed", [False, True])
async def test_an_answer_that_is_ended_before_its_client_reads_has_one_start(framed: bool) -> None:
    tried, sent = 0, list[str]()
    reads = asyncio.Event()
    bodies = [{"type": "http.request", "body": orjson.dumps(CHAT)}]

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal tried
        tried += 1
        await reads.wait()
        sent.append(message["type"])

    engine = Recorder()
    async with serving(engine) as server:
        session = server.open(Model(engine, server=server))
        headers = [(b"authorization", f"Bearer {TOKEN}".encode()), *([(b"x-trinity-record", b"1")] if framed else ())]
        scope = {"type": "http", "method": "POST", "path": f"/s/{session}/v1/chat/completions", "headers": headers,
                 "query_string": b""}
        answered = asyncio.create_task(server.answer(scope, receive, send))
        await until(lambda: tried == 1, "the start of the answer")
        server.forget(session)
        await until(lambda: tried == 2, "the start of the error")
        reads.set()
        await answered
    assert (sent[0], sent.count("http.response.start")) == ("http.response.start", 1)
    assert len(sent) > 1


@pytest.mark.parametrize(("files", "most"), [(256, 64), (1024, 384), (4096, 1920), (65536, 16384)])
def test_half_of_the_files_are_for_clients(files: int, most: int) -> None:
    assert most_connections(files) == most


async def test_clients_beyond_the_connections_wait_and_others_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Recorder()) as server:
        server._server.limit = 3
        idle, _ = await connected(server), await connected(server)
        idle[1].write(asked("/v1/chat/completions"))
        await asyncio.wait_for(idle[0].readuntil(b"}]"), 20)

        async def client() -> tuple[int, str]:
            async with httpx.AsyncClient(timeout=60) as http:
                headers = {"authorization": f"Bearer {TOKEN}"}
                answer = await http.post(f"{server.url}/v1/chat/completions", json=CHAT, headers=headers)
                assert server._server.connection_count <= 3
                return answer.status_code, answer.headers.get("connection", "")

        answers = await asyncio.wait_for(asyncio.gather(*(client() for _ in range(30))), 60)
        assert {status for status, _ in answers} == {200}
        assert (200, "close") in answers, "a client that others wait behind gives its place"
        await until(lambda: idle[0].at_eof() or server._server.connection_count < 3, "an idle connection to give way")
    told = [r for r in caplog.records if "new clients wait" in r.message]
    assert len(told) == 1
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_process_without_a_file_left_says_so_and_answers_on(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with serving(Recorder()) as server, httpx.AsyncClient(base_url=server.url, headers=headers) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.socket()
        waiting.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            waiting.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2])))
            await until(lambda: "a connection could not be accepted" in caplog.text, "the refusal")
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert is_out_of_files()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: server._server.connection_count == 2, "who waited")
        waiting.close()
    assert caplog.text.count("could not be accepted (Too many open files)") == 1


# --- what clients are told where something goes wrong, each API in its own words --------------------------------------
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

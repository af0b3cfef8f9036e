"""Connections to an engine's endpoint whose clients go, or whose answers fail, at any moment."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import httpx
import orjson
import pytest

from tests.helpers.endpoint import CHAT, TOKEN, Recorder, posted, serving, until
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.engine_server import EngineServer


def asked(path: str, body: object = CHAT) -> bytes:
    raw = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def connected(server: EngineServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))


async def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Recorder()) as server:
        _, writer = await connected(server)
        writer.write(asked("/v1/chat/completions")[:-5])
        await until(lambda: server._server.server_state.tasks, "the request")
        writer.transport.abort()
        await until(lambda: not server._server.server_state.tasks, "the end of the request")
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_a_connection_whose_request_is_over_does_not_hold_its_run() -> None:
    engine = Recorder()
    async with serving(engine) as server:
        model = Model(engine, server=server)
        session = server.open(model)
        reader, writer = await connected(server)
        writer.write(asked(f"/s/{session}/v1/chat/completions"))
        await asyncio.wait_for(reader.readuntil(b"}]"), 20)
        server.forget(session)
        await until(lambda: not server._server.server_state.tasks, "the end of the request")
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

"""Connections to an engine's endpoint as no well-behaved client has them: they end, wait and pipeline where they like."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import weakref

import orjson
import pytest

from tests.helpers.endpoint import CHAT, TOKEN, Recorder, serving, until
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

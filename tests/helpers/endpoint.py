"""An engine's HTTP endpoint, and its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai

from tests.helpers.recorded_engine import Recorder
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.events.errors import EngineError
from trinity_es.testing import ScriptedEngine

TOKEN = "the token"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def serving(engine: ScriptedEngine, **more: Any) -> AsyncIterator[EngineServer]:
    server = EngineServer(engine, name="tiny", token=TOKEN, **{"defaults": {"max_tokens": 6}, **more})
    await server.start()
    try:
        yield server
    finally:
        await asyncio.wait_for(server.stop(), 20)


async def posted(server: EngineServer, body: Any, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    given = {"headers": {"Authorization": f"Bearer {TOKEN}"}, "json": body, **more}
    async with httpx.AsyncClient(timeout=30) as http:
        return await http.post(server.url + path, **given)


async def connected(server: EngineServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))


async def until(true: Any, what: str) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not true():
        assert asyncio.get_running_loop().time() < deadline, f"waited for {what}"
        await asyncio.sleep(0.005)


class Fails(Recorder):
    def __init__(self, **details: Any) -> None:
        super().__init__()
        self.details = details

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        raise EngineError("it burns", **self.details)

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        if "late" in self.details:
            [whole] = await super().generate(prompt, sampling)
            yield replace(whole, finish_reason="")
        raise EngineError("it burns", **self.details)


@asynccontextmanager
async def client(server: EngineServer, session: str = "") -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.url}/s/{session}/v1" if session else f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=30) as made:
        yield made


CHAT: dict[str, Any] = {"messages": HELLO}
TEXT: dict[str, Any] = {"prompt": "x"}

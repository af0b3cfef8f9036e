"""Sessions of a runner's HTTP server on a real engine, such as a workflow's run has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.engines import Live
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.events.experience import Experience

HELLO: Any = [{"role": "user", "content": "c="}]


class Session:
    def __init__(self, live: Live, server: EngineServer, **defaults: Any) -> None:
        self.live, self.model = live, Model(live.engine, defaults={"max_tokens": 6, **defaults})
        self.root = f"{server.url}/s/{server.open(self.model)}"
        self.openai = openai.OpenAI(base_url=f"{self.root}/v1", api_key="secret", max_retries=0, timeout=120)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        told = httpx.post(self.root + path, json=body, headers={"x-api-key": "secret"}, timeout=120)
        assert told.status_code == status, told.text
        return told.json()

    def kept(self) -> list[Experience]:
        return self.model.extract_experience_from_history()

    def exact(self, experience: Experience) -> None:
        """Check that an experience's logprobs equal those that the engine computes for its tokens."""
        found = self.live.run(self.live.engine.logprobs(experience.tokens.tolist()))
        assert experience.logprobs.tolist() == pytest.approx(found[experience.prompt_length - 1 :], abs=2e-3)
        response = len(experience.tokens) - experience.prompt_length
        assert experience.info["version_spans"] == [[0, 0, response]]


@contextmanager
def serving(live: Live, **server_args: Any) -> Iterator[EngineServer]:
    before = live.engine.config
    live.engine.config = replace(before, server_args=server_args)

    async def start() -> EngineServer:
        server = EngineServer(live.engine, name="tiny", token="secret")
        await server.start()
        return server

    server = live.run(start())
    try:
        yield server
    finally:
        live.run(server.stop())
        live.engine.config = before

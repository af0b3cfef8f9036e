"""A proxy for a system's engines, and clients of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

import trinity_es
from tests.helpers.answers import fold_answers
from trinity_es import Explorer
from trinity_es.actors.commands import GetRoutes
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.projections.tables.serve_answers import STREAM, AnswerState
from trinity_es.serve.proxy import Proxy
from trinity_es.testing import wait_until

HELLO: Any = [{"role": "user", "content": "hello"}]


class VLLMServed(NamedTuple):
    """Serving system, its proxy, and the model of its engines."""

    client: RolloutClient
    proxy: Proxy
    model: Path


@contextmanager
def serving(config: trinity_es.Config) -> Iterator[Proxy]:
    """Run a proxy for a running system in a thread, during the block."""
    proxies: list[Proxy] = []
    failed: list[BaseException] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        explorer = Explorer(config)
        try:
            await explorer.prepare()
            await explorer.serve(proxies.append)
        except Exception as e:
            failed.append(e)
            raise
        finally:
            await explorer.shutdown()

    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait({task})), daemon=True)
    thread.start()
    try:
        wait_until(lambda: proxies or failed, "the proxy to answer", 60)
        assert not failed, failed
        wait_until(lambda: any(w.serving for w in proxies[0].engines.all()), "an engine to serve")
        yield proxies[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        assert not thread.is_alive(), "the proxy did not end"
        loop.close()


def client_of(proxy: Proxy, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.base_url, api_key=proxy.api_key, **{"max_retries": 0, "timeout": 60, **options})


def post(proxy: Proxy, path: str, body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {proxy.api_key}"}
    return httpx.post(proxy.base_url.removesuffix("/v1") + path, json=body, headers=headers, timeout=60)


def answers(client: RolloutClient) -> dict[str, AnswerState]:
    return fold_answers(client.log.read(stream=STREAM))


def recorded(client: RolloutClient, message: str) -> list[Experience]:
    from trinity_es.events.store.payloads.experiences import read_experiences

    state = answers(client)[message]
    return [] if state.payload is None else read_experiences(client._payloads, [state.payload])


class Load:
    """Clients that send plain and streamed requests until they are stopped."""

    def __init__(self, proxy: Proxy, clients: int = 8, tokens: int = 8, model: str = "rollout") -> None:
        self.answered: list[tuple[str, str]] = []
        """Message id and text of each answer."""
        self.failed: list[BaseException] = []
        self._stop = threading.Event()
        self._tokens, self._model = tokens, model
        self._threads = [threading.Thread(target=self._ask, args=(proxy, i), daemon=True) for i in range(clients)]

    def _ask(self, proxy: Proxy, number: int) -> None:
        client = client_of(proxy)
        asked = 0
        while not self._stop.wait(0.02):
            asked += 1
            messages: Any = [{"role": "user", "content": f"{number}/{asked}"}]
            try:
                if number % 2:
                    stream = client.chat.completions.create(
                        model=self._model, messages=messages, max_tokens=self._tokens, stream=True
                    )
                    chunks = list(stream)
                    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                    self.answered.append((chunks[0].id, text))
                else:
                    whole = client.chat.completions.create(
                        model=self._model, messages=messages, max_tokens=self._tokens
                    )
                    self.answered.append((whole.id, whole.choices[0].message.content or ""))
            except Exception as e:
                self.failed.append(e)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.answered) >= len(self._threads), "every client to be answered once")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request was never answered"

    def more(self, count: int = 16) -> None:
        """Wait until `count` more answers have come."""
        reached = len(self.answered) + count
        wait_until(lambda: len(self.answered) >= reached, f"{count} more answers", 60)


class Serving:
    """Watch of the engines that serve, by the coordinator's status. Keeps the minimum number."""

    def __init__(self, client: RolloutClient) -> None:
        self._client, self._stop = client, threading.Event()
        self.counts: list[int] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            found = self._client.request(GetRoutes(proxy="test", url="", knows=-1))
            self.counts.append(sum(engine["serving"] for engine in found["engines"]))

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

"""`synchronizer.in_flight: finish`: open requests end before an engine's weights change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from trinity_es.actors.engines.draining_engine import FinishingEngine
from trinity_es.actors.engines.interface import Completion, Engine, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.events.errors import EngineError, SyncError
from trinity_es.testing import ByteTokenizer

pytestmark = pytest.mark.timeout(60)
PATIENCE = 600.0


class Gated:
    """An engine whose requests end when a test sets `ends`; it notes what happens, with the version."""

    def __init__(self) -> None:
        self.model_version = 0
        self.tokenizer = ByteTokenizer()
        self.adapters = {"math": 3}
        self.ends = asyncio.Event()
        self.loads = asyncio.Event()
        self.loads.set()
        self.noted: list[str] = []

    def note(self, what: str) -> None:
        self.noted.append(f"{what} {self.model_version}")

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        self.note("begins")
        await self.ends.wait()
        self.note("ends")
        if prompt == "bad":
            raise EngineError("boom")
        return [answer("stop", 65, 66)]

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        yield answer("", 65, 66)
        await self.ends.wait()
        self.note("ends")
        yield answer("stop", 67)

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        await self.ends.wait()
        self.note("ends")
        return [-temperature]

    async def load_weights(self, version: int, path: str) -> None:
        self.note("loads")
        await self.loads.wait()
        if path == "bad":
            raise SyncError("no weights")
        self.model_version = version

    async def receive_weights(self, version: int, path: str, timeout: float) -> None:
        await self.load_weights(version, path)


class Served(Gated):
    async def application(self, name: str, recording: Any) -> Any:
        async def answers(scope: Any, receive: Any, send: Any) -> None:
            if scope["method"] == "POST":
                await self.generate(name, Sampling())
            self.note(scope["method"])

        return answers


def answer(reason: str, *ids: int) -> Completion:
    return Completion(prompt_token_ids=[1], token_ids=list(ids), logprobs=None, text="", finish_reason=reason)


def gated(inner: Gated | None = None, seconds: float = PATIENCE) -> tuple[Any, FinishingEngine]:
    inner = inner or Gated()
    return inner, FinishingEngine(cast(Engine, inner), seconds)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def begun(*calls: Any) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.ensure_future(call) for call in calls]
    await settled()
    return tasks


async def collected(parts: AsyncGenerator[Completion]) -> list[Completion]:
    return [part async for part in parts]


async def test_open_requests_end_with_the_old_weights_and_new_ones_wait_for_the_new() -> None:
    inner, engine = gated()
    [first] = await begun(engine.generate("x", Sampling()))
    [load, second] = await begun(engine.load_weights(7, "there"), engine.generate("y", Sampling()))
    assert inner.noted == ["begins 0"]
    inner.ends.set()
    await load
    assert inner.noted[:3] == ["begins 0", "ends 0", "loads 0"]
    [old], [new] = await first, await second
    assert inner.noted[3:] == ["begins 7", "ends 7"]
    assert (old.version_spans, new.version_spans) == (((0, 0, 2),), ((7, 0, 2),))


def loaded(engine: Any) -> Any:
    return engine.load_weights(7, "there")


@pytest.mark.parametrize(("ask", "load", "begins"), [
    (lambda engine: collected(engine.stream("x", Sampling())), loaded, []),
    (lambda engine: engine.logprobs([1, 2], temperature=0.5), loaded, []),
    (lambda engine: engine.generate("x", Sampling()), lambda engine: engine.receive_weights(7, "there", 1.0),
     ["begins 0"]),
], ids=["stream", "logprobs", "weights from a group"])
async def test_every_kind_of_request_is_waited_for_by_all_loads(ask: Any, load: Any, begins: list[str]) -> None:
    inner, engine = gated()
    [request] = await begun(ask(engine))
    [loading] = await begun(load(engine))
    assert inner.noted == begins
    inner.ends.set()
    await asyncio.gather(request, loading)
    assert inner.noted == [*begins, "ends 0", "loads 0"]


async def test_a_stream_has_its_version_at_its_end() -> None:
    inner, engine = gated()
    inner.ends.set()
    parts = await collected(engine.stream("x", Sampling()))
    assert [part.version_spans for part in parts] == [(), ((0, 0, 3),)]


async def test_requests_over_http_are_waited_for_and_reads_are_not() -> None:
    inner, engine = gated(Served())
    application = await engine.application("tiny", lambda: None)
    [request] = await begun(application({"type": "http", "method": "POST"}, None, None))
    [load, *_] = await begun(
        engine.load_weights(7, "there"), application({"type": "http", "method": "GET"}, None, None)
    )
    assert inner.noted == ["begins 0", "GET 0"]
    inner.ends.set()
    await asyncio.gather(request, load)
    assert inner.noted[2:] == ["ends 0", "POST 0", "loads 0"]


async def test_after_the_time_the_weights_are_loaded_and_nobody_claims_who_made_the_rest() -> None:
    inner, engine = gated(seconds=0.01)
    [first] = await begun(engine.generate("x", Sampling()))
    await asyncio.wait_for(engine.load_weights(7, "there"), PATIENCE)
    inner.ends.set()
    [late] = await first
    assert inner.noted == ["begins 0", "loads 0", "ends 7"]
    assert late.version_spans == ()


async def test_a_request_that_fails_or_is_cancelled_is_over_and_a_failed_load_lets_requests_in() -> None:
    inner, engine = gated()
    [cancelled, failing] = await begun(engine.generate("x", Sampling()), engine.generate("bad", Sampling()))
    [load, waiting, given_up] = await begun(
        engine.load_weights(7, "bad"), engine.generate("y", Sampling()), engine.generate("z", Sampling())
    )
    cancelled.cancel()
    given_up.cancel()
    await settled()
    assert inner.noted == ["begins 0", "begins 0"]
    inner.ends.set()
    with pytest.raises(EngineError, match="boom"):
        await failing
    with pytest.raises(SyncError, match="no weights"):
        await load
    [made] = await waiting
    assert (made.version_spans, engine.model_version) == (((0, 0, 2),), 0)


async def test_a_request_that_waited_does_not_begin_while_the_next_change_is_made() -> None:
    inner, engine = gated()

    async def two_loads() -> None:
        await engine.load_weights(7, "there")
        inner.loads.clear()
        await engine.load_weights(8, "there")

    inner.loads.clear()
    [loads, request] = await begun(two_loads(), engine.generate("x", Sampling()))
    inner.loads.set()
    await settled()
    assert inner.noted == ["loads 0", "loads 7"]
    inner.loads.set()
    inner.ends.set()
    await asyncio.gather(loads, request)
    assert inner.noted[2:] == ["begins 8", "ends 8"]


async def test_changes_that_come_together_are_made_one_after_the_other() -> None:
    inner, engine = gated()
    inner.loads.clear()
    loads = await begun(engine.load_weights(7, "there"), engine.load_weights(8, "there"))
    assert inner.noted == ["loads 0"]
    inner.loads.set()
    await asyncio.gather(*loads)
    assert inner.noted == ["loads 0", "loads 7"]


async def test_everything_else_is_the_engine_s_own() -> None:
    inner, engine = gated()
    assert (engine.adapters, engine.tokenizer) == ({"math": 3}, inner.tokenizer)
    assert not hasattr(engine, "application")
    assert hasattr(gated(Served())[1], "application")
    assert not hasattr(engine, "dead")


async def test_a_model_that_asked_while_requests_waited_names_the_new_version_alone() -> None:
    inner, engine = gated()
    inner.loads.clear()
    [load] = await begun(engine.load_weights(7, "there"))
    [asking] = await begun(Model(cast(Engine, engine)).generate_async("x"))
    inner.loads.set()
    inner.ends.set()
    await load
    [experience] = await asking
    assert experience.info["version_spans"] == [[7, 0, 2]]

"""The engine over HTTP where a server's answers are errors, are not whole, or can't be: whose fault each is."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.helpers.endpoint import until
from tests.helpers.http_engines import EIGHT
from tests.helpers.vllm_stand_in import StandIn
from trinity_es.actors.engines.http import engine as http_engine
from trinity_es.actors.engines.http import vllm_api as vllm_http_api
from trinity_es.actors.engines.http.engine import HTTPEngine
from trinity_es.actors.engines.http.vllm_api import VLLMServer
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.events.errors import EngineError

BAD = 99
"""A prompt with this token is answered wrongly where `alone`."""
PLAIN = pytest.mark.parametrize("spans", [True, False], ids=["spans", "labels"])


class Wrong(StandIn):
    """A server in this process, which answers as `wrong` says once that is set: with errors, or strange choices."""

    def __init__(self, model: Path, *, spans: bool = True) -> None:
        super().__init__(argparse.Namespace(
            model=str(model), max_model_len=64, api_key="", dev=True, scale_out=spans, account="",
            logprobs_mode="processed_logprobs", latency=0.0, token_seconds=0.0, load_seconds=0.0, port=1,
        ))
        self.wrong: dict[str, Any] = {}
        self.alone = False
        self.asked = 0

    async def _answer(
        self, request: Request, told: dict[str, Any], prompt: list[int], s: dict[str, Any], *, tokens: bool
    ) -> Response:
        self.asked += 1
        self.now = {} if self.alone and BAD not in prompt else self.wrong
        if "times" in self.now:
            self.now["times"] -= 1
            if self.now["times"] < 0:
                self.now = self.wrong = {}
        if "status" in self.now:
            return Response(self.now.get("body", "nope"), self.now["status"])
        made = await super()._answer(request, told, prompt, s, tokens=tokens)
        if "nan" in self.now and isinstance(made, JSONResponse):
            return Response(re.sub(rb'"(logprob|token_logprobs)":(\[?)-?[0-9.e-]+', rb'"\1":\2NaN', bytes(made.body)))
        return made

    async def _make(self, prompt: list[int], s: dict[str, Any], index: int) -> tuple[list[int], list[list[Any]]]:
        return await super()._make(prompt, {**s, **self.now.get("sampling", {})}, index)

    def _choice(
        self, index: int, ids: list[int], spans: list[list[Any]], s: dict[str, Any], tokens: bool
    ) -> dict[str, Any]:
        choice = super()._choice(index, ids, spans, s, tokens)
        if "token" in self.now:
            made = [self.now["token"]] * len(ids)
            choice["token_ids"] = made
            for row, token in zip((choice["logprobs"] or {}).get("content") or (), made, strict=False):
                row["token_id"] = token
            if (choice["logprobs"] or {}).get("tokens"):
                choice["logprobs"]["tokens"] = [f"token_id:{token}" for token in made]
        if "logprob" in self.now and choice["logprobs"]:
            for row in choice["logprobs"].get("content") or ():
                row["logprob"] = self.now["logprob"]
            if "token_logprobs" in choice["logprobs"]:
                choice["logprobs"]["token_logprobs"] = [self.now["logprob"]] * len(ids)
        if "fewer" in self.now and choice["logprobs"]:
            for rows in choice["logprobs"].values():
                rows.pop()
        choice |= self.now.get("choice", {})
        if "weights" in self.now:
            label = self.label
            choice["weight_versions"] = [{"version": label, "start": a, "end": b} for a, b in self.now["weights"]]
        return choice


class LosesLabels(Wrong):
    """It says of each label that it took it, and keeps its own."""

    async def set_label(self, request: Request) -> Response:
        return JSONResponse({"success": True})


def unmet(server: Wrong, model: Path) -> HTTPEngine:
    engine = HTTPEngine(EngineConfig(model_path=str(model), options={"url": "http://a:1"}))
    engine.server = VLLMServer("http://a:1", transport=httpx.ASGITransport(server.app()))
    return engine


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it has ended: `asyncio.wait_for` of Python 3.11 loses one that comes with its result."""
    async with asyncio.timeout(20):
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=0.1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and nobody looks at the server between two requests."""
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 3600.0)
    monkeypatch.setattr(http_engine, "FAILURE_PAUSE_SECONDS", (0.0, 0.0))
    for module in (http_engine, vllm_http_api):
        monkeypatch.setattr(module, "BUSY_SECONDS", (0.0, 0.01, 0.02))


@pytest.fixture
def spans() -> bool:
    """Whether the server says which weights made each token, but where a test is `PLAIN`."""
    return True


@pytest.fixture
def server(tiny: Path, spans: bool) -> Wrong:
    return Wrong(tiny, spans=spans)


@pytest.fixture
async def engine(server: Wrong, tiny: Path) -> AsyncIterator[HTTPEngine]:
    engine = unmet(server, tiny)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def _noted(pauses: list[float]) -> Any:
    """`asyncio.sleep` that writes pauses of the brake down, and does not wait."""
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds < 0.25 or seconds > 2.0:
            await real(seconds)
        else:
            pauses.append(seconds)

    return sleep


IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "ended by an error": {"choice": {"finish_reason": "error"}}, "ended by a number": {"choice": {"finish_reason": 5}},
    "a token beyond int32": {"token": 2**40}, "a negative token": {"token": -5},
    "a token out of the vocabulary": {"token": 10_000_000}, "half a token": {"token": 70.7},
    "no number": {"token": True},
    "an answer in other characters": {"choice": {"index": "x"}}, "NaN": {"nan": True}, "above 0": {"logprob": 5.0},
    "what vLLM writes for NaN": {"logprob": -9999.0}, "none": {"logprob": None},
    "more than was asked for": {"sampling": {"max_tokens": 40}},
    "deep": {"status": 200, "body": "[" * 100_000}, "a list": {"status": 200, "body": "[1]"},
    "no content": {"status": 204, "body": ""}, "no token ids": {"choice": {"token_ids": None}},
    "a logprob less": {"fewer": True}, "no logprobs": {"choice": {"logprobs": None}},
}
SHIFTED = [[(100, 108)], [(-8, 0)], [(0, 4), (0, 4)], [(0, 16), (8, 0)], [(0, 4), (5, 9)], [(0, 4)], [],
           [(4, 8), (4, 8)], [(0, 5), (3, 8)], [(0, 9), (9, 8)]]


@PLAIN
@pytest.mark.parametrize("wrong", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
async def test_an_answer_that_can_not_be_counts_for_nothing_and_is_the_servers_fault(
    server: Wrong, engine: HTTPEngine, wrong: dict[str, Any]
) -> None:
    server.wrong, server.alone = wrong, True
    with pytest.raises(EngineError) as failed:
        await engine.generate([BAD], EIGHT)
    assert not failed.value.details.get("refused")
    assert not failed.value.details.get("dead"), "others are answered"
    assert await engine.generate([5], EIGHT)
    if "nan" not in wrong:  # which is not JSON, so no stream of this stand-in has it
        with pytest.raises(EngineError) as failed:
            async for _ in engine.stream([BAD], EIGHT):
                pass
        assert not failed.value.details.get("refused")
    server.alone = False
    with pytest.raises(EngineError, match="it fails a request that it answered at first") as failed:
        await engine.generate([BAD], replace(EIGHT, n=2))
    assert failed.value.details["dead"]


@pytest.mark.parametrize("weights", SHIFTED)
async def test_tokens_have_weights_in_order(server: Wrong, engine: HTTPEngine, weights: list[tuple[int, int]]) -> None:
    server.wrong, server.alone = {"weights": [(0, 3), (3, 8)]}, True
    assert [c.version_spans for c in await engine.generate([BAD], EIGHT)] == [  # type: ignore[attr-defined]
        ((0, 0, 3), (0, 3, 8))
    ]
    server.wrong = {"weights": weights}
    with pytest.raises(EngineError, match="did not report which weights version generated each of 8 tokens"):
        await engine.generate([BAD], EIGHT)


@PLAIN
async def test_a_whole_answer_has_an_end_and_tokens(server: Wrong, engine: HTTPEngine) -> None:
    for wrong in ({"finish_reason": None}, {"token_ids": None, "logprobs": None}):
        server.wrong, server.alone = {"choice": wrong}, True
        with pytest.raises(EngineError):
            await engine.generate([BAD], replace(EIGHT, logprobs=False))


@pytest.mark.parametrize("status", [307, 401, 403, 404, 408, 425, 429, 500, 502, 503, 504])
async def test_an_error_that_a_server_has_with_all_ends_the_engine_and_with_one_request_fails_that(
    server: Wrong, engine: HTTPEngine, status: int
) -> None:
    told = f'{{"error": {{"message": "no", "type": "t", "param": null, "code": {status}}}}}'
    server.wrong, server.alone = {"status": status, "body": told}, True
    for dead in (False, True):
        server.alone = not dead
        with pytest.raises(EngineError) as failed:
            await engine.generate([BAD], EIGHT)
        assert not failed.value.details.get("refused"), "no task is at fault"
        if status != 429 and status != 503:  # which may answer others meanwhile
            assert bool(failed.value.details.get("dead")) == dead == (engine.dead is not None)


async def test_a_request_is_at_fault_where_vllm_says_so_and_answers_others(server: Wrong, engine: HTTPEngine) -> None:
    told = '{"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": 400}}'
    for status, body, refused in ((400, told, True), (422, told, True), (400, "<html>gateway</html>", False)):
        server.wrong, server.alone = {"status": status, "body": body}, True
        with pytest.raises(EngineError) as failed:
            await engine.generate([BAD], EIGHT)
        assert bool(failed.value.details.get("refused")) == refused
    server.wrong, server.alone = {"status": 400, "body": told}, False
    with pytest.raises(EngineError) as failed:
        await engine.generate([5], EIGHT)
    assert failed.value.details.get("dead"), "what it answered when it was met was no fault"


async def test_a_refusal_of_a_server_that_restarted_is_none(server: Wrong, engine: HTTPEngine) -> None:
    told = '{"error": {"message": "too long"}}'
    server.wrong, server.alone, server.label = {"status": 400, "body": told}, True, "default"
    with pytest.raises(EngineError, match="it restarted, or something else changed its weights") as failed:
        await engine.generate([BAD], EIGHT)
    assert failed.value.details["dead"]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_takes_nothing_is_waited_for(server: Wrong, engine: HTTPEngine, status: int) -> None:
    server.wrong = {"status": status, "times": 3}
    assert await engine.generate([5], EIGHT)
    server.wrong = {"status": status, "times": 3}
    assert [piece async for piece in engine.stream([5], EIGHT)][-1].finish_reason
    server.wrong, server.alone, server.asked = {"status": status}, True, 0
    with pytest.raises(EngineError, match=f"answered {status}") as failed:
        await engine.generate([BAD], EIGHT)
    assert not failed.value.details
    assert server.asked == 5, "four times, and what it answered when it was met"
    assert await engine.generate([5], EIGHT)


@PLAIN
@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_requests_wait_for_the_end_of_a_pause_however_long_it_is(
    server: Wrong, engine: HTTPEngine, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._last_answer_at, server.asked = float("-inf"), 0  # it has answered nobody for long
    looked = 0

    async def look(self: VLLMServer) -> bool:
        nonlocal looked
        looked += 1
        return not server.going.is_set()

    monkeypatch.setattr(VLLMServer, "is_paused", look)
    await engine.server.ask("POST", "/pause", mode=mode)
    asked = [asyncio.create_task(_all_of(engine, prompt)) for prompt in ([5], [5, 6])]
    await until(lambda: looked >= 20, "looks for the end of the pause")
    assert not await engine._test_server(), "a pause tells nothing of what the server can"
    assert engine.dead is None
    assert not any(request.done() for request in asked)
    await engine.server.resume()
    assert await asyncio.gather(*asked) == [8, 8]


async def test_a_failing_server_gets_little(server: Wrong, engine: HTTPEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = _pauses_before_tries(server, monkeypatch)
    for prompt in (BAD, BAD, BAD, BAD, BAD, 5, BAD):
        with contextlib.suppress(EngineError):
            await engine.generate([prompt], EIGHT)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 2.0, 0.25]


def _pauses_before_tries(server: Wrong, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have the server fail what it is asked alone from here on; returns the list of the pauses that follow."""
    pauses = list[float]()
    server.wrong, server.alone = {"status": 500}, True
    monkeypatch.setattr(http_engine, "FAILURE_PAUSE_SECONDS", (0.25, 2.0))
    monkeypatch.setattr(http_engine.asyncio, "sleep", _noted(pauses))  # type: ignore[attr-defined]
    return pauses


@PLAIN
async def test_a_server_that_answers_others_and_takes_nothing_new_goes_on(server: Wrong, engine: HTTPEngine) -> None:
    server.args.token_seconds = 0.1
    for others in ([5], [5, 6]):  # the second as a stream, whose parts come at its end here
        engine._last_answer_at = float("-inf")  # it has answered nobody for long
        asked, server.asked = asyncio.create_task(_all_of(engine, others)), 0
        await until(lambda: server.asked, "the request")
        server.wrong = {"status": 503}
        with pytest.raises(EngineError, match="answered 503") as failed:
            await engine.generate([BAD], EIGHT)
        assert not failed.value.details.get("dead"), "it has not ended the other request"
        assert not asked.done()
        assert await asked == 8
        server.wrong = {}
    engine._last_answer_at = float("-inf")
    server.wrong = {"status": 503}
    refused = await asyncio.gather(*(engine.generate([BAD], EIGHT) for _ in range(9)), return_exceptions=True)
    assert {error.details.get("dead") for error in refused if isinstance(error, EngineError)} == {True}


async def _all_of(engine: HTTPEngine, prompt: list[int]) -> int:
    """Return how many tokens were made, by a stream for two tokens of a prompt."""
    if len(prompt) == 1:
        return len((await engine.generate(prompt, EIGHT))[0].token_ids)
    return len([token async for piece in engine.stream(prompt, EIGHT) for token in piece.token_ids])


async def test_a_stream_is_an_answer(server: Wrong, engine: HTTPEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = _pauses_before_tries(server, monkeypatch)
    for prompt in (BAD, BAD, 5, BAD):
        with contextlib.suppress(EngineError):
            async for _ in engine.stream([prompt], EIGHT):
                pass
    assert pauses == [0.25, 0.5, 0.25], "a whole one ends the row of failures"
    engine._last_answer_at = float("-inf")
    pieces = engine.stream([5], EIGHT)
    await anext(pieces)
    server.wrong, server.alone = {"status": 429}, False
    with pytest.raises(EngineError, match="answered 429") as failed:
        await engine.generate([5], EIGHT)
    assert not failed.value.details.get("dead"), "it answered a moment ago"
    assert [piece async for piece in pieces][-1].finish_reason


async def test_a_server_that_takes_nothing_any_more_ends_the_engine(server: Wrong, engine: HTTPEngine) -> None:
    engine._last_answer_at = float("-inf")  # it has answered nobody for long
    server.wrong = {"status": 429}
    with pytest.raises(EngineError, match="answered 429") as failed:
        await engine.generate([5], EIGHT)
    assert failed.value.details["dead"]


async def test_a_server_that_does_not_keep_its_label_is_told_and_not_met_again_and_again(tiny: Path) -> None:
    server = LosesLabels(tiny)
    engine = unmet(server, tiny)
    with pytest.raises(EngineError, match=r"http://a:1 does not keep the label .* says 'default'. Give the URL of"):
        await asyncio.wait_for(engine.start(), 20)
    assert server.asked == 0


async def test_an_engine_waits_for_what_keeps_it_from_its_server(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows when its process was started, so it may have restarted: it is met again, and told why."""

    async def nothing(self: VLLMServer) -> str:
        return ""

    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(VLLMServer, "start_time", nothing)
    engine = unmet(LosesLabels(tiny), tiny)
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.waits_for or starting.done(), "what it waits for")
    for _ in range(50):
        assert "http://a:1 does not keep the label" in engine.waits_for, "between two meetings, too"
        await asyncio.sleep(0.002)
    await cancelled(starting)


async def test_a_server_that_never_answers_is_named_meanwhile(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(vllm_http_api, "UNANSWERED_SECONDS", 0.05)
    server = Wrong(tiny)
    server.args.latency = 3600.0
    engine = unmet(server, tiny)
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.waits_for or starting.done(), "what it waits for")
    assert re.match(r"an answer of http://a:1: it has 1 request, and has answered none since 20", engine.waits_for)
    server.args.latency = 0.0
    await cancelled(starting)
    engine = unmet(server, tiny)
    await engine.start()
    assert engine.waits_for == ""
    await engine.stop()


async def test_a_pause_by_somebody_else_and_a_server_that_answers_nobody_are_told_in_a_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_engine, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(vllm_http_api, "UNANSWERED_SECONDS", 0.05)
    server = Wrong(tiny)
    engine = unmet(server, tiny)
    await engine.start()
    await engine.server.ask("POST", "/pause", mode="keep")
    asked = asyncio.create_task(engine.generate([5], EIGHT))
    await until(lambda: engine.runs_wait, "the pause to be told")
    assert "its requests wait for the end of a pause of http://a:1 " in engine.runs_wait
    assert "POST http://a:1/resume ends it" in engine.runs_wait
    await engine.server.resume()
    await asked
    await until(lambda: not engine.runs_wait and not engine.waits_for, "its end to be told")
    server.args.latency = 3600.0
    asked = asyncio.create_task(engine.generate([5], EIGHT))
    await until(lambda: engine.waits_for, "the silence to be told")
    assert "an answer of http://a:1: it has 1 request, and has answered none since" in engine.waits_for
    assert engine.runs_wait == "", "nothing is known to be wrong with it"
    await cancelled(asked)
    await until(lambda: not engine.waits_for, "its end to be told")
    await engine.stop()

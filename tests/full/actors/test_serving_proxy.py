"""The proxy of mode `serve` over engines that answer oddly, and clients that go; no process, no socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import orjson
import pytest

from tests.helpers.endpoint import CHAT
from trinity_es.actors.serving.http_server import make_app
from trinity_es.config.config import Config
from trinity_es.serve.proxy import Proxy


class Kept:
    def __init__(self) -> None:
        self.answers: list[Any] = []

    async def record(self, answer: Any) -> None:
        self.answers.append(answer)


def frame(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(8, "big") + data


def record(told: bytes | None = None) -> bytes:
    if told is None:
        told = orjson.dumps({"message": "m", "versions": [0], "prompt_tokens": 1, "response_tokens": 1, "choices": []})
    return frame(b"r", len(told).to_bytes(8, "big") + told)


BODY = frame(b"b", b'{"id":"m"}')
WHOLE = record() + BODY
FRAMED = {"x-trinity-record": "1"}


def stream(body: bytes) -> httpx.Response:
    return httpx.Response(200, headers={**FRAMED, "content-type": "text/event-stream"}, content=parts(body))


async def parts(body: bytes) -> AsyncGenerator[bytes]:
    yield body


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setenv("TRINITY_ES_KEY", "k" * 64)
    made = Proxy(Config(), None)  # type: ignore[arg-type]
    made._recorder = Kept()  # type: ignore[assignment]
    return made


async def asked(proxy: Proxy, *answers: bytes | httpx.Response, engine: Any = None) -> tuple[httpx.Response, list[Any]]:
    """Return what a client gets where the first engine answers so, and the next one so, ...; and what was recorded."""
    left = list(answers)

    async def answering(request: httpx.Request) -> httpx.Response:
        answer = left.pop(0)
        return httpx.Response(200, headers=FRAMED, content=parts(answer)) if isinstance(answer, bytes) else answer

    proxy._http = httpx.AsyncClient(transport=httpx.MockTransport(engine or answering))
    proxy._attempts, proxy._patience = len(answers), 5.0
    proxy.engines.update([
        {"runner": f"r{i}", "incarnation": 1, "endpoint": f"http://r{i}", "model_version": 0, "serving": True}
        for i in range(len(answers))
    ])
    application = httpx.ASGITransport(make_app(proxy._routes()))
    async with httpx.AsyncClient(transport=application, base_url="http://proxy") as http:
        headers = {"Authorization": f"Bearer {proxy.api_key}"}
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    return answer, proxy._recorder.answers  # type: ignore[attr-defined]


@pytest.mark.parametrize("odd", {
    "nothing": lambda: b"", "no_frames": lambda: b"hello", "no_runner": lambda: httpx.Response(200, content=BODY),
    "an_error": lambda: httpx.Response(500, headers=FRAMED, content=parts(BODY)),
    "no_body_after_its_record": record, "half_a_body": lambda: WHOLE[:-3],
    "an_empty_stream": lambda: stream(b""), "half_a_stream": lambda: stream(BODY[:-3]),
}.items(), ids=lambda odd: odd[0])
async def test_p36_where_an_engine_answers_oddly_another_is_asked(proxy: Proxy, odd: tuple[str, Any]) -> None:
    answer, recorded = await asked(proxy, odd[1](), WHOLE)
    assert (answer.status_code, answer.json()) == (200, {"id": "m"})
    assert len(recorded) == 1, "what is asked again is recorded once"


@pytest.mark.parametrize("lost", [httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout])
async def test_a_request_that_lost_two_engines_gets_no_third(proxy: Proxy, lost: type[httpx.TransportError]) -> None:
    came: list[str] = []

    async def engine(request: httpx.Request) -> httpx.Response:
        came.append(request.url.host)
        raise httpx.ConnectError("not there yet") if len(came) == 1 else lost("Server disconnected")

    answer, _ = await asked(proxy, *[b""] * 5, engine=engine)
    assert came == ["r0", "r1", "r2"], "the first one has not seen the request"
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "engines_lost")
    assert "2 engines were lost while they answered this request (r2: Server disconnected)" in error["message"]
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("told", [b"{{{", b"[]", b'{"message": "m", "versions": [], "choices": []}'])
async def test_p36_what_is_no_record_is_the_engines_failure(proxy: Proxy, told: bytes) -> None:
    answer, recorded = await asked(proxy, record(told) + BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    answer, recorded = await asked(proxy, stream(BODY + record(told) + BODY))
    assert answer.status_code == 200
    assert json.loads(answer.text.partition("data: ")[2])["error"]["code"] == "engine_failed"
    assert recorded == []


async def test_p36_a_client_that_goes_in_the_middle_of_its_body_is_counted(proxy: Proxy) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [(b"authorization", f"Bearer {proxy.api_key}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    await make_app(proxy._routes())(scope, receive, send)
    assert (proxy.requests, proxy.failed) == (1, 1)


async def test_p36_each_request_is_answered_failed_or_open(proxy: Proxy) -> None:
    for answer in (WHOLE, stream(BODY + record() + BODY), stream(BODY + record(b"[]") + BODY), record(b"[]")):
        await asked(proxy, answer)
    assert (proxy.requests, proxy.answered, proxy.failed) == (4, 2, 2)
    headers = {**FRAMED, "content-type": "text/event-stream"}
    endless = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, content=never_ends()))
    opened = httpx.AsyncClient(transport=endless)
    async with opened as proxy._http:
        bodies, gone = [{"type": "http.request", "body": orjson.dumps({**CHAT, "stream": True})}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not bodies:
                await gone.wait()
            return bodies.pop() if bodies else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":  # its client goes in the middle of the stream
                assert proxy.requests - proxy.answered - proxy.failed == 1
                gone.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
                 "headers": [(b"authorization", f"Bearer {proxy.api_key}".encode())]}
        await asyncio.wait_for(make_app(proxy._routes())(scope, receive, send), 20)
    assert (proxy.requests, proxy.answered, proxy.failed) == (5, 2, 3)


async def never_ends() -> AsyncGenerator[bytes]:
    yield BODY
    await asyncio.Event().wait()

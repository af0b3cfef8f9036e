"""What a server of others may answer: no more than was asked for, not compressed, its choices numbered from 0."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from trinity_es.actors.engines.http.auxiliary_engine import RemoteEngine
from trinity_es.actors.engines.http.client import MAX_BYTES
from trinity_es.actors.engines.http.vllm_api import VLLMServer
from trinity_es.actors.engines.http.vllm_requests import max_answer_bytes, parse_answers, request_body
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.rollout.result import classify
from trinity_es.environments import openenv
from trinity_es.events.errors import EngineError, EnvironmentFailed

PART = 2**18
ENOUGH = 40 * 2**20
"""Where the stand-in of a server without end stops, so that a client without a limit fails here and takes no machine
with it."""


class Endless(httpx.AsyncByteStream):
    """A body without end: spaces, which JSON and SSE go on reading."""

    sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.sent = 0
        while self.sent < ENOUGH:
            self.sent += PART
            yield b" " * PART


def asked(spans: bool, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    s = Sampling(**{"max_tokens": 100, **sampling})
    return request_body([1, 2, 3], s, spans=spans, model="m", room=1000, stream=stream)


LOOKS: dict[str, Callable[[VLLMServer], Any]] = {
    "health": VLLMServer.unhealthy, "facts": VLLMServer.facts, "label": VLLMServer.label,
    "metrics": VLLMServer.start_time, "tokenize": lambda server: server.tokenize("a"),
    "pause": VLLMServer.pause, "paused": VLLMServer.is_paused,
    "workers": lambda server: server.in_workers("reload_weights"),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("status", [200, 500])
async def test_a_look_whose_answer_has_no_end_is_the_servers_error(look: Callable[..., Any], status: int) -> None:
    endless = Endless()
    server = VLLMServer("http://a:1", transport=httpx.MockTransport(lambda _: httpx.Response(status, stream=endless)))
    with pytest.raises(EngineError, match=rf"http://a:1/\w+\S* answers with more than {MAX_BYTES:,} bytes") as failed:
        await look(server)
    assert endless.sent <= MAX_BYTES + PART
    assert classify(failed.value)[0] == "infra"
    await server.close()


@pytest.mark.parametrize(("answer", "told"), [
    (httpx.Response(200), ""), (httpx.Response(204), ""),
    (httpx.Response(308, headers={"location": "https://b/health"}),
     "http://a:1/health answered 308, which redirects to https://b/health: give the URL of the server itself"),
    (httpx.Response(404, text="not here"), "http://a:1/health answered 404: not here"),
    (httpx.Response(500), "http://a:1/health answered 500"), (httpx.Response(503), "http://a:1/health answered 503"),
    (httpx.Response(401), "http://a:1 wants a key (401), and there is none: put it into the environment variable KEY, "
                          "and start the system again"),
], ids=lambda value: str(value.status_code) if isinstance(value, httpx.Response) else "")
async def test_a_server_that_is_not_healthy_says_what_it_answered(answer: httpx.Response, told: str) -> None:
    server = VLLMServer("http://a:1", key_variable="KEY", transport=httpx.MockTransport(lambda _: answer))
    assert await server.unhealthy() == told
    await server.close()


@pytest.mark.parametrize("body", [
    {"success": False, "message": "no"}, {"error": "no"}, {"results": [None, {"error": "no"}]},
], ids=str)
async def test_what_says_that_it_failed_did_so_whatever_its_status(body: dict[str, Any]) -> None:
    server = VLLMServer("http://a:1", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=body)))
    for ask in (lambda: server.set_label("a"), lambda: server.in_workers("reload_weights"), server.pause):
        with pytest.raises(EngineError, match=r"http://a:1/\w+ failed with status 200, see the server.s log: .*no"):
            await ask()
    await server.close()


def _choice(**other: Any) -> dict[str, Any]:
    return {"index": 0, "token_ids": [5, 6], "finish_reason": "stop", **other}


NAMES = {"tokens": ["token_id:5", "token_id:6"], "token_logprobs": [-1.0, -1.0], "top_logprobs": [{}, {}]}
LIKE_OTHERS = "; use a version of vLLM that docs/ENGINES.md lists (Tried)"


@pytest.mark.parametrize(("spans", "choice", "told"), [
    (False, _choice(token_ids=None, logprobs=NAMES), f"ValueError: the answer has no token_ids{LIKE_OTHERS}"),
    (False, _choice(logprobs=None),
     f"ValueError: the answer has 0 entries in logprobs.tokens, but 2 token_ids{LIKE_OTHERS}"),
    (False, _choice(logprobs=NAMES | {"top_logprobs": None}),
     f"ValueError: the answer has 0 entries in logprobs.top_logprobs, but 2 token_ids{LIKE_OTHERS}"),
    (False, _choice(logprobs=NAMES | {"tokens": ["A", "B"]}),
     f"ValueError: the answer's logprobs name a token by text, 'A', not as token_id:NUMBER{LIKE_OTHERS}"),
    (False, _choice(logprobs=NAMES | {"token_logprobs": [None, -1.0]}),
     "ValueError: the answer has the logprob None, expected a number"),
    (True, _choice(logprobs=None),
     f"ValueError: the answer has 0 entries in logprobs.content, but 2 token_ids{LIKE_OTHERS}"),
    (True, _choice(logprobs={"content": [{"token": "token_id:5", "logprob": -1.0}] * 2}),
     f"the answer has no token_id{LIKE_OTHERS}"),
    (True, _choice(prompt_token_ids=[1, 2]), "ValueError: the answer repeats a prompt of 2 tokens, not the 3 sent"),
    (True, None, "the answer has no choices, and says \"{'object': 'error', 'message': 'CUDA OOM'}\""),
], ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_an_answer_of_another_kind_of_server_is_told_by_the_field_that_is_missing_or_odd(
    spans: bool, choice: dict[str, Any] | None, told: str
) -> None:
    answer = {"choices": [choice]} if choice else {"object": "error", "message": "CUDA OOM"}
    sampling = Sampling(max_tokens=4, logprobs="prompt_token_ids" not in (choice or {}))
    with pytest.raises(EngineError) as failed:
        parse_answers(answer, sampling, spans=spans, vocabulary=9, server="http://a:1 (vLLM 0.8.4)", prompt=[1, 2, 3])
    assert str(failed.value) == f"http://a:1 (vLLM 0.8.4) gave an answer that can't be read ({told})"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tokens_without_end_are_the_servers_error_and_so_is_a_line(stream: bool) -> None:
    endless, request = Endless(), asked(True, stream)
    most = max_answer_bytes(request, 1000)
    assert most < 9 * 2**20, "100 tokens with a logprob each"
    server = VLLMServer("http://a:1", transport=httpx.MockTransport(lambda _: httpx.Response(200, stream=endless)))
    ask = anext(server.events("/g", request, most)) if stream else server.tokens("/g", request, most)
    with pytest.raises(EngineError, match=f"http://a:1/g answers with more than {most:,} bytes"):
        await ask
    assert endless.sent <= most + PART
    await server.close()


async def test_no_encoding_is_asked_for_and_one_that_comes_is_refused_unread() -> None:
    encodings = []

    def packed(request: httpx.Request) -> httpx.Response:
        encodings.append(request.headers["accept-encoding"])
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Endless())

    server = VLLMServer("http://a:1", key="k", transport=httpx.MockTransport(packed))
    with pytest.raises(EngineError, match=r"http://a:1/weight_info answers in the encoding 'gzip', .*: switch"):
        await server.label()
    assert encodings == ["identity"]
    await server.close()


@pytest.mark.parametrize("spans", [True, False], ids=["spans", "labels"])
def test_the_limit_follows_from_what_was_asked(spans: bool) -> None:
    one = max_answer_bytes(asked(spans, logprobs=False), 1000) - MAX_BYTES
    assert 100 * 200 < one < 100 * 300
    assert max_answer_bytes(asked(spans, n=8, logprobs=False), 1000) - MAX_BYTES == 8 * one
    assert max_answer_bytes(asked(spans, max_tokens=200, logprobs=False), 1000) - MAX_BYTES > 1.9 * one
    assert max_answer_bytes(asked(spans, max_tokens=2_000_000, logprobs=False), 1000) - MAX_BYTES < 11 * one, "the room"
    assert max_answer_bytes(asked(spans, top_logprobs=20), 1000) - MAX_BYTES > 20 * one
    whole = request_body([1] * 50, Sampling(max_tokens=1), spans=spans, model="m", room=9, prompt_logprobs=-1)
    assert max_answer_bytes(whole, 1000) > 50 * 1000 * 200


@pytest.mark.parametrize("spans", [True, False], ids=["spans", "labels"])
def test_the_longest_answers_of_vllm_are_below_it(spans: bool) -> None:
    """Names, numbers and texts as long as vLLM writes them: 1,000 tokens with 20 logprobs each, 4 times."""
    logprob, name = -12.345678901234567, "token_id:248319"
    item = {"token": name, "token_id": 248319, "logprob": logprob, "bytes": list(name.encode())}
    content = {"content": [{**item, "top_logprobs": [item] * 21}] * 1000} if spans else {
        "tokens": [name] * 1000, "token_logprobs": [logprob] * 1000, "text_offset": [123456] * 1000,
        "top_logprobs": [{f"token_id:{248000 + i}": logprob for i in range(21)}] * 1000,
    }
    choice = {"index": 0, "token_ids": [248319] * 1000, "logprobs": content, "text": "\u00e4" * 8000,
              "prompt_token_ids": [248319] * 3, "finish_reason": "length"}
    request = asked(spans, n=4, max_tokens=1000, top_logprobs=20)
    assert len(json.dumps({"choices": [choice] * 4})) < max_answer_bytes(request, 248320) - MAX_BYTES


@pytest.mark.parametrize("spans", [True, False], ids=["spans", "labels"])
@pytest.mark.parametrize("indexes", [[0, 0], [1, 2], [0], [0, 1, 2], [-1, 0], [0, 2], [], [0, True]], ids=str)
def test_choices_that_are_not_0_to_n_are_the_servers_error(indexes: list[int], spans: bool) -> None:
    def told(numbers: list[int]) -> dict[str, Any]:
        return {"choices": [{"index": i, "token_ids": [5 + i], "finish_reason": "stop"} for i in numbers]}

    sampling = Sampling(n=2, max_tokens=4, logprobs=False)
    found = parse_answers(told([1, 0]), sampling, spans=spans, vocabulary=9)
    assert [a.ids for a in found] == [[5], [6]]
    with pytest.raises(EngineError, match=r"http://a:1 gave an answer that can't be read") as failed:
        parse_answers(told(indexes), sampling, spans=spans, vocabulary=9, server="http://a:1")
    assert classify(failed.value)[0] == "infra"


@pytest.mark.parametrize("indexes", [[1], [0, 0], [0, 1]], ids=str)
def test_an_event_of_another_choice_is_the_servers_error(indexes: list[int]) -> None:
    sampling = Sampling(max_tokens=4, logprobs=False)
    event = {"choices": [{"index": i, "token_ids": [5]} for i in indexes]}
    with pytest.raises(EngineError, match=r"the answer has choices .*, expected 1 numbered from 0"):
        parse_answers(event, sampling, spans=True, vocabulary=9, whole=False)
    assert parse_answers({"choices": []}, sampling, spans=True, vocabulary=9, whole=False) == [], "such as usage alone"


async def test_an_auxiliary_models_answer_without_end_fails_the_run_as_infra() -> None:
    endless = Endless()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=endless))
    engine = RemoteEngine("judge", SimpleNamespace(), token="t", transport=transport)  # type: ignore[arg-type]
    engine.update({"judge-0": "http://127.0.0.1:1"})
    for ask in (engine.generate([1, 2], Sampling(max_tokens=100)), engine.logprobs([1, 2])):
        with pytest.raises(EngineError, match=r"http://127.0.0.1:1/engine/\w+ answers with more than") as failed:
            await ask
        assert classify(failed.value)[0] == "infra"
        assert endless.sent < 9 * 2**20
    await engine.stop()


async def test_an_environments_schema_without_end_is_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "MESSAGE_BYTES", 2**20)
    endless = Endless()
    response: Any = SimpleNamespace(content=SimpleNamespace(iter_any=endless.__aiter__), url="http://a:1/schema")
    with pytest.raises(EnvironmentFailed, match=r"http://a:1/schema answers with more than 1,048,576 bytes"):
        await openenv._body(response)
    assert endless.sent <= 2**20 + PART


@pytest.mark.parametrize(("key", "variable", "said"), [
    ("wrong", "THEIR_KEY", r"http://a:1 refuses the key in THEIR_KEY \(401\)"),
    ("", "THEIR_KEY", r"http://a:1 wants a key \(401\), and there is none: put it into .* variable THEIR_KEY"),
])
async def test_a_wrong_key_is_told_from_none(key: str, variable: str, said: str) -> None:
    refuses = httpx.MockTransport(lambda request: httpx.Response(401, text="Unauthorized"))
    server = VLLMServer("http://a:1", key=key, key_variable=variable, transport=refuses)
    with pytest.raises(EngineError, match=said):
        await server.facts()
    await server.close()

"""vLLM's own HTTP server over a runner's engine: each API's answers, and what is kept of them, token by token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.helpers.engine_sessions import HELLO, Session, serving
from tests.helpers.engines import Live
from trinity_es.actors.engines.interface import Generation
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.actors.serving.request_record import REQUEST, RequestRecord
from trinity_es.events.errors import ConfigError
from trinity_es.events.experience import Experience
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

TOOL: Any = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False}}}


def unfinished(live: Live) -> int:
    return int(live.engine._llm.get_num_unfinished_requests())


@pytest.fixture(scope="module")
def server(shared_live: Live) -> Iterator[EngineServer]:
    with serving(shared_live, tool_call_parser="hermes") as made:
        yield made


@pytest.fixture
def session(live: Live, server: EngineServer) -> Session:
    return Session(live, server)


def test_every_api_is_kept_with_the_ids_that_were_sampled(session: Session) -> None:
    chat = session.openai.chat.completions.create(model="tiny", messages=HELLO, n=2, logprobs=True)
    batch = session.openai.completions.create(model="tiny", prompt=[[5, 6, 7], [8, 9]], n=2, max_tokens=3)
    generated = session.post("/inference/v1/generate", {
        "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 1}})
    said = session.openai.responses.create(model="tiny", input="c=")
    message = session.post("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 5})
    found = session.kept()
    assert [e.eid.step for e in found] == [0, 0, 1, 1, 1, 1, 2, 3, 4]
    for experience in found:
        session.exact(experience)
    responses = [e.tokens[e.prompt_length :].tolist() for e in found]
    assert [c.token_ids for c in chat.choices] == responses[:2]
    assert [c.logprob for c in chat.choices[0].logprobs.content] == pytest.approx(found[0].logprobs.tolist())
    assert [(c.prompt_token_ids, c.token_ids) for c in batch.choices] == [
        (e.tokens[: e.prompt_length].tolist(), ids) for e, ids in zip(found[2:6], responses[2:6], strict=True)]
    assert [c.prompt_token_ids for c in batch.choices] == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    assert generated["choices"][0]["token_ids"] == responses[6]
    entries = generated["choices"][0]["logprobs"]["content"]
    assert [t["token"] for t in entries] == [f"token_id:{i}" for i in responses[6]]  # as vLLM before 0.32 says
    logprobs = [t["logprob"] for t in entries]
    assert logprobs == pytest.approx(found[6].logprobs.tolist())
    assert said.output[0].content[0].text == found[7].response_text
    unfinished = "\N{REPLACEMENT CHARACTER}"  # a character of which the last token has the first byte alone
    assert message["content"][0]["text"].rstrip(unfinished) == found[8].response_text.rstrip(unfinished)
    assert all(0 < len(ids) <= most for ids, most in zip(responses, [6, 6, 3, 3, 3, 3, 4, 6, 5], strict=True))
    assert found[0].messages == [*HELLO, {"role": "assistant", "content": found[0].response_text}]
    assert session.model.usage.response_tokens == sum(map(len, responses))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
def test_the_run_s_sampling_holds_where_an_api_has_no_field_for_it(live: Live, server: EngineServer, path: str) -> None:
    asked = {"seed": 7, "min_p": 0.01, "min_tokens": 3, "ignore_eos": True, "repetition_penalty": 1.1,
             "presence_penalty": 0.1, "frequency_penalty": 0.2}
    session = Session(live, server, **asked)
    body = {"model": "tiny", **({"input": "c="} if "responses" in path else {"messages": HELLO})}
    for _ in range(2):
        session.post(path, body | ({"max_tokens": 6} if "messages" in path else {}))
    first, second = session.kept()
    assert {name: first.info["sampling"][name] for name in asked} == asked
    assert first.tokens.tolist() == second.tokens.tolist(), "the seed is used"


def test_sampling_that_can_not_be_is_refused_and_the_engine_answers_on(live: Live, server: EngineServer) -> None:
    session = Session(live, server)  # of six tokens
    told = session.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO, "min_tokens": 20}, 400)
    assert "min_tokens must be less than or equal to max_tokens=6" in told["error"]["message"]
    short = Session(live, server, min_tokens=10, max_tokens=20)
    short.post("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 5})
    [kept] = short.kept()
    assert len(kept.tokens) - kept.prompt_length == 5, "the client's longest answer goes before the run's shortest"
    assert session.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO})["choices"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/inference/v1/generate", "/v1/chat/completions"])
def test_a_run_s_schema_holds_whatever_api_asks(live: Live, server: EngineServer, path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
              "required": ["a"], "additionalProperties": False}
    session = Session(live, server, json_schema=json.dumps(schema), max_tokens=40)
    bodies: dict[str, Any] = {"/v1/responses": {"input": "c="}, "/v1/messages": {"messages": HELLO, "max_tokens": 40},
                              "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {}}}
    session.post(path, {"model": "tiny", **bodies.get(path, {"messages": HELLO})})
    [kept] = session.kept()
    assert kept.response_text is not None
    assert kept.response_text.lstrip().startswith("{")
    assert json.loads(kept.info["sampling"]["json_schema"]) == schema


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_an_answer_that_is_waited_for_has_the_text_that_its_stream_has(
    live: Live, server: EngineServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    made = []
    generate = live.engine._llm.generate

    def noted(prompt: Any, params: Any, request: str, **more: Any) -> Any:
        made.append(params.detokenize)
        return generate(prompt, params, request, **more)

    monkeypatch.setattr(live.engine._llm, "generate", noted)
    session = Session(live, server, seed=5, ignore_eos=True, temperature=1.0)
    what: Any = {"input": "c="} if "responses" in path else {"prompt": "c="} if path == "/v1/completions" else {
        "messages": HELLO}
    body = {"model": "tiny", ("max_output_tokens" if "responses" in path else "max_tokens"): 24, **what}
    told = session.post(path, body)
    with httpx.stream("POST", session.root + path, json={**body, "stream": True}, timeout=120,
                      headers={"x-api-key": "secret"}) as answer:
        assert answer.status_code == 200
        answer.read()
    whole, streamed = session.kept()
    assert whole.tokens.tolist() == streamed.tokens.tolist()
    assert whole.response_text == streamed.response_text != ""
    assert json.dumps(whole.response_text)[1:-1] in json.dumps(told, ensure_ascii=True)
    assert made == [False, True], "vLLM makes a text as it grows for the stream alone"


@pytest.mark.parametrize("more", [
    {"prompt_logprobs": 1}, {"echo": True, "prompt_logprobs": 0}, {"logprobs": 2},
    {"logprobs": 1, "logprob_token_ids": [1, 2]},
], ids=str)
def test_logprobs_that_a_client_asks_for_have_their_names(session: Session, more: dict[str, Any]) -> None:
    told = session.post("/v1/completions", {"model": "tiny", "prompt": "c=", "max_tokens": 4, "seed": 1, **more})
    [choice] = told["choices"]
    if "logprobs" in more:
        assert all(isinstance(token, str) for token in choice["logprobs"]["tokens"])
    else:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert all(isinstance(p["decoded_token"], str) for row in others for p in row.values())
    [kept] = session.kept()
    assert len(kept.logprobs) == len(kept.tokens) - kept.prompt_length


@pytest.mark.parametrize(("character", "asked"), [
    ("b", {"stop": ["b"]}), ("b", {"stop_token_ids": [65]}), ("\u65e5", {"ignore_eos": True}),
], ids=["a stop string", "a stop token", "part of a character"])
def test_a_text_that_is_empty_for_its_client_stays_so(session: Session, character: str, asked: dict[str, Any]) -> None:
    first = session.live.engine.tokenizer.encode(character)[0]
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "allowed_token_ids": [first], **asked}
    told = session.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    [kept] = session.kept()
    assert (told or "") == kept.response_text == ""
    assert set(kept.tokens[kept.prompt_length :].tolist()) == {first}


def test_an_answer_of_ids_alone_is_kept_with_the_text_that_it_has_streamed_or_not(session: Session) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"detokenize": False, "max_tokens": 40, "seed": 3,
                                                        "ignore_eos": True, "temperature": 2.0}}
    session.post("/inference/v1/generate", body)
    with httpx.stream("POST", session.root + "/inference/v1/generate", json={**body, "stream": True}, timeout=120,
                      headers={"x-api-key": "secret"}) as answer:
        answer.read()
    whole, streamed = session.kept()
    assert whole.tokens.tolist() == streamed.tokens.tolist()
    assert whole.response_text == streamed.response_text != ""


def test_streams_are_kept_as_what_they_were_together(session: Session) -> None:
    asked: dict[str, Any] = {"model": "tiny", "stream": True, "temperature": 0.0}
    chat = list(session.openai.chat.completions.create(messages=HELLO, **asked))
    text = list(session.openai.completions.create(prompt=["c=", "d="], **asked))
    said = list(session.openai.responses.create(model="tiny", input="c=", stream=True, temperature=0.0))
    whole = session.openai.chat.completions.create(model="tiny", messages=HELLO, temperature=0.0)
    found = session.kept()
    for experience in found:
        session.exact(experience)
    ids = [e.tokens[e.prompt_length :].tolist() for e in found]
    assert [t for c in chat for t in getattr(c.choices[0], "token_ids", None) or []] == ids[0] == ids[3] == ids[4]
    for i in (0, 1):
        parts = [c for chunk in text for c in chunk.choices if c.index == i]
        assert [t for c in parts for t in c.token_ids or []] == ids[1 + i]
    assert said[-1].type in ("response.completed", "response.incomplete")
    assert whole.choices[0].token_ids == ids[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_the_ids_that_were_sampled(session: Session, stream: bool) -> None:
    said, read, wrote = [*HELLO], [], []
    for turn in range(3):  # by another kind of client each time but the last
        asked: dict[str, Any] = {"model": "tiny", "messages": said, "max_tokens": 7}
        if stream:
            chunks = list(session.openai.chat.completions.create(**asked, stream=True))
            read.append(chunks[0].prompt_token_ids)
            wrote.append([t for c in chunks for t in getattr(c.choices[0], "token_ids", None) or []])
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
        elif turn == 1:
            text = session.post("/v1/messages", asked)["content"][0]["text"]
        else:
            answer = session.openai.chat.completions.create(**asked)
            read.append(answer.prompt_token_ids)
            wrote.append(answer.choices[0].token_ids)
            text = answer.choices[0].message.content or ""
        said = [*said, {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    [experience] = session.kept()
    tokens = experience.tokens.tolist()
    assert tokens == [*read[-1], *wrote[-1]]
    assert read[-1][: len(read[0]) + len(wrote[0])] == [*read[0], *wrote[0]], "not made of its text again"
    mask = [False] * experience.prompt_length + experience.action_mask.tolist()
    assert sum(mask) == session.model.usage.response_tokens
    assert [t for t, own in zip(tokens, mask, strict=True) if own][: len(wrote[0])] == wrote[0]
    assert experience.prompt_length == len(read[0])
    found = session.live.run(session.live.engine.logprobs(tokens))[experience.prompt_length - 1 :]
    own = [(a, b) for a, b, m in zip(found, experience.logprobs.tolist(), experience.action_mask, strict=True) if m]
    assert [b for _, b in own] == pytest.approx([a for a, _ in own], abs=2e-3)
    assert session.model.usage.forks == 0


def test_an_answer_that_only_ends_is_gone_on_from_and_is_no_fork(session: Session) -> None:
    end = session.live.engine.tokenizer.eos_token_id  # type: ignore[attr-defined]  # Hugging Face's have one
    ask = session.openai.chat.completions.create
    empty = ask(model="tiny", messages=HELLO, max_tokens=4, logit_bias={str(end): 100})
    assert empty.choices[0].token_ids == [end]  # type: ignore[attr-defined]
    assert not empty.choices[0].message.content
    said = [*HELLO, {"role": "assistant", "content": ""}, {"role": "user", "content": "on"}]
    last = ask(model="tiny", messages=said, max_tokens=4)
    assert session.model.usage.forks == 0
    [experience] = session.kept()
    assert experience.tokens.tolist() == [*last.prompt_token_ids, *last.choices[0].token_ids]  # type: ignore[attr-defined]
    assert experience.response_text.startswith(session.live.engine.tokenizer.decode([end]))


def test_tools_are_called_and_parsed_and_a_format_binds_the_answer(session: Session) -> None:
    spaces = {session.live.engine.tokenizer.encode(space)[0]: -100 for space in " \t\n\r"}  # JSON has no end else
    more: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": 1, "logit_bias": spaces}
    called = session.openai.chat.completions.create(
        **more, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    [call] = called.choices[0].message.tool_calls or []
    assert call.function.name == "add"  # type: ignore[union-attr]
    assert 0 <= json.loads(call.function.arguments)["a"] <= 9  # type: ignore[union-attr]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOOL["function"]["parameters"]}}
    bound = session.openai.chat.completions.create(**more, response_format=schema)  # type: ignore[call-overload]
    assert set(json.loads(bound.choices[0].message.content)) == {"a"}
    free = session.openai.chat.completions.create(**{**more, "max_tokens": 4}, tools=[TOOL], tool_choice="auto")
    assert free.choices[0].finish_reason == "length"
    first, second, _ = session.kept()
    assert first.tools == [TOOL]
    assert json.loads(second.response_text) == json.loads(bound.choices[0].message.content)
    assert json.loads(second.info["sampling"]["json_schema"])["required"] == ["a"]


def test_a_run_s_sampling_holds_where_a_request_says_nothing(live: Live, server: EngineServer) -> None:
    session = Session(live, server, temperature=0.0, max_tokens=3, seed=7, n=1, stop=("zzz",))
    session.openai.chat.completions.create(model="tiny", messages=HELLO)
    session.openai.completions.create(model="tiny", prompt="c=", max_tokens=2, temperature=0.5)
    session.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"stop_token_ids": [250, 251]}})
    found = session.kept()
    assert [len(e.tokens) - e.prompt_length for e in found] == [3, 2, 3]
    assert [e.info["sampling"]["temperature"] for e in found] == [0.0, 0.5, 0.0]
    assert {e.info["sampling"]["seed"] for e in found} == {7}
    assert found[0].info["sampling"]["stop"] == ["zzz"]
    assert [e.info.get("further_sampling") for e in found] == [None, None, {"stop_token_ids": [250, 251]}]


def test_an_answer_longer_than_the_room_left_is_cut_if_nobody_asked_for_more(live: Live, server: EngineServer) -> None:
    session = Session(live, server, max_tokens=10_000, ignore_eos=True)
    prompt = [5] * 250
    session.openai.completions.create(model="tiny", prompt=prompt)
    session.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a" * 240}])
    session.openai.responses.create(model="tiny", input="a" * 240)
    assert [(len(e.tokens), e.truncate_status) for e in session.kept()] == [(256, "response_truncated")] * 3


def test_a_stream_of_responses_is_recorded_before_its_end(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    made = RequestRecord.experiences

    def slow(record: RequestRecord) -> list[Experience]:
        time.sleep(0.5)
        return made(record)

    monkeypatch.setattr(RequestRecord, "experiences", slow)
    kept = {event.type: len(session.model._history) for event in session.openai.responses.create(
        model="tiny", input="c=", stream=True)}
    [(last, count)] = list(kept.items())[-1:]
    assert last in ("response.completed", "response.incomplete")
    assert count == 1


def test_what_is_refused_is_refused_in_vllms_words_and_kept_by_nobody(session: Session) -> None:
    told = session.post("/v1/completions", {"prompt": "a" * 4000}, status=400)
    assert "maximum context length" in told["error"]["message"]
    assert "temperature" in session.post("/v1/completions", {"prompt": "a", "temperature": -1}, 400)["error"]["message"]
    unknown = session.post("/v1/chat/completions", {"model": "other", "messages": HELLO}, 404)
    assert "other" in unknown["error"]["message"]
    for path in ("/pause", "/collective_rpc", "/inference/v1/abort_requests", "/scale_elastic_ep"):
        session.post(path, {}, status=404)
    beams = {"prompt": "a", "use_beam_search": True, "n": 2}
    assert session.post("/v1/completions", beams, 400)["error"]["param"] == "use_beam_search"
    assert session.kept() == []
    assert session.post("/tokenize", {"prompt": "ab"})["tokens"] == session.live.engine.tokenizer.encode("ab")
    models = httpx.get(f"{session.root}/v1/models", headers={"x-api-key": "secret"}).json()
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", session.live.engine.max_model_len)


@pytest.mark.parametrize("stream", [False, True])
def test_with_its_run_a_request_ends_in_the_engine(
    live: Live, server: EngineServer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(live, server)
    asked_of_it: list[Generation] = []
    begin = RequestRecord.begin

    def begun(*args: Any) -> Generation:
        asked_of_it.append(begin(*args))
        return asked_of_it[-1]

    monkeypatch.setattr(RequestRecord, "begin", begun)
    asked = {"model": "tiny", "prompt": "c=", "max_tokens": 250, "ignore_eos": True, "stream": stream}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(
            httpx.post, f"{session.root}/v1/completions", json=asked, headers={"x-api-key": "secret"}, timeout=120)
        wait_until(lambda: unfinished(live) == 1, "the request in the engine")
        server.forget(session.root.rpartition("/")[2])
        wait_until(lambda: unfinished(live) == 0, "its end in the engine")
        told = answer.result(60)
    assert "its run is gone" in told.text
    assert stream or told.status_code == 503
    assert session.kept() == []
    assert [generation.completions for generation in asked_of_it] == [None], "it did not go on to its end"


def test_an_engine_that_is_dead_is_told_and_to_whoever_has_to_replace_it(live: Live) -> None:
    told: list[str] = []
    with serving(live) as server:
        server.on_dead = told.append
        session = Session(live, server)
        session.openai.completions.create(model="tiny", prompt="c=")
        live.engine._why_dead = "its process ended"
        try:
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HELLO}),
                               ("/v1/completions", {"prompt": "a", "stream": True})):
                error = session.post(path, body, 503)["error"]
                assert (error["code"], "its process ended" in error["message"]) == ("engine_failed", True)
        finally:
            live.engine._why_dead = None
    assert len(told) == 3
    assert session.model.engine_error is not None
    assert session.model.engine_error.details["dead"]


def test_an_option_that_vllm_serve_does_not_know_is_told(live: Live) -> None:
    for wrong, said in ((({"tool_parser": "hermes"}), "knows no tool_parser"), ({"port": 1}, "server_args.port")):
        live.engine.config = replace(before := live.engine.config, server_args=wrong)
        try:
            with pytest.raises(ConfigError, match=said):
                live.run(live.engine.application("tiny", REQUEST.get))
        finally:
            live.engine.config = before

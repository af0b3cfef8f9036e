"""I1: known clients, unmodified and pinned, against the proxy of mode `serve` over a real vLLM; a torch model agrees.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.client_packages import LETTERS, OPENENV, TRL, ask, environment, installed
from tests.helpers.engines import largest_difference
from tests.helpers.of_the_day import REAL, by_turns
from tests.helpers.serving import VLLMServed, answers, client_of, recorded
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.serve.proxy import Proxy

pytestmark = [
    by_turns("clients", REAL), pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore"),
]

HERE = Path(__file__).parent
TOLERANCE = 1e-3
CHAT: Any = [{"role": "user", "content": "c="}]
SCHEMA: Any = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}

Tokens = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of a prompt, and of its answer."""


class Served:
    """A system that serves, its proxy, and what of its log is new."""

    def __init__(self, log: RolloutClient, proxy: Proxy, model: Path) -> None:
        self.log, self.proxy, self.model = log, proxy, model
        self.root = proxy.base_url.removesuffix("/v1")
        self.openai = client_of(proxy)
        self.seen = set(answers(log))

    def new(self) -> dict[str, list[Experience]]:
        """The answers that were recorded since this was last asked, by message id."""
        found = {message: recorded(self.log, message) for message in answers(self.log) if message not in self.seen}
        self.seen |= set(found)
        return found

    def sampled(self, experiences: list[Experience]) -> None:
        """These tokens have the logprobs in torch that were recorded: the engine sampled them, and no others."""
        from examples.grpo.trainer import GRPOTrainer

        assert largest_difference(GRPOTrainer(str(self.model)), experiences) < TOLERANCE


def tokens(experience: Experience) -> Tokens:
    ids = experience.tokens.tolist()
    return tuple(ids[: experience.prompt_length]), tuple(ids[experience.prompt_length :])


def logprobs(experience: Experience) -> list[float]:
    assert experience.logprobs is not None
    return list(experience.logprobs.tolist())


@pytest.fixture
def served(vllm_served: VLLMServed) -> Served:
    return Served(*vllm_served)


# --- openai -----------------------------------------------------------------------------------------------------------
def test_i1_openai_chats_completes_and_responds_whole_and_streamed(served: Served) -> None:
    ask: Any = {"model": str(served.model), "max_tokens": 8}
    with_ids: Any = {"extra_body": {"return_token_ids": True}}
    chat = served.openai.chat.completions.create(messages=CHAT, n=2, logprobs=True, top_logprobs=2, **ask, **with_ids)
    batch = served.openai.completions.create(prompt=[[5, 6, 7], [8, 9]], n=2, logprobs=1, **ask, **with_ids)
    said = served.openai.responses.create(model=str(served.model), input="c=", max_output_tokens=8)
    chunks = list(served.openai.chat.completions.create(messages=CHAT, stream=True, logprobs=True, **ask, **with_ids))
    events = list(served.openai.responses.create(
        model=str(served.model), input="c=", max_output_tokens=8, stream=True))
    parts = list(served.openai.completions.create(prompt=[[5, 6], [7]], stream=True, **ask, **with_ids))
    done = events[-1].response  # type: ignore[union-attr]
    found = served.new()
    assert set(found) == {chat.id, batch.id, said.id, chunks[0].id, done.id, parts[0].id}

    extra = chat.model_extra or {}
    assert [tokens(e) for e in found[chat.id]] == [
        (tuple(extra["prompt_token_ids"]), tuple(c.token_ids)) for c in chat.choices]
    for choice, e in zip(chat.choices, found[chat.id], strict=True):
        assert choice.logprobs is not None
        assert [c.logprob for c in choice.logprobs.content or []] == pytest.approx(logprobs(e))
        assert {len(c.top_logprobs) for c in choice.logprobs.content or []} <= {2, 3}
    assert [tokens(e) for e in found[batch.id]] == [
        (tuple(c.prompt_token_ids), tuple(c.token_ids)) for c in batch.choices]
    assert [tokens(e)[0] for e in found[batch.id]] == [(5, 6, 7)] * 2 + [(8, 9)] * 2
    for text, e in zip(batch.choices, found[batch.id], strict=True):
        assert text.logprobs is not None
        assert text.logprobs.token_logprobs == pytest.approx(logprobs(e))
    [e] = found[said.id]
    assert said.output_text == e.response_text
    [e] = found[done.id]
    assert done.output_text == e.response_text == "".join(
        x.delta for x in events if x.type == "response.output_text.delta")
    [e] = found[chunks[0].id]
    choices = [c.choices[0] for c in chunks if c.choices]
    assert tuple(t for c in choices for t in getattr(c, "token_ids", None) or []) == tokens(e)[1]
    told = [x.logprob for c in choices if c.logprobs for x in c.logprobs.content or []]
    assert told == pytest.approx(logprobs(e))
    for i, e in enumerate(found[parts[0].id]):
        mine = [c for part in parts for c in part.choices if c.index == i]
        assert tuple(t for c in mine for t in c.token_ids or []) == tokens(e)[1]
    served.sampled([e for group in found.values() for e in group])


def test_i1_openai_calls_tools_and_binds_answers_to_a_schema(served: Served) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.model)
    spaces = {str(tokenizer.encode(space)[0]): -100 for space in " \t\n\r"}  # JSON has no end else
    ask: Any = {"model": str(served.model), "messages": CHAT, "max_tokens": 60, "seed": 1, "logit_bias": spaces}
    forced: Any = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    called = served.openai.chat.completions.create(**ask, **forced)
    [call] = called.choices[0].message.tool_calls or []
    streamed = list(served.openai.chat.completions.create(**ask, **forced, stream=True))
    pieces = [t for c in streamed if c.choices for t in c.choices[0].delta.tool_calls or []]
    free = served.openai.chat.completions.create(**{**ask, "max_tokens": 4}, tools=[TOOL], tool_choice="auto")
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    bound = served.openai.chat.completions.create(**ask, response_format=schema)
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    said = served.openai.responses.create(
        model=str(served.model), input="c=", max_output_tokens=60, text=text, extra_body={"logit_bias": spaces})
    arguments = call.function.arguments
    assert call.function.name == "add"
    assert 0 <= json.loads(arguments)["a"] <= 9
    assert [p.function.name for p in pieces if p.function and p.function.name] == ["add"]
    assert json.loads("".join(p.function.arguments or "" for p in pieces if p.function)) == json.loads(arguments)
    found = served.new()
    assert set(found) == {called.id, streamed[0].id, free.id, bound.id, said.id}
    assert found[called.id][0].tools == [TOOL]
    assert tokens(found[called.id][0]) == tokens(found[streamed[0].id][0])  # one seed
    for message, told in ((bound.id, bound.choices[0].message.content), (said.id, said.output_text)):
        assert set(json.loads(told or "")) == {"a"}
        assert json.loads(found[message][0].response_text or "") == json.loads(told or "")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        served.openai.completions.create(model=str(served.model), prompt="a" * 4000)


# --- TRL, verifiers, OpenEnv ------------------------------------------------------------------------------------------
def test_i1_trl_generates_and_chats(served: Served) -> None:
    got = ask(HERE / "ask_trl.py", installed(*TRL, beside=True), root=served.root)
    found = served.new()
    assert len(found) == 1 + 1 + 4 + 1
    by_tokens = {tokens(e): e for group in found.values() for e in group}
    for name, n in (("ids", 2), ("texts", 1), ("chats", 2), ("bound", 1)):
        prompts, responses = got[name]["prompt_ids"], got[name]["completion_ids"]
        assert len(responses) == n * len(prompts) > 0
        for i, response in enumerate(responses):
            e = by_tokens[tuple(prompts[i // n]), tuple(response)]
            if name == "bound":
                assert got[name]["logprobs"] is None
                assert re.fullmatch("[0-9]{4}", e.response_text or "")
                continue
            rows = zip(got[name]["logprob_token_ids"][i], got[name]["logprobs"][i], response, strict=True)
            assert [values[ids.index(token)] for ids, values, token in rows] == pytest.approx(logprobs(e))
    assert got["ids"]["prompt_ids"] == [[5, 6, 7], [8, 9], [10]]
    plain = [by_tokens[tuple(got[name]["prompt_ids"][i // 2]), tuple(ids)]
             for name in ("ids", "chats") for i, ids in enumerate(got[name]["completion_ids"])]
    served.sampled(plain)


def test_i1_verifiers_generates_from_token_ids(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_ES_ENVIRONMENTS", str(tmp_path))
    python = {"PYTHON": str(environment(LETTERS).python)}
    got = ask(HERE / "ask_verifiers.py", python, base_url=served.proxy.base_url,
              key=served.proxy.api_key, model=str(served.model), tokenizer=str(served.model))
    found = served.new()
    assert len(got) == 8
    assert {answer["id"] for answer in got} == set(found)
    for answer in got:
        [e] = found[answer["id"]]
        assert tokens(e) == (tuple(answer["prompt"]), tuple(answer["response"]))
        assert answer["logprobs"] == pytest.approx(logprobs(e))
    served.sampled([e for group in found.values() for e in group])


def test_i1_openenv_captures_at_token_level(served: Served) -> None:
    got = ask(HERE / "ask_openenv.py", installed(OPENENV), base_url=served.proxy.base_url,
              key=served.proxy.api_key, model=str(served.model))
    assert got["report"]["capture_level"] == "tokens"
    assert got["report"]["logprobs_mode"] == "processed"
    assert got["report"]["tool_support"] in ("ok", "no-tool-call")  # a random model calls nothing
    assert got["report"]["param_fixes"] == got["fixes"] == []
    assert len(got["turns"]) == 3
    assert got["trained"] == 3
    found = [e for group in served.new().values() for e in group]
    counted = Counter(map(tokens, found))
    for prompt, response, values in got["turns"]:
        assert counted[tuple(prompt), tuple(response)] >= 1
        assert any(tokens(e) == (tuple(prompt), tuple(response)) and logprobs(e) == pytest.approx(values)
                   for e in found)

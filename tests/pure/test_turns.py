"""Conversations as the ids that were sampled: prompts go on from them, experiences are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.recorded_engine import Marked, Recorder
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.testing import ByteTokenizer


class Merging(Marked):
    """A letter twice is one token (1000 + its code) where a text is tokenized, not where it is sampled."""

    def encode(self, text: str) -> list[int]:
        ids, i = list[int](), 0
        while i < len(text):
            double = text[i : i + 2] == text[i] * 2
            ids.append(1000 + ord(text[i]) if double else ord(text[i]))
            i += 2 if double else 1
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(t - 1000) * 2 if t >= 1000 else chr(t) for t in token_ids)


class Forgetful(Merging):
    """Drops what is in brackets from an assistant's turn once others follow, as templates do with reasoning."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        shown = [
            {**m, "content": m["content"].partition(")")[2] or m["content"]}
            if m["role"] == "assistant" and i + 1 < len(messages) else m
            for i, m in enumerate(messages)
        ]
        return super().apply_chat_template(shown, **kwargs)


class Sampler(Recorder):
    """Writes the texts that it is given, a letter a token, and the end of the turn unless it is cut."""

    def __init__(self, texts: Sequence[str], tokenizer: ByteTokenizer, cut: bool = False, **script: Any) -> None:
        super().__init__(**script)
        self.tokenizer, self.texts, self.cut = tokenizer, list(texts), cut
        self.logprobs_asked = 0

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        assert isinstance(prompt, list)
        self.asked.append((prompt, sampling))
        text = self.texts.pop(0)
        ids = [ord(c) for c in text] + ([] if self.cut else [ord("$")])
        return [
            Completion(
                prompt_token_ids=prompt, token_ids=ids, logprobs=[-0.5 - i for i in range(len(ids))], text=text,
                finish_reason="length" if self.cut else "stop",
            )
            for _ in range(sampling.n)
        ]

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        self.logprobs_asked += 1
        return await super().logprobs(token_ids, temperature)


async def talk(model: Model, asks: Sequence[str], **sampling: Any) -> list[dict[str, Any]]:
    """Ask one after the other, each with all that was said before."""
    messages: list[dict[str, Any]] = []
    for ask in asks:
        messages.append({"role": "user", "content": ask})
        [answer, *_] = await model.chat_async(messages, **sampling)
        messages.append({"role": "assistant", "content": answer.response_text})
    return messages


WORDS = st.text("ab", min_size=1, max_size=6)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5), st.booleans())
async def test_every_token_of_a_conversation_was_rendered_or_sampled(said: list[tuple[str, str]], cut: bool) -> None:
    tokenizer = Merging()
    engine = Sampler([answer for _, answer in said], tokenizer, cut)
    model = Model(engine)
    messages = await talk(model, [ask for ask, _ in said])
    for (prompt, _), (before, _) in zip(engine.asked[1:], engine.asked, strict=False):
        assert prompt[: len(before)] == before, "what the model had read is read again otherwise"
    e = await model.experience_from_messages_async(messages)
    assert engine.logprobs_asked == 0
    assert model.usage.forks == 0
    expected, mask, logprobs = [], [], []
    for i, (ask, answer) in enumerate(said):
        read = tokenizer.encode(f"{'' if i == 0 else '$' * cut + chr(10)}U:{ask}|A:")
        sampled = [ord(c) for c in answer] + [ord("$")] * (not cut)
        expected += read + sampled
        mask += [False] * len(read) + [True] * len(sampled)
        logprobs += [0.0] * len(read) + [-0.5 - n for n in range(len(sampled))]
    assert e.tokens.tolist() == expected
    assert e.prompt_length == mask.index(True)
    assert e.action_mask is not None
    assert e.action_mask.tolist() == mask[e.prompt_length :]
    assert e.logprobs is not None
    np.testing.assert_array_equal(e.logprobs, np.array(logprobs[e.prompt_length :], np.float32))
    assert e.messages == messages
    assert "untrained_turns" not in e.info
    assert all(v == 0 and e.action_mask[a:b].all() for v, a, b in e.info["version_spans"])
    assert sum(b - a for _, a, b in e.info["version_spans"]) == e.action_mask.sum()


async def test_a_template_that_drops_reasoning_forks_and_the_forks_are_counted() -> None:
    engine = Sampler(["(why)aa", "(so)bb", "cc"], Forgetful())
    model = Model(engine)
    messages = await talk(model, ["a", "b", "c"])
    assert model.usage.forks == 2
    assert [Forgetful().decode(prompt) for prompt, _ in engine.asked] == [
        "U:a|A:", "U:a|A:aa$\nU:b|A:", "U:a|A:aa$\nU:b|A:bb$\nU:c|A:",
    ]
    e = await model.experience_from_messages_async(messages)
    assert e.response_text == "cc$", "the last answer alone was sampled in the sequence that it is in"
    assert e.info["untrained_turns"] == [1, 3]
    assert e.action_mask is not None
    assert e.action_mask.all()
    assert engine.logprobs_asked == 0


async def test_answers_that_were_changed_or_written_by_others_are_tokenized_anew() -> None:
    engine = Sampler(["aa", "bb"], Merging())
    model = Model(engine)
    messages = await talk(model, ["a", "b"])
    changed = [*messages[:-1], {"role": "assistant", "content": "bbb"}]
    longer = [*messages, {"role": "user", "content": "c"}, {"role": "assistant", "content": "c"}]
    for given_messages in (changed, longer):
        e = await model.experience_from_messages_async(given_messages)
        assert e.tokens.tolist() == Merging().encode(Merging().decode(e.tokens.tolist()))
    assert engine.logprobs_asked == 2
    assert model.usage.forks == 0


async def test_what_follows_the_last_answer_is_left_out() -> None:
    model = Model(Sampler(["aa"], Merging()))
    messages = await talk(model, ["a"])
    e = await model.experience_from_messages_async([*messages, {"role": "user", "content": "bye"}])
    assert e.response_text == "aa$"


async def test_each_of_several_answers_can_be_gone_on_from() -> None:
    engine = Sampler(["aa", "bb"], Merging())
    model = Model(engine)
    await talk(model, ["a", "b"], n=2)
    assert engine.asked[1][0] == [*engine.asked[0][0], *map(ord, "aa$\nU:b|A:")]
    assert model.usage.forks == 0


@pytest.mark.parametrize(("temperature", "asked"), [(None, 0), (1.0, 0), (0.5, 1)])
async def test_logprobs_at_another_temperature_are_asked_for_the_very_ids(
    temperature: float | None, asked: int
) -> None:
    engine = Sampler(["aa"], Merging())
    model = Model(engine)
    messages = await talk(model, ["a"])
    e = await model.experience_from_messages_async(messages, temperature=temperature)
    assert engine.logprobs_asked == asked
    assert e.tokens.tolist()[-3:] == [ord("a"), ord("a"), ord("$")]
    assert e.logprobs is not None
    assert len(e.logprobs) == 3


async def test_a_conversation_that_fills_the_context_says_so() -> None:
    engine = Sampler(["aa"], Merging(), cut=True)
    model = Model(engine)
    messages = await talk(model, ["a"])
    assert (await model.experience_from_messages_async(messages)).truncate_status is None
    engine.max_model_len = len(engine.asked[0][0]) + 2
    assert (await model.experience_from_messages_async(messages)).truncate_status == "response_truncated"


async def test_what_was_sampled_stays_where_the_whole_text_would_merge_over_its_end() -> None:
    engine = Sampler(["a$", "bb"], Merging(), cut=True)
    model = Model(engine)
    await talk(model, ["a", "b"])
    assert engine.asked[1][0] == [*engine.asked[0][0], *map(ord, "a$"), *Merging().encode("$\nU:b|A:")]
    assert Merging().encode("a$$") == [ord("a"), 1000 + ord("$")], "else the text has one token there"
    assert model.usage.forks == 0


async def test_an_answer_that_somebody_went_on_with_is_not_gone_on_from() -> None:
    model = Model(Sampler(["aa", "bb"], Merging()))
    [answer] = await model.chat_async([{"role": "user", "content": "a"}])
    changed = {"role": "assistant", "content": f"{answer.response_text}b"}
    [second] = await model.chat_async([{"role": "user", "content": "a"}, changed, {"role": "user", "content": "b"}])
    assert second.tokens.tolist()[: second.prompt_length] == Merging().encode("U:a|A:aab$\nU:b|A:")
    assert model.usage.forks == 1


class Special(Merging):
    """`!` is a special token: it is in no answer's text."""


class SpecialSampler(Sampler):
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        return [replace(c, text=c.text.replace("!", "")) for c in await super().generate(prompt, sampling)]


@pytest.mark.parametrize("cut", [False, True])
async def test_a_special_token_that_was_sampled_stays_though_no_message_has_it(cut: bool) -> None:
    engine = SpecialSampler(["a!b", "!!", "cc"], Special(), cut)
    model = Model(engine)
    messages = await talk(model, ["a", "b", "c"])
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["ab", "", "cc"]
    assert Special().decode(engine.asked[2][0]) == "U:a|A:a!b$\nU:b|A:!!$\nU:c|A:"
    assert model.usage.forks == 0
    e = await model.experience_from_messages_async(messages)
    assert e.response_text == "a!b$\nU:b|A:!!$\nU:c|A:cc" + "$" * (not cut)

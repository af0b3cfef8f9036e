"""Conversations as the ids that were sampled: prompts go on from them, experiences are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.sampler import Merging, Sampler, talk
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.conversation.history import Usage
from trinity_es.actors.rollout.conversation.turns import Marks
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.result import divide_usage, with_usage
from trinity_es.events.errors import WorkflowError
from trinity_es.events.vocabulary import RunResult


class Forgetful(Merging):
    """Drops what is in brackets from an assistant's turn once others follow, as templates do with reasoning."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        shown = [
            {**m, "content": m["content"].partition(")")[2] or m["content"]}
            if m["role"] == "assistant" and i + 1 < len(messages) else m
            for i, m in enumerate(messages)
        ]
        return super().apply_chat_template(shown, **kwargs)


async def talked(
    texts: list[str], asks: str, tokenizer: Merging | None = None, cut: bool = False
) -> tuple[Sampler, Model, list[dict[str, Any]]]:
    """A conversation in which a letter was asked at a time, of an engine with these answers."""
    engine = Sampler(texts, tokenizer or Merging(), cut)
    model = Model(engine)
    return engine, model, await talk(model, list(asks))


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
    assert e.action_mask.tolist() == mask[e.prompt_length :]
    assert e.logprobs is not None
    np.testing.assert_array_equal(e.logprobs, np.array(logprobs[e.prompt_length :], np.float32))
    assert e.messages == messages
    assert "untrained_turns" not in e.info
    assert all(v == 0 and e.action_mask[a:b].all() for v, a, b in e.info["version_spans"])
    assert sum(b - a for _, a, b in e.info["version_spans"]) == e.action_mask.sum()


async def test_a_template_that_drops_reasoning_forks_and_the_forks_are_counted() -> None:
    engine, model, messages = await talked(["(why)aa", "(so)bb", "cc"], "abc", Forgetful())
    assert model.usage.forks == 2
    assert [Forgetful().decode(prompt) for prompt, _ in engine.asked] == [
        "U:a|A:", "U:a|A:aa$\nU:b|A:", "U:a|A:aa$\nU:b|A:bb$\nU:c|A:",
    ]
    e = await model.experience_from_messages_async(messages)
    assert e.response_text == "cc$", "the last answer alone was sampled in the sequence that it is in"
    assert e.info["untrained_turns"] == [1, 3]
    assert e.action_mask.all()
    assert engine.logprobs_asked == 0


async def test_answers_that_were_changed_or_written_by_others_are_not_learned_from() -> None:
    engine, model, messages = await talked(["aa", "bb"], "ab")
    changed = [*messages[:-1], {"role": "assistant", "content": "bbb"}]
    longer = [*messages, {"role": "user", "content": "c"}, {"role": "assistant", "content": "c"}]
    for said, untrained, sampled in ((changed, [3], "aa$"), (longer, [5], "aa$bb$")):
        e = await model.experience_from_messages_async(said)
        assert e.info["untrained_turns"] == untrained
        assert e.messages == said
        assert e.action_mask is not None
        assert "".join(map(chr, e.tokens[e.prompt_length :][e.action_mask])) == sampled
    assert engine.logprobs_asked == 0
    assert model.usage.forks == 0


async def test_a_conversation_with_no_answer_as_it_was_sampled_is_refused_unless_its_text_is_wanted() -> None:
    engine, model, messages = await talked(["aa", "bb"], "ab")
    edited = [messages[0], {"role": "assistant", "content": "mine"}, *messages[2:]]
    with pytest.raises(WorkflowError, match=r"traced to the tokens that this run sampled.*as_text=True"):
        await model.experience_from_messages_async(edited)
    e = await model.experience_from_messages_async(edited, as_text=True)
    assert e.tokens.tolist() == Merging().encode(Merging().decode(e.tokens.tolist()))
    assert engine.logprobs_asked == 1


class Offering(Merging):
    """Writes the names of tools before all else, as templates do."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        names = ",".join(tool["name"] for tool in kwargs.pop("tools", None) or ())
        return super().apply_chat_template([{"role": "system", "content": names}, *messages], **kwargs)


@pytest.mark.parametrize("named", [True, False])
async def test_a_conversation_with_tools_is_found_whether_or_not_they_are_named_again(named: bool) -> None:
    engine = Sampler(["aa", "bb"], Offering())
    model, tools = Model(engine), [{"name": "add"}]
    messages: list[dict[str, Any]] = []
    for ask, offered in (("a", [{"name": "sub"}]), ("b", tools)):
        messages.append({"role": "user", "content": ask})
        [answer] = await model.chat_async(messages, tools=offered)
        messages.append({"role": "assistant", "content": answer.response_text})
    e = await model.experience_from_messages_async(messages, tools=tools if named else None)
    assert e.tokens.tolist() == [*engine.asked[1][0], *map(ord, "bb$")]
    assert e.tools == tools
    assert e.info["untrained_turns"] == [1], "its prompt had other tools"
    assert engine.logprobs_asked == 0


async def test_an_answer_behind_a_prompt_that_it_was_not_sampled_for_is_refused() -> None:
    engine, model, [asked, answer] = await talked(["aa"], "a")
    with pytest.raises(WorkflowError, match="tokens that this run sampled"):
        await model.experience_from_messages_async([{**asked, "content": "another"}, answer])
    assert engine.logprobs_asked == 0


async def test_a_conversation_that_others_had_is_tokenized_anew() -> None:
    engine, model, _ = await talked(["aa"], "a")
    others = [{"role": "user", "content": "other"}, {"role": "assistant", "content": "bb"}]
    e = await model.experience_from_messages_async(others)
    assert e.tokens.tolist() == Merging().encode(Merging().decode(e.tokens.tolist()))
    assert engine.logprobs_asked == 1


async def test_what_follows_the_last_answer_is_left_out() -> None:
    _, model, messages = await talked(["aa"], "a")
    e = await model.experience_from_messages_async([*messages, {"role": "user", "content": "bye"}])
    assert e.response_text == "aa$"


async def test_each_of_several_answers_can_be_gone_on_from() -> None:
    engine = Sampler(["aa", "bb"], Merging())
    model = Model(engine)
    await talk(model, ["a", "b"], n=2)
    assert engine.asked[1][0] == [*engine.asked[0][0], *map(ord, "aa$\nU:b|A:")]
    assert model.usage.forks == 0


@pytest.mark.parametrize(("temperature", "asked"), [(None, 0), (1.0, 0), (0.5, 1)])
async def test_logprobs_at_other_temperatures_are_asked_for_the_ids(temperature: float | None, asked: int) -> None:
    engine, model, messages = await talked(["aa"], "a")
    e = await model.experience_from_messages_async(messages, temperature=temperature)
    assert engine.logprobs_asked == asked
    assert e.tokens.tolist()[-3:] == [ord("a"), ord("a"), ord("$")]
    assert len(e.logprobs) == 3


@pytest.mark.parametrize(("cut", "status"), [(True, "response_truncated"), (False, None)])
async def test_a_conversation_that_fills_the_context_says_so_unless_it_ended(cut: bool, status: str | None) -> None:
    engine, model, messages = await talked(["aa"], "a", cut=cut)
    assert (await model.experience_from_messages_async(messages)).truncate_status is None
    engine.max_model_len = len(engine.asked[0][0]) + 2 + (not cut)
    assert (await model.experience_from_messages_async(messages)).truncate_status == status


async def test_what_was_sampled_stays_where_the_whole_text_would_merge_over_its_end() -> None:
    engine, model, _ = await talked(["a$", "bb"], "ab", cut=True)
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


class Spaced(Merging):
    """Renders given answers with a space around them, and ends a whole conversation with one more mark."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        shown = [m if m["role"] == "user" else {**m, "content": f" {m['content'].strip()} "} for m in messages]
        text = super().apply_chat_template(shown, **{**kwargs, "tokenize": False})
        text += "" if kwargs.get("add_generation_prompt") else "%"
        return self.encode(text) if kwargs.get("tokenize", True) else text


async def test_what_a_template_writes_around_answers_is_found_by_asking_it() -> None:
    _, model, messages = await talked(["aa", "bb"], "ab", Spaced())
    marks = model.marks()
    assert (marks.opens, marks.closes, marks.ends) == (" ", " $\n", " $\n%")
    assert model.usage.forks == 0
    e = await model.experience_from_messages_async(messages)
    assert e.response_text == "aa$\nU:b|A:bb$"


def test_a_template_that_refuses_to_be_asked_leaves_marks_unknown() -> None:
    class Refusing(Merging):
        def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            raise ValueError("a system prompt is needed")

    assert Model(Sampler([], Refusing())).marks() == Marks()


class SpecialSampler(Sampler):
    """`!` is a special token: it is in no answer's text."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        return [replace(c, text=c.text.replace("!", "")) for c in await super().generate(prompt, sampling)]


@pytest.mark.parametrize("cut", [False, True])
async def test_a_special_token_that_was_sampled_stays_though_no_message_has_it(cut: bool) -> None:
    engine = SpecialSampler(["a!b", "!!", "cc"], Merging(), cut)
    model = Model(engine)
    messages = await talk(model, ["a", "b", "c"])
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["ab", "", "cc"]
    assert Merging().decode(engine.asked[2][0]) == "U:a|A:a!b$\nU:b|A:!!$\nU:c|A:"
    assert model.usage.forks == 0
    e = await model.experience_from_messages_async(messages)
    assert e.response_text == "a!b$\nU:b|A:!!$\nU:c|A:cc" + "$" * (not cut)


def calling(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "w", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def numbers(e: Any) -> list[tuple[int, float]]:
    """Return the tokens that are learned from, and their logprobs."""
    learned = e.action_mask
    return list(zip(e.tokens[e.prompt_length :][learned].tolist(), e.logprobs[learned].tolist(), strict=True))


async def test_p46_a_conversation_is_one_experience_and_unrelated_prompts_are_one_each() -> None:
    _, model, messages = await talked(["aa", "xx", "bb", "aa"], "a")
    [other] = await model.chat_async([{"role": "user", "content": "x"}])
    messages.append({"role": "user", "content": "b"})
    [last] = await model.chat_async(messages)
    [same] = await model.chat_async([{"role": "user", "content": "a"}])
    last.reward = 0.5
    found = model.extract_experience_from_history()
    assert [e.eid.step for e in found] == [1, 2, 3]
    assert model.usage.forks == 0
    assert (found[0], found[2]) == (other, same)
    whole = found[1]
    assert whole.response_text == "aa$\nU:b|A:bb$"
    assert (whole.reward, whole.info["sampling"]["n"], whole.messages) == (0.5, 1, last.messages)
    assert [chr(t) for t, _ in numbers(whole)] == list("aa$bb$")
    assert [lp for _, lp in numbers(whole)] == [-0.5, -1.5, -2.5] * 2
    assert whole.info["version_spans"] == [[0, 0, 3], [0, len(whole.action_mask) - 3, len(whole.action_mask)]]
    assert model.extract_experience_from_history() == []


async def test_p46_each_answer_is_an_experience_of_its_own_where_that_is_asked_for() -> None:
    _, model, _ = await talked(["aa", "bb"], "ab")
    found = model.extract_experience_from_history(clear_history=False, per_request=True)
    assert [e.response_text for e in found] == ["aa", "bb"]
    [whole] = model.extract_experience_from_history()
    assert whole.response_text == "aa$\nU:b|A:bb$"


async def test_p46_what_was_given_out_is_not_learned_from_again() -> None:
    _, model, messages = await talked(["aa", "bb"], "a")
    [first] = model.extract_experience_from_history()
    await model.chat_async([*messages, {"role": "user", "content": "b"}])
    [second] = model.extract_experience_from_history()
    assert (first.response_text, second.response_text) == ("aa", "bb")
    assert second.prompt_text == "U:a|A:aa$\nU:b|A:"


async def test_p46_an_answer_with_a_reward_of_its_own_stays_one() -> None:
    model = Model(Sampler(["aa", "bb", "cc"], Merging()))
    messages: list[dict[str, Any]] = []
    for ask, reward in (("a", None), ("b", 0.5), ("c", None)):
        messages.append({"role": "user", "content": ask})
        [answer] = await model.chat_async(messages)
        answer.reward = reward
        messages.append({"role": "assistant", "content": answer.response_text})
    two, one = model.extract_experience_from_history()
    assert (two.reward, two.response_text) == (0.5, "aa$\nU:b|A:bb$")
    assert (one.reward, one.response_text) == (None, "cc")


async def test_an_answer_that_two_conversations_go_on_from_is_learned_from_once() -> None:
    _, model, messages = await talked(["aa", "bb", "cc"], "a")
    for ask in ("b", "c"):
        await model.chat_async([*messages, {"role": "user", "content": ask}])
    first, second = model.extract_experience_from_history()
    assert [chr(t) for t, _ in numbers(first)] == list("aa$bb$")
    assert second.response_text == "cc"
    assert second.prompt_text == "U:a|A:aa$\nU:c|A:"


async def test_prompts_that_begin_with_the_ids_of_an_answer_go_on_from_it() -> None:
    model = Model(Sampler(["aa", "bb"], Merging()))
    [first] = await model.generate_async([1, 2, 3])
    await model.generate_async([*first.tokens.tolist(), 7])
    [whole] = model.extract_experience_from_history()
    assert whole.tokens.tolist() == [1, 2, 3, *map(ord, "aa$"), 7, *map(ord, "bb$")]
    assert whole.action_mask.tolist() == [True] * 3 + [False] + [True] * 3


@pytest.mark.parametrize("said", ["aa", "so</think>\n\naa"])
async def test_a_client_s_own_form_of_an_answer_is_known_again(said: str) -> None:
    engine = Sampler([said], Merging())
    model = Model(engine)
    asked = [{"role": "user", "content": "a"}]
    await model.chat_async(asked)
    parsed = {"role": "assistant", "content": "aa", "reasoning_content": "so"}
    e = await model.experience_from_messages_async([*asked, parsed])
    assert e.tokens.tolist() == [*map(ord, "U:a|A:"), *map(ord, f"{said}$")]
    assert engine.logprobs_asked == 0


@pytest.mark.parametrize("city", ["b", "c"])
async def test_a_tool_call_is_known_again_by_what_it_says(city: str) -> None:
    engine = Sampler(['<call>{"name":"w", "arguments":{"n":1, "city":"b"}}'], Merging())
    model = Model(engine)
    asked = [{"role": "user", "content": "a"}]
    await model.chat_async(asked)
    said = [*asked, calling(f'{{"city": "{city}", "n": 1}}')]
    if city == "c":
        with pytest.raises(WorkflowError, match="tokens that this run sampled"):
            await model.experience_from_messages_async(said)
        return
    e = await model.experience_from_messages_async(said)
    assert "call" in e.response_text
    assert engine.logprobs_asked == 0


class Several(Sampler):
    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        each = [super(Several, self).generate(prompt, replace(sampling, n=1)) for _ in range(sampling.n)]
        return [completion for one in each for completion in await one]


async def of_several(texts: list[str]) -> tuple[Model, list[dict[str, Any]]]:
    model, asked = Model(Several(texts, Merging())), [{"role": "user", "content": "a"}]
    await model.chat_async(asked, n=len(texts))
    return model, asked


@pytest.mark.parametrize("pair", [
    ('{"city":"b"}', '{"city":"b", "day":"c"}'), ('{"x":"c", "y":"b"}', '{"x":"b", "y":"c"}'), ("{}", '{"n":1}'),
])
async def test_of_several_tool_calls_each_conversation_has_its_own_tokens(pair: tuple[str, str]) -> None:
    texts = [f'<call>{{"name":"w", "arguments":{arguments}}}' for arguments in pair]
    model, asked = await of_several(texts)
    for text, arguments in zip(texts, pair, strict=True):
        e = await model.experience_from_messages_async([*asked, calling(arguments)])
        assert e.response_text == f"{text}$"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_answers_that_differ_in_reasoning_alone_are_told_apart_by_it_or_not_at_all(name: str) -> None:
    model, asked = await of_several(texts := ["<think>so</think>4", "<think>no</think>4"])
    with pytest.raises(WorkflowError, match="reasoning_content"):
        await model.experience_from_messages_async([*asked, {"role": "assistant", "content": "4"}])
    for text, thought in zip(texts, ("so", "no"), strict=True):
        for message in ({"content": text}, {"content": "4", name: thought}):
            e = await model.experience_from_messages_async([*asked, {"role": "assistant", **message}])
            assert e.response_text == f"{text}$"


async def test_equal_answers_are_given_out_once_each() -> None:
    model, asked = await of_several(["aa", "b", "aa"])
    first, second = [turn for turn in model.turns if turn.text == "aa"]
    for turn in (first, second):
        assert not turn.has_experience
        await model.experience_from_messages_async([*asked, {"role": "assistant", "content": "aa"}])
        assert turn.has_experience


@pytest.mark.parametrize("arguments", ['{"x":"c", "y":"b"}', '{"x":"b"}', "{}", '{"x":"b", "y":"cc"}'])
async def test_a_tool_call_that_somebody_changed_is_not_learned_from(arguments: str) -> None:
    model, asked = await of_several(['<call>{"name":"w", "arguments":{"x":"b", "y":"c"}}'])
    with pytest.raises(WorkflowError, match="tokens that this run sampled"):
        await model.experience_from_messages_async([*asked, calling(arguments)])


async def test_a_conversation_as_long_as_the_context_is_cut_where_its_logprobs_are_asked_for() -> None:
    engine, model, messages = await talked(["aa", "bb"], "ab", cut=True)
    engine.max_model_len = len(engine.asked[1][0]) + 2
    e = await model.experience_from_messages_async(messages, temperature=0.5)
    assert len(e.tokens) == engine.max_model_len - 1
    assert (e.truncate_status, len(e.logprobs), len(e.action_mask)) == ("response_truncated",) + (
        len(e.tokens) - e.prompt_length,) * 2
    assert (e.logprobs[~e.action_mask] == 0).all()
    assert (e.logprobs[e.action_mask] != 0).all()


def test_forks_are_a_metric_of_runs_whose_conversations_went_on() -> None:
    one = RunResult(run=0, metrics={}, experiences=1)
    assert with_usage(one, Usage(requests=1)).metrics == {}
    assert with_usage(one, Usage(requests=2, continued=1)).metrics == {"conversation_forks": 0.0}
    assert with_usage(one, Usage(requests=2, forks=1)).metrics == {"conversation_forks": 1.0}
    two = [one, RunResult(run=1, metrics={}, experiences=1)]
    results, _ = divide_usage(two, [], Usage(requests=2, forks=3))
    assert [r.metrics for r in results] == [{"conversation_forks": 1.5}] * 2


async def test_the_splices_of_each_answer_are_places_of_the_whole_conversation() -> None:
    class Spliced(Sampler):
        async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
            return [replace(c, splices=(2,)) for c in await super().generate(prompt, sampling)]

    model = Model(Spliced(["abcd", "efgh"], Merging()))
    messages = await talk(model, ["x", "y"])
    [history] = model.extract_experience_from_history()
    for e in (await model.experience_from_messages_async(messages), history):
        assert len(e.splices) == 2
        assert [chr(e.tokens[e.prompt_length + at]) for at in e.splices] == ["c", "g"]

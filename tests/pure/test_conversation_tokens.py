"""A conversation as one experience: what the model is to learn from, by the tokenizer's own template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers.recorded_engine import HELLO, TALK, Marked, Recorder
from trinity_es.actors.rollout.conversation.conversation_tokens import plain_messages
from trinity_es.actors.rollout.model import Model
from trinity_es.events.errors import WorkflowError
from trinity_es.testing import ByteTokenizer


class Forgetful(Marked):
    """Drops an assistant's turn to `...` once others follow, as templates do with reasoning."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        shown = [{**m, "content": "..."} if m["role"] == "assistant" and m is not messages[-1] else m for m in messages]
        return super().apply_chat_template(shown, **kwargs)


class Merging(Marked):
    """`:a` is one token (1000) within a text, so a prompt that ends in `:` does not share its last token."""

    def encode(self, text: str) -> list[int]:
        return [1000 if t == "\0" else ord(t) for t in text.replace(":a", "\0")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(":a" if t == 1000 else chr(t) for t in token_ids)


def writing(tokenizer: ByteTokenizer) -> Recorder:
    engine = Recorder()
    engine.tokenizer = tokenizer
    return engine


def acted(tokenizer: ByteTokenizer) -> tuple[str, str]:
    """The response of TALK, and the same with `.` for what is masked out."""
    e = Model(writing(tokenizer)).tokenized(TALK)
    response = e.tokens[e.prompt_length :].tolist()
    assert len(e.action_mask) == len(response)
    shown = "".join(
        tokenizer.decode([t]) if m else "." * len(tokenizer.decode([t]))
        for t, m in zip(response, e.action_mask, strict=True)
    )
    return tokenizer.decode(response), shown


class Opening(Marked):
    """Opens an answer with `<think>`, which is gone from it once it is given."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        text = str(super().apply_chat_template(messages, **{**kwargs, "tokenize": False}))
        text += "<think>" if kwargs.get("add_generation_prompt") else ""
        return self.encode(text) if kwargs.get("tokenize", True) else text


class Changing(Marked):
    """Renders everything anew, the longer the conversation."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        text = f"{len(messages)}{super().apply_chat_template(messages, **{**kwargs, 'tokenize': False})}"
        return self.encode(text) if kwargs.get("tokenize", True) else text


QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


class Qwen3(ByteTokenizer):
    """A template without generation marks that drops the reasoning of all turns but the last."""

    chat_template = QWEN3

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        jinja2 = pytest.importorskip("jinja2")
        text = jinja2.Template(QWEN3).render(
            messages=messages, add_generation_prompt=kwargs.get("add_generation_prompt", False)
        )
        return self.encode(text) if kwargs.get("tokenize", True) else text


def test_p48_a_template_that_drops_reasoning_leaves_its_last_turns_to_learn_from() -> None:
    engine = writing(Qwen3())
    three = [*TALK, {"role": "user", "content": "q3"}, {"role": "assistant", "content": "a3"}]
    for talk, untrained, said in ((TALK, [1], "a2"), (three, [1, 3], "a3")):
        e = Model(engine).tokenized(talk)
        assert e.info["untrained_turns"] == untrained
        assert e.action_mask is not None
        learned = bytes(t for t, m in zip(e.tokens[e.prompt_length :].tolist(), e.action_mask, strict=True) if m)
        assert learned.decode() == f"<think>\n\n</think>\n\n{said}<|im_end|>\n"
        assert e.response_text.startswith("<think>")


@pytest.mark.parametrize(("tokenizer", "response", "shown"), [
    (Marked(), "a1$\nU:q2|A:a2$\n", "a1$........a2$."), (Merging(), ":a1$\nU:q2|A:a2$\n", ":a1$.......:a2$."),
    (Forgetful(), "a2$\n", "a2$."), (Opening(), "a1$\nU:q2|A:a2$\n", "a1$........a2$."),
], ids=["plain", "tokens that merge over the edge of a turn belong to it", "a turn that is rendered differently later",
        "what opens an answer need not stay in it"])
def test_p48_the_mask_covers_the_assistant_s_turns_alone(tokenizer: ByteTokenizer, response: str, shown: str) -> None:
    assert acted(tokenizer) == (response, shown)


def test_a_template_that_renders_every_turn_differently_later_is_refused() -> None:
    with pytest.raises(WorkflowError, match="message 1 differently"):
        acted(Changing())


async def test_p48_a_conversation_beyond_the_models_context_is_cut_and_says_so() -> None:
    engine = writing(Marked())
    whole = await Model(engine).experience_from_messages_async(TALK)
    assert whole.truncate_status is None
    engine.max_model_len = len(whole.tokens) - 3
    cut = await Model(engine).experience_from_messages_async(TALK)
    assert cut.truncate_status == "response_truncated"
    assert cut.tokens.tolist() == whole.tokens[: len(whole.tokens) - 4].tolist()
    assert len(cut.logprobs) == len(cut.action_mask) == len(cut.tokens) - cut.prompt_length
    engine.max_model_len = 4
    none = await Model(engine).experience_from_messages_async(TALK)
    assert (none.truncate_status, none.prompt_length, len(none.tokens)) == ("prompt_truncated", 2, 3)
    assert (none.action_mask.tolist(), none.logprobs.tolist()) == ([False], [0.0])


async def test_p48_a_conversation_without_an_assistant_has_a_mask_that_is_all_false() -> None:
    for tokenizer in (ByteTokenizer(), Marked(), Strict()):
        engine = writing(tokenizer)
        e = await Model(engine).experience_from_messages_async(HELLO)
        assert e.tokens.tolist() == tokenizer.apply_chat_template(HELLO)
        assert (e.prompt_length, e.experience_type) == (1, "multi_turn")
        assert e.action_mask.tolist() == [False] * (len(e.tokens) - 1)
        assert len(e.logprobs) == len(e.tokens) - 1


class Strict(ByteTokenizer):
    """A template without generation marks that renders no empty conversation, and begins with a system prompt."""

    chat_template = "of messages[0]"

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        text = "" if messages[0]["role"] == "system" else "<|im_start|>system\nBe kind.<|im_end|>\n"
        text += "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        text += "<|im_start|>assistant\n" if kwargs.get("add_generation_prompt") else ""
        return self.encode(text) if kwargs.get("tokenize", True) else text


class Bare(Strict):
    """It renders nothing that ends with a user's turn, so what it writes before an answer can't be compared."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        if messages[-1]["role"] != "assistant":
            raise ValueError("conversations end with the assistant")
        return super().apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize("tokenizer", [Strict(), Bare()])
async def test_p48_a_conversation_may_begin_with_the_assistant(tokenizer: ByteTokenizer) -> None:
    engine = writing(tokenizer)
    hello = {"role": "assistant", "content": "hello"}
    e = await Model(engine).experience_from_messages_async([hello])
    assert e.prompt_text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>assistant\n"
    assert (e.response_text, e.action_mask.all()) == ("hello<|im_end|>\n", True)
    if not isinstance(tokenizer, Bare):
        e = await Model(engine).experience_from_messages_async([hello, *TALK])
        learned = bytes(t for t, m in zip(e.tokens[e.prompt_length :].tolist(), e.action_mask, strict=True) if m)
        assert learned.decode() == "".join(f"{said}<|im_end|>\n" for said in ("hello", "a1", "a2"))
        assert "untrained_turns" not in e.info


async def test_a_conversation_gets_the_logprobs_of_its_response() -> None:
    engine = writing(Marked())
    e = await Model(engine).experience_from_messages_async(TALK)
    assert len(e.logprobs) == len(e.tokens) - e.prompt_length
    whole = await engine.logprobs(e.tokens.tolist())
    np.testing.assert_allclose(e.logprobs, whole[e.prompt_length - 1 :], rtol=1e-6)
    again = await asyncio.to_thread(Model(engine, loop=asyncio.get_running_loop()).experience_from_messages, TALK)
    np.testing.assert_array_equal(again.logprobs, e.logprobs)


@pytest.mark.parametrize("messages", ["hello", b"hello", {"role": "user", "content": "hi"}, [1], None, ["hello"]])
def test_what_is_no_conversation_is_named(messages: object) -> None:
    with pytest.raises(WorkflowError, match=r"messages are .*expected a list of"):
        plain_messages(messages)


def test_messages_are_copied_from_whatever_gives_them() -> None:
    one = {"role": "user", "content": "hi"}
    [copy] = plain_messages(m for m in [one])
    assert copy == one
    assert copy is not one

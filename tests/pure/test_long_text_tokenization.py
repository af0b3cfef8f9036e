"""Long prompts: tokenized once and off the loop, and refused unread where no tokenization of them fits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.recorded_engine import Marked, Recorder
from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.engines.long_text_tokenization import LARGE, encode, is_large, prompt_ids, refuse_too_long
from trinity_es.actors.engines.vllm import server as vllm_server
from trinity_es.actors.engines.vllm.server import _RecordingClient
from trinity_es.actors.rollout.model import Model
from trinity_es.events.errors import EngineError
from trinity_es.testing import ByteTokenizer, ScriptedEngine


class Words(Marked):
    """Has a vocabulary of letters and of "word"; a run of spaces is one token."""

    chat_template = "a template"
    all_special_ids: Sequence[int] = ()
    knows_all = True

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.threads: list[int] = []

    def get_vocab(self) -> dict[str, int]:
        return {"word": 300, **{chr(i): i for i in range(256)}}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text[:1] != "\U000f0000":
            self.texts.append(text)
            self.threads.append(threading.get_ident())
            return [0] * len(text.split()) if len(text) > 1000 else super().encode(text)
        return [0] * (len(text) if self.knows_all else 1)


def asking(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def of(tokenizer: Words, longest: int) -> Model:
    engine = Recorder()
    engine.tokenizer, engine.max_model_len = tokenizer, longest
    return Model(engine)


@pytest.mark.parametrize(("size", "apart"), [(100, False), (LARGE + 1, True)])
async def test_a_chat_is_tokenized_once_and_off_the_loop_where_it_is_large(size: int, apart: bool) -> None:
    tokenizer = Words()
    await of(tokenizer, 10**6).chat_async(asking("w" * size))
    assert [len(text) for text in tokenizer.texts if len(text) > 50] == [size + len("U:|A:")]
    assert (tokenizer.threads[0] != threading.get_ident()) is apart


async def test_a_chat_that_no_tokenization_makes_fit_is_refused_before_it_is_tokenized() -> None:
    tokenizer = Words()
    model = of(tokenizer, LARGE // 4)
    told = rf"65,5\d\d characters has 16,\d+ tokens or more.*maximum context length of {LARGE // 4}"
    with pytest.raises(EngineError, match=told) as e:
        await model.chat_async(asking("w" * LARGE))
    assert e.value.details["refused"] is True
    assert tokenizer.texts == []
    assert model.engine.asked == []


@pytest.mark.parametrize("text", [
    "word" * (LARGE // 4 - 1) + "word ", "word" + " " * LARGE, "é" * LARGE * 2, "\n" * LARGE * 2,
])
def test_nothing_is_refused_that_may_fit(text: str) -> None:
    refuse_too_long(Words(), text, LARGE // 4 + 1)


async def test_nothing_is_refused_where_a_tokenizer_leaves_out_what_it_does_not_know() -> None:
    tokenizer = Words()
    tokenizer.knows_all = False
    refuse_too_long(tokenizer, "w" * LARGE * 8, 10)
    refuse_too_long(Marked(), "w" * LARGE * 8, 10)
    with pytest.raises(EngineError, match="shorten it"):
        await prompt_ids(Words(), "w" * LARGE * 8, 10, "")


def test_messages_are_large_by_all_their_texts() -> None:
    call = {"function": {"name": "f", "arguments": {"a": ["x" * LARGE]}}}
    assert is_large([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert is_large([[{"role": "user", "content": "x" * 100}] * 1000, None])
    assert not is_large([{"role": "user", "content": "x" * 100}] * 600)


@pytest.mark.parametrize(("prompt", "room"), [(6, 2), (7, 1), (8, 0), (9, -1)])
def test_a_conversation_may_fill_the_context_to_its_last_token_and_not_beyond(prompt: int, room: int) -> None:
    """A prompt that goes on from what was sampled may be longer than the one that vLLM's server looked at.

    Others asked for 0 tokens then (tinker-cookbook 506, verl-tool 88), or for one that has no place.
    """
    asked: list[Any] = []
    params = SimpleNamespace(n=1, max_tokens=5)
    engine: Any = SimpleNamespace(max_model_len=8, outputs=lambda ids, params, *_, **__: asked.append(params))
    record: Any = SimpleNamespace(exact_prompt=lambda _, ids: list(range(prompt)), engine_only={},
                                  default_length=4, records_tokens=False, adapter="")
    client = _RecordingClient(engine, None, lambda: record)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            vllm_server, "with_changes", lambda params, changes: SimpleNamespace(**{**vars(params), **changes})
        )
        if room < 1:
            with pytest.raises(ValueError, match=rf"maximum context length is 8 tokens.* contains {prompt} input"):
                client.generate({"prompt_token_ids": [1] * 5}, params, "1")
            return
        client.generate({"prompt_token_ids": [1] * 5}, params, "1")
    assert asked[0].max_tokens == room


def test_a_short_text_is_encoded_once_for_all_runs_and_each_gets_a_list_of_its_own() -> None:
    tokenizer = Words()
    first, second = encode(tokenizer, "abc"), encode(tokenizer, "abc")
    first.append(7)
    assert second == encode(tokenizer, "abc") == [97, 98, 99]
    assert tokenizer.texts == ["abc"]


async def test_ids_of_a_prompt_are_python_s_own_and_a_copy() -> None:
    prompt = [97, 98]
    ids = await prompt_ids(Words(), prompt, 100, "")
    prompt.append(99)
    assert ids == [97, 98]
    ids = await prompt_ids(Words(), [97, np.int64(98), True], 100, "")  # type: ignore[list-item]
    assert [type(i) for i in ids] == [int] * 3


class ByteLevel:
    """Decoder, as Hugging Face's tokenizers call it."""


class Bytes(ByteTokenizer):
    backend_tokenizer = SimpleNamespace(decoder=ByteLevel())


BYTES = st.lists(st.lists(st.sampled_from("aé好🦉".encode()), min_size=1, max_size=6), min_size=1, max_size=6)


@given(BYTES, BYTES)
@example([[0xC3], [97]], [[0xA9, 97], [97]])  # the two bytes of é
def test_a_prompt_s_text_is_that_of_its_ids_wherever_they_end(asks: list[list[int]], answers: list[list[int]]) -> None:
    engine = ScriptedEngine(EngineConfig(model_path=""))
    engine.tokenizer = Bytes()
    model, prompt = Model(engine), list[int]()
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=False)):
        prompt = prompt + ask
        completion = Completion(prompt_token_ids=prompt, token_ids=answer, logprobs=None, text="", finish_reason="stop")
        made = model.with_experiences([completion], 0, None, Sampling())
        assert made[0][1].prompt_text == Bytes().decode(prompt)
        model.keep(number, made)
        prompt = prompt + answer

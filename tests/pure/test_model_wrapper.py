"""What a workflow gets as `self.model`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.engines.vllm_engine import VersionedCompletion
from trinity_es.actors.rollout.conversations import plain_messages
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.worker_main import _RemoteModel
from trinity_es.events.errors import DataError, EngineError, WorkflowError
from trinity_es.testing import ByteTokenizer, ScriptedEngine


class Recorder(ScriptedEngine):
    """A scripted engine that remembers what it was asked."""

    def __init__(self, **script: Any) -> None:
        super().__init__(EngineConfig(model_path="", options=script))
        self.asked: list[tuple[str | list[int], Sampling]] = []
        self.cancelled = 0

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt, sampling))
        try:
            return await super().generate(prompt, sampling)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


HELLO = [{"role": "user", "content": "hi"}]


# --- experiences ------------------------------------------------------------------------------------------------------
async def test_a_chat_gives_an_experience_that_lacks_only_its_reward() -> None:
    model = Model(Recorder(response="yes"), defaults={"max_tokens": 8})
    (e,) = await model.chat_async(HELLO)
    assert e.tokens.tolist() == list(b"hi\nyes")
    assert e.tokens.dtype == np.int32
    assert e.prompt_length == 3
    assert e.logprobs is not None
    assert e.logprobs.dtype == np.float32
    assert len(e.logprobs) == 3
    assert e.action_mask is not None
    assert e.action_mask.tolist() == [True, True, True]
    assert (e.prompt_text, e.response_text, e.truncate_status, e.reward) == ("hi\n", "yes", None, None)
    assert e.messages == [*HELLO, {"role": "assistant", "content": "yes"}]
    assert e.info["version_spans"] == [[0, 0, 3]]
    assert (e.info["sampling"]["max_tokens"], e.info["sampling"]["choice"]) == (8, 0)


async def test_prompts_are_texts_or_token_ids_and_answers_keep_their_order() -> None:
    engine = Recorder(response="ok")
    model = Model(engine)
    found = await model.generate_async(["one", [97, 98]], n=2, max_tokens=4)
    assert [e.prompt_text for e in found] == ["one", "one", "ab", "ab"]
    assert len(await model.generate_async("one")) == 1
    assert (await model.generate_async([97, 98]))[0].prompt_text == "ab"
    assert await model.generate_async([]) == []


async def test_a_cut_answer_says_so() -> None:
    (e,) = await Model(Recorder(response="abcdef"), defaults={"max_tokens": 3}).generate_async("x")
    assert e.truncate_status == "response_truncated"


async def test_a_chat_that_ends_with_the_assistant_continues_it() -> None:
    seen: dict[str, Any] = {}

    class Spy(ByteTokenizer):
        def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            seen.update(kwargs)
            return super().apply_chat_template(messages, **kwargs)

    engine = Recorder(response="ok")
    engine.tokenizer = Spy()
    await Model(engine).chat_async([*HELLO, {"role": "assistant", "content": "<think>"}])
    assert seen["continue_final_message"]
    assert not seen.get("add_generation_prompt")


async def test_an_aborted_answer_is_an_error_and_no_experience() -> None:
    class Aborting(Recorder):
        async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
            return [Completion(prompt_token_ids=[1], token_ids=[2], logprobs=None, text="", finish_reason="abort")]

    with pytest.raises(EngineError, match="aborted"):
        await Model(Aborting()).generate_async("x")


# --- sampling ---------------------------------------------------------------------------------------------------------
async def test_a_call_goes_over_the_task_and_the_task_over_the_defaults() -> None:
    engine = Recorder(response="ok")
    model = Model(engine, defaults={"temperature": 0.5, "stop": ["\n"], "logprobs": 0})
    await model.generate_async("x", temperature=0.7, stop="END", n=2)
    assert engine.asked[0][1] == Sampling(temperature=0.7, stop=("END",), n=2)
    await model.generate_async("x")
    assert engine.asked[1][1] == Sampling(temperature=0.5, stop=("\n",))


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 4}, {"temperature": -1}, {"temperature": "hot"}, {"temperature": float("nan")}, {"top_p": 0},
        {"n": 0}, {"n": True}, {"max_tokens": 1.5}, {"stop": [3]}, {"stop": [""]}, {"ignore_eos": 1}, {"seed": -1},
        {"logprobs": "yes"}, {"top_k": -2},
    ],
)
async def test_a_sampling_that_can_not_be_is_told_by_name_whoever_gave_it(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(DataError, match=name):
        Model(Recorder(), defaults=bad)
    with pytest.raises(WorkflowError, match=name):
        await Model(Recorder()).generate_async("x", **bad)


def test_an_unknown_sampling_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="known are temperature, top_p, top_k, max_tokens"):
        Model(Recorder(), defaults={"max_new_tokens": 4})


# --- usage ------------------------------------------------------------------------------------------------------------
async def test_usage_counts_tokens_and_the_versions_seen(tmp_path: Any) -> None:
    engine = Recorder(response="abc")
    model = Model(engine)
    await model.generate_async(["xx", "yy"], n=2)
    usage = model.usage
    assert (usage.requests, usage.prompt_tokens, usage.response_tokens) == (2, 4, 12)
    assert (usage.min_version, usage.max_version) == (0, 0)
    await engine.load_weights(7, str(tmp_path))
    await model.logprobs_async([1, 2, 3])
    assert (usage.min_version, usage.max_version, usage.prompt_tokens) == (0, 7, 7)


async def test_an_engine_that_knows_which_version_made_which_token_is_believed() -> None:
    class Knows(Recorder):
        async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
            return [
                VersionedCompletion(
                    prompt_token_ids=[1], token_ids=[2, 3, 4], logprobs=None, text="", finish_reason="stop",
                    version_spans=((4, 0, 1), (6, 1, 3)),
                )
            ]

    model = Model(Knows())
    (e,) = await model.generate_async("x")
    assert e.info["version_spans"] == [[4, 0, 1], [6, 1, 3]]
    assert (model.usage.min_version, model.usage.max_version) == (4, 6)


async def test_where_nobody_knows_nothing_is_claimed(tmp_path: Any) -> None:
    engine = Recorder(response="ok", latency_seconds=0.05)
    model = Model(engine)
    asked = asyncio.ensure_future(model.generate_async("x"))
    await asyncio.sleep(0.01)
    await engine.load_weights(1, str(tmp_path))
    (e,) = await asked
    assert "version_spans" not in e.info
    assert (model.usage.min_version, model.usage.max_version) == (0, 1)


# --- failing, cancelling, blocking ------------------------------------------------------------------------------------
async def test_the_first_failed_prompt_cancels_the_others_and_is_raised_as_it_is() -> None:
    engine = Recorder(rules=[{"prompt": "bad", "error": "boom"}, {"hang": True}])
    with pytest.raises(EngineError, match="boom"):
        await Model(engine).generate_async(["slow", "bad", "slow"])
    assert engine.cancelled == 2


async def test_a_sync_workflow_calls_the_blocking_twins_from_its_thread() -> None:
    model = Model(Recorder(response="ok"))

    def play() -> tuple[int, int, np.ndarray[Any, Any]]:
        return len(model.chat(HELLO, n=2)), len(model.generate("x")), model.logprobs([1, 2, 3])

    chats, texts, scored = await asyncio.to_thread(play)
    assert (chats, texts, len(scored)) == (2, 1, 2)


async def test_a_blocking_call_on_the_loop_itself_is_an_error_and_no_hang() -> None:
    with pytest.raises(WorkflowError, match="_async"):
        Model(Recorder()).chat(HELLO)


def test_a_blocking_call_without_a_loop_is_an_error() -> None:
    with pytest.raises(WorkflowError, match="no running event loop"):
        Model(Recorder()).generate("x")


# --- conversations ----------------------------------------------------------------------------------------------------
TALK = [
    {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"},
]


class Marked(ByteTokenizer):
    """`U:q1|A:a1$\\n`, and so on: the end of a turn is `$`, and the template puts a newline behind it."""

    eos_token_id = ord("$")

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        text = "".join(
            f"U:{m['content']}|" if m["role"] == "user" else f"A:{m['content']}$\n" for m in messages
        ) + ("A:" if kwargs.get("add_generation_prompt") else "")
        return self.encode(text) if kwargs.get("tokenize", True) else text


class Forgetful(Marked):
    """Drops an assistant's turn to `...` once others follow, as templates do with reasoning."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        shown = [
            {**m, "content": "..."} if m["role"] == "assistant" and m is not messages[-1] else m for m in messages
        ]
        return super().apply_chat_template(shown, **kwargs)


class Merging(Marked):
    """`:a` is one token (1000) within a text, so a prompt that ends in `:` does not share its last token."""

    def encode(self, text: str) -> list[int]:
        return [1000 if t == "\0" else ord(t) for t in text.replace(":a", "\0")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(":a" if t == 1000 else chr(t) for t in token_ids)


def acted(tokenizer: ByteTokenizer) -> tuple[str, str]:
    """The response of TALK, and the same with `.` for what is masked out."""
    engine = Recorder()
    engine.tokenizer = tokenizer
    e = Model(engine).tokenized(TALK)
    response = e.tokens[e.prompt_length :].tolist()
    assert e.action_mask is not None
    assert len(e.action_mask) == len(response)
    shown = "".join(
        tokenizer.decode([t]) if m else "." * len(tokenizer.decode([t]))
        for t, m in zip(response, e.action_mask, strict=True)
    )
    return tokenizer.decode(response), shown


def test_the_mask_covers_what_the_assistant_wrote_and_its_end_of_turn_alone() -> None:
    assert acted(Marked()) == ("a1$\nU:q2|A:a2$\n", "a1$........a2$.")


def test_tokens_that_merge_over_the_edge_of_a_turn_belong_to_it() -> None:
    assert acted(Merging()) == (":a1$\nU:q2|A:a2$\n", ":a1$.......:a2$.")


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
    engine = Recorder()
    engine.tokenizer = Qwen3()
    three = [*TALK, {"role": "user", "content": "q3"}, {"role": "assistant", "content": "a3"}]
    for talk, untrained, said in ((TALK, [1], "a2"), (three, [1, 3], "a3")):
        e = Model(engine).tokenized(talk)
        assert e.info["untrained_turns"] == untrained
        assert e.action_mask is not None
        learned = bytes(t for t, m in zip(e.tokens[e.prompt_length :].tolist(), e.action_mask, strict=True) if m)
        assert learned.decode() == f"<think>\n\n</think>\n\n{said}<|im_end|>\n"
        assert e.response_text.startswith("<think>")


def test_p48_a_turn_that_is_rendered_differently_later_is_not_learned_from_and_named() -> None:
    response, shown = acted(Forgetful())
    assert (response, shown) == ("a2$\n", "a2$.")


def test_p48_what_opens_an_answer_need_not_stay_in_it() -> None:
    assert acted(Opening()) == ("a1$\nU:q2|A:a2$\n", "a1$........a2$.")


def test_a_template_that_renders_every_turn_differently_later_is_refused() -> None:
    with pytest.raises(WorkflowError, match="message 1 differently"):
        acted(Changing())


async def test_p48_a_conversation_beyond_the_models_context_is_cut_and_says_so() -> None:
    engine = Recorder()
    engine.tokenizer = Marked()
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


# --- under the names of the known system ------------------------------------------------------------------------------
async def test_p47_names_and_keywords_of_the_known_system() -> None:
    engine = Recorder()
    engine.tokenizer = Marked()
    model = Model(engine)
    assert await model.model_version_async == model.model_version == 0
    assert await model.get_message_token_len(HELLO) == len("U:hi|A:")
    by_name = await model.logprobs_async(tokens=[1, 2, 3], temperature=0.5)
    np.testing.assert_array_equal(by_name, await model.logprobs_async(token_ids=[1, 2, 3], temperature=0.5))
    with pytest.raises(WorkflowError, match="which tokens"):
        await model.logprobs_async()
    warm = await model.convert_messages_to_experience_async(TALK, None, 0.5)
    plain = await model.convert_messages_to_experience_async(TALK, tools=None, temperature=1.0)
    np.testing.assert_allclose(warm.logprobs, plain.logprobs * 2, rtol=1e-6)
    in_thread = Model(engine, loop=asyncio.get_running_loop())
    again = await asyncio.to_thread(in_thread.convert_messages_to_experience, TALK, temperature=0.5)
    np.testing.assert_array_equal(again.logprobs, warm.logprobs)
    blocking = await asyncio.to_thread(in_thread.logprobs, tokens=[1, 2, 3], temperature=0.5)
    np.testing.assert_array_equal(blocking, by_name)


async def test_p46_what_was_answered_is_in_the_history_once() -> None:
    model = Model(Recorder(), defaults={"max_tokens": 4})
    assert model.extract_experience_from_history() == []
    [first] = await model.chat_async(HELLO)
    more = await model.generate_async(["a", "b"], n=2)
    found = model.extract_experience_from_history(clear_history=False)
    assert [id(e) for e in found] == [id(e) for e in (first, *more)]
    assert [e.eid.step for e in found] == [0, 1, 1, 1, 1]
    assert len(model.extract_experience_from_history()) == 5
    assert model.extract_experience_from_history() == []


async def test_p44_a_workflow_tells_its_state_and_what_is_no_json_or_too_much_is_refused() -> None:
    model = Model(Recorder())
    await model.set_workflow_state({"step": 1, "score": np.float32(0.5)})
    await model.set_workflow_state({"step": 2})
    assert await model.get_workflow_state() == {"step": 2, "score": 0.5}
    for bad in ({"x": object()}, {"x": float("nan")}, {"x": "y" * 5000}):
        with pytest.raises(WorkflowError, match="state"):
            await model.set_workflow_state(bad)
    await model.clean_workflow_state()
    assert await model.get_workflow_state() == {}


def test_a_conversation_without_an_assistant_is_refused() -> None:
    with pytest.raises(WorkflowError, match="assistant"):
        Model(Recorder()).tokenized(HELLO)


async def test_a_conversation_gets_the_logprobs_of_its_response() -> None:
    engine = Recorder()
    engine.tokenizer = Marked()
    e = await Model(engine).experience_from_messages_async(TALK)
    assert e.logprobs is not None
    assert len(e.logprobs) == len(e.tokens) - e.prompt_length
    whole = await engine.logprobs(e.tokens.tolist())
    np.testing.assert_allclose(e.logprobs, whole[e.prompt_length - 1 :], rtol=1e-6)
    again = await asyncio.to_thread(Model(engine, loop=asyncio.get_running_loop()).experience_from_messages, TALK)
    np.testing.assert_array_equal(again.logprobs, e.logprobs)


@pytest.mark.filterwarnings("ignore")
def test_a_real_tokenizer_gives_the_same_mask_by_its_marks_and_by_growth() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from examples.grpo.tiny_model import CHAT_TEMPLATE

    alphabet = {chr(32 + i): i for i in range(95)}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=alphabet, merges=[]))
    bpe.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    engine = Recorder()
    engine.tokenizer = tokenizer
    grown = Model(engine).tokenized(TALK)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "<|{{ message['role'] }}|>{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}",
        "<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
        "<|end|>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}",
    )
    assert "generation %" in tokenizer.chat_template
    marked = Model(engine).tokenized(TALK)
    assert marked.tokens.tolist() == grown.tokens.tolist()
    assert marked.prompt_length == grown.prompt_length
    assert marked.action_mask is not None
    assert grown.action_mask is not None
    assert marked.action_mask.tolist() == grown.action_mask.tolist()
    written = grown.tokens[grown.prompt_length :][grown.action_mask].tolist()
    assert tokenizer.convert_ids_to_tokens(written) == ["a", "1", "<|end|>", "a", "2", "<|end|>"]


def test_a_worker_s_model_waits_for_nothing_on_a_loop_that_it_has_not() -> None:
    """Each method that blocks is answered by the runner's model there."""
    blocking = {name for name, value in vars(Model).items() if hasattr(value, "__wrapped__")}
    assert blocking >= {"chat", "generate", "convert_messages_to_experience"}
    assert blocking - vars(_RemoteModel).keys() == set()


@pytest.mark.parametrize("messages", ["hello", b"hello", {"role": "user", "content": "hi"}, [1], None, ["hello"]])
def test_what_is_no_conversation_is_named(messages: object) -> None:
    with pytest.raises(WorkflowError, match=r"messages are .*a list of .*is expected"):
        plain_messages(messages)


def test_messages_are_copied_from_whatever_gives_them() -> None:
    one = {"role": "user", "content": "hi"}
    [copy] = plain_messages(m for m in [one])
    assert copy == one
    assert copy is not one

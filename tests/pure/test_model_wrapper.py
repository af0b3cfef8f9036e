"""What a workflow gets as `self.model`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.helpers.recorded_engine import HELLO, TALK, Marked, Recorder
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.workers.main import _RemoteModel
from trinity_es.events.errors import DataError, EngineError, WorkflowError
from trinity_es.testing import ByteTokenizer


# --- experiences ------------------------------------------------------------------------------------------------------
async def test_p47_the_sampling_of_a_task_is_told_for_clients_of_other_models() -> None:
    model = Model(Recorder(), defaults={"temperature": 0.5, "max_tokens": 7})
    assert model.generate_kwargs == {"temperature": 0.5, "top_p": 1.0, "max_tokens": 7}


async def test_a_chat_gives_an_experience_that_lacks_only_its_reward() -> None:
    model = Model(Recorder(response="yes"), defaults={"max_tokens": 8})
    (e,) = await model.chat_async(HELLO)
    assert e.tokens.tolist() == list(b"hi\nyes")
    assert e.tokens.dtype == np.int32
    assert e.prompt_length == 3
    assert e.logprobs.dtype == np.float32
    assert len(e.logprobs) == 3
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
    (e,) = await Model(Recorder(response="abcdef"), defaults={"max_tokens": 3}).generate_async("x")
    assert e.truncate_status == "response_truncated", "a cut answer says so"


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


@pytest.mark.parametrize(("reason", "ids"), [("abort", [2]), ("error", [2]), ("error", [])])
async def test_an_answer_that_the_engine_cut_off_is_its_error_and_no_experience(reason: str, ids: list[int]) -> None:
    class Aborting(Recorder):
        async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
            return [Completion(prompt_token_ids=[1], token_ids=ids, logprobs=None, text="", finish_reason=reason)]

    with pytest.raises(EngineError, match=rf"before its answer was complete \({reason}\)"):
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
                Completion(
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
    assert engine.aborted == 2


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
    with pytest.raises(WorkflowError, match="need an event loop in another thread"):
        Model(Recorder()).generate("x")


# --- under the names of the known system ------------------------------------------------------------------------------
async def test_p47_names_and_keywords_of_the_known_system() -> None:
    engine = Recorder()
    engine.tokenizer = Marked()
    model = Model(engine)
    assert await model.model_version_async == model.model_version == 0
    assert await model.get_message_token_len(HELLO) == len("U:hi|A:")
    by_name = await model.logprobs_async(tokens=[1, 2, 3], temperature=0.5)
    np.testing.assert_array_equal(by_name, await model.logprobs_async(token_ids=[1, 2, 3], temperature=0.5))
    with pytest.raises(WorkflowError, match="without token ids"):
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


def test_a_worker_s_model_waits_for_nothing_on_a_loop_that_it_has_not() -> None:
    """Each method that blocks is answered by the runner's model there."""
    blocking = {name for name, value in vars(Model).items() if hasattr(value, "__wrapped__")}
    assert blocking >= {"chat", "generate", "convert_messages_to_experience"}
    assert blocking | {"convert_messages_to_experience_async"} <= vars(_RemoteModel).keys()


# --- after the run ----------------------------------------------------------------------------------------------------
async def test_a_model_whose_run_is_over_answers_nothing_more() -> None:
    class Late(Recorder):
        over = asyncio.Event()

        async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
            found = await super().generate(prompt, sampling)
            await self.over.wait()
            return found

    model = Model(engine := Late(response="yes"))
    late = asyncio.create_task(model.chat_async(HELLO))
    await asyncio.sleep(0)
    await model.aclose()
    engine.over.set()
    asked = len(engine.asked)
    for call in (late, model.chat_async(HELLO), model.generate_async("a"), model.logprobs_async([1, 2])):
        with pytest.raises(WorkflowError, match="its run is over: let the workflow await all that it starts"):
            await call
    assert len(engine.asked) == asked, "the engine is not asked for what nobody keeps"
    with pytest.raises(WorkflowError, match="its run is over"):
        model.extract_experience_from_history()

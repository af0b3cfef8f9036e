"""Requests and changes of weights on a real vLLM engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import trinity_es
from tests.helpers.engines import Live
from tests.helpers.made_rollouts import record
from trinity_es import Task
from trinity_es.actors.engines.checkpoints import auto_tokenizer
from trinity_es.actors.engines.interface import Completion, Sampling
from trinity_es.actors.engines.vllm import engine as vllm_engine
from trinity_es.actors.engines.vllm import values as vllm_values
from trinity_es.actors.engines.vllm import weights as vllm_weights
from trinity_es.actors.rollout.model import Model
from trinity_es.audit.regenerate import find_rollout, make_regeneration, play_turns
from trinity_es.events.errors import EngineError, SyncError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)


def ask(live: Live, prompt: str | list[int] = "c=", **sampling: object) -> list[Completion]:
    return live.run(live.engine.generate(prompt, Sampling(**{"max_tokens": 8, **sampling})))  # type: ignore[arg-type]


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


def unfinished(live: Live) -> int:
    return int(live.engine._llm.get_num_unfinished_requests())


# --- requests ---------------------------------------------------------------------------------------------------------
def test_an_answer_has_its_prompt_its_tokens_and_a_logprob_for_each(live: Live) -> None:
    (answer,) = ask(live, ignore_eos=True, temperature=0.0)  # greedy, the untrained model writes no special token
    assert answer.prompt_token_ids == live.engine.tokenizer.encode("c=")
    assert len(answer.token_ids) == 8
    assert answer.finish_reason == "length"
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 8
    assert all(math.isfinite(lp) and lp <= 0 for lp in answer.logprobs)
    assert answer.text == live.engine.tokenizer.decode(answer.token_ids)


def test_token_ids_are_prompts_as_they_are(live: Live) -> None:
    assert ask(live, [70, 71, 72])[0].prompt_token_ids == [70, 71, 72]


def test_n_answers_differ_and_one_seed_gives_the_same_again(live: Live) -> None:
    first, again = ask(live, n=4, seed=7, ignore_eos=True), ask(live, n=4, seed=7, ignore_eos=True)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 4
    assert [c.token_ids for c in first] != [c.token_ids for c in ask(live, n=4, seed=8, ignore_eos=True)]


def test_greedy_gives_n_equal_answers(live: Live) -> None:
    answers = ask(live, n=3, temperature=0.0)
    assert len(answers) == 3
    assert answers[0] == answers[1] == answers[2]


def test_p55_penalties_formats_and_the_likeliest_tokens_are_vllms_own(live: Live) -> None:
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
    (plain,) = ask(live, **greedy)
    (penalized,) = ask(live, **greedy, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0)
    assert len(set(penalized.token_ids)) > len(set(plain.token_ids))
    (longer,) = ask(live, min_tokens=12, max_tokens=12)
    assert len(longer.token_ids) == 12
    (told,) = ask(live, **greedy, top_logprobs=3)
    assert told.token_ids == plain.token_ids
    assert told.top_logprobs is not None
    assert told.logprobs is not None
    assert [len(row) for row in told.top_logprobs] == [3] * 16
    assert [row[0] for row in told.top_logprobs] == list(zip(told.token_ids, told.logprobs, strict=True))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for written, wanted in ((json.dumps(schema), [{"a": 1}, {"a": 2}]), ("{}", None)):
        (answer,) = ask(live, json_schema=written, max_tokens=100, seed=1)
        if answer.finish_reason == "stop":
            assert wanted is None or json.loads(answer.text) in wanted
        assert answer.text.lstrip().startswith("{")
    with pytest.raises(EngineError) as refused:
        ask(live, json_schema='{"type": "nonsense"}')
    assert refused.value.details == {"refused": True}


def test_logprobs_can_be_left_out(live: Live) -> None:
    assert ask(live, logprobs=False)[0].logprobs is None


def test_a_stop_text_ends_an_answer(live: Live) -> None:
    text = ask(live, temperature=0.0, max_tokens=12)[0].text
    stopped = ask(live, temperature=0.0, max_tokens=12, stop=(text[3],))[0]
    assert stopped.finish_reason == "stop"
    assert text[3] not in stopped.text


@pytest.mark.parametrize(
    "more", [{}, {"stop": ("a", "e")}, {"top_logprobs": 2}, {"temperature": 0.0}, {"logprobs": False}], ids=str
)
def test_a_text_made_when_the_answer_is_whole_is_the_one_that_vllm_makes_as_it_grows(
    live: Live, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    asked = {"n": 8, "seed": 3, "max_tokens": 60, "temperature": 2.0, **more}  # at 2, of bytes that are no UTF-8
    ours = ask(live, "\u00e9=", **asked)
    monkeypatch.setattr(vllm_engine, "whole_answer_params", vllm_values.sampling_params)
    assert ours == ask(live, "\u00e9=", **asked)
    assert any(c.text for c in ours)


PIECES = ["plain", " text", "é", "好", "\ufffd", "🦉", "<|end|>", "<|user|>", " "]


@given(st.lists(st.sampled_from(PIECES)), st.lists(st.sampled_from(PIECES)), st.integers(0, 3), st.integers(0, 3),
       st.sampled_from(["stop", "length"]))
def test_a_text_made_at_once_is_vllm_s_also_where_ids_begin_or_end_within_a_character(
    tiny: Path, prompt: list[str], answer: list[str], cut: int, begin: int, finish: str
) -> None:
    tokenizer = auto_tokenizer(str(tiny))
    before, ids = ([*tokenizer.encode("".join(pieces))] for pieces in (["a", *prompt], answer))
    before, ids = before[: len(before) - cut] or [1], ids[begin : len(ids) - cut]
    params = vllm_values.sampling_params(Sampling())
    at_once = vllm_values.text_of(tokenizer, before, params, ids, finish)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_values, "has_byte_decoder", lambda _: False)
        assert at_once == vllm_values.text_of(tokenizer, before, params, ids, finish)


def test_vllm_makes_no_text_and_no_names_of_tokens_unless_it_looks_for_a_stop_in_it(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(vllm_engine, "add_texts", lambda _t, _i, params, _o: asyncio.sleep(0, seen.append(params)))
    for sampling in ({}, {"stop": ("a",)}, {"top_logprobs": 2}):
        ask(live, **sampling)
    assert [(p.detokenize, p.flat_logprobs) for p in seen] == [(False, True), (True, True), (False, False)]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_of_given_tokens_are_those_of_sampling_them(live: Live, temperature: float) -> None:
    (answer,) = ask(live, temperature=temperature, ignore_eos=True)
    scored = live.run(live.engine.logprobs(answer.prompt_token_ids + answer.token_ids, temperature=temperature))
    assert len(scored) == len(answer.prompt_token_ids) + 8 - 1
    np.testing.assert_allclose(scored[-8:], answer.logprobs or [], atol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [([], {}), ("x" * 300, {}), ([99999], {}), ("c=", {"top_p": 7.0}), ("c=", {"max_tokens": 0})],
    ids=["no tokens", "too long", "no such token", "no such top_p", "no answer wanted"],
)
def test_what_can_never_be_served_is_refused_and_the_engine_goes_on(
    live: Live, prompt: str | list[int], sampling: dict[str, object]
) -> None:
    with pytest.raises(EngineError) as refused:
        ask(live, prompt, **sampling)
    assert refused.value.details == {"refused": True}
    assert ask(live)


def test_a_cancelled_request_is_aborted(live: Live) -> None:
    asked = live.spawn(live.engine.generate("c=", Sampling(max_tokens=250, n=4, ignore_eos=True)))
    wait_until(lambda: unfinished(live) > 0)
    asked.cancel()
    wait_until(lambda: unfinished(live) == 0)
    with pytest.raises(concurrent.futures.CancelledError):
        live.run(cancelled_model_call(live))
    wait_until(lambda: unfinished(live) == 0)
    assert ask(live)


async def cancelled_model_call(live: Live) -> None:
    call = asyncio.ensure_future(Model(live.engine).generate_async(["a=", "b="], max_tokens=250, ignore_eos=True))
    while live.engine._llm.get_num_unfinished_requests() < 2:
        await asyncio.sleep(0.001)
    call.cancel()
    await call


# --- weights ----------------------------------------------------------------------------------------------------------
def test_requests_in_flight_finish_over_a_change_of_weights_and_say_who_made_what(live: Live, other: Path) -> None:
    long = Sampling(max_tokens=240, ignore_eos=True)
    asked = [live.spawn(live.engine.generate([65 + i, 61], long)) for i in range(4)]
    wait_until(lambda: unfinished(live) == 4)
    time.sleep(0.1)  # into their answers; the spans below tell if it was too soon or too late
    live.run(live.engine.load_weights(5, str(other)))
    answers = [a.result(60)[0] for a in asked]
    assert live.engine.model_version == 5
    for answer in answers:
        assert len(answer.token_ids) == 240
        (old, start, middle), (new, middle2, end) = answer.version_spans
        assert (old, start, new, end) == (0, 0, 5, 240)
        assert 0 < middle == middle2 < 240


def test_tokens_after_a_change_are_made_from_no_old_keys_and_values(live: Live, other: Path) -> None:
    long = Sampling(max_tokens=240, ignore_eos=True)
    asked = live.spawn(live.engine.generate("c=", long))
    wait_until(lambda: unfinished(live) == 1)
    time.sleep(0.1)
    live.run(live.engine.load_weights(5, str(other)))
    (answer,) = asked.result(60)
    middle = answer.version_spans[1][1]
    scored = live.run(live.engine.logprobs(answer.prompt_token_ids + answer.token_ids))  # by version 5, afresh
    np.testing.assert_allclose(scored[1 + middle :], answer.logprobs[middle:], atol=1e-3)
    assert not np.allclose(scored[1 : 1 + middle], answer.logprobs[:middle], atol=1e-3)


def test_the_prefix_cache_is_dropped_with_the_weights(live: Live, other: Path) -> None:
    prompt = list(range(200))
    before = live.run(live.engine.generate(prompt, GREEDY))
    live.run(live.engine.load_weights(1, str(other)))
    cached = live.run(live.engine.generate(prompt, GREEDY))
    live.run(live.engine._llm.reset_prefix_cache())
    afresh = live.run(live.engine.generate(prompt, GREEDY))
    assert cached == afresh
    assert cached != before


def copy(source: Path, target: Path, change: Callable[[dict[str, np.ndarray]], None]) -> str:
    shutil.copytree(source, target)
    tensors = load_file(str(source / "model.safetensors"))
    change(tensors)
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    return str(target)


KEY = "model.layers.1.self_attn.k_proj.weight"


def missing_path(tiny: Path, where: Path) -> str:
    return str(where / "nowhere")


def no_weights(tiny: Path, where: Path) -> str:
    where.mkdir()
    (where / "config.json").write_text("{}")
    return str(where)


def cut_off(tiny: Path, where: Path) -> str:
    shutil.copytree(tiny, where)
    with (where / "model.safetensors").open("r+b") as f:
        f.truncate(500_000)
    return str(where)


def not_safetensors(tiny: Path, where: Path) -> str:
    shutil.copytree(tiny, where)
    (where / "model.safetensors").write_bytes(b"\xff" * 1000)
    return str(where)


def missing_tensor(tiny: Path, where: Path) -> str:
    return copy(tiny, where, lambda t: t.__delitem__(KEY))


def unknown_tensor(tiny: Path, where: Path) -> str:
    return copy(tiny, where, lambda t: t.update({"extra.weight": np.zeros(3, np.float32)}))


def other_shape(tiny: Path, where: Path) -> str:
    return copy(tiny, where, lambda t: t.update({KEY: np.zeros((64, 128), np.float32)}))


def nan_weights(tiny: Path, where: Path) -> str:
    return copy(tiny, where, lambda t: t[KEY].__setitem__((0, 0), np.nan))


def missing_shard(tiny: Path, where: Path) -> str:
    shutil.copytree(tiny, where)
    names = {"weight_map": {KEY: "model-00002-of-00002.safetensors"}}
    (where / "model.safetensors.index.json").write_text(json.dumps(names))
    return str(where)


BAD = [
    (missing_path, "no folder"), (no_weights, "no weights"), (cut_off, "can't be read"),
    (not_safetensors, "can't be read"), (missing_tensor, KEY), (unknown_tensor, "extra.weight"),
    (other_shape, "shape"), (nan_weights, "NaN"), (missing_shard, "model-00002-of-00002"),
]


@pytest.mark.parametrize(("make", "why"), BAD, ids=[make.__name__ for make, _ in BAD])
def test_weights_that_cannot_be_loaded_leave_the_engine_serving_what_it_served(
    live: Live, tiny: Path, tmp_path: Path, make: Callable[[Path, Path], str], why: str
) -> None:
    before = live.run(live.engine.generate("c=", GREEDY))
    with pytest.raises(SyncError, match=why):
        live.run(live.engine.load_weights(9, make(tiny, tmp_path / "bad")))
    assert live.run(live.engine.generate("c=", GREEDY), timeout=30) == before
    assert live.engine.model_version == 0
    assert not live.run(live.engine._llm.is_paused())


def test_a_reload_that_fails_half_way_is_undone_to_the_last_weight(
    live: Live, other: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.run(live.engine.load_weights(3, str(other)))
    before = live.run(live.engine.generate("c=", GREEDY))
    monkeypatch.setattr(vllm_weights, "why_unloadable", lambda *_: None)  # it would see it, so vLLM never would
    in_flight = live.spawn(live.engine.generate("d=", Sampling(max_tokens=200, ignore_eos=True)))
    with pytest.raises(SyncError, match="loaded again"):
        live.run(live.engine.load_weights(9, other_shape(tiny, tmp_path / "bad")))
    assert len(in_flight.result(30)[0].token_ids) == 200
    after = live.run(live.engine.generate("c=", GREEDY), timeout=30)
    assert after == before  # tokens and logprobs
    assert live.engine.model_version == 3
    monkeypatch.undo()
    live.run(live.engine.load_weights(10, str(tiny)))
    live.run(live.engine.load_weights(11, str(other)))
    assert [c.logprobs for c in live.run(live.engine.generate("c=", GREEDY))] == [c.logprobs for c in before]


def test_pids_name_the_processes_that_serve(live: Live) -> None:
    import psutil

    pids = live.engine.pids()
    assert pids
    ours = {p.pid for p in psutil.Process().children(recursive=True)}
    assert set(pids) <= ours


# --- generated again --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "seeded"])
def test_a_recorded_rollout_is_generated_again_token_by_token(
    live: Live, tiny: Path, other: Path, tmp_path: Path, sampling: dict[str, float]
) -> None:
    rollout = {"engine_type": "vllm", "model_path": str(tiny), "max_response_tokens": 8}
    config = trinity_es.Config.from_dict({"mode": "explore", "explorer": {"rollout_model": rollout}}, folder=tmp_path)
    tasks = [
        Task(workflow="trinity_es.workflows:SingleTurnWorkflow", repeat_times=3, rollout_args=sampling,
             reward_fn="examples.grpo.reward:letter_share", raw_task={"prompt": f"{letter}=", "answer": letter})
        for letter in "abcd"
    ]
    live.run(live.engine.load_weights(3, str(other)))
    live.run(record(tmp_path / "log.sqlite", live.engine, config, tasks, weights=str(other)))
    with trinity_es.open_log(str(tmp_path / "log.sqlite")) as log:
        found = [find_rollout(log, 1, task, run) for task in range(4) for run in range(3)]
    assert {(f.version, f.weights) for f in found} == {(3, str(other))}
    assert found[0].engine_version.startswith("vllm ")
    for one in found:
        turns = live.run(play_turns(live.engine, one))
        again = make_regeneration(one, live.engine, turns, model=str(tiny), weights=str(other))
        assert again.equal, again
        assert again.turns[0].logprob_max is not None
        assert again.turns[0].logprob_max < 1e-3
    live.run(live.engine.load_weights(4, str(tiny)))  # other weights, other tokens or at least other logprobs
    turns = [turn for one in found for turn in live.run(play_turns(live.engine, one))]
    assert any(t.first_difference is not None or (t.logprob_max or 0) > 1e-2 for t in turns)

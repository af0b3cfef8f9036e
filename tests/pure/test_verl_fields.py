"""Experiences as the fields of verl's AgentLoopOutput: which token is whose, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trinity_es.errors import ConfigError, DataError
from trinity_es.events.experience import Experience
from trinity_es.integrations.verl import RolloutLoop, output_fields


def experience(**more: Any) -> Experience:
    return Experience(**{
        "tokens": [1, 2, 3, 7, 8, 9], "prompt_length": 3, "logprobs": [-1.0, -5.0, -2.0], "reward": 0.5,
        "action_mask": [True, False, True], "info": {"version_spans": [[4, 0, 1], [6, 1, 3]]},
        "messages": [{"role": role, "content": ""} for role in ("system", "user", "assistant", "tool", "assistant")],
        **more})


def test_a_conversation_keeps_its_mask_its_logprobs_and_its_versions() -> None:
    made = experience()
    found = output_fields(made, 3, 10)
    assert found.pop("extra_fields") == {
        "turn_scores": [], "tool_rewards": [], "experience_id": made.eid.uid, "min_global_steps": 4,
        "max_global_steps": 6}
    assert found == {
        "prompt_ids": [1, 2, 3], "response_ids": [7, 8, 9], "response_mask": [1, 0, 1],
        "response_logprobs": [-1.0, 0.0, -2.0], "reward_score": 0.5, "num_turns": 4}


def test_what_is_not_known_is_none_and_all_of_a_plain_answer_is_the_models() -> None:
    found = output_fields(experience(action_mask=None, logprobs=None, reward=None, info={}, messages=None), 3, 10)
    assert (found["response_mask"], found["response_logprobs"], found["reward_score"]) == ([1, 1, 1], None, None)
    assert (found["num_turns"], found["extra_fields"]["min_global_steps"]) == (2, None)
    assert output_fields(experience(info={"model_version": 3}), 3, 10)["extra_fields"]["max_global_steps"] == 3


def test_a_response_is_cut_where_verl_cuts_its_own_and_a_prompt_never() -> None:
    found = output_fields(experience(), 3, 2)
    assert [found[name] for name in ("response_ids", "response_mask", "response_logprobs")] == [
        [7, 8], [1, 0], [-1.0, 0.0]]
    with pytest.raises(DataError, match=r"has 3 tokens, but rollout\.prompt_length is 2"):
        output_fields(experience(), 2, 10)


def test_what_would_be_put_around_verls_messages_is_refused() -> None:
    rollout = SimpleNamespace(prompt_length=3, response_length=3)
    trainer = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    for reward_fn in (None, "rewards:letters"):
        with pytest.raises(ConfigError, match="format_args has system_prompt, but the trainer's prompts are sent unch"):
            RolloutLoop("x", trainer_config=trainer, reward_fn=reward_fn, format_args={"system_prompt": "x"})
    RolloutLoop("x", trainer_config=trainer, workflow="single_turn", format_args={"system_prompt": "x"})

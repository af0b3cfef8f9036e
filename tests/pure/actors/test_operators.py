"""Our operators: advantages, filters, shaping (P29)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.pipelines import experience, first, group, run
from trinity_es.actors.coordinator.delivery.operators import OPERATORS, GroupAdvantage
from trinity_es.events.errors import PipelineError
from trinity_es.events.experience import EID, Experience


def grpo(experiences: list[Experience], **args: Any) -> list[Experience]:
    return GroupAdvantage(**args).process(experiences)[0]


def test_p29_grpo_gives_the_distance_from_the_tasks_mean_in_its_sample_deviations() -> None:
    done = grpo(group(0.0, 1.0, 1.0, 2.0), epsilon=1e-6)
    wanted = [(r - 1.0) / (math.sqrt(2 / 3) + 1e-6) for r in (0.0, 1.0, 1.0, 2.0)]
    assert [first(e.advantages) for e in done] == pytest.approx(wanted, rel=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_p29_grpo_agrees_with_the_formula_in_float32(rewards: list[float]) -> None:
    std = float(np.std(np.array(rewards), ddof=1))
    wanted = [(r - float(np.mean(rewards))) / (std + 1e-6) for r in rewards]
    assert [first(e.advantages) for e in grpo(group(*rewards))] == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_p29_grpo_of_a_task_with_one_run_is_its_reward() -> None:
    assert first(grpo(group(3.0))[0].advantages) == pytest.approx(3.0 / (1 + 1e-6))


def test_p29_grpo_of_equal_rewards_is_exactly_zero() -> None:
    for n in range(2, 60):
        assert [first(e.advantages) for e in grpo(group(*[0.1] * n))] == [0.0] * n


def test_p29_grpo_weighs_only_what_the_model_said() -> None:
    done = grpo([experience(0, 0, 0.0, action_mask=[1, 0]), experience(0, 1, 2.0, action_mask=[0, 1])])
    assert done[0].advantages.tolist() == pytest.approx([-math.sqrt(0.5), 0.0], abs=1e-5)
    assert done[1].returns.tolist() == pytest.approx([0.0, math.sqrt(0.5)], abs=1e-5)
    assert (done[0].advantages.dtype, done[1].returns.dtype) == (np.float32, np.float32)
    done[0].advantages[0] = 5.0
    assert first(done[0].returns) != 5.0


def test_p29_grpo_compares_the_runs_of_one_task_and_no_others() -> None:
    mixed = [experience(0, 0, 0.0), experience(1, 0, 10.0), experience(0, 1, 2.0), experience(1, 1, 12.0)]
    done = grpo(mixed)
    assert [(e.eid.task, e.eid.run) for e in done] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [round(first(e.advantages), 4) for e in done] == [-0.7071, 0.7071, -0.7071, 0.7071]


def test_p29_grpo_can_take_the_deviation_of_the_whole_batch() -> None:
    done = grpo(group(0.0, 2.0) + group(10.0, 12.0, task=1), std_cal_level="batch")
    std = float(np.std([0, 2, 10, 12], ddof=1))
    assert [first(e.advantages) for e in done] == pytest.approx([-1 / std, 1 / std] * 2, rel=1e-5)


def test_p29_grpo_can_drop_the_tasks_that_teach_nothing() -> None:
    batch = group(1.0, 1.0) + group(0.0, 1.0, task=1) + group(5.0, task=2)
    result = run([{"name": "grpo", "args": {"std_threshold": 0.0}}], batch)
    assert {e.eid.task for e in result.experiences} == {1}
    assert (result.dropped, result.metrics["experience_pipeline/filtered_count"]) == (3, 3.0)


def test_p29_grpo_names_the_experience_that_has_no_reward() -> None:
    with pytest.raises(PipelineError, match=r"grpo .*1/0/1/0/s0-1 has no reward"):
        run([{"name": "grpo"}], [experience(0, 1, None)])
    pair = experience(0, 0, 1.0, chosen=[1], rejected=[2])
    with pytest.raises(PipelineError, match=r"has no action_mask, and the operator .* needs one"):
        run([{"name": "grpo"}], [pair])


def test_p29_reward_std_filter_keeps_tasks_whose_rewards_differ() -> None:
    batch = group(1.0, 1.0) + group(0.0, 1.0, task=1) + group(5.0, task=2)
    kept = run([{"name": "reward_std_filter", "args": {"threshold": 0.4999}}], batch).experiences
    assert {e.eid.task for e in kept} == {1}
    assert run([{"name": "reward_std_filter", "args": {"threshold": 0.5001}}], batch).experiences == []


@pytest.mark.parametrize(("operation", "wanted"), [("ADD", 7.0), ("SUB", -1.0), ("MUL", 12.0), ("DIV", 0.75)])
def test_p29_rewards_are_shaped_by_what_stands_in_info(operation: str, wanted: float) -> None:
    config = {"stats_key": "quality", "op_type": operation, "weight": 2.0}
    batch = [experience(0, 0, 3.0, info={"quality": 2.0}), experience(0, 1, 3.0), experience(0, 2, None)]
    result = run([{"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": [config]}}], batch)
    assert [e.reward for e in result.experiences] == [wanted, 3.0, None]
    assert result.metrics["experience_pipeline/reward_diff/mean"] == (wanted - 3.0) / 2


def test_p29_a_division_by_zero_leaves_the_reward() -> None:
    config = {"stats_key": "quality", "op_type": "DIV"}
    result = run(
        [{"name": "reward_shaping_mapper", "args": {"reward_shaping_configs": [config]}}],
        [experience(0, 0, 3.0, info={"quality": 0})],
    )
    assert result.experiences[0].reward == 3.0


def test_p29_experiences_without_a_reward_can_be_left_out() -> None:
    batch = [experience(0, 0, 1.0), experience(0, 1, None), experience(0, 2, 0.0)]
    result = run([{"name": "invalid_reward_filter"}, {"name": "reward_filter"}], batch)
    assert [e.eid.run for e in result.experiences] == [0, 2]
    assert result.dropped_by == {"invalid_reward_filter": ["1/0/1/0/s0-1"]}


@pytest.mark.parametrize(("scope", "kept"), [("task", ["0/0", "0/2", "1/0"]), ("batch", ["0/0", "0/2"])])
def test_p29_dedup_keeps_the_first_of_those_that_say_the_same(scope: str, kept: list[str]) -> None:
    batch = [experience(0, run, float(run)) for run in range(3)] + [experience(1, 0, 5.0)]
    batch[2].tokens = batch[2].tokens + 1
    result = run([{"name": "dedup", "args": {"scope": scope}}], batch)
    assert [f"{e.eid.task}/{e.eid.run}" for e in result.experiences] == kept
    dropped = float(4 - len(kept))
    assert result.metrics["experience_pipeline/duplicate_count"] == dropped
    assert result.metrics["experience_pipeline/dedup/dropped_count"] == dropped
    assert len(result.dropped_by["dedup"]) == dropped


def test_p29_dedup_compares_prompt_response_and_inputs() -> None:
    def said(run: int, **more: Any) -> Experience:
        eid = EID(1, 0, run, 0, str(run))
        return Experience(**({"eid": eid, "tokens": [1, 2, 3, 4], "prompt_length": 2, "reward": 0.0} | more))

    image = {"image": np.zeros((2, 2), np.float32)}
    batch = [
        said(0), said(1, prompt_length=3), said(2, tokens=[1, 2, 3]), said(3, multi_modal_inputs=image),
        said(4, chosen=[1], rejected=[2]), said(5, chosen=[1], rejected=[3]),
        said(6, multi_modal_inputs={"image": np.zeros((4, 1), np.float32)}), said(7, multi_modal_inputs=image),
    ]
    assert [e.eid.run for e in run([{"name": "dedup"}], batch).experiences] == [0, 1, 2, 3, 4, 5, 6]


def test_p29_the_pass_rate_of_its_task_stands_in_every_experience() -> None:
    result = run([{"name": "pass_rate_calculator"}], group(0.0, 1.0) + group(1.0, 1.0, task=1))
    assert [e.info["pass_rate"] for e in result.experiences] == [0.5, 0.5, 1.0, 1.0]
    assert result.metrics["experience_pipeline/pass_rate/mean"] == 0.75


@pytest.mark.parametrize(("name", "known"), [
    ("zero_variance_filter", "reward_std_filter"), ("reward_shaping", "reward_shaping_mapper"),
    ("group_advantage", "grpo"),
])
def test_p29_operators_are_found_under_the_names_that_people_look_for(name: str, known: str) -> None:
    assert OPERATORS[name] is OPERATORS[known]


def test_p29_every_operator_that_leaves_something_out_says_what() -> None:
    batch = group(1.0, 1.0) + group(0.0, 1.0, task=1) + group(-1.0, 2.0, task=2)
    result = run([{"name": "zero_variance_filter"}, {"name": "reward_filter"}, {"name": "reward_filter"}], batch)
    assert result.dropped_by == {
        "zero_variance_filter": ["1/0/0/0/s0-0", "1/0/1/0/s0-1"], "reward_filter": ["1/2/0/0/s2-0"],
    }
    assert result.dropped == 3
    assert "experience_pipeline/reward_filter_2/dropped_count" not in result.metrics

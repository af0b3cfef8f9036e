"""actors.advantages: the values of Trinity-RFT 0.6, computed here from its published formulas with torch's float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_es.actors.coordinator.delivery.operators import OPERATORS, Operated
from trinity_es.events.errors import ConfigError, DataError
from trinity_es.events.experience import EID, Experience, group_by

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    """Import torch in the process that runs these tests, not in each that collects them."""
    globals().update(torch=pytest.importorskip("torch"))


REWARDS = st.one_of(
    st.floats(-2.0, 2.0, allow_nan=False).map(lambda x: round(x, 3)), st.sampled_from([0.0, 1.0, 1 / 3, 0.1, -1.0])
)
TASKS = st.lists(st.lists(REWARDS, min_size=1, max_size=9), min_size=1, max_size=4)


def made(tasks: list[list[float]]) -> list[Experience]:
    return [
        Experience(
            eid=EID(7, task, run, 0, f"{task}.{run}"), tokens=[1, 2, 3, 4], action_mask=[True, False, True],
            reward=reward, logprobs=[-0.1 * (run % 3) - 0.01 * run, -0.5, -0.25],
        )
        for task, rewards in enumerate(tasks) for run, reward in enumerate(rewards)
    ]


def run(name: str, experiences: list[Experience], **args: Any) -> Operated:
    returned = OPERATORS[name](**args).process(experiences)
    assert isinstance(returned, tuple)
    return returned


def scores(experiences: list[Experience]) -> list[float]:
    """Each experience's score; its mask is applied, and returns are the same."""
    found = []
    for e in experiences:
        assert e.advantages.dtype == np.float32
        assert e.returns is not None
        assert e.advantages[1] == 0
        assert e.advantages[0] == e.advantages[2]
        assert e.returns.tolist() == e.advantages.tolist()
        found.append(float(e.advantages[0]))
    return found


def close(found: list[float], wanted: list[float], rewards: list[float]) -> bool:
    """Equal but for where the mean's own sum was rounded: by one bit of the largest number, baselines with them."""
    baselines = [reward - value for reward, value in zip(rewards, wanted, strict=True)]
    bit = float(np.spacing(np.float32(max(1e-3, *map(abs, [*rewards, *wanted, *baselines])))))
    return all(abs(a - b) <= bit * 1.01 for a, b in zip(found, wanted, strict=True))


def f32(values: list[float]) -> Any:
    return torch.tensor(values, dtype=torch.float32)


def opmd(rewards: list[float], soft: bool, tau: float) -> list[float]:
    base: Any = torch.tensor(0.0)
    if len(rewards) > 1:
        base = f32(rewards).mean()
        if soft:
            base = tau * (torch.logsumexp(f32(rewards) / tau, dim=-1) - torch.log(torch.tensor(len(rewards))))
    return [(r - base).item() for r in rewards]


def asymre(rewards: list[float], shift: float) -> list[float]:
    base = torch.tensor(0.0) if len(rewards) == 1 else f32(rewards).mean() + shift
    return [(r - base).item() for r in rewards]


def rec(rewards: list[float], normalize: bool) -> list[float]:
    values = f32(rewards)
    one = len(rewards) == 1
    mean, std = (torch.tensor(0.0), torch.tensor(1.0)) if one else (values.mean(), values.std(unbiased=False))
    return [((v - mean) / (std + 1e-6) if normalize else v - mean).item() for v in values]


@settings(max_examples=150)
@given(TASKS)
def test_p51_advantages_have_the_values_of_the_known_system(tasks: list[list[float]]) -> None:
    for name, args, formula in (
        ("reinforce", {}, lambda r: [v.item() for v in f32(r)]),
        ("opmd", {}, lambda r: opmd(r, False, 1.0)),
        ("opmd", {"opmd_baseline": "logavgexp", "tau": 0.5}, lambda r: opmd(r, True, 0.5)),
        ("asymre", {}, lambda r: asymre(r, -0.1)),
        ("asymre", {"baseline_shift": 0.25}, lambda r: asymre(r, 0.25)),
        ("rec", {}, lambda r: rec(r, False)),
    ):
        experiences, metrics = run(name, made(tasks), **args)
        found = iter(scores(experiences))
        for rewards in tasks:
            mine = [next(found) for _ in rewards]
            if args.get("opmd_baseline"):  # exp and log of numpy and torch differ in their last bits
                assert mine == pytest.approx(formula(rewards), rel=1e-6, abs=5e-7)
            else:
                assert close(mine, formula(rewards), rewards), (name, args, rewards)
        assert all(k.startswith("group_advantages/") and math.isfinite(v) for k, v in metrics.items())
    experiences, _ = run("rec", made(tasks), std_normalize=True)
    found = iter(scores(experiences))
    for rewards in tasks:
        mine = [next(found) for _ in rewards]
        if len(rewards) > 1 and np.std(rewards) < 1e-3:
            continue  # the rounding of equal rewards, over epsilon
        assert mine == pytest.approx(rec(rewards, True), rel=2e-4, abs=1e-4)


def test_p51_the_values_of_a_task_by_hand() -> None:
    # 0.5 and 0.6 as float32 are 0.5 and 0.60000002384; their mean is 0.55000001192.
    experiences, metrics = run("opmd", made([[0.5, 0.6]]))
    assert scores(experiences) == [-0.050000011920928955, 0.050000011920928955]
    assert metrics["group_advantages/group_baseline/mean"] == metrics["group_advantages/reward_mean/max"]
    experiences, metrics = run("asymre", made([[0.0, 1.0], [1.0]]))
    assert scores(experiences) == [float(np.float32(-0.4)), float(np.float32(0.6)), 1.0]
    assert metrics["group_advantages/group_baseline/min"] == 0.0
    assert metrics["group_advantages/reward_mean/min"] == 0.1  # of one experience: its baseline, 0, minus the shift
    experiences, metrics = run("rec", made([[0.0, 1.0]]), std_normalize=True)
    assert scores(experiences) == [float(np.float32(-0.5) / np.float32(0.500001)),
                                   float(np.float32(0.5) / np.float32(0.500001))]
    assert metrics["group_advantages/reward_std/mean"] == 0.5
    assert scores(run("opmd", made([[0.3]]))[0]) == [float(np.float32(0.3))]


def test_p51_rec_balances_what_is_below_the_mean_the_same_way_every_time() -> None:
    task = [1.0, 0.0, 0.0, 0.0, 0.0]
    experiences, metrics = run("rec", made([task]), drop="balance")
    found = scores(experiences)
    assert sorted(found) == [-0.5, 0.0, 0.0, 0.0, 0.5]
    assert metrics["group_advantages/drop_balance/mean"] == 0.6
    assert metrics["group_advantages/reward_mean/mean"] == 0.5
    assert scores(run("rec", made([task]), drop="balance")[0]) == found
    most_right = [[1.0, 1.0, 0.0]]
    assert scores(run("rec", made(most_right), drop="balance")[0]) == scores(run("rec", made(most_right))[0])


def steps(rewards: list[list[list[float]]]) -> list[Experience]:
    """Rewards by task, run and step."""
    return [
        Experience(eid=EID(7, t, r, s, f"{t}.{r}.{s}"), tokens=[1, 2, 3], prompt_length=1, reward=reward)
        for t, runs in enumerate(rewards) for r, run_ in enumerate(runs) for s, reward in enumerate(run_)
    ]


def test_p51_step_wise_grpo_gives_every_step_the_advantage_of_its_run_s_last() -> None:
    given_rewards = [[[9.0, 0.1], [9.0, 9.0, 0.7], [0.4]], [[0.5], [0.5, 0.5]], [[1.0, 3.0]]]
    values = f32([0.1, 0.7, 0.4])
    wanted = ((values - values.mean()) / (values.std() + 1e-6)).tolist()
    experiences, metrics = run("step_wise_grpo", steps(given_rewards))
    found = [float(e.advantages[0]) for e in experiences if e.advantages is not None]
    assert found[:6] == [wanted[0]] * 2 + [wanted[1]] * 3 + [wanted[2]]
    assert found[6:] == [0.0] * 3 + [float(np.float32(3) / np.float32(1.000001))] * 2
    assert metrics["experience_count"] == 11
    assert (metrics["filtered_count"], metrics["skipped_group_ratio"]) == (0, 0)
    experiences, _ = run("step_wise_grpo", steps(given_rewards), enable_step_norm=True)
    normed = [float(e.advantages[0]) for e in experiences if e.advantages is not None]
    assert normed[:6] == [float(np.float32(wanted[0]) / np.float32(2))] * 2 + [
        float(np.float32(wanted[1]) / np.float32(3))] * 3 + [wanted[2]]
    experiences, metrics = run("step_wise_grpo", steps(given_rewards), std_threshold=0.0)
    assert {e.eid.task for e in experiences} == {0}
    assert (metrics["filtered_count"], metrics["skipped_group_ratio"]) == (5, 2 / 3)
    experiences, _ = run("step_wise_grpo", steps(given_rewards), std_cal_level="batch")
    std = f32([0.1, 0.7, 0.4, 0.5, 0.5, 3.0]).std()
    assert float(experiences[0].advantages[0]) == ((0.1 - values.mean()) / (std + 1e-6)).item()


def test_p51_grpo_with_a_rank_penalty_has_mean_and_std_of_the_penalized_rewards() -> None:
    tasks = [[1.0, 0.5, 0.0, 1.0]]
    given_experiences = made(tasks)
    logprobs = torch.tensor([torch.tensor(e.logprobs).mean() for e in given_experiences])
    ranks = torch.argsort(torch.argsort(logprobs)) / 4
    penalized = f32(tasks[0]) * (1 - ranks * 0.3)
    wanted = [((r - penalized.mean()) / (penalized.std() + 1e-6)).item() for r in tasks[0]]
    experiences, _ = run("grpo", given_experiences, rank_penalty=0.3)
    assert scores(experiences) == pytest.approx(wanted, rel=3e-7, abs=1e-7)
    for e in (bare := made(tasks)):
        e.logprobs = None
    with pytest.raises(DataError, match="rank_penalty"):
        run("grpo", bare, rank_penalty=0.3)
    assert scores(run("grpo", made([[1.0]]), rank_penalty=0.3)[0]) == [float(np.float32(1 / 1.000001))]


def test_p51_grpo_replaces_dropped_tasks_by_copies_of_others() -> None:
    tasks = [[1.0, 1.0], [0.0, 1.0], [0.5], [0.0, 0.0]]
    experiences, metrics = run("grpo", made(tasks), std_threshold=0.0, duplicate_experiences=True)
    assert [e.eid.task for e in experiences] == [1] * 8  # its two, and three copies
    assert metrics["filtered_count"] == 5
    assert len({e.eid.uid for e in experiences}) == 8
    assert [e.eid.suffix for e in experiences[:4]] == ["1.0", "1.1", "1.0-copy1", "1.1-copy1"]
    assert all(e.advantages is not None for e in experiences)
    again = run("grpo", made(tasks), std_threshold=0.0, duplicate_experiences=True)[0]
    assert again == experiences
    assert run("grpo", made([[1.0, 1.0]]), std_threshold=0.0, duplicate_experiences=True)[0] == []
    assert len(run("grpo", made(tasks), duplicate_experiences=True)[0]) == 7  # without a threshold none is dropped


def test_p51_dynamic_sampling_keeps_tasks_with_right_and_wrong_answers() -> None:
    experiences = made([[1.0, 1.0], [0.0, 0.5], [0.0, -1.0], [1.0]])
    kept, metrics = run("dapo_dynamic_sampling", experiences)
    assert {e.eid.task for e in kept} == {1}
    assert metrics == {"filtered_count": 5.0, "dropped_all_correct": 2.0, "dropped_all_wrong": 2.0}
    for e in experiences:
        e.metrics = {"accuracy": float(e.eid.run == 0)}
    assert len(run("dapo_dynamic_sampling", experiences)[0]) == 6
    assert run("dapo_dynamic_sampling", experiences, metric_key="x", correct_threshold=0.7)[0] == []
    experiences[0].reward, experiences[0].metrics = None, {}
    with pytest.raises(DataError, match="neither a metric 'accuracy' nor a reward"):
        run("dapo_dynamic_sampling", experiences)


def test_p51_of_truncated_responses_no_token_is_learnt_from() -> None:
    experiences = made([[1.0, 0.0]])
    experiences[0].truncate_status = "response_truncated"
    kept, metrics = run("mask_response_truncated", experiences)
    assert [None if e.action_mask is None else e.action_mask.any() for e in kept] == [False, True]
    assert metrics == {"masked_truncated_count": 1.0}


def test_p51_selection_metrics_say_how_many_tasks_teach_something() -> None:
    tasks = [[0.0, 0.0], [1.0, 1.0], [0.5, 0.5], [0.05, 0.05], [0.95, 0.95]]
    experiences, metrics = run("pass_rate_calculator", made(tasks))
    assert {k: v for k, v in metrics.items() if k.startswith("selection/")} == {
        "selection/valid_ratio": 0.6, "selection/strict_valid_ratio": 0.2, "selection/<1_ratio": 0.8,
        "selection/>0_ratio": 0.8, "selection/<15_16_ratio": 0.6, "selection/>1_16_ratio": 0.6,
    }
    assert [members[0].info["pass_rate"] for members in group_by(experiences, "task").values()] == [
        0.0, 1.0, 0.5, 0.05, 0.95]
    assert run("pass_rate_calculator", []) == ([], {})


@pytest.mark.parametrize(("name", "args"), [
    ("opmd", {"opmd_baseline": "median"}), ("opmd", {"tau": 0.0}), ("rec", {"drop": "all"}), ("rec", {"epsilon": 0.0}),
    ("step_wise_grpo", {"std_cal_level": "run"}), ("step_wise_grpo", {"epsilon": -1.0}),
])
def test_p51_arguments_that_can_not_be_are_refused(name: str, args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        OPERATORS[name](**args)
    with pytest.raises(DataError, match="has no reward"):
        run(name, [Experience(eid=EID(0, 0), tokens=[1, 2], prompt_length=1)])


def test_p51_advantages_without_experiences_are_none() -> None:
    for name in ("reinforce", "opmd", "asymre", "rec", "step_wise_grpo", "dapo_dynamic_sampling"):
        assert run(name, [])[0] == []

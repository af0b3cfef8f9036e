"""Operators that compute `advantages` and `returns` from the experiences of a batch.

Both are float32 arrays of the shape [response]: the experience's score where `action_mask` is true, 0 elsewhere.
Experiences come out task by task, in the order of the tasks. Names, formulas and arguments are those of Trinity-RFT.
Operators compute in float32 as it does: each operation is rounded once (a sum or standard deviation only as a whole, so
the order of its terms changes nothing). Only `grpo` computes in float64, and rounds the score.

Random draws are seeded with the experiences' ids, so a pipeline that runs again after a failure gives the same result.
`process` raises DataError, which names the experience, if a reward or an action mask that it needs is missing.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from trinity_es.actors.coordinator.delivery.group_metrics import GroupMetrics
from trinity_es.events.errors import ConfigError, DataError
from trinity_es.events.experience import Experience, group_by
from trinity_es.projections.metric_aggregation import aggregate_batch

__all__ = [
    "AsymREAdvantage", "GroupAdvantage", "OPMDAdvantage", "RECAdvantage", "ReinforceAdvantage", "StepWiseAdvantage",
    "mean_and_std", "reward_of",
]

Operated = tuple[list[Experience], dict[str, float]]
F32 = np.float32
_PREFIX = "group_advantages"


class GroupAdvantage:
    """`grpo`, also `group_advantage`: advantage relative to the other runs of a task.

    advantage = (reward - mean) / (std + epsilon), over the experiences of a task (`eid.tid`), with the sample standard
    deviation (n - 1). A task with one experience has mean 0 and std 1. Source: DeepSeekMath (arXiv:2402.03300), eq. 3
    and below, as in Trinity-RFT's `grpo`, which computes in float32; here it is float64, rounded once.

    - `std_cal_level="batch"` takes the std over all experiences (arXiv:2508.08221).
    - `std_threshold` drops tasks whose own std is not above it, and tasks with one experience.
    - `duplicate_experiences` replaces each task that `std_threshold` dropped by a copy of another task (Polaris,
      hkunlp.github.io/blog/2025/Polaris), whose `eid.suffix` ends in `-copy<n>`.
    - `rank_penalty` (arXiv:2506.02355): mean and std are taken over reward * (1 - rank / n * rank_penalty), where rank
      is 0 for the run with the least mean logprob. Needs logprobs.

    Metrics: `group_advantages/reward_mean|reward_std/mean|max|min` over tasks, `filtered_count`.
    """

    needs = ("reward", "action_mask")

    def __init__(
        self, epsilon: float = 1e-6, std_threshold: float | None = None, duplicate_experiences: bool = False,
        rank_penalty: float | None = None, std_cal_level: Literal["group", "batch"] = "group",
    ) -> None:
        _require_epsilon("grpo", epsilon)
        _require_level("grpo", std_cal_level)
        self.epsilon, self.std_threshold, self.duplicate_experiences = epsilon, std_threshold, duplicate_experiences
        self.rank_penalty, self.std_cal_level = rank_penalty, std_cal_level
        self.by_task = std_cal_level == "group" and not duplicate_experiences

    def process(self, experiences: list[Experience]) -> Operated:
        batch_std = mean_and_std([reward_of(e) for e in experiences])[1] if self.std_cal_level == "batch" else None
        kept_groups: list[list[Experience]] = []
        group_metrics: list[dict[str, float]] = []
        groups = group_by(experiences, "task")
        for members in groups.values():
            rewards = [reward_of(e) for e in members]
            has_penalty = self.rank_penalty is not None and len(members) > 1
            mean, std = mean_and_std(self._penalized_rewards(members) if has_penalty else rewards)
            group_metrics.append({"reward_mean": mean, "reward_std": std})
            if self.std_threshold is not None and (len(members) == 1 or std <= self.std_threshold):
                continue
            scale = (std if batch_std is None else batch_std) + self.epsilon
            _set_advantages("grpo", members, [F32((reward - mean) / scale) for reward in rewards])
            kept_groups.append(members)
        filtered_count = float(len(experiences) - sum(map(len, kept_groups)))
        metrics = GroupMetrics(group_metrics, _PREFIX, filtered_count=filtered_count)
        if self.duplicate_experiences and self.std_threshold is not None:
            kept_groups += _random_copies(kept_groups, len(groups) - len(kept_groups))
        return _flat(kept_groups), metrics

    def _penalized_rewards(self, members: list[Experience]) -> list[float]:
        """Return a task's rewards after `rank_penalty`, computed in float32 as in Trinity-RFT."""
        mean_logprobs = []
        for e in members:
            if e.logprobs is None or not len(e.logprobs):
                raise DataError(f"experience {e.eid} has no logprobs, and the rank_penalty of grpo needs them: set "
                                "explorer.rollout_model.logprobs, or leave rank_penalty out")
            mean_logprobs.append(_mean([F32(p) for p in e.logprobs]))
        order = sorted(range(len(members)), key=lambda i: mean_logprobs[i])
        relative_rank = {i: F32(F32(rank) / F32(len(members))) for rank, i in enumerate(order)}
        penalty = F32(self.rank_penalty or 0.0)
        return [float(F32(reward_of(e)) * (F32(1) - relative_rank[i] * penalty)) for i, e in enumerate(members)]


class _TaskAdvantage:
    """Base of operators that compute the advantages of a task from its rewards, and drop no experience."""

    name: ClassVar[str]
    by_task = True
    needs = ("reward", "action_mask")

    def process(self, experiences: list[Experience]) -> Operated:
        group_metrics = []
        groups = group_by(experiences, "task")
        for tid, members in groups.items():
            advantages, metrics = self._advantages(tid, _rewards(members))
            _set_advantages(self.name, members, advantages)
            group_metrics.append(metrics)
        return _flat(groups.values()), GroupMetrics(group_metrics, _PREFIX)

    def _advantages(self, tid: str, rewards: list[np.float32]) -> tuple[list[np.float32], dict[str, float]]:
        """Return the advantage for each reward, and the task's metrics."""
        raise NotImplementedError


class ReinforceAdvantage(_TaskAdvantage):
    """`reinforce`: the advantage is the reward, without a baseline (Williams 1992). Metric:
    `group_advantages/reward_mean/mean|max|min` over tasks."""

    name = "reinforce"

    def _advantages(self, tid: str, rewards: list[np.float32]) -> tuple[list[np.float32], dict[str, float]]:
        return rewards, {"reward_mean": float(_mean(rewards))}


class OPMDAdvantage(_TaskAdvantage):
    """`opmd`: reward - baseline, over the experiences of a task; the baseline of a task with one experience is 0.

    The baseline is the mean reward (`opmd_baseline="mean"`), or tau * (logsumexp(rewards / tau) - log n)
    ("logavgexp"): Kimi k1.5 (arXiv:2501.12599), section 2.3.2, as in Trinity-RFT's `opmd`. Metrics:
    `group_advantages/group_baseline|reward_mean/mean|max|min` over tasks.
    """

    name = "opmd"

    def __init__(self, opmd_baseline: Literal["mean", "logavgexp"] = "mean", tau: float = 1.0) -> None:
        if opmd_baseline not in ("mean", "logavgexp"):
            raise ConfigError(f'opmd: opmd_baseline is {opmd_baseline!r}, expected "mean" or "logavgexp"')
        if not tau > 0:
            raise ConfigError(f"opmd: tau is {tau}, expected a positive number")
        self.opmd_baseline, self.tau = opmd_baseline, tau

    def _advantages(self, tid: str, rewards: list[np.float32]) -> tuple[list[np.float32], dict[str, float]]:
        mean = _mean(rewards)
        if len(rewards) == 1:
            baseline = F32(0)
        else:
            baseline = mean if self.opmd_baseline == "mean" else self._logavgexp(rewards)
        return [r - baseline for r in rewards], {"group_baseline": float(baseline), "reward_mean": float(mean)}

    def _logavgexp(self, rewards: list[np.float32]) -> np.float32:
        """Return tau * (logsumexp(rewards / tau) - log n). Subtracts the maximum first, so that exp can't overflow."""
        tau = F32(self.tau)
        scaled = [r / tau for r in rewards]
        maximum = max(scaled)
        total = F32(math.fsum(float(np.exp(s - maximum)) for s in scaled))
        return F32(tau * ((np.log(total) + maximum) - np.log(F32(len(rewards)))))


class AsymREAdvantage(_TaskAdvantage):
    """`asymre`: reward - (mean + baseline_shift), over a task's experiences. With one experience the baseline is 0.

    Source: AsymRE (arXiv:2506.20520), as in Trinity-RFT's `asymre`. Metrics: `group_advantages/group_baseline`, and
    `reward_mean`, which is the baseline minus the shift, each `/mean|max|min` over tasks.
    """

    name = "asymre"

    def __init__(self, baseline_shift: float = -0.1) -> None:
        self.baseline_shift = baseline_shift

    def _advantages(self, tid: str, rewards: list[np.float32]) -> tuple[list[np.float32], dict[str, float]]:
        baseline = F32(0) if len(rewards) == 1 else _mean(rewards) + F32(self.baseline_shift)
        reward_mean = float(baseline) - self.baseline_shift  # as in Trinity-RFT
        return [r - baseline for r in rewards], {"group_baseline": float(baseline), "reward_mean": reward_mean}


class RECAdvantage(_TaskAdvantage):
    """`rec`: reward - mean over a task's experiences. With `std_normalize` it is divided by (population std + epsilon).

    `drop="balance"`: if more rewards of a task are below its mean than not, some of them are drawn at random (seeded
    with the task's id), until both numbers are equal. Their experiences get advantage 0 and are left out of mean and
    std. With at most one experience left, mean is 0 and std 1. Source: REC (arXiv:2509.24203), as in Trinity-RFT's
    `rec`.
    Metrics: `group_advantages/drop_balance` (share of a task's experiences that were drawn), `reward_mean`,
    `reward_std`, each `/mean|max|min` over tasks.
    """

    name = "rec"

    def __init__(
        self, epsilon: float = 1e-6, std_normalize: bool = False, drop: Literal["balance"] | None = None
    ) -> None:
        _require_epsilon("rec", epsilon)
        if drop not in (None, "balance"):
            raise ConfigError(f'rec: drop is {drop!r}, expected "balance" or null')
        self.epsilon, self.std_normalize, self.drop = epsilon, std_normalize, drop

    def _advantages(self, tid: str, rewards: list[np.float32]) -> tuple[list[np.float32], dict[str, float]]:
        excluded = self._excluded(tid, rewards)
        counted = [r for i, r in enumerate(rewards) if i not in excluded]
        mean, std = (F32(0), F32(1)) if len(counted) <= 1 else (_mean(counted), _std(counted, ddof=0))
        scale = std + F32(self.epsilon) if self.std_normalize else F32(1)
        advantages = [F32(0) if i in excluded else (r - mean) / scale for i, r in enumerate(rewards)]
        drop_balance = len(excluded) / len(rewards)
        return advantages, {"drop_balance": drop_balance, "reward_mean": float(mean), "reward_std": float(std)}

    def _excluded(self, tid: str, rewards: list[np.float32]) -> set[int]:
        """Return the indices of a task's rewards that `drop` excludes, drawn among the rewards below the mean."""
        if self.drop is None:
            return set()
        mean = _mean(rewards) if len(rewards) > 1 else F32(0)
        below = [i for i, r in enumerate(rewards) if r < mean]
        surplus = len(below) - (len(rewards) - len(below))
        return set(random.Random(f"rec/{tid}").sample(below, surplus)) if surplus > 0 else set()


class StepWiseAdvantage:
    """`step_wise_grpo`: every step of a run gets the advantage of its last step.

    The last step is a run's last experience. Its advantage is that of `grpo`, computed from the rewards of the last
    steps of a task's runs. `enable_step_norm` divides it by the number of steps. `std_cal_level="batch"` takes the std
    over the last steps of all runs. `std_threshold` drops tasks whose std is not above it, and tasks with one run.
    Source: rLLM (github.com/rllm-org/rllm), as in Trinity-RFT's `step_wise_grpo`. Metrics:
    `group_advantages/reward_mean|reward_std/mean|max|min` over tasks, `filtered_count`, `skipped_group_ratio`.
    """

    needs = ("action_mask",)

    def __init__(
        self, epsilon: float = 1e-6, enable_step_norm: bool = False,
        std_cal_level: Literal["group", "batch"] = "group", std_threshold: float | None = None,
    ) -> None:
        _require_epsilon("step_wise_grpo", epsilon)
        _require_level("step_wise_grpo", std_cal_level)
        self.epsilon, self.enable_step_norm = epsilon, enable_step_norm
        self.std_cal_level, self.std_threshold = std_cal_level, std_threshold

    def process(self, experiences: list[Experience]) -> Operated:
        if not experiences:
            return [], {}
        tasks = [group_by(members, "run") for members in group_by(experiences, "task").values()]
        last_rewards = [_rewards([steps[-1] for steps in runs.values()]) for runs in tasks]
        batch_std = None
        if self.std_cal_level == "batch":
            all_rewards = [r for rewards in last_rewards for r in rewards]
            batch_std = F32(1) if len(all_rewards) <= 1 else _std(all_rewards, ddof=1)
        kept: list[Experience] = []
        group_metrics, skipped_count = [], 0
        for runs, rewards in zip(tasks, last_rewards, strict=True):
            mean, std = (F32(0), F32(1)) if len(rewards) == 1 else (_mean(rewards), _std(rewards, ddof=1))
            group_metrics.append({"reward_mean": float(mean), "reward_std": float(std)})
            if self.std_threshold is not None and (len(rewards) == 1 or float(std) <= self.std_threshold):
                skipped_count += 1
                continue
            scale = (std if batch_std is None else batch_std) + F32(self.epsilon)
            for reward, steps in zip(rewards, runs.values(), strict=True):
                advantage = (reward - mean) / scale
                divisor = F32(len(steps) if self.enable_step_norm else 1)
                _set_advantages("step_wise_grpo", steps, [advantage / divisor] * len(steps))
                kept += steps
        metrics = aggregate_batch(group_metrics, prefix=_PREFIX)
        metrics["experience_count"] = float(len(kept))
        metrics["filtered_count"] = float(len(experiences) - len(kept))
        metrics["skipped_group_ratio"] = skipped_count / len(tasks)
        return kept, metrics


# --- sums -----------------------------------------------------------------------------------------------------------
def reward_of(experience: Experience) -> float:
    """Return the experience's reward. Raises DataError if it has none."""
    if experience.reward is None:
        raise DataError(f"experience {experience.eid} has no reward: have its workflow set one, name a reward_fn in "
                        "its taskset, or choose buffer.pipeline.operators that need none")
    return experience.reward


def mean_and_std(rewards: list[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation; (0, 1) for fewer than two rewards."""
    n = len(rewards)
    if n < 2:
        return 0.0, 1.0
    if min(rewards) == max(rewards):  # otherwise dividing by epsilon would amplify a rounding error
        return rewards[0], 0.0
    # fsum is correctly rounded, so the order of the runs changes nothing.
    mean = math.fsum(rewards) / n
    return mean, math.sqrt(math.fsum((r - mean) * (r - mean) for r in rewards) / (n - 1))


def _rewards(members: Sequence[Experience]) -> list[np.float32]:
    """Return the rewards in float32. Raises DataError for an experience without a reward."""
    with np.errstate(over="ignore"):  # the pipeline's check finds rewards that overflow float32
        return [F32(reward_of(e)) for e in members]


def _mean(values: Sequence[np.float32]) -> np.float32:
    return F32(math.fsum(map(float, values)) / len(values))


def _std(values: Sequence[np.float32], ddof: int) -> np.float32:
    mean = math.fsum(map(float, values)) / len(values)
    return F32(math.sqrt(math.fsum((float(v) - mean) ** 2 for v in values) / (len(values) - ddof)))


def _set_advantages(operator: str, members: Sequence[Experience], advantages: Sequence[np.float32]) -> None:
    """Set advantages and returns of each experience to its number where `action_mask` is true, to 0 elsewhere.
    Raises DataError without an `action_mask`."""
    for experience, advantage in zip(members, advantages, strict=True):
        if experience.action_mask is None:
            raise DataError(f"experience {experience.eid} has no action_mask, and the operator {operator} needs one: "
                            "have its workflow set one")
        experience.advantages = experience.action_mask.astype(np.float32) * advantage
        experience.returns = experience.advantages.copy()


def _flat(groups: Iterable[list[Experience]]) -> list[Experience]:
    return [e for members in groups for e in members]


def _random_copies(groups: list[list[Experience]], count: int) -> list[list[Experience]]:
    """Return copies of `count` tasks, drawn at random from these, seeded with their ids; [] if there are no tasks."""
    if not groups:
        return []
    drawn_groups = random.Random("/".join(members[0].eid.tid for members in groups)).choices(groups, k=count)
    return [[_copy(e, number) for e in members] for number, members in enumerate(drawn_groups, 1)]


def _copy(experience: Experience, number: int) -> Experience:
    duplicate = copy.deepcopy(experience)
    duplicate.eid = replace(experience.eid, suffix=f"{experience.eid.suffix}-copy{number}")
    return duplicate


def _require_epsilon(operator: str, epsilon: float) -> None:
    if not epsilon > 0:
        raise ConfigError(f"{operator}: epsilon is {epsilon}, expected a positive number")


def _require_level(operator: str, level: str) -> None:
    if level not in ("group", "batch"):
        raise ConfigError(f'{operator}: std_cal_level is {level!r}, expected "group" or "batch"')

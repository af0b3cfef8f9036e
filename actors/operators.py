"""The operators that the experience pipeline knows by name: advantages, shaped rewards, filters.

An operator takes all experiences of a batch and gives back those to go on with, in order. What it leaves out is counted
by the pipeline and named in the log (`BatchFinalized.dropped_by`). Names are those that Trinity-RFT's users know, where
the meaning is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np

from events.errors import ConfigError, DataError
from events.experience import Experience, group_by
from projections.metrics import aggregate_batch

__all__ = [
    "OPERATORS",
    "Dedup",
    "GroupAdvantage",
    "InvalidRewardFilter",
    "Operated",
    "Operator",
    "PassRate",
    "RewardFilter",
    "RewardShaping",
    "RewardSpreadFilter",
]

Operated = tuple[list[Experience], dict[str, float]]


class Operator(Protocol):
    """One step of the pipeline. Built once with the `args` of its config, then called for every batch.

    It may have `needs`, a tuple of names of fields: runs with an experience that lacks one are dropped before it, and
    named, unless all do.
    """

    def process(self, experiences: list[Experience]) -> Operated:
        """The experiences to go on with, in order, and metrics (finite numbers).

        `experiences` are all of the batch, possibly none; they may be changed in place. What it raises fails the
        finalize, and the batch can be finalized again.
        """
        ...


class GroupAdvantage:
    """`grpo`, also `group_advantage`: how much better a run was than the other runs of its task.

    advantage = (reward - mean) / (std + epsilon), over the experiences of a task (`eid.tid`), with the sample standard
    deviation (n - 1); of a task with one experience the mean is 0 and the std 1. Sets `advantages` and `returns` of
    each to float32 [response], the advantage where `action_mask` is true and 0 elsewhere. Experiences come out task by
    task. Source: DeepSeekMath (arXiv:2402.03300), eq. 3 and below, as Trinity-RFT's `grpo` advantage function has it;
    it computes in float32, we in float64 and round once.

    `std_cal_level="batch"` takes the std over all experiences (arXiv:2508.08221). With `std_threshold` tasks whose own
    std is not above it, and tasks with one experience, are dropped. Metrics: `group_advantages/reward_mean|reward_std/
    mean|max|min` over tasks, `filtered_count`.
    """

    needs = ("reward", "action_mask")

    def __init__(
        self,
        epsilon: float = 1e-6,
        std_threshold: float | None = None,
        std_cal_level: Literal["group", "batch"] = "group",
    ) -> None:
        if not epsilon > 0:
            raise ConfigError(f"grpo: epsilon is {epsilon}, expected a positive number")
        if std_cal_level not in ("group", "batch"):
            raise ConfigError(f'grpo: std_cal_level is {std_cal_level!r}, expected "group" or "batch"')
        self.epsilon = epsilon
        self.std_threshold = std_threshold
        self.std_cal_level = std_cal_level

    def process(self, experiences: list[Experience]) -> Operated:
        """Raises DataError for an experience without a reward or an action mask, naming it (see `Operator`)."""
        batch_std = _mean_and_std([_reward(e) for e in experiences])[1] if self.std_cal_level == "batch" else None
        kept: list[Experience] = []
        per_group: list[dict[str, float]] = []
        for members in group_by(experiences, "task").values():
            rewards = [_reward(e) for e in members]
            mean, std = _mean_and_std(rewards)
            per_group.append({"reward_mean": mean, "reward_std": std})
            if self.std_threshold is not None and (len(members) == 1 or std <= self.std_threshold):
                continue
            scale = (std if batch_std is None else batch_std) + self.epsilon
            for experience, reward in zip(members, rewards, strict=True):
                if experience.action_mask is None:
                    raise DataError(f"experience {experience.eid}: grpo needs an action_mask")
                advantages = experience.action_mask.astype(np.float32)
                advantages *= np.float32((reward - mean) / scale)
                experience.advantages = advantages
                experience.returns = advantages.copy()
            kept.extend(members)
        metrics = aggregate_batch(per_group, prefix="group_advantages")
        metrics["filtered_count"] = float(len(experiences) - len(kept))
        return kept, metrics


class RewardFilter:
    """`reward_filter`: keeps the experiences with a reward of at least `threshold`. Metric: `filtered_count`."""

    needs = ("reward",)

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, experiences: list[Experience]) -> Operated:
        """Raises DataError for an experience without a reward, naming it (see `Operator`)."""
        kept = [e for e in experiences if _reward(e) >= self.threshold]
        return kept, {"filtered_count": float(len(experiences) - len(kept))}


class RewardSpreadFilter:
    """`reward_std_filter`, also `zero_variance_filter`: keeps the tasks whose rewards differ.

    Theirs have a population std above `threshold`. Tasks with one experience are dropped. Metric: `filtered_count`.
    """

    needs = ("reward",)

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, experiences: list[Experience]) -> Operated:
        """Raises DataError for an experience without a reward, naming it (see `Operator`)."""
        kept: list[Experience] = []
        for members in group_by(experiences, "task").values():
            rewards = [_reward(e) for e in members]
            _, std = _mean_and_std(rewards)  # the sample's; the population's is smaller by sqrt((n - 1) / n)
            if len(members) > 1 and std * math.sqrt((len(members) - 1) / len(members)) > self.threshold:
                kept.extend(members)
        return kept, {"filtered_count": float(len(experiences) - len(kept))}


class RewardShaping:
    """`reward_shaping_mapper`, also `reward_shaping`: changes rewards by numbers that stand in `Experience.info`.

    Each of `reward_shaping_configs` is `{"stats_key", "op_type", "weight"}`: reward ADD | SUB | MUL | DIV weight *
    info[stats_key], one after the other. Experiences without a reward or without that key, and divisions by zero, stay
    as they are. One whose reward becomes no finite number is dropped. Metrics: `reward_diff/mean|max|min`.
    """

    def __init__(self, reward_shaping_configs: list[dict[str, Any]] | None = None) -> None:
        self.steps: list[tuple[str, str, float]] = []
        for config in reward_shaping_configs or []:
            unknown = config.keys() - {"stats_key", "op_type", "weight"}
            operation = str(config.get("op_type", "ADD")).upper()
            if unknown or "stats_key" not in config or operation not in ("ADD", "SUB", "MUL", "DIV"):
                raise ConfigError(
                    f"reward_shaping_mapper: {config!r} is not {{stats_key, op_type (ADD, SUB, MUL or DIV), weight}}"
                )
            self.steps.append((config["stats_key"], operation, float(config.get("weight", 1.0))))

    def process(self, experiences: list[Experience]) -> Operated:
        """Raises DataError where no experience has a number under its key."""
        changes, kept = [], []
        error: DataError | None = None
        for experience in experiences:
            try:
                reward = self._shaped(experience)
            except DataError as e:
                error = e
                continue
            if reward is not None and experience.reward is not None:
                changes.append({"reward_diff": reward - experience.reward})
                experience.reward = reward
            kept.append(experience)
        if error is not None and not kept:
            raise error
        return kept, aggregate_batch(changes)

    def _shaped(self, experience: Experience) -> float | None:
        reward = experience.reward
        for key, operation, weight in self.steps:
            if reward is not None and key in experience.info:
                value = experience.info[key]
                if not isinstance(value, int | float):
                    raise DataError(f"experience {experience.eid}: info[{key!r}] is {value!r}, expected a number")
                reward = _apply(operation, reward, weight * value)
        if reward is not None and not math.isfinite(reward):
            raise DataError(f"experience {experience.eid}: its shaped reward is {reward}")
        return reward


class InvalidRewardFilter:
    """`invalid_reward_filter`: drops the experiences without a reward. Metric: `filtered_count`.

    (No experience has a reward that is NaN: it can't be made.)
    """

    def process(self, experiences: list[Experience]) -> Operated:
        kept = [e for e in experiences if e.reward is not None]
        return kept, {"filtered_count": float(len(experiences) - len(kept))}


class Dedup:
    """`dedup`: of experiences that say the same, keeps the first, by task, run and step.

    The same: equal tokens, prompt and response, cut at the same place (and for a preference pair equal chosen and
    rejected tokens), with equal images or other inputs. `scope="task"` (default) compares the runs of one task,
    `"batch"` all of the batch. The others' rewards are gone with them: put it after `grpo` where the group's mean is to
    count every run. Metric: `duplicate_count`.
    """

    def __init__(self, scope: Literal["task", "batch"] = "task") -> None:
        if scope not in ("task", "batch"):
            raise ConfigError(f'dedup: scope is {scope!r}, expected "task" or "batch"')
        self.scope = scope

    def process(self, experiences: list[Experience]) -> Operated:
        seen: set[object] = set()
        kept = []
        for experience in experiences:
            key = (experience.eid.tid if self.scope == "task" else "", _said(experience))
            if key not in seen:
                seen.add(key)
                kept.append(experience)
        return kept, {"duplicate_count": float(len(experiences) - len(kept))}


class PassRate:
    """`pass_rate_calculator`: the mean reward of each task, in every experience's `info["pass_rate"]`.

    Metrics: `pass_rate/mean|max|min` over tasks.
    """

    needs = ("reward",)

    def process(self, experiences: list[Experience]) -> Operated:
        """Raises DataError for an experience without a reward, naming it (see `Operator`)."""
        rates = []
        for members in group_by(experiences, "task").values():
            rate = math.fsum(_reward(e) for e in members) / len(members)
            rates.append({"pass_rate": rate})
            for experience in members:
                experience.info["pass_rate"] = rate
        return experiences, aggregate_batch(rates)


def _data_juicer(**_: Any) -> Operator:
    raise ConfigError(
        "data_juicer is not built in: wrap the Data-Juicer operators that you need in a class of yours, with "
        'process(experiences) -> (experiences, metrics), and name it "module:Class"'
    )


OPERATORS: dict[str, Callable[..., Operator]] = {
    "data_juicer": _data_juicer,
    "dedup": Dedup,
    "group_advantage": GroupAdvantage,
    "grpo": GroupAdvantage,
    "invalid_reward_filter": InvalidRewardFilter,
    "pass_rate_calculator": PassRate,
    "reward_filter": RewardFilter,
    "reward_shaping": RewardShaping,
    "reward_shaping_mapper": RewardShaping,
    "reward_std_filter": RewardSpreadFilter,
    "zero_variance_filter": RewardSpreadFilter,
}
"""Operators by the name that a config gives; add your own, or name it "module:Class" there."""


def _said(experience: Experience) -> tuple[object, ...]:
    """What an experience says, to be compared."""
    arrays = (experience.tokens, experience.chosen, experience.rejected)
    inputs = sorted((experience.multi_modal_inputs or {}).items())
    return (
        experience.prompt_length,
        *(None if a is None else a.tobytes() for a in arrays),
        *((name, a.shape, a.tobytes()) for name, a in inputs),
    )


def _reward(experience: Experience) -> float:
    if experience.reward is None:
        raise DataError(f"experience {experience.eid} has no reward")
    return experience.reward


def _mean_and_std(rewards: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; (0, 1) for fewer than two."""
    n = len(rewards)
    if n < 2:
        return 0.0, 1.0
    if min(rewards) == max(rewards):  # rounding must not make a difference that epsilon would blow up
        return rewards[0], 0.0
    # fsum is correctly rounded: the order of the runs changes nothing.
    mean = math.fsum(rewards) / n
    return mean, math.sqrt(math.fsum((r - mean) * (r - mean) for r in rewards) / (n - 1))


def _apply(operation: str, reward: float, value: float) -> float:
    match operation:
        case "ADD":
            return reward + value
        case "SUB":
            return reward - value
        case "MUL":
            return reward * value
        case _:
            return reward / value if value else reward

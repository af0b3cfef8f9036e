"""Operators of the experience pipeline: filters, changes of rewards, and the advantages of `advantages.py`.

An operator takes all experiences of a batch and returns those to keep, in order. The log names the dropped ones
(`BatchFinalized.dropped_by`). An operator has the name that it has in Trinity-RFT if it means the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from trinity_es.actors.coordinator.delivery.advantages import (
    AsymREAdvantage,
    GroupAdvantage,
    Operated,
    OPMDAdvantage,
    RECAdvantage,
    ReinforceAdvantage,
    StepWiseAdvantage,
    mean_and_std,
    reward_of,
)
from trinity_es.actors.coordinator.delivery.group_metrics import GroupMetrics
from trinity_es.events.errors import ConfigError, DataError
from trinity_es.events.experience import Experience, group_by
from trinity_es.projections.metric_aggregation import aggregate_batch

__all__ = [
    "OPERATORS", "Dedup", "DynamicSampling", "ExperienceOperator", "ExperienceOperatorV1", "GroupAdvantage",
    "InvalidRewardFilter", "MaskTruncated", "Operated", "Operator", "PassRate", "RewardFilter", "RewardShaping",
    "RewardSpreadFilter",
]


class Operator(Protocol):
    """One step of the pipeline, built once with the `args` of its config and called for every batch.

    It may have `needs`, a tuple of field names of Experience. Before it runs, runs with an experience in which such a
    field is None are dropped and named in `dropped_by`, unless that is the case for all runs.

    It may have `by_task`, true if it looks at one task at a time and returns `GroupMetrics`. If all operators do, a
    large batch goes through them in parts, twice: to compute the result, and to write it.

    It may also have `set_auxiliary_model(models)`, `prepare()` and `close()`, as `ExperienceOperatorV1` does. The last
    two and `process` may be coroutines. All methods run on one event loop, in one thread.
    """

    def process(self, experiences: list[Experience]) -> Operated | Awaitable[Operated]:
        """Return the experiences to keep, in order, and metrics (finite numbers).

        `experiences` are all experiences of the batch, possibly none, and may be changed in place. If it raises, the
        batch is not finalized and stays open; another finalize tries again.
        """
        ...


class ExperienceOperator:
    """Optional base of an operator with a plain `process`, under its name in Trinity-RFT."""

    def process(self, exps: list[Experience]) -> Operated:
        raise NotImplementedError

    def close(self) -> None:
        """Release resources when the system ends in order."""


class ExperienceOperatorV1:
    """Optional base of an operator with a coroutine `process`, under its name in Trinity-RFT."""

    auxiliary_models: Mapping[str, list[Any]]

    def set_auxiliary_model(self, auxiliary_models: Mapping[str, list[Any]] | None = None) -> None:
        """Store the clients of the auxiliary models: model name -> one `openai.AsyncOpenAI` per engine.

        The pipeline calls this before `prepare`, and again when engines come or go. Requests name the model by the
        client's `model_path`.
        """
        self.auxiliary_models = auxiliary_models or {}

    async def prepare(self) -> None:
        """Get ready for the first batch. The pipeline calls this once, and again if it raised."""

    async def process(self, exps: list[Experience]) -> Operated:
        raise NotImplementedError

    async def close(self) -> None:
        """Release resources when the system ends in order."""


class RewardFilter:
    """`reward_filter`: keeps experiences with a reward of at least `threshold`. Metric: `filtered_count`."""

    by_task = True
    needs = ("reward",)

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, experiences: list[Experience]) -> Operated:
        kept = [e for e in experiences if reward_of(e) >= self.threshold]
        return kept, GroupMetrics(filtered_count=float(len(experiences) - len(kept)))


class RewardSpreadFilter:
    """`reward_std_filter`, also `zero_variance_filter`: keeps tasks whose rewards have a population std > `threshold`.

    Tasks with one experience are dropped. Metrics: `filtered_count` (also as `operator_filtered_count`), and
    `origin_group_advantages/reward_mean|reward_std/mean|max|min` over all tasks of two experiences or more.
    """

    by_task = True
    needs = ("reward",)

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, experiences: list[Experience]) -> Operated:
        kept: list[Experience] = []
        group_metrics: list[dict[str, float]] = []
        for members in group_by(experiences, "task").values():
            rewards = [reward_of(e) for e in members]
            if len(members) < 2:
                continue
            mean, sample_std = mean_and_std(rewards)
            population_std = sample_std * math.sqrt((len(members) - 1) / len(members))
            group_metrics.append({"reward_mean": mean, "reward_std": population_std})
            if population_std > self.threshold:
                kept.extend(members)
        filtered_count = float(len(experiences) - len(kept))
        return kept, GroupMetrics(
            group_metrics, "origin_group_advantages", filtered_count=filtered_count,
            operator_filtered_count=filtered_count,
        )


class DynamicSampling:
    """`dapo_dynamic_sampling`: keeps tasks with both right and wrong experiences.

    An experience is right if `metrics[metric_key]`, or without that metric its reward, is above `correct_threshold`.
    Tasks with one experience are dropped. Source: DAPO (arXiv:2503.14476), section 3.2, as in Trinity-RFT's operator.
    Metrics: `filtered_count`, `dropped_all_correct`, `dropped_all_wrong` (experiences).
    """

    by_task = True

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self.metric_key, self.correct_threshold = metric_key, correct_threshold

    def process(self, experiences: list[Experience]) -> Operated:
        kept: list[Experience] = []
        all_right_count = all_wrong_count = 0
        for members in group_by(experiences, "task").values():
            right_count = sum(self._score(e) > self.correct_threshold for e in members)
            if len(members) < 2:
                continue
            if 0 < right_count < len(members):
                kept += members
            elif right_count:
                all_right_count += len(members)
            else:
                all_wrong_count += len(members)
        return kept, GroupMetrics(
            filtered_count=float(len(experiences) - len(kept)), dropped_all_correct=float(all_right_count),
            dropped_all_wrong=float(all_wrong_count),
        )

    def _score(self, experience: Experience) -> float:
        """Return an experience's metric, or its reward if it lacks that metric. Raises DataError without either."""
        if self.metric_key in experience.metrics:
            return float(experience.metrics[self.metric_key])
        if experience.reward is None:
            raise DataError(f"experience {experience.eid} has neither a metric {self.metric_key!r} nor a reward: have "
                            "its workflow set one of them")
        return experience.reward


class MaskTruncated:
    """`mask_response_truncated`: excludes all tokens of truncated responses from training.

    `action_mask` becomes all false if `truncate_status` is "response_truncated". Put it before the advantages, which
    are then 0. Source: DAPO (arXiv:2503.14476), section 3.4, as in Trinity-RFT's operator. Metric:
    `masked_truncated_count`.
    """

    by_task = True

    def process(self, experiences: list[Experience]) -> Operated:
        masked_count = 0
        for experience in experiences:
            if experience.truncate_status == "response_truncated" and experience.action_mask is not None:
                experience.action_mask = np.zeros_like(experience.action_mask, dtype=np.bool_)
                masked_count += 1
        return experiences, GroupMetrics(masked_truncated_count=float(masked_count))


class RewardShaping:
    """`reward_shaping_mapper`, also `reward_shaping`: changes rewards by numbers in `Experience.info`.

    Each of `reward_shaping_configs` is `{"stats_key", "op_type", "weight"}`: reward ADD | SUB | MUL | DIV weight *
    info[stats_key], one after the other. Experiences without a reward or without that key, and divisions by zero, stay
    as they are. An experience whose reward becomes infinite or NaN is dropped. Metrics: `reward_diff/mean|max|min`.
    """

    def __init__(self, reward_shaping_configs: list[dict[str, Any]] | None = None) -> None:
        self.steps: list[tuple[str, Callable[[float, float], float], float]] = []
        for config in reward_shaping_configs or []:
            unknown_keys = config.keys() - {"stats_key", "op_type", "weight"}
            operation = _OPERATIONS.get(str(config.get("op_type", "ADD")).upper())
            if unknown_keys or "stats_key" not in config or operation is None:
                raise ConfigError(
                    f"reward_shaping_mapper: {config!r} is not {{stats_key, op_type (ADD, SUB, MUL or DIV), weight}}"
                )
            self.steps.append((config["stats_key"], operation, float(config.get("weight", 1.0))))

    def process(self, experiences: list[Experience]) -> Operated:
        """Shape the rewards, and drop experiences for which that fails. Raises DataError if it fails for all."""
        differences, kept = [], []
        last_error: DataError | None = None
        for experience in experiences:
            try:
                reward = self._shaped_reward(experience)
            except DataError as e:
                last_error = e
                continue
            if reward is not None and experience.reward is not None:
                differences.append({"reward_diff": reward - experience.reward})
                experience.reward = reward
            kept.append(experience)
        if last_error is not None and not kept:
            raise last_error
        return kept, aggregate_batch(differences)

    def _shaped_reward(self, experience: Experience) -> float | None:
        """Return the reward after all steps; None without a reward. Raises DataError if a value in `info` is no number,
        or the result is not finite."""
        reward = experience.reward
        for key, operation, weight in self.steps:
            if reward is not None and key in experience.info:
                value = experience.info[key]
                if not isinstance(value, int | float):
                    raise DataError(f"experience {experience.eid}: info[{key!r}] is {value!r}, expected a number")
                reward = operation(reward, weight * value)
        if reward is not None and not math.isfinite(reward):
            raise DataError(f"experience {experience.eid}: its shaped reward is {reward}, expected a finite number")
        return reward


_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "ADD": operator.add, "SUB": operator.sub, "MUL": operator.mul,
    "DIV": lambda reward, value: reward / value if value else reward,
}


class InvalidRewardFilter:
    """`invalid_reward_filter`: drops experiences without a reward; NaN can't occur. Metric: `filtered_count`."""

    by_task = True

    def process(self, experiences: list[Experience]) -> Operated:
        kept = [e for e in experiences if e.reward is not None]
        return kept, GroupMetrics(filtered_count=float(len(experiences) - len(kept)))


class Dedup:
    """`dedup`: of equal experiences it keeps the first, in the order of task, run and step.

    Experiences are equal if they have the same tokens of prompt and response, prompt length, chosen and rejected tokens
    of a preference pair, and images or other inputs. `scope="task"` (default) compares the runs of one task, `"batch"`
    the whole batch. The rewards of dropped experiences are dropped too, so put it after `grpo` if the group's mean
    should count every run. Metric: `duplicate_count`.
    """

    def __init__(self, scope: Literal["task", "batch"] = "task") -> None:
        if scope not in ("task", "batch"):
            raise ConfigError(f'dedup: scope is {scope!r}, expected "task" or "batch"')
        self.scope = scope
        self.by_task = scope == "task"

    def process(self, experiences: list[Experience]) -> Operated:
        keys: set[object] = set()
        kept = []
        for experience in experiences:
            key = (experience.eid.tid if self.scope == "task" else "", _content_key(experience))
            if key not in keys:
                keys.add(key)
                kept.append(experience)
        return kept, GroupMetrics(duplicate_count=float(len(experiences) - len(kept)))


class PassRate:
    """`pass_rate_calculator`: puts the mean reward of each task into every experience's `info["pass_rate"]`.

    Metrics: `pass_rate/mean|max|min` over tasks, and the share of tasks whose pass rate p is in a range, as in
    Trinity-RFT's operator: `selection/valid_ratio` (0 < p < 1), `selection/strict_valid_ratio`
    (1/16 + 0.001 < p < 15/16 - 0.001), `selection/<1_ratio`, `selection/>0_ratio`, `selection/<15_16_ratio` and
    `selection/>1_16_ratio` (with the same 0.001). A taskset's `data_selector` needs no operator: it reads the log.
    """

    needs = ("reward",)

    def process(self, experiences: list[Experience]) -> Operated:
        rates = []
        for members in group_by(experiences, "task").values():
            rate = math.fsum(reward_of(e) for e in members) / len(members)
            rates.append(rate)
            for experience in members:
                experience.info["pass_rate"] = rate
        metrics = aggregate_batch([{"pass_rate": rate} for rate in rates])
        if rates:
            metrics |= {name: sum(map(is_in, rates)) / len(rates) for name, is_in in _RATE_RANGES.items()}
        return experiences, metrics


_LOW, _HIGH = 1 / 16 + 1e-3, 15 / 16 - 1e-3
_RATE_RANGES: dict[str, Callable[[float], bool]] = {
    "selection/valid_ratio": lambda p: 0 < p < 1,
    "selection/strict_valid_ratio": lambda p: _LOW < p < _HIGH,
    "selection/<1_ratio": lambda p: p < 1,
    "selection/>0_ratio": lambda p: p > 0,
    "selection/<15_16_ratio": lambda p: p < _HIGH,
    "selection/>1_16_ratio": lambda p: p > _LOW,
}


def _refuse_data_juicer(**_: Any) -> Operator:
    raise ConfigError(
        "data_juicer is not built in: wrap the Data-Juicer operators that you need in a class of yours, with "
        'process(experiences) -> (experiences, metrics), and name it "module:Class"'
    )


OPERATORS: dict[str, Callable[..., Operator]] = {
    "asymre": AsymREAdvantage,
    "dapo_dynamic_sampling": DynamicSampling,
    "data_juicer": _refuse_data_juicer,
    "dedup": Dedup,
    "group_advantage": GroupAdvantage,
    "grpo": GroupAdvantage,
    "invalid_reward_filter": InvalidRewardFilter,
    "mask_response_truncated": MaskTruncated,
    "opmd": OPMDAdvantage,
    "pass_rate_calculator": PassRate,
    "rec": RECAdvantage,
    "reinforce": ReinforceAdvantage,
    "reward_filter": RewardFilter,
    "reward_shaping": RewardShaping,
    "reward_shaping_mapper": RewardShaping,
    "reward_std_filter": RewardSpreadFilter,
    "step_wise_grpo": StepWiseAdvantage,
    "zero_variance_filter": RewardSpreadFilter,
}
"""Operators by their name in the config. A config may also name a user's own operator, as "module:Class"."""


def _content_key(experience: Experience) -> tuple[object, ...]:
    """Return a key that is equal for experiences with the same tokens and inputs."""
    arrays = (experience.tokens, experience.chosen, experience.rejected)
    inputs = sorted((experience.multi_modal_inputs or {}).items())
    return (
        experience.prompt_length,
        *(None if a is None else a.tobytes() for a in arrays),
        *((name, a.shape, a.tobytes()) for name, a in inputs),
    )

"""The experience pipeline: what happens to a batch's experiences between the runners and the trainer.

A list of operators, each a name and arguments from the config: shape rewards, compute advantages, filter. The
coordinator runs it while a train batch is finalized and writes what it returns; reading and writing payloads is not its
job. It runs again from the payloads after a failure, so operators may change experiences in place, and should be
deterministic: the same experiences in, the same out.

After every operator the experiences are checked (`Experience.validate`, and no NaN in what the trainer weighs them by),
so a wrong operator is named, not found in the loss curve.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np

from events.errors import ConfigError, DataError, PipelineError
from events.experience import Experience, group_by
from projections.metrics import aggregate_batch

__all__ = [
    "OPERATORS",
    "GroupAdvantage",
    "Operator",
    "Pipeline",
    "PipelineResult",
    "RewardFilter",
    "RewardShaping",
    "RewardSpreadFilter",
]

_PREFIX: Final = "experience_pipeline"

Operated = tuple[list[Experience], dict[str, float]]


class Operator(Protocol):
    """One step of the pipeline. Built once with the `args` of its config, then called for every batch."""

    def process(self, experiences: list[Experience]) -> Operated:
        """The experiences to go on with, in order, and metrics (finite numbers).

        `experiences` are all of the batch, possibly none; they may be changed in place. What it raises fails the
        finalize, and the batch can be finalized again.
        """
        ...


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What came out."""

    experiences: list[Experience]
    metrics: dict[str, float]
    """Names start with `experience_pipeline/`; times in seconds."""
    dropped: int = 0
    """Experiences that went in and did not come out."""


class Pipeline:
    """The operators of a config, ready to run."""

    def __init__(self, operators: Iterable[Mapping[str, Any]] = ()) -> None:
        """`operators`: `{"name": one of OPERATORS or "module:Class", "args": {..}}` each.

        Raises ConfigError for a name that is not found, for arguments that the operator does not take, and for a class
        that is no operator.
        """
        self._operators: list[tuple[str, Operator]] = []
        seen: Counter[str] = Counter()
        for entry in operators:
            name = _entry_name(entry)
            label = name.rpartition(":")[2]  # a ":" in a metric's name would choose how it is aggregated
            seen[label] += 1
            if seen[label] > 1:
                label = f"{label}_{seen[label]}"
            self._operators.append((label, _build(name, entry.get("args") or {})))

    def run(self, experiences: list[Experience], clock: Callable[[], float]) -> PipelineResult:
        """Take a batch's experiences through all operators. `clock` gives seconds; no experiences give no metrics.

        Metrics: each operator's own, `<operator>/time`, `time/total`, `experience_count` (delivered) and
        `dropped_count`, all under `experience_pipeline/`. Where two operators use one metric's name, the later one's
        stands under `<operator>/<name>`; a second operator of the same name is `<operator>_2`.

        Raises PipelineError, naming the operator, when one raises, returns something else than experiences and finite
        metrics, or leaves an experience with a NaN reward, advantage or return, or of a wrong shape.
        """
        if not experiences:
            return PipelineResult([], {})
        before = Counter(e.eid.uid for e in experiences)
        metrics: dict[str, float] = {}
        times: dict[str, float] = {}
        began = clock()
        for label, operator in self._operators:
            start = clock()
            try:
                returned = operator.process(experiences)
            except Exception as e:  # a user's code, the boundary to ours
                raise PipelineError(
                    f"operator {label} of the experience pipeline failed: {type(e).__name__}: {e}",
                    operator=label, cause=type(e).__name__,
                ) from e
            experiences, own = _checked(label, returned)
            for key, value in own.items():
                taken = f"{_PREFIX}/{key}" in metrics
                metrics[f"{_PREFIX}/{label}/{key}" if taken else f"{_PREFIX}/{key}"] = value
            times[f"{_PREFIX}/{label}/time"] = clock() - start
        dropped = (before - Counter(e.eid.uid for e in experiences)).total()
        metrics |= times
        metrics[f"{_PREFIX}/time/total"] = clock() - began
        metrics[f"{_PREFIX}/experience_count"] = float(len(experiences))
        metrics[f"{_PREFIX}/dropped_count"] = float(dropped)
        return PipelineResult(experiences, metrics, dropped)


# --- built-in operators ---------------------------------------------------------------------------------------------
class GroupAdvantage:
    """`grpo`: how much better a run was than the other runs of its task.

    advantage = (reward - mean) / (std + epsilon), over the experiences of a task (`eid.tid`), with the sample standard
    deviation (n - 1); of a task with one experience the mean is 0 and the std 1. Sets `advantages` and `returns` of
    each to float32 [response], the advantage where `action_mask` is true and 0 elsewhere. Experiences come out task by
    task. Source: DeepSeekMath (arXiv:2402.03300), eq. 3 and below, as Trinity-RFT's `grpo` advantage function has it;
    it computes in float32, we in float64 and round once.

    `std_cal_level="batch"` takes the std over all experiences (arXiv:2508.08221). With `std_threshold` tasks whose own
    std is not above it, and tasks with one experience, are dropped. Metrics: `group_advantages/reward_mean|reward_std/
    mean|max|min` over tasks, `filtered_count`.
    """

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
        """Raises DataError for an experience without a reward or an action mask, naming it."""
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

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, experiences: list[Experience]) -> Operated:
        """Raises DataError for an experience without a reward, naming it."""
        kept = [e for e in experiences if _reward(e) >= self.threshold]
        return kept, {"filtered_count": float(len(experiences) - len(kept))}


class RewardSpreadFilter:
    """`reward_std_filter`: keeps the tasks whose rewards differ: population std above `threshold`.

    Tasks with one experience are dropped. Metric: `filtered_count`.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, experiences: list[Experience]) -> Operated:
        """Raises DataError for an experience without a reward, naming it."""
        kept: list[Experience] = []
        for members in group_by(experiences, "task").values():
            rewards = [_reward(e) for e in members]
            _, std = _mean_and_std(rewards)  # the sample's; the population's is smaller by sqrt((n - 1) / n)
            if len(members) > 1 and std * math.sqrt((len(members) - 1) / len(members)) > self.threshold:
                kept.extend(members)
        return kept, {"filtered_count": float(len(experiences) - len(kept))}


class RewardShaping:
    """`reward_shaping_mapper`: changes rewards by numbers that stand in `Experience.info`.

    Each of `reward_shaping_configs` is `{"stats_key", "op_type", "weight"}`: reward ADD | SUB | MUL | DIV weight *
    info[stats_key], one after the other. Experiences without a reward or without that key, and divisions by zero, stay
    as they are. Metrics: `reward_diff/mean|max|min`.
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
        """Raises TypeError for a value in `info` that is no number."""
        changes = []
        for experience in experiences:
            if experience.reward is None:
                continue
            reward = experience.reward
            for key, operation, weight in self.steps:
                if key in experience.info:
                    reward = _apply(operation, reward, weight * experience.info[key])
            changes.append({"reward_diff": reward - experience.reward})
            experience.reward = reward
        return experiences, aggregate_batch(changes)


OPERATORS: dict[str, Callable[..., Operator]] = {
    "grpo": GroupAdvantage,
    "reward_filter": RewardFilter,
    "reward_std_filter": RewardSpreadFilter,
    "reward_shaping_mapper": RewardShaping,
}
"""Operators by the name that a config gives; add your own, or name it "module:Class" there."""


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


# --- building and checking ------------------------------------------------------------------------------------------
def _entry_name(entry: Mapping[str, Any]) -> str:
    unknown = entry.keys() - {"name", "args"}
    name = entry.get("name")
    if unknown or not isinstance(name, str):
        raise ConfigError(f"an operator is {{name, args}}, not {dict(entry)!r}")
    return name


def _build(name: str, args: Mapping[str, Any]) -> Operator:
    make = OPERATORS.get(name) or _imported(name)
    try:
        operator = make(**args)
    except Exception as e:  # a user's class: say which one, whatever it raised
        raise ConfigError(f"operator {name} can't be built with {dict(args)!r}: {e}", operator=name) from e
    process = getattr(operator, "process", None)
    if not callable(process):
        raise ConfigError(f"operator {name} has no method process(experiences)", operator=name)
    if inspect.iscoroutinefunction(process):
        raise ConfigError(f"operator {name}: process is async, the pipeline calls it as a plain method", operator=name)
    return operator


def _imported(name: str) -> Callable[..., Operator]:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"there is no operator {name!r}; known: {', '.join(sorted(OPERATORS))}. Give your own as "
            '"module:Class", a class with process(experiences) -> (experiences, metrics)',
            operator=name,
        )
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as e:  # importing runs a user's module, which may raise anything
        raise ConfigError(
            f"operator {name!r} can't be imported ({type(e).__name__}: {e}): is {module!r} installed, or on "
            f"PYTHONPATH, where the coordinator runs? Known without importing: {', '.join(sorted(OPERATORS))}",
            operator=name,
        ) from e
    if not callable(found):
        raise ConfigError(f"operator {name!r} is a {type(found).__name__}, not a class", operator=name)
    return found  # type: ignore[no-any-return]  # any callable; what it makes is checked


def _checked(label: str, returned: Any) -> Operated:
    """What an operator returned, if it is what it should be."""

    def wrong(what: str, **details: Any) -> PipelineError:
        return PipelineError(f"operator {label} of the experience pipeline {what}", operator=label, **details)

    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise wrong(f"returned a {type(returned).__name__}, expected (experiences, metrics)")
    experiences, own = returned
    if not isinstance(experiences, list) or not isinstance(own, dict):
        raise wrong(
            f"returned ({type(experiences).__name__}, {type(own).__name__}), expected a list of experiences and a dict "
            "of metrics"
        )
    for experience in experiences:
        if not isinstance(experience, Experience):
            raise wrong(f"returned a {type(experience).__name__} among the experiences")
        try:
            experience.validate()
        except DataError as e:
            raise wrong(f"left an experience that can't be used: {e}", **e.details) from e
        for name in ("advantages", "returns"):
            array = getattr(experience, name)
            if array is not None and not np.isfinite(array).all():
                raise wrong(f"left {name} of experience {experience.eid} that are not finite", eid=experience.eid.uid)
    metrics = {}
    for key, value in own.items():
        if not isinstance(key, str):
            raise wrong(f"returned a metric named {key!r}, expected text")
        if not isinstance(value, int | float | np.number | np.bool_):
            raise wrong(f"returned metric {key} of type {type(value).__name__}, expected a number")
        metrics[key] = float(value)
        if not math.isfinite(metrics[key]):
            raise wrong(f"returned metric {key} = {metrics[key]}: only finite numbers can be recorded")
    return experiences, metrics

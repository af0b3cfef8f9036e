"""Aggregation of metrics: from experiences to a run, from runs to a task, from tasks to a batch.

All functions are pure. Runners aggregate experiences; the fold of a batch does the rest. A replay must give the same
bits on every machine, so every sum is `math.fsum`, which is correctly rounded. (The order of additions in numpy's and
Python's `sum` and `mean` depends on their version.)

A suffix `:mean`, `:sum`, `:max`, `:min` or `:last` of a metric's name selects its aggregation at every level. The
default is the mean. Any other suffix belongs to the name. Values that are not numbers are left out. NaN and infinities
raise DataError, since no event may hold them. Results are clamped to the largest float.

The formulas are those of Trinity-RFT's `trinity/utils/metrics.py`; best@k and worst@k go back to verl's
`trainer/ppo/metric_utils.py`.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, Final

from trinity_es.events.errors import DataError
from trinity_es.events.values import BatchId

__all__ = [
    "aggregate_batch", "aggregate_eval_batch", "aggregate_run", "aggregate_task", "mean_reward", "metric_prefix",
    "missing_runs", "missing_runs_by_metric",
]

Metrics = dict[str, float]
_EVAL_REWARD = re.compile(r"/reward/mean@(\d+)(?:/mean)?\Z")  # with /mean if monitor.detailed_stats is on

_LARGEST: Final = sys.float_info.max
_DRAWS: Final = 1000
_SEED: Final = 42
# Durations have no best of k.
_PLAIN_IN_EVAL: Final = ("time/task_execution", "time/run_execution")


def aggregate_run(experiences: Sequence[Metrics]) -> Metrics:
    """Aggregate the metrics of a run's experiences, given in order. Names keep suffixes except `:mean`.

    Raises DataError.
    """
    return {key: _REDUCTIONS[statistic](values) for key, (statistic, values) in _values_by_metric(experiences).items()}


def aggregate_task(runs: Sequence[Metrics], is_eval: bool, total_runs: int = 0) -> Metrics:
    """Aggregate the metrics of a task's runs, given in order. Raises DataError.

    In training this is `aggregate_run`. In evals, a metric without a suffix gives `<name>/mean@n` and `<name>/std@n`
    (population std). It also gives `<name>/best@k` and `<name>/worst@k` for k = n and each power of two from 2 below n.
    These are means over 1000 draws of k values with replacement, of the best and the worst value of a draw. The draws
    are those of `np.random.RandomState(42).choice(values, k)`, the same for every metric. `n` is `total_runs`, but at
    least the number of values, so that a task that lost runs has the same metric names as the other tasks.
    `time/run_execution` and `time/task_execution` are only averaged.
    """
    if not is_eval:
        return aggregate_run(runs)
    aggregated: Metrics = {}
    for key, (statistic, values) in _values_by_metric(runs).items():
        if statistic != "mean" or any(part in _parse(key)[0] for part in _PLAIN_IN_EVAL):
            aggregated[key] = _REDUCTIONS[statistic](values)
            continue
        n = max(total_runs, len(values))
        aggregated[f"{key}/mean@{n}"] = _mean(values)
        aggregated[f"{key}/std@{n}"] = _std(values)
        powers = [2**i for i in range(1, n.bit_length()) if 2**i < n]
        for k in (*powers, n) if n > 1 else ():
            aggregated[f"{key}/best@{k}"], aggregated[f"{key}/worst@{k}"] = _best_and_worst(values, k)
    return aggregated


def aggregate_batch(tasks: Iterable[Metrics], prefix: str = "") -> Metrics:
    """Aggregate the metrics of a train batch's tasks, given in order. Raises DataError.

    A metric gives `<prefix>/<name>/mean`, `/max` and `/min`. With a suffix it gives only `<prefix>/<name>/<suffix>`.
    """
    return _aggregate_over_tasks(tasks, prefix, ("mean", "max", "min"))


def aggregate_eval_batch(tasks: Iterable[Metrics], prefix: str = "", detailed_stats: bool = False) -> Metrics:
    """Aggregate the metrics of an eval's tasks, given in order. Raises DataError.

    A metric gives its mean over the tasks as `<prefix>/<name>`. With `detailed_stats` it gives `<prefix>/<name>/mean`,
    `/max`, `/min` and `/std` (population). With a suffix it gives `<prefix>/<name>/<suffix>`.
    """
    return _aggregate_over_tasks(tasks, prefix, ("mean", "max", "min", "std") if detailed_stats else ())


def missing_runs_by_metric(runs: Iterable[Metrics]) -> dict[str, int]:
    """Return {averaged metric: number of runs without it}, for metrics that some runs have. Raises DataError."""
    run_count, counts_by_name = 0, Counter[str]()
    for metrics in runs:
        run_count += 1
        averaged = (key for key, (statistic, _) in _values_by_metric([metrics]).items() if statistic == "mean")
        counts_by_name.update(averaged)
    return {name: run_count - count for name, count in counts_by_name.items() if count < run_count}


def _aggregate_over_tasks(tasks: Iterable[Metrics], prefix: str, stats: tuple[str, ...]) -> Metrics:
    """Compute `stats` of each metric over the tasks. If `stats` is empty, compute the mean as `<prefix>/<name>`."""
    aggregated: Metrics = {}
    for key, (statistic, values) in _values_by_metric(tasks).items():
        name = f"{prefix}/{_parse(key)[0]}" if prefix else _parse(key)[0]
        if statistic == "mean" and not stats:
            aggregated[name] = _mean(values)
        for stat in stats if statistic == "mean" else (statistic,):
            aggregated[f"{name}/{stat}"] = _REDUCTIONS[stat](values)
    return aggregated


@lru_cache(maxsize=4096)
def _parse(key: str) -> tuple[str, str]:
    """Split a metric's name into (name, aggregation): ("a", "sum") for "a:sum", ("a:b", "mean") for "a:b"."""
    name, colon, suffix = key.rpartition(":")
    return (name, suffix) if colon and suffix in _REDUCTIONS and suffix != "std" else (key, "mean")


def _values_by_metric(dicts: Iterable[Metrics]) -> dict[str, tuple[str, list[float]]]:
    """Collect each metric's values: return {name with suffix but without `:mean`: (aggregation, values)}."""
    values_by_name: dict[str, tuple[str, list[float]]] = {}
    for metrics in dicts:
        for key, value in metrics.items():
            number = _finite_number(key, value)
            if number is None:
                continue
            name, statistic = _parse(key)
            full_name = name if statistic == "mean" else f"{name}:{statistic}"
            values_by_name.setdefault(full_name, (statistic, []))[1].append(number)
    return values_by_name


def _finite_number(key: str, value: Any) -> float | None:
    """Return a metric's value as a float, or None if it is no number. Raises DataError if it is not finite."""
    if not isinstance(value, (int, float)) and not isinstance(value, Real):  # Real is an abstract class: slow
        return None
    number = float(value)
    if not math.isfinite(number):
        raise DataError(f"metric {key} is {number}: only finite numbers can be recorded", metric=key)
    return number


def _clamp(value: float) -> float:
    return min(max(value, -_LARGEST), _LARGEST)


def _total(values: Sequence[float], divisor: int = 1) -> float:
    """Return the sum of the values divided by `divisor`. The sum is rounded once, then the quotient."""
    try:
        return math.fsum(values) / divisor
    except OverflowError:  # add scaled values; a scale that is a power of two changes no digit
        scale = 2.0 ** len(values).bit_length()
        return _clamp(math.fsum(v / scale for v in values) / divisor * scale)


def _mean(values: Sequence[float]) -> float:
    return _total(values, len(values))


def _std(values: Sequence[float]) -> float:
    """Return the population standard deviation: sqrt(mean((x - mean)^2))."""
    mean = _mean(values)
    return math.sqrt(_mean([_clamp((v - mean) * (v - mean)) for v in values]))


_REDUCTIONS: Final[dict[str, Callable[[list[float]], float]]] = {
    "mean": _mean, "sum": _total, "max": max, "min": min, "last": lambda values: values[-1], "std": _std}
"""Name -> statistic. All names but `std` are also suffixes of metrics."""


@lru_cache(maxsize=256)
def _draw_masks(n: int, k: int) -> tuple[int, ...]:
    """Return a bit mask for each of n values, whose bits are the draws of k values that contain it.

    One `choice` of 1000 draws gives the same as 1000 calls. numpy guarantees that RandomState's stream never changes.
    """
    import numpy as np  # imported here: a quarter of this package's import time, and only evals need it

    indices = np.random.RandomState(_SEED).choice(n, size=(_DRAWS, k), replace=True)
    contains = np.zeros((n, _DRAWS), dtype=np.bool_)
    contains[indices.ravel(), np.repeat(np.arange(_DRAWS), k)] = True
    return tuple(int.from_bytes(np.packbits(row).tobytes(), "big") for row in contains)


def _best_and_worst(values: Sequence[float], k: int) -> tuple[float, float]:
    """Return best@k and worst@k: the means over the draws of the largest and of the smallest of their k values.

    A value is the largest of a draw that contains it and no larger value. So it is enough to go through the values from
    the largest down and count draws, as bits of a number.
    """
    draws = _draw_masks(len(values), k)
    ascending = sorted(range(len(values)), key=values.__getitem__)
    return _mean_of_first(values, reversed(ascending), draws), _mean_of_first(values, ascending, draws)


def _mean_of_first(values: Sequence[float], order: Iterable[int], draws: tuple[int, ...]) -> float:
    """Return the mean, over all draws, of the first value in `order` in the draw. `draws`: from `_draw_masks`."""
    open_draws = (1 << _DRAWS) - 1
    terms = []
    for i in order:
        settled_draws = open_draws & draws[i]
        if settled_draws:
            terms.append(_clamp(values[i] * settled_draws.bit_count()))
            open_draws ^= settled_draws
            if not open_draws:
                break
    return _total(terms, _DRAWS)


def metric_prefix(batch_id: BatchId, batch_type: str) -> str:
    """Return the prefix of a batch's metric names, such as `rollout` or `eval/gsm8k`."""
    if batch_type != "eval":
        return "rollout"
    name = str(batch_id).split("/", 1)[-1]
    return name if name.startswith("bench/") else f"eval/{name}"


def missing_runs(batch_id: BatchId, batch_type: str, metrics: Mapping[str, float]) -> int:
    """Return the number of runs that a batch's mean reward leaves out, because they failed or lack a reward."""
    prefix = metric_prefix(batch_id, batch_type)
    return int(sum(metrics.get(f"{prefix}/{name}missing_run_count", 0) for name in ("", "reward/")))


def mean_reward(result: dict[str, Any]) -> float | None:
    """Return the mean reward in a batch's result; None without rewards. Of several `mean@n` (before 2026-11), take the
    largest n."""
    metrics = result["metrics"]
    if "rollout/reward/mean" in metrics:
        return float(metrics["rollout/reward/mean"])
    means = {int(m.group(1)): float(v) for k, v in metrics.items() if (m := _EVAL_REWARD.search(k))}
    return means[max(means)] if means else None

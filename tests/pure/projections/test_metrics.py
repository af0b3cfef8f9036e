"""projections.metrics against a slow reference, written from the documented formulas."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_es.events.errors import DataError
from trinity_es.projections.metrics import aggregate_batch, aggregate_eval_batch, aggregate_run, aggregate_task

numbers = st.floats(-1e6, 1e6) | st.integers(-1000, 1000) | st.booleans()
names = st.sampled_from(["a", "a:mean", "b:sum", "c:max", "d:min", "e:last", "f:odd", "g/h", "time/run_execution"])
dicts = st.lists(st.dictionaries(names, numbers, max_size=6), max_size=5)


# --- the reference --------------------------------------------------------------------------------------------------
def parsed(key: str) -> tuple[str, str]:
    for how in ("mean", "sum", "max", "min", "last"):
        if key.endswith(":" + how):
            return key[: -len(how) - 1], how
    return key, "mean"


def columns(metrics: list[dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    out: dict[tuple[str, str], list[float]] = {}
    for one in metrics:
        for key, value in one.items():
            out.setdefault(parsed(key), []).append(float(value))
    return out


def reduced(how: str, values: list[float]) -> float:
    if how == "last":
        return values[-1]
    return float({"mean": np.mean, "std": np.std, "sum": np.sum, "max": np.max, "min": np.min}[how](values))


def with_suffix(name: str, how: str) -> str:
    return name if how == "mean" else f"{name}:{how}"


def run_reference(metrics: list[dict[str, Any]]) -> dict[str, float]:
    return {with_suffix(*key): reduced(key[1], values) for key, values in columns(metrics).items()}


def bootstrap(values: list[float], k: int) -> tuple[float, float]:
    """As the formula says: 1000 times k values with replacement, the mean of their best and of their worst."""
    state = np.random.get_state()
    np.random.seed(42)
    draws = [[values[i] for i in np.random.choice(len(values), size=k, replace=True)] for _ in range(1000)]
    np.random.set_state(state)
    return float(np.mean([max(d) for d in draws])), float(np.mean([min(d) for d in draws]))


def eval_reference(metrics: list[dict[str, Any]]) -> dict[str, float]:
    out = {}
    for (name, how), values in columns(metrics).items():
        if how != "mean" or name == "time/run_execution":
            out[with_suffix(name, how)] = reduced(how, values)
            continue
        n = len(values)
        out[f"{name}/mean@{n}"] = float(np.mean(values))
        out[f"{name}/std@{n}"] = float(np.std(values))
        for k in sorted({2, 4, 8, 16, 32, n}):
            if 1 < k <= n:
                out[f"{name}/best@{k}"], out[f"{name}/worst@{k}"] = bootstrap(values, k)
    return out


def batch_reference(metrics: list[dict[str, Any]], prefix: str, stats: list[str]) -> dict[str, float]:
    out = {}
    for (name, how), values in columns(metrics).items():
        for stat in stats if how == "mean" else [how]:
            end = f"/{stat}" if stat != "alone" else ""
            out[f"{prefix}/{name}{end}"] = reduced("mean" if stat == "alone" else stat, values)
    return out


def agree(got: dict[str, float], wanted: dict[str, float]) -> None:
    assert list(got) == list(wanted)
    assert got == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert all(type(v) is float for v in got.values())


# --- P30 ------------------------------------------------------------------------------------------------------------
@given(dicts)
def test_p30_experiences_become_a_run_and_runs_a_task_with_the_suffix_kept(metrics: list[dict[str, Any]]) -> None:
    agree(aggregate_run(metrics), run_reference(metrics))
    agree(aggregate_task(metrics, is_eval=False), run_reference(metrics))


@given(dicts)
def test_p30_tasks_become_a_batch_with_mean_max_and_min(metrics: list[dict[str, Any]]) -> None:
    agree(aggregate_batch(metrics, prefix="rollout"), batch_reference(metrics, "rollout", ["mean", "max", "min"]))


def test_p30_a_suffix_chooses_the_aggregation_all_the_way_up() -> None:
    runs = [aggregate_run([{"n:sum": 1, "r": 1.0, "v:last": 3}, {"n:sum": 2, "r": 3.0, "v:last": 4}]), {"n:sum": 5}]
    assert runs[0] == {"n:sum": 3.0, "r": 2.0, "v:last": 4.0}
    task = aggregate_task(runs, is_eval=False)
    assert task == {"n:sum": 8.0, "r": 2.0, "v:last": 4.0}
    assert aggregate_batch([task, {"n:sum": 2}], prefix="rollout") == {
        "rollout/n/sum": 10.0, "rollout/r/mean": 2.0, "rollout/r/max": 2.0, "rollout/r/min": 2.0, "rollout/v/last": 4.0,
    }  # fmt: skip


def test_p30_a_run_counts_once_however_many_turns_it_took() -> None:
    """Long runs, which fail, weighed as many times as they had turns in another trainer's mean (labs-molt 64)."""
    runs = [aggregate_run([{"reward": 0.0}] * 30), aggregate_run([{"reward": 1.0}])]
    assert aggregate_batch([aggregate_task(runs, is_eval=False)], prefix="rollout")["rollout/reward/mean"] == 0.5
    assert aggregate_task(runs, is_eval=True)["reward/mean@2"] == 0.5


def test_p30_an_unknown_suffix_is_part_of_the_name() -> None:
    assert aggregate_run([{"a:odd": 1}, {"a:odd": 2}]) == {"a:odd": 1.5}
    assert aggregate_batch([{"a:odd": 1}]) == {"a:odd/mean": 1.0, "a:odd/max": 1.0, "a:odd/min": 1.0}


def test_p30_what_is_no_number_is_left_out_and_numpy_numbers_are_numbers() -> None:
    mixed: list[Any] = [{"a": "x", "b": None, "c": np.float32(0.5), "d": np.int64(2), "e": True}]
    assert aggregate_run(mixed) == {"c": 0.5, "d": 2.0, "e": 1.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_p30_a_number_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    for aggregate in (aggregate_run, aggregate_batch, aggregate_eval_batch, lambda m: aggregate_task(m, is_eval=True)):
        with pytest.raises(DataError, match="metric score:sum is") as e:
            aggregate([{"score:sum": bad}])
        assert e.value.details == {"metric": "score:sum"}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_p30_finite_metrics_never_become_infinite(values: list[float]) -> None:
    metrics = [{"a": v, "b:sum": v} for v in values]
    found = [aggregate_run(metrics), aggregate_task(metrics, is_eval=True), aggregate_batch(metrics)]
    found.append(aggregate_eval_batch(metrics, detailed_stats=True))
    assert all(math.isfinite(v) for one in found for v in one.values())


def test_p30_nothing_gives_nothing() -> None:
    assert aggregate_run([]) == aggregate_task([], is_eval=True) == aggregate_task([], is_eval=False) == {}
    assert aggregate_batch([], prefix="rollout") == aggregate_eval_batch([], prefix="eval/x") == {}


# --- P31 ------------------------------------------------------------------------------------------------------------
@settings(max_examples=30)
@given(st.lists(st.dictionaries(names, numbers, max_size=3), max_size=9))
def test_p31_evals_give_mean_std_best_and_worst_of_the_runs(metrics: list[dict[str, Any]]) -> None:
    agree(aggregate_task(metrics, is_eval=True), eval_reference(metrics))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 16, 17, 32])
def test_p31_best_and_worst_are_given_for_powers_of_two_below_n_and_for_n(n: int) -> None:
    metrics = [{"score": math.sin(i)} for i in range(n)]
    agree(aggregate_task(metrics, is_eval=True), eval_reference(metrics))


def test_p31_the_draws_are_the_same_for_ever() -> None:
    # Figures of the known system, taken from it once: a log of today must replay to them on numpy of the future.
    found = aggregate_task([{"score": float(i)} for i in range(4)], is_eval=True)
    assert found == {
        "score/mean@4": 1.5, "score/std@4": math.sqrt(1.25), "score/best@2": 2.105, "score/worst@2": 0.843,
        "score/best@4": 2.614, "score/worst@4": 0.384,
    }  # fmt: skip


@given(dicts, st.booleans())
def test_p31_tasks_become_an_eval_with_the_mean_or_details(metrics: list[dict[str, Any]], detailed: bool) -> None:
    stats = ["mean", "max", "min", "std"] if detailed else ["alone"]
    agree(aggregate_eval_batch(metrics, prefix="eval/gsm8k", detailed_stats=detailed),
          batch_reference(metrics, "eval/gsm8k", stats))  # fmt: skip


def test_p31_times_are_averaged_not_bootstrapped() -> None:
    metrics = [{"time/run_execution": 1.0, "time/task_execution": 3.0}, {"time/run_execution": 2.0}]
    assert aggregate_task(metrics, is_eval=True) == {"time/run_execution": 1.5, "time/task_execution": 3.0}


def test_p31_the_global_random_state_belongs_to_the_user() -> None:
    from trinity_es.projections import metrics

    metrics._draws.cache_clear()
    np.random.seed(7)
    wanted = np.random.random(3).tolist()
    np.random.seed(7)
    aggregate_task([{"a": 1}, {"a": 2}, {"a": 3}], is_eval=True)
    assert np.random.random(3).tolist() == wanted


def test_p31_every_process_gives_the_same_bits() -> None:
    code = (
        "import numpy as np\n"
        "from trinity_es.projections.metrics import *\n"
        "r = np.random.RandomState(0)\n"
        "m = [[{'a': float(x), 'b:sum': float(y)} for x, y in r.random_sample((16, 2))] for _ in range(20)]\n"
        "t = [aggregate_task(x, True) for x in m]\n"
        "found = aggregate_eval_batch(t, 'e', True) | aggregate_batch(t, 'r') | aggregate_run(t)\n"
        "print({k: v.hex() for k, v in found.items()})\n"
    )
    run = [subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ".", "NPY_DISABLE_CPU_FEATURES": features},
    ).stdout for seed, features in (("0", ""), ("1", "AVX512F"))]  # fmt: skip
    assert run[0] == run[1]
    assert len(run[0]) > 1000


@given(st.permutations([0.1 * i for i in range(12)]))
def test_p31_means_and_spreads_do_not_depend_on_the_order_of_additions(values: list[float]) -> None:
    wanted = aggregate_eval_batch([{"a": 0.1 * i, "b:sum": 0.1 * i} for i in range(12)], "e", True)
    assert aggregate_eval_batch([{"a": v, "b:sum": v} for v in values], "e", True) == wanted


def test_p31_an_eval_of_hundreds_of_tasks_takes_milliseconds() -> None:
    tasks = [[{"score": math.sin(t * 16 + r), "right": float(r % 3 == 0)} for r in range(16)] for t in range(300)]
    aggregate_task(tasks[0], is_eval=True)  # the draws are made once a process
    start = time.process_time()
    aggregate_eval_batch([aggregate_task(t, is_eval=True) for t in tasks], "eval/x", True)
    assert time.process_time() - start < 1.0  # 40 ms here; 20 s when each draw is a call

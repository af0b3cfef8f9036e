"""The aggregation of metrics, level by level; test_metrics_formulas has the formulas themselves."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_es.events.errors import DataError
from trinity_es.projections.metric_aggregation import (
    aggregate_batch,
    aggregate_eval_batch,
    aggregate_run,
    aggregate_task,
)


# --- P30 ------------------------------------------------------------------------------------------------------------
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
def test_p31_the_draws_are_the_same_for_ever() -> None:
    # Figures of the known system, taken from it once: a log of today must replay to them on numpy of the future.
    found = aggregate_task([{"score": float(i)} for i in range(4)], is_eval=True)
    assert found == {
        "score/mean@4": 1.5, "score/std@4": math.sqrt(1.25), "score/best@2": 2.105, "score/worst@2": 0.843,
        "score/best@4": 2.614, "score/worst@4": 0.384,
    }  # fmt: skip


def test_p31_times_are_averaged_not_bootstrapped() -> None:
    metrics = [{"time/run_execution": 1.0, "time/task_execution": 3.0}, {"time/run_execution": 2.0}]
    assert aggregate_task(metrics, is_eval=True) == {"time/run_execution": 1.5, "time/task_execution": 3.0}


def test_p31_the_global_random_state_belongs_to_the_user() -> None:
    from trinity_es.projections import metric_aggregation

    metric_aggregation._draw_masks.cache_clear()
    np.random.seed(7)
    wanted = np.random.random(3).tolist()
    np.random.seed(7)
    aggregate_task([{"a": 1}, {"a": 2}, {"a": 3}], is_eval=True)
    assert np.random.random(3).tolist() == wanted


def test_p31_every_process_gives_the_same_bits() -> None:
    code = (
        "import numpy as np\n"
        "from trinity_es.projections.metric_aggregation import *\n"
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

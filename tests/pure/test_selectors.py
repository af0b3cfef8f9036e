"""trinity_es.tasksets.selectors and `interleave`: which rows come next, as in Trinity-RFT 0.6 (PARITY P50)."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError, TasksetError
from trinity_es.tasksets.mix import Mix
from trinity_es.tasksets.taskset import Cursor, Taskset


def levels(folder: Path, name: str = "t", rows: int = 10, **keys: Any) -> Taskset:
    """Rows with the features `weak` and `strong`."""
    path = folder / f"{name}.jsonl"
    lines = [{"prompt": f"p{i}", "weak": (i * 7 % rows) / rows, "strong": min(1.0, (i * 7 % rows) / rows + 0.3)}
             for i in range(rows)]
    if not path.exists():
        path.write_text("\n".join(json.dumps(line) for line in lines))
    return Taskset(TasksetConfig(name=name, path=str(path), **keys))


def drawn(taskset: Taskset, *counts: int) -> list[list[int]]:
    cursor, found = Cursor(), []
    for n in counts:
        tasks, cursor = taskset.read(cursor, n)
        found.append([t.index["index"] for t in tasks])
    return found


def chooses(**how: Any) -> dict[str, Any]:
    return {"data_selector": how, "epochs": 2}


def learns(epochs: int | None = None, **kwargs: Any) -> dict[str, Any]:
    how = {"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"], "kwargs": kwargs}
    return {"data_selector": how, "epochs": epochs}


def test_p50_selectors_choose_the_rows_of_the_known_system(tmp_path: Path) -> None:
    assert drawn(levels(tmp_path, **chooses(selector_type="sequential")), 6, 6, 9) == [
        [0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 1], [2, 3, 4, 5, 6, 7, 8, 9]]  # the rest of two epochs
    first, second = (np.random.default_rng(42 + epoch).permutation(10).tolist() for epoch in (0, 1))
    assert drawn(levels(tmp_path, **chooses(selector_type="shuffle")), 6, 6, 8) == [
        first[:6], first[6:] + second[:2], second[2:]]
    assert drawn(levels(tmp_path, **chooses(selector_type="random", seed=7)), 4, 4) == [
        np.random.default_rng(7 + position).choice(10, 4, replace=False).tolist() for position in (0, 4)]
    easy = levels(tmp_path, **chooses(selector_type="offline_easy2hard", feature_keys=["weak"]))
    assert drawn(easy, 10, 2) == [[7, 4, 1, 8, 5, 2, 9, 6, 3, 0], [7, 4]]


def test_p50_a_selector_goes_on_from_any_cursor_and_ends_with_the_epochs(tmp_path: Path) -> None:
    for kind in ("sequential", "shuffle"):
        taskset = levels(tmp_path, **chooses(selector_type=kind))
        [whole] = drawn(taskset, 20)
        assert Counter(whole) == dict.fromkeys(range(10), 2)
        tasks, after = levels(tmp_path, **chooses(selector_type=kind)).read(Cursor(1, 3), 50)  # as after a restart
        assert [t.index["index"] for t in tasks] == whole[13:]
        assert taskset.read(after, 1)[0] == []
        assert taskset.left(Cursor(1, 3)) == 7
    assert levels(tmp_path, epochs=None).left(Cursor(5, 0)) == math.inf


def test_p50_difficulty_learns_as_the_known_system_does(tmp_path: Path) -> None:
    how = learns(2, m=4, tau=0, target_reward=0.8)
    taskset = levels(tmp_path, **how)
    assert drawn(taskset, 4) == [[0, 1, 2, 3]]  # all rates are 1/2
    mix = Mix([taskset])
    mix.learn({"t": ([0, 1, 2, 3], [0.0, 1.0, 0.5, 0.25]), "other": ([1], [1.0])})
    # by hand, for row 1 (features 0.7, 1.0) and row 5 (0.5, 0.8), which was not played
    low, high = (0.0 + 0.7 + 0.4 + 0.1) / 4, (0.3 + 1.0 + 0.7 + 0.4) / 4
    ability = ((0.0 + 1.0 + 0.5 + 0.25) / 4 - low) / (high - low + 1e-6)
    expected = 0.3 * ability + 0.5
    alphas, betas = taskset.selector.beliefs
    assert (alphas[1], betas[1]) == pytest.approx((0.8 + 0.2 + 0.8 * 4 + 0.2 * 4, 0.8 + 0.2), rel=1e-12)
    assert (alphas[5], betas[5]) == pytest.approx((1 + 0.2 * expected * 4, 1 + 0.2 * (1 - expected) * 4), rel=1e-12)
    again = levels(tmp_path, **how)
    Mix([again]).learn({"t": ([0, 1, 2, 3], [0.0, 1.0, 0.5, 0.25])})
    rates = alphas / (alphas + betas)
    best = np.argsort(np.abs(0.8 - rates), kind="stable")[:3].tolist()
    assert drawn(taskset, 3) == drawn(again, 3) == [best]
    mix.learn({})
    mix.learn({"t": ([2], [1.0])})
    low, high = 0.4, 0.7
    ability = 0.9 * ability + (1 - 0.9) * ((1.0 - low) / (high - low + 1e-6))
    expected = min(1.0, 0.3 * ability + 0.5)
    after = taskset.selector.beliefs[0][5]
    assert after == pytest.approx(0.8 * alphas[5] + 0.2 + 0.2 * expected * 4, rel=1e-12)


def test_p50_difficulty_draws_by_weights_and_the_same_again(tmp_path: Path) -> None:
    def learnt() -> Taskset:
        taskset = levels(tmp_path, **learns(tau=0.05, do_sample=True))
        Mix([taskset]).learn({"t": (list(range(10)), [float(i == 6) for i in range(10)])})
        return taskset

    counts = [3] * 60
    steps = drawn(learnt(), *counts)
    assert steps == drawn(learnt(), *counts)
    assert all(len(set(step)) == 3 for step in steps)
    assert sum(6 in step for step in steps) > 50  # the one that passes
    assert len({row for step in steps for row in step}) > 5


@pytest.mark.parametrize("reward", [1.1, -1.0, 30.0])
def test_difficulty_draws_though_rewards_are_no_rates(tmp_path: Path, reward: float) -> None:
    taskset, bound = levels(tmp_path, **learns(do_sample=True)), levels(tmp_path, **learns(do_sample=True))
    for _ in range(3):
        Mix([taskset]).learn({"t": (list(range(10)), [reward] * 10)})
        assert len(drawn(taskset, 3)[0]) == 3
        Mix([bound]).learn({"t": (list(range(10)), [min(max(reward, 0.0), 1.0)] * 10)})
    assert np.array_equal(taskset.selector.beliefs, bound.selector.beliefs)


def test_p50_a_selector_that_does_not_fit_the_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match=r"row 0: hard is None, not a number: fix the row, or remove hard"):
        levels(tmp_path, **chooses(selector_type="offline_easy2hard", feature_keys=["hard"]))
    with pytest.raises(ConfigError, match=r"data_selector\.kwargs"):
        levels(tmp_path, **chooses(selector_type="difficulty_based", feature_keys=["weak", "strong"], kwargs={"x": 1}))
    with pytest.raises(ConfigError, match="random takes no kwargs"):
        levels(tmp_path, **chooses(selector_type="random", kwargs={"x": 1}))
    with pytest.raises(TasksetError, match="has 10 rows, but each step draws 11 different ones"):
        drawn(levels(tmp_path, **chooses(selector_type="random")), 11)


def test_p50_tasksets_interleave_as_in_the_known_system(tmp_path: Path) -> None:
    def mixed() -> Mix:
        made = [levels(tmp_path, f"t{i}", rows, epochs=2) for i, rows in enumerate((5, 3))]
        for i, taskset in enumerate(made):
            taskset.number = i
        return Mix(made, "shuffled")

    ids = [0] * 5 + [1] * 3
    passes = []
    for epoch in (0, 1):
        shuffled = ids.copy()
        np.random.default_rng(epoch).shuffle(shuffled)
        passes += shuffled
    cursors: dict[str, Cursor] = {}
    given: list[int] = []
    read: Counter[tuple[int, int]] = Counter()
    for step in range(4):
        mix = mixed()  # as after a restart
        assert mix.left(cursors) == 16 - 5 * step
        tasks, cursors = mix.read(cursors, 5)
        numbers = [t.index["taskset_id"] for t in tasks]
        assert Counter(numbers) == Counter(passes[5 * step : 5 * step + 5])
        assert numbers == sorted(numbers, key=numbers.index)  # those of one taskset together
        given += numbers
        read.update((t.index["taskset_id"], t.index["index"]) for t in tasks)
    assert len(given) == 16
    assert set(read.values()) == {2}


ONE, TWO = ({"name": name, "path": "t.jsonl"} for name in "ab")


@pytest.mark.parametrize(("inputs", "says"), [
    *(({"tasksets": [{**ONE, "data_selector": how}]}, says) for how, says in (
        ({"selector_type": "easiest"}, "must be one of"),
        ({"selector_type": "difficulty_based", "feature_keys": ["weak"]}, "difficulty_based takes two"),
        ({"selector_type": "offline_easy2hard"}, "offline_easy2hard takes one or more"),
        ({"selector_type": "random", "feature_keys": ["weak"]}, "random takes no"),
    )),
    ({"tasksets": [ONE, {**TWO, "epochs": 3}], "interleave": "shuffled"}, "different epochs"),
    ({"tasksets": [ONE, {**TWO, "ratio": 3.0}], "interleave": "shuffled"}, "takes every row once, and a ratio"),
    ({"tasksets": [{**ONE, "shuffle": True, "data_selector": {}}]}, "has both shuffle and data_selector"),
    ({"eval_tasksets": [{**ONE, "data_selector": {"selector_type": "random"}}]}, "as evals play all rows"),
])
def test_p50_an_order_that_can_not_be_is_refused_with_the_config(inputs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Config.from_dict({"buffer": {"explorer_input": inputs}})

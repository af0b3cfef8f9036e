"""Order of a taskset's rows: by `shuffle`, or by `data_selector` with Trinity-RFT 0.6's names and formulas.

The next rows depend only on the number of rows taken before (`position`, over all epochs), on `n`, and, for a selector
that learns, on the mean rewards of finalized tasks in the log. So the same log gives the same rows. A selector learns
only from steps that are always over when its step is submitted (`SyncPolicy.always_generated`).
Draws are those of `numpy.random.default_rng(seed + position)`, as in Trinity-RFT. Only `difficulty_based` with tau
above 0 differs: Trinity-RFT draws by torch, with the same weights, without replacement.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.events.errors import ConfigError, TasksetError
from trinity_es.tasksets.files import RowFile

__all__ = ["Difficulty", "Selector", "selector_of"]

ROWS_AT_ONCE = 4096
"""Maximum number of rows in memory while features are read."""


class Selector:
    """Order in which the rows of a taskset are taken."""

    learns = False
    """True if the order depends on the rewards of earlier tasks."""

    def rows(self, position: int, n: int) -> list[int]:
        """Return the next `n` row numbers after `position` rows were taken. Raises TasksetError."""
        raise NotImplementedError

    def learn(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Learn the mean rewards of a finalized step's tasks, given by row, if `learns`. Steps come in order."""


def selector_of(config: TasksetConfig, file: RowFile) -> Selector:
    """Return the selector that a taskset's config names. Features are read from its file.

    Raises TasksetError for a row without a feature, ConfigError for an unknown argument.
    """
    selector_config, size = config.data_selector, len(file)
    if selector_config is None and config.shuffle:
        return _Ordered(size, lambda epoch: _shuffled(size, f"{config.seed}/{epoch}"))
    if selector_config is None:
        return _Ordered(size, lambda epoch: range(size))
    if selector_config.kwargs and selector_config.selector_type != "difficulty_based":
        raise ConfigError(f"taskset {config.name}: data_selector {selector_config.selector_type} takes no kwargs")
    seed = selector_config.seed
    match selector_config.selector_type:
        case "sequential":
            return _Ordered(size, lambda epoch: range(size))
        case "shuffle":
            return _Ordered(size, lambda epoch: np.random.default_rng(seed + epoch).permutation(size))
        case "random":
            return _Random(config.name, size, seed)
        case "offline_easy2hard":
            features = _features(config, file, selector_config.feature_keys)
            order = [int(row[-1]) for row in sorted([*row, i] for i, row in enumerate(features.tolist()))[::-1]]
            return _Ordered(size, lambda epoch: order)
        case _:
            features = _features(config, file, selector_config.feature_keys)
            try:
                return Difficulty(config.name, features, seed, **selector_config.kwargs)
            except TypeError as e:
                raise ConfigError(f"taskset {config.name}: data_selector.kwargs: {e}") from e


class _Ordered(Selector):
    """Selector that takes all rows in every epoch: `sequential`, `offline_easy2hard` or `shuffle`."""

    def __init__(self, size: int, order: Callable[[int], Sequence[int] | np.ndarray[Any, Any]]) -> None:
        """`order` returns the order of an epoch."""
        self._size = size
        self._order = functools.lru_cache(maxsize=1)(order)

    def rows(self, position: int, n: int) -> list[int]:
        return [int(self._order(i // self._size)[i % self._size]) for i in range(position, position + n)]


def _shuffled(size: int, seed: str) -> array[int]:
    """Return the row numbers in the random order of this seed, with 8 bytes for each."""
    order = array("Q", range(size))
    random.Random(seed).shuffle(order)
    return order


class _Random(Selector):
    """Selector `random`: each step draws its rows without replacement."""

    def __init__(self, name: str, size: int, seed: int) -> None:
        self._name, self._size, self._seed = name, size, seed

    def rows(self, position: int, n: int) -> list[int]:
        _require_enough(self._name, n, self._size)
        rows = np.random.default_rng(self._seed + position).choice(self._size, n, replace=False)
        return [int(row) for row in rows]


class Difficulty(Selector):
    """`difficulty_based`: the rows whose expected reward is nearest to `target_reward`.

    Each row's pass rate is a Beta distribution (alpha, beta), at first (1, 1). After a step with rewards s of some rows
    the model's ability c is (mean s - mean f0) / (mean f1 - mean f0 + 1e-6) over these rows' two features, smoothed by
    0.9. The expected pass rate is p = s for played rows, p = clip(f0 + (f1 - f0) c, 0, 1) for the others, and

        alpha = (1 - lamb) alpha + lamb + (1 - rho) m s [played] + rho m p
        beta  = (1 - lamb) beta + lamb + (1 - rho) m (1 - s) [played] + rho m (1 - p)

    `m` is the weight of a step in observations, `lamb` the pull back to (1, 1), `rho` the share of the expected rate
    beside the observed one; [played] is 1 for rows that were played, else 0.

    A row's score is -|target_reward - rate|. Its rate is alpha / (alpha + beta), or with `do_sample` a draw from the
    distribution. With `tau` 0 the best scores are taken, else rows are drawn with weights exp(score / tau).
    """

    learns = True

    def __init__(
        self, name: str, features: np.ndarray[Any, Any], seed: int, *, m: int = 16, lamb: float = 0.2,
        rho: float = 0.2, target_reward: float = 1.0, tau: float = 1.0, do_sample: bool = False,
        adaptive_rho: bool = False,
    ) -> None:
        self._name, self._features, self._seed = name, np.asarray(features, dtype=float), seed
        self._m, self._lamb, self._rho = m, lamb, rho
        self._target, self._tau, self._do_sample, self._adaptive = target_reward, tau, do_sample, adaptive_rho
        self._ability: float | None = None
        self.beliefs = np.ones(len(features)), np.ones(len(features))
        """Alpha and beta of each row."""

    def learn(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Update `beliefs` by the class's formulas, unless the step had no tasks of this taskset."""
        if not len(rows):
            return
        played = list(rows)
        rewards = np.clip(np.array(rates, dtype=float), 0, 1)
        low, high = np.mean(self._features[played], axis=0)
        ability = (np.mean(rewards) - low) / (high - low + 1e-6)
        self._ability = ability if self._ability is None else 0.9 * self._ability + (1 - 0.9) * ability
        alphas, betas = self.beliefs
        passed, failed = np.zeros(len(alphas)), np.zeros(len(alphas))
        passed[played], failed[played] = rewards * self._m, (1 - rewards) * self._m
        spread = self._features[:, 1] - self._features[:, 0]
        expected = np.clip(spread * self._ability + self._features[:, 0], 0, 1)
        if self._adaptive and np.mean(np.abs(expected[played] - rewards)) >= 0.25:
            self._rho *= 0.5
        expected[played] = rewards
        old_share, rho = 1 - self._lamb, self._rho
        self.beliefs = (
            old_share * alphas + self._lamb + (1 - rho) * passed + rho * expected * self._m,
            old_share * betas + self._lamb + (1 - rho) * failed + rho * (1 - expected) * self._m,
        )

    def rows(self, position: int, n: int) -> list[int]:
        """Return `n` different rows: those with the best scores, or a draw by score. Raises TasksetError if too few."""
        alphas, betas = self.beliefs
        _require_enough(self._name, n, len(alphas))
        rng = np.random.default_rng(self._seed + position)
        rates = rng.beta(alphas, betas) if self._do_sample else alphas / (alphas + betas)
        scores = -np.abs(self._target - rates)
        # The n largest values of log weight - log exponential are a draw by these weights without replacement.
        if self._tau:
            scores = scores / self._tau - np.log(rng.exponential(size=len(scores)))
        return [int(row) for row in np.argsort(-scores, kind="stable")[:n]]


def _require_enough(name: str, n: int, size: int) -> None:
    if n > size:
        raise TasksetError(
            f"taskset {name} has {size} rows, but each step draws {n} different ones: lower buffer.batch_size, or "
            "use the data_selector shuffle"
        )


def _features(config: TasksetConfig, file: RowFile, keys: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the numbers at these keys, as an array [rows, keys]. Raises TasksetError if one is missing."""
    table: list[list[float]] = []
    for first in range(0, len(file), ROWS_AT_ONCE):
        for row in file.read(range(first, min(first + ROWS_AT_ONCE, len(file)))):
            values = [row.get(key) for key in keys]
            for key, value in zip(keys, values, strict=True):
                if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
                    raise TasksetError(
                        f"taskset {config.name} row {len(table)}: {key} is {value!r}, not a number: fix the "
                        f"row, or remove {key} from data_selector.feature_keys", row=len(table),
                    )
            table.append([float(value) for value in values if value is not None])
    return np.array(table)

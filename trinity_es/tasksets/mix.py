"""Shares of several tasksets in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from trinity_es.events.errors import TasksetError
from trinity_es.events.values import Task
from trinity_es.tasksets.taskset import Cursor, Taskset

__all__ = ["Mix"]


class Mix:
    """Tasksets that a run trains on together, each with a share of the tasks by its `ratio`.

    The next task comes from the taskset that is furthest behind its share, or the first of several. So the choice
    depends only on the number of tasks taken from each, any sequence of steps has these shares within one task each,
    and the batch size does not matter. A taskset that was read `epochs` times is over, and the others share the rest.
    The run ends when all are over, so each row is used exactly `epochs` times. With `epochs: null` it never ends.

    `interleave="shuffled"` works as in Trinity-RFT: a pass takes all rows of all tasksets, in an order drawn for that
    pass. Within a step, tasks of one taskset come together.
    """

    def __init__(self, tasksets: Sequence[Taskset], interleave: Literal["ratio", "shuffled"] = "ratio") -> None:
        self.tasksets, self.interleave = tasksets, interleave
        self._pass: tuple[int, list[int]] | None = None

    @property
    def names(self) -> list[str]:
        return [t.config.name for t in self.tasksets]

    @property
    def learns(self) -> bool:
        """True if the next tasks depend on the rewards of earlier ones."""
        return any(t.selector.learns for t in self.tasksets)

    def learn(self, rates: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
        """Take the rewards of a finalized step: rows and mean rewards by taskset. Steps come in order."""
        for taskset in self.tasksets:
            if taskset.config.name in rates:
                taskset.selector.learn(*rates[taskset.config.name])

    def left(self, cursors: Mapping[str, Cursor]) -> float:
        """Return how many tasks come after these cursors; inf if a taskset is endless."""
        return sum(t.left(cursors.get(t.config.name, Cursor())) for t in self.tasksets)

    def read(self, cursors: Mapping[str, Cursor], n: int) -> tuple[list[Task], dict[str, Cursor]]:
        """Return the next `n` tasks after these cursors (none: from the beginning), and the cursors after them.

        Returns fewer, at last none, when all tasksets are over. Raises ValueError and TasksetError, as `Taskset.read`.
        """
        at = {t.config.name: cursors.get(t.config.name, Cursor()) for t in self.tasksets}
        shuffled = self.interleave == "shuffled"
        order = self._shuffled_order(at, n) if shuffled else self._order_by_ratio(at, n)
        batches: list[list[Task]] = []
        for i, taskset in enumerate(self.tasksets):
            name = taskset.config.name
            tasks, at[name] = taskset.read(at[name], order.count(i))
            batches.append(tasks)
        if shuffled:
            return [task for i in dict.fromkeys(order) for task in batches[i]], at
        queues = [iter(tasks) for tasks in batches]
        return [next(queues[i]) for i in order], at

    def task(self, name: str, row: int) -> Task:
        """Return the task of one row of the taskset with this name. Raises TasksetError if it does not exist."""
        taskset = next((t for t in self.tasksets if t.config.name == name), None)
        if taskset is None or row >= len(taskset):
            state = "is not in the config" if taskset is None else f"has {len(taskset)} rows"
            raise TasksetError(f"taskset {name} {state}, and the run began with row {row} of it: put it back")
        return taskset.task(row)

    def _counts_taken(self, at: Mapping[str, Cursor]) -> list[int]:
        return [at[t.config.name].epoch * len(t) + at[t.config.name].offset for t in self.tasksets]

    def _shuffled_order(self, at: Mapping[str, Cursor], n: int) -> list[int]:
        """Return the taskset of each of the next `n` tasks, with another order in every pass over all tasksets."""
        taken = sum(self._counts_taken(at))
        size, order = sum(len(t) for t in self.tasksets), []
        for position in range(taken, taken + int(min(n, self.left(at)))):
            number = position // size
            if self._pass is None or self._pass[0] != number:
                ids = [i for i, t in enumerate(self.tasksets) for _ in range(len(t))]
                np.random.default_rng(number).shuffle(ids)
                self._pass = number, ids
            order.append(self._pass[1][position % size])
        return order

    def _order_by_ratio(self, at: Mapping[str, Cursor], n: int) -> list[int]:
        """Return the taskset of each of the next `n` tasks."""
        taken = self._counts_taken(at)
        ends = [None if t.config.epochs is None else t.config.epochs * len(t) for t in self.tasksets]
        order: list[int] = []
        while len(order) < n:
            live = [i for i, end in enumerate(ends) if end is None or taken[i] < end]
            if not live:
                break
            ratios, so_far = sum(self.tasksets[i].config.ratio for i in live), sum(taken[i] for i in live)
            behind = {i: self.tasksets[i].config.ratio / ratios * (so_far + 1) - taken[i] for i in live}
            chosen = max(live, key=lambda i: (behind[i], -i))
            taken[chosen] += 1
            order.append(chosen)
        return order

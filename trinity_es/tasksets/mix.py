"""Mix of several tasksets, each with a share of the tasks."""

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

    The next task comes from the taskset that is furthest behind its share; of several such tasksets, from the first.
    So the choice depends only on the number of tasks taken from each, not on the batch size, and each taskset always
    has its share within one task. A taskset that was read `epochs` times is over, and the others share the rest. The
    run ends when all are over, so each row is used exactly `epochs` times; with `epochs: null` it never ends.

    `interleave="shuffled"` works as in Trinity-RFT: a pass takes all rows of all tasksets, in an order drawn for that
    pass. Within a step, tasks of one taskset come together.
    """

    def __init__(self, tasksets: Sequence[Taskset], interleave: Literal["ratio", "shuffled"] = "ratio") -> None:
        self.tasksets, self.interleave = tasksets, interleave
        self._pass: tuple[int, list[int]] | None = None
        """Number of the last shuffled pass, and for each of its tasks the index of the taskset."""

    @property
    def learns(self) -> bool:
        """True if the choice of tasks depends on rewards of earlier tasks."""
        return any(t.selector.learns for t in self.tasksets)

    def learn(self, rates: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
        """Pass a finalized step's rewards, {taskset: (rows, mean rewards)}, to the selectors. Steps come in order."""
        for taskset in self.tasksets:
            if taskset.config.name in rates:
                taskset.selector.learn(*rates[taskset.config.name])

    def left(self, cursors: Mapping[str, Cursor]) -> float:
        """Return how many tasks come after these cursors; inf if a taskset is endless."""
        return sum(t.left(cursors.get(t.config.name, Cursor())) for t in self.tasksets)

    def read(self, cursors: Mapping[str, Cursor], n: int) -> tuple[list[Task], dict[str, Cursor]]:
        """Return the next `n` tasks after these cursors, and the cursors after them; a missing cursor is the beginning.

        Returns fewer tasks, or none, at the end of all tasksets. Raises ValueError and TasksetError, as `Taskset.read`.
        """
        positions = {t.config.name: cursors.get(t.config.name, Cursor()) for t in self.tasksets}
        is_shuffled = self.interleave == "shuffled"
        order = self._shuffled_order(positions, n) if is_shuffled else self._order_by_ratio(positions, n)
        tasks_by_taskset: list[list[Task]] = []
        for i, taskset in enumerate(self.tasksets):
            name = taskset.config.name
            tasks, positions[name] = taskset.read(positions[name], order.count(i))
            tasks_by_taskset.append(tasks)
        if is_shuffled:  # tasks of one taskset come together
            return [task for i in dict.fromkeys(order) for task in tasks_by_taskset[i]], positions
        queues = [iter(tasks) for tasks in tasks_by_taskset]
        return [next(queues[i]) for i in order], positions

    def task(self, name: str, row: int) -> Task:
        """Return the task of one row of the taskset with this name. Raises TasksetError if it does not exist."""
        taskset = next((t for t in self.tasksets if t.config.name == name), None)
        if taskset is None or row >= len(taskset):
            problem = "is not in the config" if taskset is None else f"has {len(taskset)} rows"
            raise TasksetError(f"taskset {name} {problem}, but a task of this run came from its row {row}: restore "
                               "the taskset")
        return taskset.task(row)

    def _counts_taken(self, positions: Mapping[str, Cursor]) -> list[int]:
        cursors = [positions[taskset.config.name] for taskset in self.tasksets]
        return [cursor.epoch * len(t) + cursor.offset for cursor, t in zip(cursors, self.tasksets, strict=True)]

    def _shuffled_order(self, positions: Mapping[str, Cursor], n: int) -> list[int]:
        """Return for each of the next `n` tasks the index of its taskset, in the order drawn for the pass."""
        taken_count = sum(self._counts_taken(positions))
        pass_size = sum(len(taskset) for taskset in self.tasksets)
        order = []
        for position in range(taken_count, taken_count + int(min(n, self.left(positions)))):
            pass_number = position // pass_size
            if self._pass is None or self._pass[0] != pass_number:
                indices = [i for i, taskset in enumerate(self.tasksets) for _ in range(len(taskset))]
                np.random.default_rng(pass_number).shuffle(indices)
                self._pass = pass_number, indices
            order.append(self._pass[1][position % pass_size])
        return order

    def _order_by_ratio(self, positions: Mapping[str, Cursor], n: int) -> list[int]:
        """Return for each of the next `n` tasks the index of its taskset: the one furthest behind its share."""
        counts = self._counts_taken(positions)
        totals = [None if t.config.epochs is None else t.config.epochs * len(t) for t in self.tasksets]
        order: list[int] = []
        while len(order) < n:
            unfinished = [i for i, total in enumerate(totals) if total is None or counts[i] < total]
            if not unfinished:
                break
            ratio_sum = sum(self.tasksets[i].config.ratio for i in unfinished)
            count_sum = sum(counts[i] for i in unfinished)
            shares = {i: self.tasksets[i].config.ratio / ratio_sum * (count_sum + 1) for i in unfinished}
            index = max(unfinished, key=lambda i: (shares[i] - counts[i], -i))
            counts[index] += 1
            order.append(index)
        return order

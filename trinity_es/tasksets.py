"""Tasksets: files of tasks, read in a known order from a known place.

`Taskset` checks every row of its file when it is built, so that a bad row stops a run before it starts and not at step
400; what is in them is read when it is asked for (`trinity_es.taskset_files`). `read` is a pure function of the cursor:
the same cursor gives the same tasks on every machine, however often a run was restarted and however it is cut into
batches; every row comes exactly once an epoch. (A `data_selector` may draw for each step, and learn from the log: see
`trinity_es.selectors`.) `Mix` shares steps out among several tasksets in the same way. Whoever reads keeps the cursors
(they are in the log, written in the transaction of the batch). Files must not change in use.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trinity_es.config import TasksetConfig
from trinity_es.events.errors import TasksetError
from trinity_es.events.values import Task
from trinity_es.selectors import selector_of
from trinity_es.taskset_files import RowFile, open_rows

__all__ = ["Cursor", "Mix", "Taskset"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a taskset: `offset` tasks of pass `epoch` were read. Both from 0."""

    epoch: int = 0
    offset: int = 0


class Taskset:
    """One taskset. `len()` is its rows.

    Raises TasksetError, which names the file and the line, for a file that can't be read, is empty, is not UTF-8, or
    has a row that is not a JSON object with the prompt key.
    """

    def __init__(self, config: TasksetConfig, *, is_eval: bool = False, number: int = 0) -> None:
        """Open a taskset. `number`: its place among those that are trained on, `index["taskset_id"]` of its tasks."""
        self.config = config
        self.is_eval, self.number = is_eval, number
        self._order: tuple[int, array[int]] | None = None
        self._file: RowFile = open_rows(config)
        self.selector = selector_of(config, self._file)

    def __len__(self) -> int:
        return len(self._file)

    def read(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """Return the next `n` tasks from `cursor` on, and the cursor after them; goes on into the next epoch by itself.

        Fewer than `n`, at last none, when the last epoch ends. Raises ValueError for a negative `n` or a cursor that
        lies outside of an epoch, TasksetError when the file was changed since it was checked.
        """
        if n < 0:
            raise ValueError(f"n must be 0 or more, not {n}")
        if cursor.epoch < 0 or not 0 <= cursor.offset <= len(self):
            raise ValueError(f"{cursor} lies outside of taskset {self.config.name}, which has {len(self)} rows")
        if self.selector is not None:
            position = cursor.epoch * len(self) + cursor.offset
            count = int(min(n, self.left(cursor)))
            return self._tasks(self.selector.rows(position, count)), Cursor(*divmod(position + count, len(self)))
        rows: list[int] = []
        epoch, offset = cursor.epoch, cursor.offset
        while len(rows) < n and not self._ended(epoch):
            take = self._rows(epoch, offset, n - len(rows))
            rows += take
            offset += len(take)
            if offset == len(self):
                epoch, offset = epoch + 1, 0
        return self._tasks(rows), Cursor(epoch, offset)

    def left(self, cursor: Cursor) -> float:
        """Return how many tasks come after this cursor; inf where the taskset is read without end."""
        if self.config.epochs is None:
            return math.inf
        return max(0, self.config.epochs * len(self) - (cursor.epoch * len(self) + cursor.offset))

    def all(self) -> list[Task]:
        """Return every row once, in the order of the file: what an evaluation runs."""
        return self._tasks(list(range(len(self))))

    def _ended(self, epoch: int) -> bool:
        return self.config.epochs is not None and epoch >= self.config.epochs

    def _rows(self, epoch: int, offset: int, n: int) -> list[int]:
        stop = min(offset + n, len(self))
        if not self.config.shuffle:
            return list(range(offset, stop))
        if self._order is None or self._order[0] != epoch:
            order = array("Q", range(len(self)))
            random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return list(self._order[1][offset:stop])

    def _tasks(self, rows: list[int]) -> list[Task]:
        return [self._task(row, sample) for row, sample in zip(rows, self._file.read(rows), strict=True)]

    def _task(self, row: int, sample: dict[str, Any]) -> Task:
        c = self.config
        return Task(
            workflow=self._named(row, sample, c.format.workflow_key) or c.workflow, repeat_times=c.repeat_times,
            format_args=c.format.for_task(), rollout_args=dict(c.rollout_args), workflow_args=dict(c.workflow_args),
            reward_fn=self._named(row, sample, c.format.reward_fn_key) or c.reward_fn,
            reward_fn_args=dict(c.reward_fn_args), is_eval=self.is_eval, raw_task=sample,
            index={"taskset": c.name, "index": row} | ({} if self.is_eval else {"taskset_id": self.number}),
        )

    def _named(self, row: int, sample: dict[str, Any], key: str | None) -> str | None:
        """Return what the row itself names, where the taskset lets it; None: what the taskset says."""
        value = None if key is None else sample.get(key)
        if value is not None and not isinstance(value, str):
            raise TasksetError(
                f"taskset {self.config.name} row {row}: {key} is {value!r}: a name or \"module:name\" is expected",
                row=row,
            )
        return value


class Mix:
    """Tasksets that are trained on together: each gives its share of the tasks, by `ratio`.

    Which taskset gives the next task depends only on how many each has given so far: the one that is furthest behind
    its share, of several the first. So every run of steps has them in these shares, give or take one task each, and
    cutting it elsewhere changes nothing. A taskset that was read `epochs` times is over, and the others share what
    comes after; the run ends when all are over, so every row of each is used exactly `epochs` times. It never ends
    while one has `epochs: null`.

    `interleave="shuffled"` is Trinity-RFT's way: in each pass over all, every taskset gives as many tasks as it has
    rows, in an order that is drawn for that pass; of a step's tasks those of one taskset come together.
    """

    def __init__(self, tasksets: Sequence[Taskset], interleave: Literal["ratio", "shuffled"] = "ratio") -> None:
        self.tasksets, self.interleave = tasksets, interleave
        self._pass: tuple[int, list[int]] | None = None

    @property
    def names(self) -> list[str]:
        return [t.config.name for t in self.tasksets]

    @property
    def learns(self) -> bool:
        """True if what comes next depends on how well earlier tasks went."""
        return any(t.selector is not None and t.selector.learns for t in self.tasksets)

    def learn(self, rates: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> None:
        """Take in how well the tasks of a finalized step went: rows and mean rewards by taskset. Steps in order."""
        for taskset in self.tasksets:
            if taskset.selector is not None and taskset.config.name in rates:
                taskset.selector.learn(*rates[taskset.config.name])

    def left(self, cursors: Mapping[str, Cursor]) -> float:
        """Return how many tasks come after these cursors; inf where a taskset is read without end."""
        return sum(t.left(cursors.get(t.config.name, Cursor())) for t in self.tasksets)

    def read(self, cursors: Mapping[str, Cursor], n: int) -> tuple[list[Task], dict[str, Cursor]]:
        """Return the next `n` tasks from these cursors on (none given: the beginning), and the cursors after them.

        Fewer, at last none, when all tasksets are over. Raises ValueError and TasksetError, as `Taskset.read`.
        """
        at = {t.config.name: cursors.get(t.config.name, Cursor()) for t in self.tasksets}
        shuffled = self.interleave == "shuffled"
        order = self._shuffled(at, n) if shuffled else self._order(at, n)
        given: list[list[Task]] = []
        for i, taskset in enumerate(self.tasksets):
            name = taskset.config.name
            tasks, at[name] = taskset.read(at[name], order.count(i))
            given.append(tasks)
        if shuffled:
            return [task for i in dict.fromkeys(order) for task in given[i]], at
        queues = [iter(tasks) for tasks in given]
        return [next(queues[i]) for i in order], at

    def _shuffled(self, at: Mapping[str, Cursor], n: int) -> list[int]:
        """Return the same for `shuffled`: every pass over all tasksets has an order of its own."""
        taken = sum(at[t.config.name].epoch * len(t) + at[t.config.name].offset for t in self.tasksets)
        size, order = sum(len(t) for t in self.tasksets), []
        for position in range(taken, taken + int(min(n, self.left(at)))):
            number = position // size
            if self._pass is None or self._pass[0] != number:
                ids = [i for i, t in enumerate(self.tasksets) for _ in range(len(t))]
                np.random.default_rng(number).shuffle(ids)
                self._pass = number, ids
            order.append(self._pass[1][position % size])
        return order

    def _order(self, at: Mapping[str, Cursor], n: int) -> list[int]:
        """Return which taskset gives each of the next `n` tasks."""
        taken = [at[t.config.name].epoch * len(t) + at[t.config.name].offset for t in self.tasksets]
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

"""Tasksets: tasks read from a source in a fixed order.

`Taskset` checks every row when it is built, so a bad row stops a run before it starts and not at step 400. Rows are
read on demand (`files.py`). `read` is a pure function of the cursor: the same cursor gives the same tasks on every
machine, after any restart and for any batch size, and every row comes exactly once an epoch. (A `data_selector` may
draw for each step and learn from the log: see `selectors.py`.) The caller keeps the cursors, and the log stores them in
the batch's transaction. Files must not change while they are in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.events.values import Task
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.tasksets.files import RowFile
from trinity_es.tasksets.generated import with_scorer
from trinity_es.tasksets.row_checks import row_name
from trinity_es.tasksets.selectors import selector_of
from trinity_es.tasksets.source import open_source

__all__ = ["Cursor", "Taskset"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in a taskset: after `offset` tasks of epoch `epoch`. Both count from 0."""

    epoch: int = 0
    offset: int = 0


class Taskset:
    """Tasks of one source, read by cursor. `len()` is the number of rows.

    Raises TasksetError, which names file and line, if a file can't be read, is empty, is not UTF-8, or has a row that
    is not a JSON object with the prompt key.
    """

    def __init__(
        self, config: TasksetConfig, *, is_eval: bool = False, number: int = 0, recorded: TasksetSource | None = None,
        rows: RowFile | None = None,
    ) -> None:
        """Open a taskset. `number`: its index among the training tasksets, which tasks have as `index["taskset_id"]`.

        `recorded`: the source in the run's log (TasksetResolved) to open again. `rows`: rows to use without a source.
        """
        self.is_eval, self.number = is_eval, number
        self.source: TasksetSource | None = None
        self._file: RowFile
        if rows is not None:
            self._file = rows
        else:
            self._file, self.source = open_source(config, recorded, is_eval=is_eval)
        self.config = with_scorer(config) if config.kind == "reasoning_gym" and rows is None else config
        self.selector = selector_of(config, self._file)

    def __len__(self) -> int:
        return len(self._file)

    def read(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """Return the next `n` tasks after `cursor`, across epochs, and the cursor after them.

        Returns fewer than `n` tasks, or none, at the end of the last epoch. Raises ValueError for a negative `n` or a
        cursor outside of an epoch, TasksetError if the file changed since it was checked.
        """
        if n < 0:
            raise ValueError(f"n must be 0 or more, not {n}")
        if cursor.epoch < 0 or not 0 <= cursor.offset <= len(self):
            raise ValueError(f"{cursor} lies outside of taskset {self.config.name}, which has {len(self)} rows")
        position = cursor.epoch * len(self) + cursor.offset
        count = int(min(n, self.left(cursor)))
        return self._tasks(self.selector.rows(position, count)), Cursor(*divmod(position + count, len(self)))

    def left(self, cursor: Cursor) -> float:
        """Return the number of tasks after this cursor; inf if the taskset is endless."""
        if self.config.epochs is None:
            return math.inf
        return max(0, self.config.epochs * len(self) - (cursor.epoch * len(self) + cursor.offset))

    def all(self) -> list[Task]:
        """Return a task of every row, in the order of the file, for an evaluation."""
        return self._tasks(list(range(len(self))))

    def task(self, row: int) -> Task:
        return self._tasks([row])[0]

    def _tasks(self, rows: list[int]) -> list[Task]:
        return [self._task(row, sample) for row, sample in zip(rows, self._file.read(rows), strict=True)]

    def _task(self, row: int, sample: dict[str, Any]) -> Task:
        """Return the task of a row. A workflow or reward that the row names overrides the config's."""
        config = self.config
        index: dict[str, Any] = {"taskset": config.name, "index": row}
        if not self.is_eval:
            index["taskset_id"] = self.number
        return Task(
            workflow=row_name(sample, config.format.workflow_key) or config.workflow,
            repeat_times=config.repeat_times, format_args=config.format.task_format_args(),
            rollout_args=dict(config.rollout_args), workflow_args=dict(config.workflow_args),
            reward_fn=row_name(sample, config.format.reward_fn_key) or config.reward_fn,
            reward_fn_args=dict(config.reward_fn_args), is_eval=self.is_eval, raw_task=sample, index=index,
        )

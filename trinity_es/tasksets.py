"""Tasksets: files of tasks, read in a known order from a known place.

`Taskset` checks every line of its file when it is built, so that a bad row stops a run before it starts and not at step
400; it keeps where lines begin, not what is in them, so a file may be larger than memory. `read` is a pure function of
the cursor: the same cursor gives the same tasks on every machine, however often a run was restarted and however it is
cut into batches; every row comes exactly once an epoch. Whoever reads keeps the cursor (it is in the log, written in
the transaction of the batch). The file must not change while it is used.
"""

from __future__ import annotations

import os
import random
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from events.errors import TasksetError
from events.values import Task
from trinity_es.config import TasksetConfig

__all__ = ["Cursor", "Taskset"]

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a taskset: `offset` tasks of pass `epoch` were read. Both from 0."""

    epoch: int = 0
    offset: int = 0


class Taskset:
    """One taskset. `len()` is its rows.

    Raises TasksetError, which names the file and the line, for a file that can't be read, is empty, is not UTF-8, or
    has a line that is not a JSON object with the prompt key. Blank lines and a byte order mark are passed over.
    """

    def __init__(self, config: TasksetConfig, *, is_eval: bool = False) -> None:
        self.config = config
        self.is_eval = is_eval
        self._file: Path = config.file
        self._starts = array("Q")
        self._order: tuple[int, array[int]] | None = None
        try:
            with self._file.open("rb") as f:
                self._identity = _identity(f)
                self._check(f)
        except OSError as e:
            split = ": choose <split>.jsonl in it with split" if self._file.is_dir() else ""
            raise TasksetError(
                f"taskset {config.name}: {self._file} can't be read ({e.strerror}){split}", file=str(self._file)
            ) from e
        if not self._starts:
            raise TasksetError(f"{self._file} is empty: a taskset has at least one row", file=str(self._file))

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, cursor: Cursor, n: int) -> tuple[list[Task], Cursor]:
        """The next `n` tasks from `cursor` on, and the cursor after them; goes on into the next epoch by itself.

        Fewer than `n`, at last none, when the last epoch ends. Raises ValueError for a negative `n` or a cursor that
        lies outside of an epoch, TasksetError when the file was changed since it was checked.
        """
        if n < 0:
            raise ValueError(f"n must be 0 or more, not {n}")
        if cursor.epoch < 0 or not 0 <= cursor.offset <= len(self):
            raise ValueError(f"{cursor} lies outside of taskset {self.config.name}, which has {len(self)} rows")
        rows: list[int] = []
        epoch, offset = cursor.epoch, cursor.offset
        while len(rows) < n and not self._ended(epoch):
            take = self._rows(epoch, offset, n - len(rows))
            rows += take
            offset += len(take)
            if offset == len(self):
                epoch, offset = epoch + 1, 0
        return self._tasks(rows), Cursor(epoch, offset)

    def all(self) -> list[Task]:
        """Every row once, in the order of the file: what an evaluation runs."""
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
        if not rows:
            return []
        with self._file.open("rb") as f:
            if _identity(f) != self._identity:
                raise TasksetError(
                    f"{self._file} was changed while taskset {self.config.name} was in use: its rows are no longer "
                    "those that the cursor counts. Put the old file back, or start a new run",
                    file=str(self._file),
                )
            return [self._task(f, row) for row in rows]

    def _task(self, f: IO[bytes], row: int) -> Task:
        f.seek(self._starts[row])
        c = self.config
        return Task(
            workflow=c.workflow, repeat_times=c.repeat_times, format_args=c.format.model_dump(exclude_none=True),
            rollout_args=dict(c.rollout_args), workflow_args=dict(c.workflow_args), reward_fn=c.reward_fn,
            reward_fn_args=dict(c.reward_fn_args), is_eval=self.is_eval, raw_task=orjson.loads(f.readline()),
            index={"taskset": c.name, "index": row},
        )

    def _check(self, f: IO[bytes]) -> None:
        start = 0
        for number, line in enumerate(f, 1):
            skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            if line[skip:].strip():
                self._check_line(number, line[skip:])
                self._starts.append(start + skip)
            start += len(line)

    def _check_line(self, number: int, line: bytes) -> None:
        where = f"{self._file} line {number}"
        details = {"file": str(self._file), "line": number}
        try:
            row: Any = orjson.loads(line)
        except orjson.JSONDecodeError as e:
            try:
                line.decode()
            except UnicodeDecodeError as bad:
                raise TasksetError(f"{where}: not UTF-8 (byte {bad.start}): save the file as UTF-8", **details) from e
            raise TasksetError(f"{where}: not JSON ({e.msg}): fix or remove the line", **details) from e
        if not isinstance(row, dict):
            kind = "a list" if isinstance(row, list) else f"{line.strip().decode():.40}"
            raise TasksetError(f"{where}: must be a JSON object, not {kind}: fix or remove the line", **details)
        key = self.config.format.prompt_key
        if key not in row:
            keys = ", ".join(list(row)[:8]) or "no keys"
            raise TasksetError(
                f"{where}: no prompt: the key {key!r} is missing (there are: {keys}); name the right one in "
                "format.prompt_key of the taskset",
                **details,
            )


def _identity(f: IO[bytes]) -> tuple[int, int]:
    stat = os.fstat(f.fileno())
    return stat.st_size, stat.st_mtime_ns

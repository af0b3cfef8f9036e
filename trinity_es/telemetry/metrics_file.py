"""`metrics.jsonl`: the metrics of a run, a JSON object a line, as one file that goes on with it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from pathlib import Path

import orjson

from trinity_es.events.atomic_file import whole_file
from trinity_es.events.private_files import make_private_folder, open_private

__all__ = ["DIGITS", "JsonlMonitor", "Place", "Row", "read_metrics"]

DIGITS = 3
"""Of a time in `metrics.jsonl`: milliseconds."""
_LOG = logging.getLogger("trinity_es.telemetry.monitors")


class JsonlMonitor:
    """`jsonl`: one JSON object a line: `step`, `time` (unix seconds), `position` in the log, and metrics by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        make_private_folder(self.path.parent)
        self._unwritten: list[bytes] = []
        """Lines that the disk did not take yet, the oldest first."""
        self._open()

    def _open(self) -> None:
        self._file = os.fdopen(open_private(self.path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)

    def begin(self, rows: Iterable[Row], known: Collection[Place]) -> int:
        """Write the file anew with these rows; return the last position of the log that an earlier life wrote.

        A file with a line that is none of `known` is somebody else's: it is kept under another name.
        """
        there = self.path.read_bytes().splitlines(keepends=True)
        if len(there) > 1 and not there[-1].endswith(b"\n"):
            there.pop()  # it was being written when its run was killed
        written = [_place(line) for line in there]
        with whole_file(self.path) as file:
            file.writelines(map(_line, rows))
            file.flush()
            if not set(written) <= set(known):  # not before: what could not be written would be appended to theirs
                names = (self.path.with_name(f"{self.path.name}.{n}") for n in count(1))
                aside = next(path for path in names if not path.exists())
                os.replace(self.path, aside)
                _LOG.warning("%s has lines that are not of this run: it is %s now", self.path, aside)
                written = []
        self._file.close()
        self._open()
        return max((position for _, position, _ in written), default=0)

    def log(
        self, metrics: Mapping[str, float], step: int, position: int | None = None, at: float | None = None
    ) -> None:
        """Append a line. Raises OSError where the disk takes no more: the line is kept, and comes with the next."""
        self._unwritten.append(_line((metrics, step, position, at)))
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            whole, line = os.fstat(self._file.fileno()).st_size, self._unwritten[0]
            if self._file.write(line) != len(line):  # the disk is full: no half line may stay
                os.ftruncate(self._file.fileno(), whole)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            del self._unwritten[0]

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()


Row = tuple[Mapping[str, float], int, int | None, float | None]
"""Metrics, step, position in the log, and when they were recorded."""
Place = tuple[int, int, float]
"""Step, position and time of a line: two runs alike have the same steps at the same positions, at other times."""


def _line(row: Row) -> bytes:
    metrics, step, position, at = row
    where = {} if position is None else {"position": position}
    when = round(time.time() if at is None else at, DIGITS)
    told = {"step": step, "time": when, **where, **dict(sorted(metrics.items()))}
    return orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)


def _place(line: bytes) -> Place:
    """Return where a line is from; (-1, -1, 0) where it does not say."""
    try:
        row = orjson.loads(line)
        return int(row["step"]), int(row["position"]), float(row["time"])
    except (AttributeError, TypeError, KeyError, ValueError):
        return -1, -1, 0.0


def read_metrics(path: str | Path) -> dict[int, dict[str, float]]:
    """Return a `metrics.jsonl` by step: all its metrics."""
    steps: dict[int, dict[str, float]] = {}
    for line in Path(path).read_bytes().splitlines():
        row = orjson.loads(line)
        step = row.pop("step")
        for name in ("time", "position"):
            row.pop(name, None)
        steps.setdefault(step, {}).update(row)
    return steps

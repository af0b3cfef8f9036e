"""The file `metrics.jsonl`, which has all metrics of a run, one JSON object per line."""

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

__all__ = ["DIGITS", "JsonlMonitor", "LineId", "Row", "read_metrics"]

DIGITS = 3
"""Decimal digits of a time in `metrics.jsonl`: milliseconds."""
_LOG = logging.getLogger("trinity_es.telemetry.monitors")


class JsonlMonitor:
    """Monitor `jsonl`. A line has `step`, `time` (unix seconds), `position` (in the log), and the metrics by name."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        make_private_folder(self.path.parent)
        self._unwritten: list[bytes] = []
        """Lines that could not be written yet, oldest first."""
        self._open()

    def _open(self) -> None:
        self._file = os.fdopen(open_private(self.path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)

    def rewrite(self, rows: Iterable[Row], line_ids: Collection[LineId]) -> int:
        """Replace the file by one with `rows`, and return the last log position of the old file.

        If the old file has a line that is not in `line_ids`, it belongs to another run: it is renamed, and 0 returned.
        """
        lines = self.path.read_bytes().splitlines(keepends=True)
        if len(lines) > 1 and not lines[-1].endswith(b"\n"):
            lines.pop()  # the run was killed while it wrote this line
        old_ids = [_line_id(line) for line in lines]
        with whole_file(self.path) as file:
            file.writelines(map(_line, rows))
            file.flush()
            if not set(old_ids) <= set(line_ids):  # renamed only now, so that nothing changes if the write above fails
                new_paths = (self.path.with_name(f"{self.path.name}.{n}") for n in count(1))
                new_path = next(path for path in new_paths if not path.exists())
                os.replace(self.path, new_path)
                _LOG.warning("%s has lines of another run: it was renamed to %s", self.path, new_path)
                old_ids = []
        self._file.close()
        self._open()
        return max((position for _, position, _ in old_ids), default=0)

    def log(
        self, metrics: Mapping[str, float], step: int, position: int | None = None, at: float | None = None
    ) -> None:
        """Append a line. If the disk is full, raises OSError, and the next call writes the line first."""
        self._unwritten.append(_line((metrics, step, position, at)))
        self._write()

    def _write(self) -> None:
        """Write the waiting lines. If the disk is full, raises OSError, and leaves no partial line in the file."""
        while self._unwritten:
            size, line = os.fstat(self._file.fileno()).st_size, self._unwritten[0]
            if self._file.write(line) != len(line):  # the disk is full: remove the partial line
                os.ftruncate(self._file.fileno(), size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            del self._unwritten[0]

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()


Row = tuple[Mapping[str, float], int, int | None, float | None]
"""(metrics, step, log position, time of recording)."""
LineId = tuple[int, int, float]
"""(step, position, time) of a line. The time distinguishes runs that have the same steps at the same positions."""


def _line(row: Row) -> bytes:
    """Encode a row as a line of JSON, with the current time if the row has none."""
    metrics, step, position, at = row
    fields = {} if position is None else {"position": position}
    seconds = round(time.time() if at is None else at, DIGITS)
    data = {"step": step, "time": seconds, **fields, **dict(sorted(metrics.items()))}
    return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)


def _line_id(line: bytes) -> LineId:
    """Return the step, position and time of a line; (-1, -1, 0) if it lacks one of them."""
    try:
        row = orjson.loads(line)
        return int(row["step"]), int(row["position"]), float(row["time"])
    except (AttributeError, TypeError, KeyError, ValueError):
        return -1, -1, 0.0


def read_metrics(path: str | Path) -> dict[int, dict[str, float]]:
    """Read the metrics of a `metrics.jsonl`, by step and then by name."""
    steps: dict[int, dict[str, float]] = {}
    for line in Path(path).read_bytes().splitlines():
        row = orjson.loads(line)
        step = row.pop("step")
        for name in ("time", "position"):
            row.pop(name, None)
        steps.setdefault(step, {}).update(row)
    return steps

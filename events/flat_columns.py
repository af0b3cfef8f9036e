"""Arrays of many experiences, concatenated in one flat array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

__all__ = ["Array", "FlatColumn", "Rows", "expanded", "offsets_of", "presence"]

Array = np.ndarray[Any, np.dtype[Any]]
LONG_RUN: Final = 512
"""Mean run length from which writing a slice per run is faster than `np.repeat`."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatColumn:
    """Arrays of N experiences: `column[i]` is the array of experience `i`, or None if it has none."""

    values: Array
    """All arrays concatenated, each in C order."""
    offsets: Array
    """int64 [N + 1]: the values of experience `i` are `values[offsets[i] : offsets[i + 1]]`."""
    present: Array
    """bool [N]: true for experiences with an array."""
    shapes: list[Any] | None = None
    """Shape of each array (None for an experience without one), or None if all arrays have one dimension."""

    @property
    def lengths(self) -> Array:
        """int64 [N]: number of values of each experience."""
        return np.diff(self.offsets)

    def __getitem__(self, number: int) -> Array | None:
        """Return the array of one experience as a view of `values`; None if it has none."""
        if not self.present[number]:
            return None
        array = self.values[self.offsets[number] : self.offsets[number + 1]]
        return array if self.shapes is None else array.reshape(self.shapes[number])

    def arrays(self) -> list[Array | None]:
        """Return each experience's array as a view of `values`, with None for an experience without one."""
        ends, values = self.offsets.tolist(), self.values
        out = [values[a:b] for a, b in pairwise(ends)]
        if self.shapes is not None:
            return [None if s is None else a.reshape(s) for a, s in zip(out, self.shapes, strict=True)]
        return [a if is_present else None for a, is_present in zip(out, self.present.tolist(), strict=True)]

    @classmethod
    def empty(cls, rows: int, dtype: np.dtype[Any]) -> FlatColumn:
        return cls(np.empty(0, dtype), np.zeros(rows + 1, np.int64), np.zeros(rows, np.bool_))

    @classmethod
    def of_shapes(cls, values: Array, shapes: Sequence[Any]) -> FlatColumn:
        """Return the column of concatenated arrays with these shapes.

        A shape is a number for one dimension, a list for several, or None for an experience without an array.
        """
        kinds = set(map(type, shapes))
        if kinds <= {int}:
            present, sizes = np.ones(len(shapes), np.bool_), shapes
        else:
            present = np.array([shape is not None for shape in shapes], np.bool_)
            sizes = [0 if s is None else s if isinstance(s, int) else math.prod(s) for s in shapes]
        return cls(values, offsets_of(sizes), present, list(shapes) if not kinds <= {int, type(None)} else None)


def offsets_of(lengths: Sequence[int] | Array) -> Array:
    """Return the offsets, int64 [N + 1], of concatenated arrays with these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def expanded(values: Array, lengths: Array, size: int) -> Array:
    """Repeat each value as often as its entry in `lengths`. `size` is the length of the result."""
    if size < LONG_RUN * len(values):
        return np.repeat(values, lengths)
    out = np.empty(size, values.dtype)
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    for value, begin, end in zip(values, [0, *ends], ends, strict=False):
        out[begin:end] = value
    return out


def presence(columns: Sequence[FlatColumn | None], counts: Sequence[int]) -> Array:
    """Return a bool for each row of all files: true if it has an array. `counts`: rows of each file.

    `columns` has the column of each file, or None if the file lacks it.
    """
    files = zip(columns, counts, strict=True)
    return _concatenated([np.zeros(n, np.bool_) if c is None else c.present for c, n in files])


class Rows:
    """Selection of rows of several files. Rows that are adjacent in a file are copied together, as a run."""

    def __init__(self, counts: Sequence[int], rows: Array) -> None:
        """Select `rows` (int64 [N], numbered through all files) of files that have `counts` rows each."""
        self._counts, self._rows = counts, rows
        firsts = offsets_of(counts)
        files = np.searchsorted(firsts, rows, "right") - 1
        begins = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (np.diff(files, prepend=-1) != 0))
        ends = np.append(begins[1:], len(rows)) - 1 if len(rows) else begins
        in_file = rows - firsts[files]
        self._runs = list(
            zip(files[begins].tolist(), in_file[begins].tolist(), (in_file[ends] + 1).tolist(), strict=True)
        )
        """(file, first row, end row) of each run."""

    def gather(self, columns: Sequence[FlatColumn | None]) -> FlatColumn | None:
        """Return the selected rows of one column, in order, or None if no such row has an array.

        `columns` has the column of each file, or None if the file lacks it. The result is writable. It is a copy unless
        it is one whole column.
        """
        files = list(zip(columns, self._counts, strict=True))
        present = presence(columns, self._counts)[self._rows]
        if not present.any():
            return None
        lengths = _concatenated([np.zeros(n, np.int64) if c is None else c.lengths for c, n in files])[self._rows]
        runs = [(c, begin, end) for file, begin, end in self._runs if (c := columns[file]) is not None]
        shapes = None
        if any(c is not None and c.shapes is not None for c in columns):
            every = [shape for c, n in files for shape in ([None] * n if c is None else c.shapes or c.lengths.tolist())]
            shapes = [every[row] if is_present else None for row, is_present in zip(self._rows, present, strict=True)]
        column, begin, end = runs[0]
        if len(runs) == 1 and end - begin == len(column.present) and column.values.flags.writeable:
            values = column.values
        else:
            values = np.concatenate([c.values[c.offsets[begin] : c.offsets[end]] for c, begin, end in runs])
        return FlatColumn(values, offsets_of(lengths), present, shapes)


def _concatenated(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

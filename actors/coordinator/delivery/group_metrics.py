"""Metrics of operators that look at one task at a time, so that a large batch can go through them in parts."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from trinity_es.projections.metric_aggregation import aggregate_batch

__all__ = ["GroupMetrics"]


class GroupMetrics(dict[str, float]):
    """Metrics of a batch, or of a part of it: aggregates over its tasks (`aggregate_batch`), and counts."""

    def __init__(self, tasks: Sequence[Mapping[str, float]] = (), prefix: str = "", **counts: float) -> None:
        """`tasks` has the metrics of each task, all with the same names. `prefix` is put before these names."""
        self._names = tuple(tasks[0]) if tasks else ()
        self._values = array("d", [task[name] for task in tasks for name in self._names])
        self._prefix, self._counts = prefix, counts
        self._fill()

    def _fill(self) -> None:
        rows = zip(*[iter(self._values)] * len(self._names), strict=True) if self._names else ()
        self.update(aggregate_batch((dict(zip(self._names, row, strict=True)) for row in rows), prefix=self._prefix))
        self.update(self._counts)

    @classmethod
    def join(cls, parts: Sequence[GroupMetrics]) -> GroupMetrics:
        """Return the metrics of a batch from those of its parts, bit by bit as if it had not been divided."""
        joined = cls(prefix=parts[0]._prefix)
        joined._names = next((part._names for part in parts if part._names), ())
        for part in parts:
            joined._values.extend(part._values)
        joined._counts = {name: sum(part._counts[name] for part in parts) for name in parts[0]._counts}
        joined._fill()
        return joined

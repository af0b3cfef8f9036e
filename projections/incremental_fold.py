"""Fold of one stream whose value is kept between reads, so that each read folds only new events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from trinity_es.events.store.records.log_values import Recorded

__all__ = ["KeptFold"]

T = TypeVar("T")


class KeptFold(Generic[T]):
    """Value of `fold(events, value so far)` over one stream. Not safe for threads.

    The fold starts from the first event again after a failed read, and if the log was restored from an older copy. The
    hash of the last folded event shows this.
    """

    def __init__(self, fold: Callable[[Iterable[Recorded], T | None], T]) -> None:
        self.value: T | None = None
        self._fold, self._position, self._hash = fold, 0, b""

    def follow(self, read: Callable[[int], Iterable[Recorded]]) -> T:
        """Fold the new events, and return the value. `read(position)` returns the stream's events after a position."""
        value, self.value = self.value, None
        if value is not None:
            events = iter(read(self._position - 1))  # the last folded event comes first, to compare its hash
            last_folded = next(events, None)
            if last_folded is None or (last_folded.position, last_folded.hash) != (self._position, self._hash):
                value = None
        if value is None:
            events = iter(read(0))
        self.value = self._fold(self._remember_last(events), value)
        return self.value

    def _remember_last(self, events: Iterator[Recorded]) -> Iterator[Recorded]:
        """Yield these events, and remember position and hash of the last one."""
        for item in events:
            self._position, self._hash = item.position, item.hash
            yield item

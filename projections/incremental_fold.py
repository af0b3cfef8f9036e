"""A fold of one stream, kept while it is asked for: the next time it reads only what came since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from trinity_es.events.store.records.recorded import Recorded

__all__ = ["KeptFold"]

T = TypeVar("T")


class KeptFold(Generic[T]):
    """What `fold(events, value so far)` makes of a stream. For one thread at a time.

    What the log does not hold any more (it was put back to a copy) is noticed by the hash of the last event that was
    folded, and folded anew; so is what broke off half way.
    """

    def __init__(self, fold: Callable[[Iterable[Recorded], T | None], T]) -> None:
        self.value: T | None = None
        self._fold, self._position, self._hash = fold, 0, b""

    def follow(self, read: Callable[[int], Iterable[Recorded]]) -> T:
        """Return the fold up to now; `read` gives the stream's events with a position greater than that."""
        value, self.value = self.value, None
        if value is not None:
            events = iter(read(self._position - 1))
            last = next(events, None)
            if last is None or (last.position, last.hash) != (self._position, self._hash):
                value = None
        if value is None:
            events = iter(read(0))
        self.value = self._fold(self._noted(events), value)
        return self.value

    def _noted(self, events: Iterator[Recorded]) -> Iterator[Recorded]:
        for item in events:
            self._position, self._hash = item.position, item.hash
            yield item

"""Which runner has room for one more unit: a heap, so that it costs no walk over all runners."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Capacity", "Room"]

AHEAD_SHARE = 2
"""A runner gets no more units beyond its places than this part of its share of those that wait."""


@dataclass(slots=True)
class Capacity:
    """A runner that can take units now: how many more, and how full it is."""

    name: str
    incarnation: int
    model_version: int
    places: int
    load: int
    limit: int
    """Units it may hold at once: its places, and those that wait in it where units are short."""

    @property
    def share(self) -> float:
        """Return how full it is."""
        return self.load / self.places


class Room:
    """Runners that can take units, the least loaded first; of equals the one that came first."""

    def __init__(
        self, runners: Iterable[Capacity] = (), fits: Callable[[Capacity], bool] = lambda runner: True
    ) -> None:
        """`fits` says whether a runner may have units now. One that may not is forgotten until it is put in again."""
        self._fits = fits
        self._runners: dict[str, Capacity] = {}
        self._numbers: dict[str, int] = {}
        """Of each runner that ever came."""
        self._heap: list[tuple[float, int, int, Capacity]] = []
        """Share, number of the runner and of the entry, for each that has room; also entries that were true once."""
        self._entries = 0
        self._places = 0
        self._beyond: float | None = None
        """What may be given beyond a runner's places, as a share of these; None: as much as its limit says."""
        for runner in runners:
            self.put(runner)

    def put(self, runner: Capacity) -> None:
        """Take a runner as it is now."""
        self._numbers.setdefault(runner.name, len(self._numbers))
        self.drop(runner.name)
        self._runners[runner.name] = runner
        self._places += runner.places
        self._enter(runner)

    def drop(self, name: str) -> None:
        """Take a runner out; one that is not there is fine."""
        runner = self._runners.pop(name, None)
        self._places -= 0 if runner is None else runner.places

    def expect(self, waiting: int) -> None:
        """Take note how many units wait: runners get no more beyond their places than a part of these."""
        self._beyond = waiting / (AHEAD_SHARE * max(1, self._places)) if len(self._runners) > 1 else None

    def give(self, runner: Capacity) -> None:
        """Take note that a runner gets one more unit."""
        runner.load += 1
        self._enter(runner)

    def find(self, name: str) -> Capacity | None:
        """Return the runner of this name, if it has room."""
        runner = self._runners.get(name)
        if runner is None or runner.load >= runner.limit or not self._may_have(runner) or not self._fits(runner):
            return None
        return runner

    def least(self, avoid: str | None = None) -> Capacity | None:
        """Return the least loaded runner that has room, but not `avoid`; None where there is none."""
        heap, aside = self._heap, []
        found = None
        while heap and found is None:
            share, _, _, runner = heap[0]
            if self._runners.get(runner.name) is not runner or runner.load >= runner.limit or share != runner.share:
                heapq.heappop(heap)
            elif not self._fits(runner):
                self.drop(runner.name)
            elif runner.name == avoid:
                aside.append(heapq.heappop(heap))
            elif not self._may_have(runner):
                break  # no more may those that are fuller
            else:
                found = runner
        for entry in aside[:1]:  # the others say the same
            heapq.heappush(heap, entry)
        return found

    def has_other(self, name: str) -> bool:
        """Return True if there is a runner besides this one, with room or without."""
        return any(r.name != name and self._fits(r) for r in self._runners.values())

    def _may_have(self, runner: Capacity) -> bool:
        """Return True if a runner may have one more unit, as few wait."""
        if runner.load < runner.places or self._beyond is None:
            return True
        return runner.load + 1 <= runner.places * (1 + self._beyond)

    def _enter(self, runner: Capacity) -> None:
        if runner.load >= runner.limit:
            return
        self._entries += 1
        heapq.heappush(self._heap, (runner.share, self._numbers[runner.name], self._entries, runner))
        if len(self._heap) > 64 + 4 * len(self._runners):  # most of them were true once
            self._heap = [
                (r.share, self._numbers[r.name], number, r)
                for number, r in enumerate(self._runners.values(), self._entries) if r.load < r.limit
            ]
            self._entries += len(self._runners)
            heapq.heapify(self._heap)

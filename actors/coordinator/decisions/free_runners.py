"""Heap of runners with room for one more unit, so that finding one costs no walk over all runners."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Capacity", "Room"]

AHEAD_DIVISOR = 2
"""Divisor of a runner's share of the waiting units, which gives how many units it may get beyond its places."""


@dataclass(slots=True)
class Capacity:
    """Runner that can take units now, with its load and limit."""

    name: str
    incarnation: int
    model_version: int
    places: int
    load: int
    limit: int
    """Maximum number of units that it holds: its places, and more that wait in it if units are short."""

    @property
    def share(self) -> float:
        return self.load / self.places


class Room:
    """Runners that can take units, the least loaded first, and of equals the one that came first."""

    def __init__(
        self, runners: Iterable[Capacity] = (), fits: Callable[[Capacity], bool] = lambda runner: True
    ) -> None:
        """Offer only runners for which `fits` is True. Another is dropped when met, until its next `put`."""
        self._fits = fits
        self._runners: dict[str, Capacity] = {}
        self._arrival_numbers: dict[str, int] = {}
        """Number of each runner, in the order of arrival."""
        self._heap: list[tuple[float, int, int, Capacity]] = []
        """Used share of its places, arrival number, entry's number and runner; entries may be out of date."""
        self._entry_count = 0
        self._place_count = 0
        self._extra_share: float | None = None
        """Units allowed beyond a runner's places, as a share of these; None: up to its limit."""
        for runner in runners:
            self.put(runner)

    def put(self, runner: Capacity) -> None:
        """Add a runner, or replace it by its new state."""
        self._arrival_numbers.setdefault(runner.name, len(self._arrival_numbers))
        self.drop(runner.name)
        self._runners[runner.name] = runner
        self._place_count += runner.places
        self._push(runner)

    def drop(self, name: str) -> None:
        """Forget a runner; its entries in the heap are out of date from now on."""
        runner = self._runners.pop(name, None)
        self._place_count -= 0 if runner is None else runner.places

    def expect(self, waiting_count: int) -> None:
        """Set the number of waiting units, which limits the units beyond the runners' places."""
        several = len(self._runners) > 1
        self._extra_share = waiting_count / (AHEAD_DIVISOR * max(1, self._place_count)) if several else None

    def add_unit(self, runner: Capacity) -> None:
        """Count one more unit for a runner."""
        runner.load += 1
        self._push(runner)

    def find(self, name: str) -> Capacity | None:
        """Return the runner of this name if it has room."""
        runner = self._runners.get(name)
        if runner is None or runner.load >= runner.limit or not self._may_get_unit(runner) or not self._fits(runner):
            return None
        return runner

    def least_loaded(self, avoid: str | None = None) -> Capacity | None:
        """Return the least loaded runner with room, other than `avoid`; None if there is none. Also drops the entries
        that are out of date, and the runners that do not fit."""
        heap, avoided_entries = self._heap, []
        result = None
        while heap and result is None:
            share, _, _, runner = heap[0]
            if self._runners.get(runner.name) is not runner or runner.load >= runner.limit or share != runner.share:
                heapq.heappop(heap)
            elif not self._fits(runner):
                self.drop(runner.name)
            elif runner.name == avoid:
                avoided_entries.append(heapq.heappop(heap))
            elif not self._may_get_unit(runner):
                break  # the fuller runners may have no more either
            else:
                result = runner
        for entry in avoided_entries[:1]:  # the other entries are copies of it
            heapq.heappush(heap, entry)
        return result

    def has_other(self, name: str) -> bool:
        """Return True if there is a runner besides this one, with room or without."""
        return any(r.name != name and self._fits(r) for r in self._runners.values())

    def _may_get_unit(self, runner: Capacity) -> bool:
        """Return True if a runner has a free place, or may get one more unit beyond its places."""
        if runner.load < runner.places or self._extra_share is None:
            return True
        return runner.load + 1 <= runner.places * (1 + self._extra_share)

    def _push(self, runner: Capacity) -> None:
        """Put a runner with room into the heap; rebuild the heap if most of its entries are out of date."""
        if runner.load >= runner.limit:
            return
        self._entry_count += 1
        heapq.heappush(self._heap, (runner.share, self._arrival_numbers[runner.name], self._entry_count, runner))
        if len(self._heap) > 64 + 4 * len(self._runners):
            self._heap = [
                (r.share, self._arrival_numbers[r.name], number, r)
                for number, r in enumerate(self._runners.values(), self._entry_count) if r.load < r.limit
            ]
            self._entry_count += len(self._runners)
            heapq.heapify(self._heap)

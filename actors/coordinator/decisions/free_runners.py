"""Heap of runners with room for one more unit, so that finding one costs no walk over all runners."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["Capacity", "Room"]

AHEAD_DIVISOR = 2
"""A runner may hold its share of the waiting units divided by this number, beyond the units that it runs at once."""


@dataclass(slots=True)
class Capacity:
    """Runner that can take units now. `places`: units that it runs at once; `load`: units that it has."""

    name: str
    incarnation: int
    model_version: int
    places: int
    load: int
    limit: int
    """Maximum number of units that the runner may have: `places`, and some that wait in it if units end fast."""

    @property
    def share(self) -> float:
        return self.load / self.places


class Room:
    """Runners that can take units, the least loaded first. Among equals the runner that was put first comes first."""

    def __init__(
        self, runners: Iterable[Capacity] = (), fits: Callable[[Capacity], bool] = lambda runner: True
    ) -> None:
        """Offer only runners for which `fits` returns True. Any other runner is dropped until its next `put`."""
        self._fits = fits
        self._runners: dict[str, Capacity] = {}
        self._arrival_numbers: dict[str, int] = {}
        """Number of each runner, in the order of arrival."""
        self._heap: list[tuple[float, int, int, Capacity]] = []
        """(share of the runner's places in use, arrival number, entry number, runner). Entries may be out of date."""
        self._entry_count = 0
        self._place_count = 0
        self._extra_share: float | None = None
        """Units allowed beyond a runner's places, as a share of its places; None: up to its limit."""
        for runner in runners:
            self.put(runner)

    def put(self, runner: Capacity) -> None:
        self._arrival_numbers.setdefault(runner.name, len(self._arrival_numbers))
        self.drop(runner.name)
        self._runners[runner.name] = runner
        self._place_count += runner.places
        self._push(runner)

    def drop(self, name: str) -> None:
        """Remove a runner. Its entries in the heap stay, and are out of date."""
        runner = self._runners.pop(name, None)
        self._place_count -= 0 if runner is None else runner.places

    def set_waiting_count(self, waiting_count: int) -> None:
        """Set the number of waiting units, which limits how many units runners get beyond their places."""
        several = len(self._runners) > 1
        self._extra_share = waiting_count / (AHEAD_DIVISOR * max(1, self._place_count)) if several else None

    def add_unit(self, runner: Capacity) -> None:
        runner.load += 1
        self._push(runner)

    def find(self, name: str) -> Capacity | None:
        """Return the runner of this name if it can take one more unit, else None."""
        runner = self._runners.get(name)
        if runner is None or runner.load >= runner.limit or not self._may_get_unit(runner) or not self._fits(runner):
            return None
        return runner

    def least_loaded(self, avoid: str | None = None) -> Capacity | None:
        """Return the least loaded runner that can take one more unit, other than `avoid`; None if there is none."""
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
        """Return True if there is another runner than this one, even if it can take no unit now."""
        return any(r.name != name and self._fits(r) for r in self._runners.values())

    def _may_get_unit(self, runner: Capacity) -> bool:
        """Return True if a runner has a free place, or may get one more unit beyond its places."""
        if runner.load < runner.places or self._extra_share is None:
            return True
        return runner.load + 1 <= runner.places * (1 + self._extra_share)

    def _push(self, runner: Capacity) -> None:
        """Add a runner to the heap unless it is at its limit. Rebuild the heap if most entries are out of date."""
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

"""Time in the log: what the clock said, and how long it was all the same where somebody set the clock.

`recorded_at` is the clock of the host (on PostgreSQL of its server). Where that was stepped, the log says so by a
`ClockStepped`, and only there may its time go back. Beside it each event has its writer's monotonic clock, which nobody
can set, with the boot that it counts from: how long ago something was is told by it, on the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FIRST_SECONDS", "STEP_SECONDS", "Clock", "boot", "monotonic", "steady_clock"]

STEP_SECONDS = 0.5
"""Minimum difference between wall clock and monotonic clock that is a step, beside what a clock may be off by."""

DRIFT = 0.001
"""Share of the time between two looks by which a clock may drift, as it is slewed."""

FIRST_SECONDS = 5.0
"""Minimum difference that is a step at a writer's first append: events before it were timed when they were decided."""


def monotonic() -> float:
    """Return seconds since the boot, those asleep among them where the system tells; nobody can set them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@cache
def boot() -> str:
    """Return the beginning of this boot's id: monotonic clocks of one boot can be compared. Empty: there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


def steady_clock() -> Callable[[], float]:
    """Return a clock of unix seconds that is set once, now: a later step of the machine's does not move it."""
    offset = time.time() - monotonic()
    return lambda: offset + monotonic()


@dataclass(slots=True)
class Clock:
    """What one writer knows of the clock by which it records."""

    _last: tuple[float, float, float] | None = None
    """When it appended last: the clock, and the monotonic one just before and after."""

    def seen(self, wall: float, before: float, after: float) -> None:
        """Take note of the clock, read between these two moments of the monotonic one."""
        self._last = wall, before, after

    def knows(self) -> bool:
        return self._last is not None

    def step(
        self, wall: float, before: float, after: float, recorded_at: float, *, slack: float = STEP_SECONDS
    ) -> float:
        """Return by how many seconds the clock was set since the last append, 0.0 where it was not.

        `recorded_at`: the time of the last event. Without an earlier moment only a clock that is behind that tells.
        """
        off = 0.0
        if self._last is not None:
            then, earliest, latest = self._last
            least, most = before - latest, after - earliest
            passed = wall - then
            off = passed - most if passed > most else min(0.0, passed - least)
            slack += DRIFT * most
        if abs(off) <= slack:
            off = wall - recorded_at  # another writer may have recorded while the clock was ahead
            return off if off < -slack else 0.0
        return off

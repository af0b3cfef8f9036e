"""Time in the log: the recorded clock, and true durations even if the clock was set.

`recorded_at` is the host's clock (on PostgreSQL its server's). It may go back only at a `ClockStepped`. Each event also
has its writer's boot and monotonic clock, which can't be set: on the same machine it shows how long ago an event was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FIRST_SECONDS", "STEP_SECONDS", "Clock", "boot", "monotonic", "steady_clock"]

STEP_SECONDS = 0.5
"""Minimum difference between wall clock and monotonic clock that counts as a step, beyond the clock's drift."""

DRIFT = 0.001
"""Share of the time between two readings by which a clock may drift while it is slewed."""

FIRST_SECONDS = 5.0
"""Minimum step at a writer's first append. Earlier events got their times when they were decided."""


def monotonic() -> float:
    """Return seconds since the boot, including suspension if the system counts it; this clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@cache
def boot() -> str:
    """Return the beginning of this boot's id, or "". Monotonic clocks of one boot are comparable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


def steady_clock() -> Callable[[], float]:
    """Return a clock of unix seconds that is set once, now, and ignores later steps of the machine's clock."""
    offset = time.time() - monotonic()
    return lambda: offset + monotonic()


@dataclass(slots=True)
class Clock:
    """A writer's view of the clock that dates its events."""

    last: tuple[float, float, float] | None = None
    """Clock at the writer's last append, and the monotonic clock just before and after."""

    def remember(self, wall: float, before: float, after: float) -> None:
        """Remember a reading of the clock, taken between two readings of the monotonic one."""
        self.last = wall, before, after

    def step(
        self, wall: float, before: float, after: float, recorded_at: float, *, slack: float = STEP_SECONDS
    ) -> float:
        """Return by how many seconds the clock was set since the last append, 0.0 if it was not.

        `wall, before, after`: a reading as in `remember`. `recorded_at`: time of the last event. Without an earlier
        reading only a clock behind that time reveals a step.
        """
        step = 0.0
        if self.last is not None:
            last_wall, last_before, last_after = self.last
            shortest, longest = before - last_after, after - last_before
            elapsed = wall - last_wall
            # Between `shortest` and `longest` the clock need not have been set.
            step = elapsed - longest if elapsed > longest else min(0.0, elapsed - shortest)
            slack += DRIFT * longest
        if abs(step) <= slack:
            step = wall - recorded_at  # another writer may have recorded while the clock was ahead
            return step if step < -slack else 0.0
        return step

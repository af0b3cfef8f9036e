"""Clocks of the log: the wall clock that dates events, and a monotonic clock that can't be set.

`recorded_at` is read from the host's wall clock (on PostgreSQL, the server's). It goes back only at a `ClockStepped`
event. Each event also records its writer's boot id and monotonic clock, which give its true age on the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["FIRST_SECONDS", "STEP_SECONDS", "Reading", "boot", "monotonic", "seconds_set", "steady_clock"]

STEP_SECONDS = 0.5
"""Minimum difference between wall clock and monotonic clock that counts as a step, beyond the clock's drift."""

DRIFT = 0.001
"""Drift of a slewed clock, as a share of the time between two readings."""

FIRST_SECONDS = 5.0
"""The same at a writer's first append, which compares with a stored event. It is larger, because that event's monotonic
time was read some time before its `recorded_at`."""


def monotonic() -> float:
    """Return seconds since the boot from a clock that can't be set. On Linux it includes suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@cache
def boot() -> str:
    """Return the first 8 characters of this boot's id, or "". Monotonic times of one boot are comparable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return ""


def steady_clock() -> Callable[[], float]:
    """Return a clock of unix seconds that does not jump if the machine's clock is set later."""
    offset = time.time() - monotonic()
    return lambda: offset + monotonic()


Reading = tuple[float, float, float]
"""Time of the clock that dates a writer's events, and the monotonic clock just before and after it was read."""


def seconds_set(last: Reading | None, reading: Reading, recorded_at: float, slack: float = STEP_SECONDS) -> float:
    """Return the seconds by which the clock was set since the last append; 0.0 if it was not.

    `last`: the reading at that append. `recorded_at`: time of the last event. Without an earlier reading, a step is
    noticed only if the clock is behind `recorded_at`.
    """
    step, (wall, before, after) = 0.0, reading
    if last is not None:
        last_wall, last_before, last_after = last
        shortest, longest = before - last_after, after - last_before
        elapsed = wall - last_wall
        # An elapsed time between `shortest` and `longest` shows no step.
        step = elapsed - longest if elapsed > longest else min(0.0, elapsed - shortest)
        slack += DRIFT * longest
    if abs(step) <= slack:
        step = wall - recorded_at  # another writer may have recorded while the clock was ahead
        return step if step < -slack else 0.0
    return step

"""Who gets the next request, and who the next unit: the least loaded, unless another has the task's prefix already.

Requests and runs of one task share their prompt, which an engine keeps (its prefix cache) and another would compute
again. So all of a task go to one engine, its home, for as long as that is not *much more loaded* than the least loaded
one: for requests by more than `SLACK_REQUESTS`, or than the least loaded has itself where that is more; for units
(`actors.coordinator.decisions.batches.dispatch`) by more than the share `SLACK_PLACES` of its places.

Pure functions: load, time and names come in as arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["REPORT_SECONDS", "SLACK_PLACES", "SLACK_REQUESTS", "choose", "reported", "stays"]

SLACK_REQUESTS = 8
"""Requests that an engine may have more than the least loaded one before a task leaves it."""
SLACK_PLACES = 0.25
"""Share of a runner's places by which it may be fuller than the least loaded runner and still get a task's units."""
REPORT_SECONDS = 5.0
"""How long a reported load is trusted. An engine that was busy once would else get no request, and never report."""


def stays(load: float, least: float, slack: float) -> bool:
    """Return True if a home with this load is kept, where the least loaded has `least`."""
    return load <= least + slack


def reported(others: int, told: float, now: float) -> int:
    """Return how many requests of others an engine has, told at `told` (seconds, as `now`): 0 when that is old."""
    return others if now - told < REPORT_SECONDS else 0


def choose(task: str | None, loads: Mapping[str, int], home: str | None = None) -> str | None:
    """Return the engine for the next request of a task; None where there is no engine.

    `loads`: requests that each engine has, as far as the caller knows; `home`: the one that had the task's last
    request. Among engines that are equally free a task's own one is chosen, the same by every caller; a caller that
    names no task gets any.
    """
    if not loads:
        return None
    least = min(loads.values())
    if home is not None and home in loads and stays(loads[home], least, max(SLACK_REQUESTS, least)):
        return home
    return max((name for name, load in loads.items() if load == least), key=lambda name: (_affinity(task, name), name))


def _affinity(task: str | None, name: str) -> bytes:
    """Return how well an engine fits a task: a number that every process finds, and that spreads tasks evenly."""
    return hashlib.blake2b(f"{task}\0{name}".encode(), digest_size=8).digest()

"""When an ended process is started again: pure, with the time and the chance as arguments.

A runner that ends is started again after a pause that doubles with every end, with some jitter so that many do not
start at once; a life that was healthy for long wipes the slate. One that ends too often is quarantined: its slot stays
empty, an event says so, and the others go on. The coordinator is never quarantined, since nothing goes on without it:
it comes back at once after a life that served, and with the same growing pauses after short lives in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Policy", "coordinator_pause", "remembered", "runner_pause", "short_lives"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How patient the guardian is. All in seconds but `restarts` and `jitter`."""

    restarts: int = 3
    """Maximum number of ends within `period` that are followed by a start."""
    period: float = 600.0
    pause: float = 1.0
    """Before the first start; doubles with each."""
    longest: float = 60.0
    jitter: float = 0.2
    """The pause varies by this share in both directions."""
    healthy: float = 300.0
    """A life that served so long is no sign of trouble: what ended before it is forgotten."""
    short: float = 5.0
    """A coordinator that served less than this pauses before it comes back."""


def remembered(policy: Policy, deaths: Sequence[float], now: float, served: float) -> list[float]:
    """Return the ends that count, this one included.

    `deaths` and `now` are monotonic seconds, `served` is the last life's.
    """
    if served >= policy.healthy:
        return [now]
    return [*(t for t in deaths if now - t < policy.period), now]


def _backoff(policy: Policy, ends: int, chance: float) -> float:
    pause = min(policy.longest, policy.pause * 2.0 ** min(ends - 1, 30))
    return pause * (1.0 + policy.jitter * (2.0 * chance - 1.0))


def runner_pause(policy: Policy, ends: int, chance: float) -> float | None:
    """Return seconds until the runner is started again after `ends` remembered ends; None: it is quarantined.

    `chance` is uniform in [0, 1).
    """
    return None if ends > policy.restarts else _backoff(policy, ends, chance)


def short_lives(policy: Policy, before: int, served: float) -> int:
    """Count the coordinators in a row whose lives were short, this one included: 0 after one that served.

    `before`: without this one. Other ends are no sign of trouble with starting: were they counted, a coordinator that
    is killed young after many that were killed in their prime would be waited for the longest.
    """
    return 0 if served >= policy.short else before + 1


def coordinator_pause(policy: Policy, short: int, chance: float) -> float:
    """Return seconds until the next coordinator is started after so many short lives in a row.

    It is 0 after a life that served.
    """
    return 0.0 if short <= 1 else _backoff(policy, short - 1, chance)

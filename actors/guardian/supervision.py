"""Decisions of the guardian: which child is overdue, and when it is started again. Pure; time and chance are arguments.

A child is a runner or the coordinator, and each of its processes is a life. A child is overdue if it sends no heartbeat
after its start, its heartbeat stops, its engine's loop does not answer, or its engine is not ready in time. If the
guardian itself was suspended, it extends all these deadlines.

A runner that ends is started again after a pause that doubles with every end, with some jitter so that many do not
start at once. One long healthy life resets the count. A runner that ends too often is quarantined: it is not started
again, an event records it, and the others go on. The coordinator is never quarantined, since nothing goes on without
it. It is started again at once after a life that served, and with the same growing pauses after several short lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CHECK_SECONDS", "ENDED", "GONE", "HELLO_SECONDS", "Child", "Policy", "Supervision", "coordinator_pause",
    "count_short_lives", "counted_ends", "runner_pause",
]

GONE = frozenset({"waiting", "quarantined", "down"})
"""States of a child without a process."""
ENDED = GONE | {"retired", "failed"}
"""States of a child that sends nothing more."""
CHECK_SECONDS = 1.0
"""Interval between two checks of the children's heartbeats."""
HELLO_SECONDS = 60.0
"""How long a new process may take to send its first heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits and pauses of the guardian, all in seconds except `restarts` and `jitter`."""

    restarts: int = 3
    """Maximum number of ends within `period` after which a runner is started again."""
    period: float = 600.0
    pause: float = 1.0
    """Pause before the first new start; doubles with each."""
    longest_pause: float = 60.0
    jitter: float = 0.2
    """The pause varies by this share in both directions."""
    healthy_life: float = 300.0
    """After a life that served this long, earlier ends no longer count."""
    short_life: float = 5.0
    """A coordinator that served less than this had a short life."""
    heartbeat_timeout: float = 20.0
    """Longest silence of a process after its first heartbeat."""
    hang_timeout: float = 60.0
    """How long an engine's loop may not answer."""
    startup_timeout: float = 600.0
    """How long an engine may take until it is ready."""


def counted_ends(policy: Policy, earlier_ends: Sequence[float], now: float, served_seconds: float) -> list[float]:
    """Return the times of a child's recent ends, in monotonic seconds, the last at `now`. Too many mean quarantine.
    `earlier_ends`: the previous result. `served_seconds` is how long the process that ended now had served."""
    if served_seconds >= policy.healthy_life:
        return [now]
    return [*(t for t in earlier_ends if now - t < policy.period), now]


def _backoff(policy: Policy, end_count: int, chance: float) -> float:
    """Return the pause in seconds after this many ends: it doubles with each, and varies by chance."""
    pause = min(policy.longest_pause, policy.pause * 2.0 ** min(end_count - 1, 30))
    return pause * (1.0 + policy.jitter * (2.0 * chance - 1.0))


def runner_pause(policy: Policy, end_count: int, chance: float) -> float | None:
    """Return the pause in seconds before a runner starts again; None if it is quarantined. `end_count`: number of its
    recent ends, as `counted_ends` returns them. `chance` is uniform in [0, 1)."""
    return None if end_count > policy.restarts else _backoff(policy, end_count, chance)


def count_short_lives(policy: Policy, count_before: int, served_seconds: float) -> int:
    """Return how many coordinators in a row had a short life: `count_before`, plus the one that ended after
    `served_seconds`. A longer life resets the count to 0."""
    return 0 if served_seconds >= policy.short_life else count_before + 1


def coordinator_pause(policy: Policy, short_life_count: int, chance: float) -> float:
    """Return the pause in seconds before the next coordinator starts, after this many short lives in a row."""
    return 0.0 if short_life_count <= 1 else _backoff(policy, short_life_count - 1, chance)


@dataclass(slots=True)
class Child:
    """A runner or the coordinator, with the state of its current or last process."""

    name: str
    incarnation: int
    address: Any
    born: float
    """Time of the start, in monotonic seconds like all times here."""
    pid: int = 0
    started: str = ""
    """Start time of the process (`events.processes`); with the pid it identifies the process."""
    deaths: list[float] = field(default_factory=list)
    """Times of its recent ends (`counted_ends`)."""
    short_lives: int = 0
    """For the coordinator: number of short lives in a row."""
    state: str = "starting"
    seen: float = 0.0
    """Time of the child's last message."""
    silent: float = 0.0
    """Seconds since the engine's loop last answered."""
    up_at: float | None = None
    """Time at which the process began to serve."""
    restart_at: float = 0.0
    is_first: bool = True
    """True if this is the child's first process."""
    reason: str = ""
    """Reason for the end of the child's last process."""
    model: str = "rollout"
    endpoint: str = ""
    """URL of the engine while it serves."""
    is_leaving: bool = False
    """True if this runner retires because its server was removed."""

    def is_coordinator(self) -> bool:
        return self.name == "coordinator"

    def is_gone(self) -> bool:
        return self.state in GONE

    def end_reason(self, reason: str) -> str:
        """Return why this process ended, from the reason that it reported with its state `failed`."""
        return reason if self.up_at is not None else f"its engine did not start: {reason}"


class Supervision:
    """The runners and the coordinator that a guardian watches, by name."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.policy, self.children, self._checked_at = policy, dict[str, Child](), now

    def runners(self) -> list[Child]:
        return [c for c in self.children.values() if not c.is_coordinator()]

    def begin(self, name: str, incarnation: int, address: Any, now: float, model: str = "rollout") -> Child:
        """Record a new process of the child `name`, and return its record, which keeps the child's earlier ends."""
        child = Child(name, incarnation, address, born=now, seen=now, model=model)
        previous = self.children.get(name)
        if previous is not None:
            child.is_first = False
            child.deaths, child.short_lives = previous.deaths, previous.short_lives
            child.reason = previous.reason
        self.children[name] = child
        return child

    def find_overdue(self, now: float) -> list[tuple[Child, str]]:
        """Return each overdue child and the reason. Call it every `CHECK_SECONDS`. A longer gap between two calls
        extends all deadlines, since this process was suspended and read no heartbeats."""
        gap = now - self._checked_at
        self._checked_at = now
        if gap > 3 * CHECK_SECONDS:  # the others were perhaps suspended, too
            for child in self.children.values():
                child.seen, child.born = now, min(now, child.born + gap)
        reasons = [(c, self._overdue_reason(c, now)) for c in self.children.values() if c.state not in ENDED]
        return [(child, reason) for child, reason in reasons if reason]

    def _overdue_reason(self, child: Child, now: float) -> str:
        policy, age, silent_seconds = self.policy, now - child.born, now - child.seen
        if child.pid == 0:
            return f"it did not say hello within {HELLO_SECONDS:.0f} s of its start" if age > HELLO_SECONDS else ""
        if silent_seconds > policy.heartbeat_timeout:
            return f"process {child.pid} gave no sign of life for {silent_seconds:.0f} s"
        if child.silent > policy.hang_timeout:
            return f"the engine's loop of process {child.pid} hung for {child.silent:.0f} s"
        if child.state != "ready" and not child.is_coordinator() and age > policy.startup_timeout:
            return f"its engine was not ready {policy.startup_timeout:.0f} s after its start"
        return ""

    def end_life(
        self, child: Child, reason: str, now: float, chance: float, *, asked: bool = False, for_good: bool = False
    ) -> float | None:
        """Record that a child's process ended. Return the pause in seconds before its next one; None if there is none.

        `asked`: the end was requested, so it does not count, and a runner starts again at once. `for_good`: the system
        ends. `chance` is uniform in [0, 1).
        """
        served_seconds = 0.0 if child.up_at is None else now - child.up_at
        child.reason = reason
        if not asked:
            child.deaths = counted_ends(self.policy, child.deaths, now, served_seconds)
        pause: float | None
        if child.is_coordinator():
            child.short_lives = count_short_lives(self.policy, child.short_lives, served_seconds)
            pause = coordinator_pause(self.policy, child.short_lives, chance)
        else:
            pause = 0.0 if asked else runner_pause(self.policy, len(child.deaths), chance)
        if for_good or pause is None:
            child.state = "down" if for_good else "quarantined"
            return None
        child.state, child.restart_at = "waiting", now + pause
        return pause

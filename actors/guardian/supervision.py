"""Who is there, who is to be ended, when an ended process is started again: pure, with time and chance as arguments.

A process says that it has begun, and then that it lives, now and then. One that does not, or whose engine's loop
answers no more, or whose engine is not ready in time, is overdue. When the guardian itself stood still, nobody is
blamed for what it did not hear meanwhile.

A runner that ends is started again after a pause that doubles with every end, with some jitter so that many do not
start at once; a life that was healthy for long wipes the slate. One that ends too often is quarantined: its slot stays
empty, an event says so, and the others go on. The coordinator is never quarantined, since nothing goes on without it:
it comes back at once after a life that served, and with the same growing pauses after short lives in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CHECK_SECONDS", "ENDED", "GONE", "HELLO_SECONDS", "Child", "Policy", "Supervision", "coordinator_pause",
    "remembered", "runner_pause", "short_lives",
]

GONE = frozenset({"waiting", "quarantined", "down"})
"""States of a child that has no process."""
ENDED = GONE | {"retired", "failed"}
"""States of a child from which nothing more is to be waited for."""
CHECK_SECONDS = 1.0
"""Interval between two looks at the children's heartbeats."""
HELLO_SECONDS = 60.0
"""How long a new process may take to say that it has begun, on a busy machine."""


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
    heartbeat_timeout: float = 20.0
    """How long a process that has begun may say nothing."""
    hang_timeout: float = 60.0
    """How long an engine's loop may answer nothing."""
    startup_timeout: float = 600.0
    """How long an engine may take until it is ready."""


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


@dataclass(slots=True)
class Child:
    """A slot and the life that is in it now, or was last."""

    name: str
    incarnation: int
    address: Any
    born: float
    """Monotonic, as all times here."""
    pid: int = 0
    started: str = ""
    """Start of the process (see `events.processes`): with the pid it names one process."""
    deaths: list[float] = field(default_factory=list)
    short_lives: int = 0
    """Of a coordinator: lives in a row that hardly served."""
    state: str = "starting"
    seen: float = 0.0
    silent: float = 0.0
    """Seconds that its engine's loop has not answered."""
    up_at: float | None = None
    """When it began to serve."""
    restart_at: float = 0.0
    first: bool = True
    """No life was in this slot before."""
    reason: str = ""
    """Why the last life ended."""
    model: str = "rollout"
    """Which model a runner serves."""
    endpoint: str = ""
    """Where its engine is asked by HTTP, while it serves."""
    leaving: bool = False
    """It was told to retire, for its server was taken away."""

    def is_coordinator(self) -> bool:
        return self.name == "coordinator"

    def is_gone(self) -> bool:
        return self.state in GONE

    def failure(self, reason: str) -> str:
        """Return why this life, which said that it failed, is ended: one that had served tells itself what ended."""
        return reason if self.up_at is not None else f"its engine did not start: {reason}"


class Supervision:
    """The slots of a system, by name, and the lives in them."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.policy, self.children, self._looked = policy, dict[str, Child](), now

    def runners(self) -> list[Child]:
        return [c for c in self.children.values() if not c.is_coordinator()]

    def begin(self, name: str, incarnation: int, address: Any, now: float, model: str = "rollout") -> Child:
        old, child = self.children.get(name), Child(name, incarnation, address, born=now, seen=now, model=model)
        if old is not None:
            child.deaths, child.reason, child.first = old.deaths, old.reason, False
            child.short_lives = old.short_lives
        self.children[name] = child
        return child

    def overdue(self, now: float) -> list[tuple[Child, str]]:
        """Return the children that are not to be waited for any longer, and why. Call it every `CHECK_SECONDS`."""
        gap, self._looked = now - self._looked, now
        if gap > 3 * CHECK_SECONDS:  # this process itself stood still, or all did: nobody's beats were read
            for child in self.children.values():
                child.seen, child.born = now, min(now, child.born + gap)
        told = [(c, self._trouble(c, now)) for c in self.children.values() if c.state not in ENDED]
        return [(child, reason) for child, reason in told if reason]

    def _trouble(self, child: Child, now: float) -> str:
        policy, age, unheard = self.policy, now - child.born, now - child.seen
        if child.pid == 0:
            late = age > HELLO_SECONDS
            return f"it did not say hello within {HELLO_SECONDS:.0f} s of its start" if late else ""
        if unheard > policy.heartbeat_timeout:
            return f"process {child.pid} gave no sign of life for {unheard:.0f} s"
        if child.silent > policy.hang_timeout:
            return f"the engine's loop of process {child.pid} hung for {child.silent:.0f} s"
        if child.state != "ready" and not child.is_coordinator() and age > policy.startup_timeout:
            return f"its engine was not ready {policy.startup_timeout:.0f} s after its start"
        return ""

    def ended(
        self, child: Child, reason: str, now: float, chance: float, *, asked: bool = False, for_good: bool = False
    ) -> float | None:
        """Take note that a life ended; return seconds until the next one begins, None where none does.

        `asked`: somebody wanted it, so it comes back at once and nothing is counted. `for_good`: the system ends.
        """
        served = 0.0 if child.up_at is None else now - child.up_at
        child.reason = reason
        if not asked:
            child.deaths = remembered(self.policy, child.deaths, now, served)
        pause: float | None
        if child.is_coordinator():
            child.short_lives = short_lives(self.policy, child.short_lives, served)
            pause = coordinator_pause(self.policy, child.short_lives, chance)
        else:
            pause = 0.0 if asked else runner_pause(self.policy, len(child.deaths), chance)
        if for_good or pause is None:
            child.state = "down" if for_good else "quarantined"
            return None
        child.state, child.restart_at = "waiting", now + pause
        return pause

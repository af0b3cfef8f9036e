"""How long an attempt may take, from what attempts took so far (`explorer.dynamic_timeout`).

What was measured is in the log, an event a train step, so a coordinator that takes over goes on with it; and which
timeout a unit got stands in its TasksDispatched.
"""

from __future__ import annotations

from typing import Any

from trinity_es.actors.config.schema import ExplorerConfig
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.batch import BatchState

__all__ = ["DynamicTimeout", "allowed", "measured"]


def allowed(
    steps: int, attempts: int, seconds: float, *, ratio: float, warmup_min_steps: int, max_timeout: float
) -> float:
    """Return seconds that an attempt may take.

    It is 0 for `max_timeout`: while there were too few steps, or where that is less.
    """
    if steps < warmup_min_steps or attempts == 0:
        return 0.0
    timeout = ratio * seconds / attempts
    return timeout if timeout < max_timeout else 0.0


def measured(last: ev.PaceMeasured | None, batch: BatchState, **limits: Any) -> ev.PaceMeasured | None:
    """Return what is known after this batch, which has ended; None where it is no train step.

    `limits`: see `allowed`.
    """
    if batch.state is not BatchLifecycleState.FINALIZED or batch.timed_attempts == 0:
        return None
    steps, attempts, seconds = (0, 0, 0.0) if last is None else (last.steps, last.attempts, last.seconds)
    totals = steps + 1, attempts + batch.timed_attempts, seconds + batch.timed_seconds
    return ev.PaceMeasured(
        batch_id=batch.batch_id, steps=totals[0], attempts=totals[1], seconds=totals[2],
        timeout=allowed(*totals, **limits),
    )


class DynamicTimeout:
    """The timeout of attempts by what the live state says that attempts took, under this config."""

    def __init__(self, explorer: ExplorerConfig, live: LiveState) -> None:
        dynamic = explorer.dynamic_timeout
        self._live, self._enabled = live, dynamic.enable
        self._limits: dict[str, Any] = {
            "ratio": dynamic.ratio,
            "warmup_min_steps": dynamic.warmup_min_steps,
            "max_timeout": explorer.max_timeout,
        }

    def ended(self, batch: BatchState) -> None:
        """Record what a batch that has just ended tells."""
        event = measured(self._live.attempt_times, batch, **self._limits) if self._enabled else None
        if event is not None:
            self._live.record(event)

    def timeout(self) -> float:
        """Return seconds that an attempt which is dispatched now may take; 0: explorer.max_timeout."""
        last = self._live.attempt_times
        if not self._enabled or last is None:
            return 0.0
        return allowed(last.steps, last.attempts, last.seconds, **self._limits)

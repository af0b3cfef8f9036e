"""Timeout of attempts, computed from the durations of earlier attempts (`explorer.dynamic_timeout`).

An event per train step records the measurements, so they survive the end of a coordinator. The timeout of a unit is in
its TasksDispatched.
"""

from __future__ import annotations

from typing import Any

from trinity_es.actors.config.run_sections import ExplorerConfig
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.batch import BatchState

__all__ = ["DynamicTimeout", "add_measurements", "attempt_timeout"]


def attempt_timeout(
    steps: int, attempts: int, seconds: float, *, ratio: float, warmup_min_steps: int, max_timeout: float
) -> float:
    """Return the seconds that an attempt may take: `ratio` times the mean duration, `seconds` / `attempts`. Returns 0,
    which stands for `max_timeout`, if that is less, and before `warmup_min_steps` steps were measured."""
    if steps < warmup_min_steps or attempts == 0:
        return 0.0
    timeout = ratio * seconds / attempts
    return timeout if timeout < max_timeout else 0.0


def add_measurements(last: ev.PaceMeasured | None, batch: BatchState, **limits: Any) -> ev.PaceMeasured | None:
    """Return the measurements with those of an ended batch added to `last`; None if it is no train step. `limits` are
    the keyword arguments of `attempt_timeout`."""
    if batch.state is not BatchLifecycleState.FINALIZED or batch.timed_attempts == 0:
        return None
    if last is None:
        last = ev.PaceMeasured(batch_id=batch.batch_id, steps=0, attempts=0, seconds=0.0, timeout=0.0)
    steps, attempts = last.steps + 1, last.attempts + batch.timed_attempts
    seconds = last.seconds + batch.timed_seconds
    timeout = attempt_timeout(steps, attempts, seconds, **limits)
    return ev.PaceMeasured(batch_id=batch.batch_id, steps=steps, attempts=attempts, seconds=seconds, timeout=timeout)


class DynamicTimeout:
    """Timeout of attempts, from the measurements in the live state and the config."""

    def __init__(self, explorer: ExplorerConfig, live: LiveState) -> None:
        dynamic = explorer.dynamic_timeout
        self._live, self._enabled = live, dynamic.enable
        self._limits: dict[str, Any] = {
            "ratio": dynamic.ratio, "warmup_min_steps": dynamic.warmup_min_steps, "max_timeout": explorer.max_timeout,
        }

    def record_attempt_times(self, batch: BatchState) -> None:
        """Record the durations of an ended batch's attempts, if the dynamic timeout is enabled."""
        event = add_measurements(self._live.attempt_times, batch, **self._limits) if self._enabled else None
        if event is not None:
            self._live.record(event)

    def timeout(self) -> float:
        """Return the seconds that an attempt dispatched now may take; 0 means explorer.max_timeout."""
        last = self._live.attempt_times
        if not self._enabled or last is None:
            return 0.0
        return attempt_timeout(last.steps, last.attempts, last.seconds, **self._limits)

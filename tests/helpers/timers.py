"""Timers of an actor, which a test fires."""

from __future__ import annotations

from collections.abc import Callable


class Timers:
    """Timers of a `TimerHost`. `timers` are the armed ones, `delays` the delays of all that were ever set."""

    def __init__(self) -> None:
        self.timers: dict[str, Callable[[], None]] = {}
        self.delays: list[float] = []

    def after(self, seconds: float, name: str, call: Callable[[], None]) -> None:
        self.timers[name] = call
        self.delays.append(seconds)

    def cancel_timer(self, name: str) -> None:
        self.timers.pop(name, None)

    def has_timer(self, name: str) -> bool:
        return name in self.timers

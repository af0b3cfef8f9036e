"""Protocol of the actor, for the other parts of a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["TimerHost"]


class TimerHost(Protocol):
    """Actor that sends messages and has timers."""

    def send(self, to: Any, message: Any) -> None: ...
    def now(self) -> float: ...
    def after(self, seconds: float, name: str, call: Callable[[], None]) -> None: ...
    def cancel_timer(self, name: str) -> None: ...
    def has_timer(self, name: str) -> bool: ...

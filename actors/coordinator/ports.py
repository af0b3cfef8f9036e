"""What the parts of a coordinator need of what is around them: of the actor, and of the desk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trinity_es.actors.messages import Request

__all__ = ["Answers", "Sender", "Timers"]


class Sender(Protocol):
    """The side of an actor that sends."""

    def send(self, to: Any, message: Any) -> None: ...
    def now(self) -> float: ...


class Timers(Sender, Protocol):
    """The side of an actor that sends and has timers."""

    def after(self, seconds: float, name: str, call: Callable[[], None]) -> None: ...
    def cancel(self, name: str) -> None: ...
    def has_timer(self, name: str) -> bool: ...


class Answers(Protocol):
    """The side of the desk that answers clients: when this turn is durable (`reply`), or now (`answer`)."""

    def reply(self, request: Request, value: Any = None, error: BaseException | None = None) -> None: ...
    def answer(self, request: Request, value: Any = None, error: BaseException | None = None) -> None: ...

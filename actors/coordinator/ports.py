"""Protocols of the actor and the router of commands, for the other parts of a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from trinity_es.actors.commands import Command, CommandRequest

__all__ = ["MessageSender", "Responder", "TimerHost"]

A = TypeVar("A")


class MessageSender(Protocol):
    """Actor that sends messages."""

    def send(self, to: Any, message: Any) -> None: ...
    def now(self) -> float: ...


class TimerHost(MessageSender, Protocol):
    """Actor that sends messages and has timers."""

    def after(self, seconds: float, name: str, call: Callable[[], None]) -> None: ...
    def cancel(self, name: str) -> None: ...
    def has_timer(self, name: str) -> bool: ...


class Responder(Protocol):
    """Part of the router that answers clients: when this turn is durable (`reply`), or now (`answer`)."""

    def reply(
        self, request: CommandRequest[Command[A]], value: A | None = None, error: BaseException | None = None
    ) -> None: ...
    def answer(
        self, request: CommandRequest[Command[A]], value: A | None = None, error: BaseException | None = None
    ) -> None: ...
    def on_turn_lost(self, request: CommandRequest[Any], error: Exception) -> None: ...

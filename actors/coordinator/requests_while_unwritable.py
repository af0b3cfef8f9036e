"""Requests that come while the log can't be written: each is answered at once, and says why.

A disk is full, a file lost its name, the database refuses: nobody knows for how long. So nobody is left waiting for it.
`status` is answered from memory, with the trouble in it. Who waited for a batch before goes on waiting. Everybody else
gets the error of one more try, made after they asked: so the first request after the trouble is over goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trinity_es.actors.commands import CommandRequest, GetStatus
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.requests import Parcel, Reply, pack
from trinity_es.events.errors import LogRewound, error_to_dict
from trinity_es.events.store.database.retry import is_transient
from trinity_es.events.store.payloads.payloads import PayloadStore

__all__ = ["Unwritten"]

TRY_SECONDS = 0.5
"""Interval between two tries that requests cause."""


class _Router(Protocol):
    def take(self, request: CommandRequest[Any], sender: Any) -> None: ...
    def is_waiting(self, request: CommandRequest[Any], sender: Any) -> bool: ...


class Failing(Protocol):
    """The session of the log that can't be written."""

    failed_at: float
    try_again: Callable[[], None]


class Unwritten:
    """See the module."""

    def __init__(self, actor: TimerHost, session: Failing) -> None:
        self._actor, self._session = actor, session
        self.router: _Router | None = None
        """None until the log was opened."""
        self._held: dict[str, tuple[CommandRequest[Any], Any]] = {}
        """Requests that wait for the try that is being made, by their ids."""

    def take(self, request: CommandRequest[Any], sender: Any, error: Exception) -> None:
        """Answer it, or hold it until the try that it causes is over."""
        actor, session, command = self._actor, self._session, request.command
        if isinstance(error, LogRewound):
            self._answer(request, sender, error)
        elif isinstance(command, GetStatus):
            self._status(request, sender, error)
        elif self.router is not None and self.router.is_waiting(request, sender):
            pass
        elif is_transient(error) and (command.waits or not command.writes):
            pass  # the client asks again
        else:
            if not self._held and actor.has_timer("reload"):  # else a try is being made, or the last one is ending
                actor.after(max(0.0, session.failed_at + TRY_SECONDS - actor.now()), "reload", session.try_again)
            self._held[request.id] = request, sender

    def refuse(self, error: Exception) -> None:
        """Tell who was held that the try failed."""
        held, self._held = self._held, {}
        for request, sender in held.values():
            self._answer(request, sender, error)

    def go_on(self) -> None:
        """Take what was held, as the log is written again."""
        held, self._held = self._held, {}
        assert self.router is not None
        for request, sender in held.values():
            self.router.take(request, sender)

    def _status(self, request: CommandRequest[Any], sender: Any, error: Exception) -> None:
        if self.router is not None:
            self.router.take(request, sender)
            return
        value = {"batches": [], "runners": [], "trouble": f"the log can't be written: {error}", "refuses": True}
        self._actor.send(sender, Reply(request.id, pack(value, _NOWHERE), None))

    def _answer(self, request: CommandRequest[Any], sender: Any, error: Exception) -> None:
        self._actor.send(sender, Reply(request.id, Parcel(b"null"), error_to_dict(error)))


_NOWHERE: PayloadStore = None  # type: ignore[assignment]  # what is so short is not stored

"""Answers to requests that come while the log can't be written, for instance because the disk is full.

The coordinator answers `status` from memory, with the trouble. A client that already waits for a batch goes on waiting.
Any other request triggers an attempt to write and gets its error, so the first request after the trouble succeeds.
"""

from __future__ import annotations

from typing import Any

import orjson

from trinity_es.actors.commands import CommandRequest, GetStatus
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter
from trinity_es.actors.coordinator.log_session import LogSession
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.requests import Parcel, Reply
from trinity_es.events.errors import LogRewound, error_to_dict
from trinity_es.events.store.database.retry import is_transient

__all__ = ["HeldRequests"]

TRY_SECONDS = 0.5
"""Minimum interval between two attempts that requests trigger."""


class HeldRequests:
    def __init__(self, actor: TimerHost, session: LogSession) -> None:
        self._actor, self._session = actor, session
        self.router: CommandRouter | None = None
        """Router of requests; None until the log has opened."""
        self._held: dict[str, tuple[CommandRequest[Any], Any]] = {}
        """Request id -> request and sender, held until the current attempt to write ends."""

    def take(self, request: CommandRequest[Any], sender: Any, error: Exception) -> None:
        """Answer the request, or hold it until the attempt to write that it triggers has ended."""
        actor, session, command = self._actor, self._session, request.command
        if isinstance(error, LogRewound):
            self._answer(request, sender, error)
            return
        if isinstance(command, GetStatus):
            if self.router is not None:
                self.router.take(request, sender)
            else:
                trouble = f"the log can't be written: {error}"
                status = {"batches": [], "runners": [], "trouble": trouble, "refuses": True}
                actor.send(sender, Reply(request.id, Parcel(orjson.dumps(status))))
            return
        if self.router is not None and self.router.answer_if_repeated(request, sender):
            return
        if is_transient(error) and (command.waits or not command.writes):
            return  # the client repeats its request
        if not self._held and actor.has_timer("reload"):  # without the timer a try is already running
            actor.after(max(0.0, session.failed_at + TRY_SECONDS - actor.now()), "reload", session.try_again)
        self._held[request.id] = request, sender

    def refuse(self, error: Exception) -> None:
        """Answer the held requests with the error of the failed attempt."""
        requests, self._held = self._held, {}
        for request, sender in requests.values():
            self._answer(request, sender, error)

    def handle(self) -> None:
        """Handle the held requests, since the log can be written again."""
        requests, self._held = self._held, {}
        assert self.router is not None
        for request, sender in requests.values():
            self.router.take(request, sender)

    def _answer(self, request: CommandRequest[Any], sender: Any, error: Exception) -> None:
        self._actor.send(sender, Reply(request.id, Parcel(b"null"), error_to_dict(error)))

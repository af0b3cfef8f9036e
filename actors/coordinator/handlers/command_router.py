"""Router of client commands: it passes each request to its command's handler once, and keeps the answer.

A repeated request, with the same id, gets the same answer, or goes on waiting under its new address. An answer is sent
only when everything that it depends on is durable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import orjson

from trinity_es.actors.commands import COMMANDS, Command, CommandRequest, GetStatus
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.log_reader import Fetch, NotRead, read_now
from trinity_es.actors.coordinator.log_writer import Undone
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.coordinator.suspect_requests import RequestsInHand
from trinity_es.actors.requests import LIMIT, Parcel, Reply
from trinity_es.events.errors import DataError, TrinityError, error_to_dict
from trinity_es.events.store.checks.log_end import Mark

__all__ = ["CommandRouter", "HandlerRow", "handler_row"]

REMEMBERED_ANSWERS = 4096
"""Maximum number of answers that are kept for repeated requests."""
STATUS_LIMIT = 8 * LIMIT
"""Maximum bytes of JSON of a status, which must fit into a message even while no payload can be stored."""

A = TypeVar("A")
C = TypeVar("C", bound=Command[Any])
Handler = Callable[[CommandRequest[Any]], None]


class HandlerRow(NamedTuple):
    """Row of the router's table: a command and its handler."""

    command: type[Command[Any]]
    handler: Handler
    again: Callable[[str], None]


def handler_row(
    command: type[C], handler: Callable[[CommandRequest[C]], None], *, again: Callable[[str], None] = lambda _: None
) -> HandlerRow:
    """Return a row of the router's table, whose types mypy checks. `again` is called with the id of a waiting request
    when its client repeats it."""
    return HandlerRow(command, handler, again)


class CommandRouter:
    """Table of handlers, with the answers that were given and the clients that wait."""

    def __init__(
        self, live: LiveState, actor: TimerHost, log_end: Callable[[], Mark | None], in_hand: RequestsInHand
    ) -> None:
        """`log_end` returns the mark of the last acknowledged event. `in_hand` refuses requests that crash
        coordinators."""
        self._live, self._actor, self._log_end, self._in_hand = live, actor, log_end, in_hand
        self._handlers: dict[type[Command[Any]], HandlerRow] = {}
        self._answers: OrderedDict[str, Reply | None] = OrderedDict()
        """Request id -> answer, the oldest first; None while the request is open."""
        self._senders: dict[str, Any] = {}
        """Request id -> address of the client that waits for the answer."""
        self._undone: dict[str, CommandRequest[Any]] = {}
        """Requests to handle again, since their turns were undone because another turn could not be written."""

    def add_handlers(self, handlers: Iterable[HandlerRow]) -> None:
        """Add the handlers of all commands to the table. Raises TypeError if a command has none, or two."""
        for row in handlers:
            if other := self._handlers.get(row.command):
                raise TypeError(f"{row.command.__name__} has two handlers: {other.handler} and {row.handler}")
            self._handlers[row.command] = row
        missing_names = [command.__name__ for command in COMMANDS.values() if command not in self._handlers]
        if missing_names:
            raise TypeError(f"no handler for {', '.join(missing_names)}: add one in coordinator/handlers/")

    # --- requests ---------------------------------------------------------------------------------------------------
    def take(self, request: CommandRequest[Any], sender: Any) -> None:
        """Handle a new request. A repeated request gets its answer or goes on waiting."""
        if self.answer_if_repeated(request, sender):
            if self._answers[request.id] is None:
                self._handlers[type(request.command)].again(request.id)
            return
        self._senders[request.id], self._answers[request.id] = sender, None
        while len(self._answers) > REMEMBERED_ANSWERS:
            oldest_answered = next((i for i, reply in self._answers.items() if reply is not None), None)
            if oldest_answered is None:
                break  # an unanswered request that is forgotten would be done again
            del self._answers[oldest_answered]
            self._senders.pop(oldest_answered, None)
        self._handle(request, Fetch())

    def answer_if_repeated(self, request: CommandRequest[Any], sender: Any) -> bool:
        """Return True if the request came before. Then `sender` gets the answer, now or when there is one."""
        if request.id not in self._answers:
            return False
        self._senders[request.id] = sender
        answer = self._answers[request.id]
        if answer is not None:
            self._deliver(answer)
        return True

    def _handle(self, request: CommandRequest[Any], fetched: Fetch) -> None:
        """Call the handler of a request. If it needs data from the log, read that in a thread and call it once more."""
        self._live.turn.failure_calls.append(lambda error: self.on_turn_lost(request, error))
        name, handler = request.command.name, self._handlers[type(request.command)].handler
        write_count = len(self._live.turn.writes)
        self._live.fetch = fetched
        try:
            self._in_hand.begin_request(request)
            handler(request)
        except NotRead as missing:
            key = missing.key  # the name `missing` ends with this block
            if len(self._live.turn.writes) > write_count:
                error = RuntimeError(f"{name} has to read {key!r} after it recorded something")
                self._in_hand.blame(request, error)
                raise error from None  # it would record again with each new start
            self._in_hand.suspend_request(request)
            self._live.turn.failure_calls.pop()  # nothing of it can fail

            def done(result: Any) -> None:
                fetched[key] = result
                self._handle(request, fetched)

            self._live.run_in_thread(missing.read, done)
        except Exception as e:
            if len(self._live.turn.writes) > write_count:
                self._in_hand.blame(request, e)
                raise  # memory may be ahead of the log
            if not isinstance(e, TrinityError | ValueError):
                e = DataError(f"request {name!r} can't be used: {type(e).__name__}: {e}")
            self.reply(request, error=e)
        finally:
            self._live.fetch = read_now

    def on_turn_lost(self, request: CommandRequest[Any], error: Exception) -> None:
        """Answer a request whose turn could not be written. If another turn was the cause, handle it again instead."""
        if isinstance(error, Undone):
            self._undone[request.id] = request
        else:
            self.answer(request, error=error)

    def handle_undone_again(self) -> None:
        """Handle the undone requests again, if their clients still wait."""
        requests, self._undone = self._undone, {}
        for request in requests.values():
            if request.id in self._senders:
                self._handle(request, Fetch())

    # --- answers ----------------------------------------------------------------------------------------------------
    def reply(
        self, request: CommandRequest[Command[A]], value: A | None = None, error: BaseException | None = None
    ) -> None:
        """Answer once this turn is durable, or with the error if it can't be written."""
        self._live.when_durable(lambda: self.answer(request, value, error))
        self._live.turn.failure_calls.append(lambda lost: self.on_turn_lost(request, lost))

    def answer(
        self, request: CommandRequest[Command[A]], value: A | None = None, error: BaseException | None = None
    ) -> None:
        """Answer now. A value too large for a message is first stored as a payload."""
        failure = None if error is None else error_to_dict(error)
        try:
            data = orjson.dumps(value)
        except TypeError as e:
            data, failure = b"null", error_to_dict(DataError(f"the answer can't be sent: {e}"))
        limit = STATUS_LIMIT if isinstance(request.command, GetStatus) else LIMIT
        if len(data) <= limit:
            self._answer_with(Reply(request.id, Parcel(data), failure))
            return

        def on_stored(digest: str | Exception) -> None:
            if isinstance(digest, Exception):
                self._answer_with(Reply(request.id, Parcel(b"null"), error_to_dict(digest)))
            else:
                self._answer_with(Reply(request.id, Parcel(None, digest), failure))

        self._live.run_in_thread(lambda: self._live.payloads.put(data), on_stored)

    def _answer_with(self, reply: Reply) -> None:
        """Keep a reply for repeated requests, and send it to the client if it waits."""
        self._answers[reply.id] = reply
        self._deliver(reply)

    def _deliver(self, reply: Reply) -> None:
        """Send a reply to the client if it waits, with the current end of the log."""
        sender = self._senders.pop(reply.id, None)
        if sender is not None:
            self._actor.send(sender, replace(reply, end=self._log_end()))

    def give_up(self, error: TrinityError) -> None:
        for request_id in [i for i, reply in self._answers.items() if reply is None]:
            self._deliver(Reply(request_id, Parcel(b"null"), error_to_dict(error)))

"""What clients ask: each request is handled once, by the handler of its command, and answered once.

A request is known by its id: sent again, it gets the same answer, or goes on waiting under its new address. Nobody is
answered before what the answer says is durable.
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
from trinity_es.actors.coordinator.ports import MessageSender
from trinity_es.actors.coordinator.requests_in_hand import RequestsInHand
from trinity_es.actors.requests import LIMIT, Parcel, Reply
from trinity_es.events.errors import DataError, TrinityError, error_to_dict
from trinity_es.events.store.checks.log_end import Mark

__all__ = ["CommandRouter", "Handled", "handled"]

REMEMBERED_ANSWERS = 4096
"""Maximum number of requests whose answers are kept for a client that asks again."""
STATUS_LIMIT = 8 * LIMIT
"""Maximum bytes of JSON of a status that travel in a message: it is told also while no payload can be stored."""

A = TypeVar("A")
C = TypeVar("C", bound=Command[Any])
Handler = Callable[[CommandRequest[Any]], None]


class Handled(NamedTuple):
    """A command, and what handles it."""

    command: type[Command[Any]]
    handler: Handler
    again: Callable[[str], None]


def handled(
    command: type[C], handler: Callable[[CommandRequest[C]], None], *, again: Callable[[str], None] = lambda _: None
) -> Handled:
    """Return a row of the router's table; the type checker sees that the handler takes this command.

    `again` is called with the id of a request that waits, when its client asks again.
    """
    return Handled(command, handler, again)


class CommandRouter:
    """Has each request handled once, and remembers its answer."""

    def __init__(
        self, live: LiveState, actor: MessageSender, end: Callable[[], Mark | None], in_hand: RequestsInHand
    ) -> None:
        """`end` gives the end of the log, as it may be told; `in_hand` knows which requests ended coordinators."""
        self._live, self._actor, self._end, self._in_hand = live, actor, end, in_hand
        self._handlers: dict[type[Command[Any]], Handled] = {}
        self._answers: OrderedDict[str, Reply | None] = OrderedDict()
        self._senders: dict[str, Any] = {}
        self._again: dict[str, CommandRequest[Any]] = {}
        """Requests that were undone with others that could not be written: they are handled anew."""

    def connect(self, handlers: Iterable[Handled]) -> None:
        """Take the handlers of all commands. Raises TypeError where one has none, or two."""
        for row in handlers:
            if known := self._handlers.get(row.command):
                raise TypeError(f"{row.command.__name__} has two handlers: {known.handler} and {row.handler}")
            self._handlers[row.command] = row
        if missing := [command.__name__ for command in COMMANDS.values() if command not in self._handlers]:
            raise TypeError(f"nobody handles {', '.join(missing)}: see coordinator/handlers/")

    # --- requests ---------------------------------------------------------------------------------------------------
    def take(self, request: CommandRequest[Any], sender: Any) -> None:
        """Take a request, which arrives perhaps not for the first time."""
        if self.is_waiting(request, sender):
            if self._answers[request.id] is None:
                self._handlers[type(request.command)].again(request.id)
            return
        self._senders[request.id], self._answers[request.id] = sender, None
        while len(self._answers) > REMEMBERED_ANSWERS:
            old = next((i for i, reply in self._answers.items() if reply is not None), None)
            if old is None:
                break  # what is not answered yet would be done again
            del self._answers[old]
            self._senders.pop(old, None)
        self._handle(request, Fetch())

    def is_waiting(self, request: CommandRequest[Any], sender: Any) -> bool:
        """Return True if this request came before: it goes on waiting under its new address, or has its answer again.
        """
        if request.id not in self._answers:
            return False
        self._senders[request.id] = sender
        known = self._answers[request.id]
        if known is not None:
            self._deliver(known)
        return True

    def _handle(self, request: CommandRequest[Any], fetched: Fetch) -> None:
        """Have it handled; where that needs what is not in memory, again from its start when it was read."""
        self._live.turn.failed.append(lambda error: self.lost(request, error))
        name, handler = request.command.name, self._handlers[type(request.command)].handler
        written, self._live.fetch = len(self._live.turn.writes), fetched
        try:
            self._in_hand.take(request)
            handler(request)
        except NotRead as missing:
            key = missing.key  # an exception's name ends with its block
            if len(self._live.turn.writes) > written:
                error = RuntimeError(f"{name} has to read {key!r} after it recorded something")
                self._in_hand.blame(request, error)
                raise error from None  # it would record it again, each time that it begins
            self._in_hand.put_aside(request)
            self._live.turn.failed.pop()  # it did nothing that could fail

            def done(found: Any) -> None:
                fetched.put(key, found)
                self._handle(request, fetched)

            self._live.ask(missing.read, done)
        except Exception as e:
            if len(self._live.turn.writes) > written:
                self._in_hand.blame(request, e)
                raise  # memory may be ahead of the log
            plain = isinstance(e, TrinityError | ValueError)
            what = f"request {name!r} can't be used: {type(e).__name__}: {e}"
            self.reply(request, error=e if plain else DataError(what))
        finally:
            self._live.fetch = read_now

    def lost(self, request: CommandRequest[Any], error: Exception) -> None:
        """Take note that its turn could not be written. Where that was another's fault, it is done again."""
        if isinstance(error, Undone):
            self._again[request.id] = request
        else:
            self.answer(request, error=error)

    def do_again(self) -> None:
        """Handle what was undone."""
        undone, self._again = self._again, {}
        for request in undone.values():
            if request.id in self._senders:
                self._handle(request, Fetch())

    # --- answers ----------------------------------------------------------------------------------------------------
    def reply(
        self, request: CommandRequest[Command[A]], value: A | None = None, error: BaseException | None = None
    ) -> None:
        """Answer when this turn is durable, or that it could not be written."""
        self._live.then(lambda: self.answer(request, value, error))
        self._live.turn.failed.append(lambda lost: self.lost(request, lost))

    def answer(
        self, request: CommandRequest[Command[A]], value: A | None = None, error: BaseException | None = None
    ) -> None:
        """Answer now, or when a payload holds what is too large for a message."""
        told = None if error is None else error_to_dict(error)
        try:
            data = orjson.dumps(value)
        except TypeError as e:
            data, told = b"null", error_to_dict(DataError(f"the answer can't be sent: {e}"))
        if len(data) <= (STATUS_LIMIT if isinstance(request.command, GetStatus) else LIMIT):
            self._tell(Reply(request.id, Parcel(data), told))
            return

        def stored(digest: str | Exception) -> None:
            if isinstance(digest, Exception):
                self._tell(Reply(request.id, Parcel(b"null"), error_to_dict(digest)))
            else:
                self._tell(Reply(request.id, Parcel(None, digest), told))

        self._live.ask(lambda: self._live.payloads.put(data), stored)

    def _tell(self, reply: Reply) -> None:
        self._answers[reply.id] = reply
        self._deliver(reply)

    def _deliver(self, reply: Reply) -> None:
        sender = self._senders.pop(reply.id, None)
        if sender is not None:
            self._actor.send(sender, replace(reply, end=self._end()))

    def give_up(self, error: TrinityError) -> None:
        """Answer everybody who waits with this."""
        for request_id in [i for i, reply in self._answers.items() if reply is None]:
            self._deliver(Reply(request_id, Parcel(b"null"), error_to_dict(error)))

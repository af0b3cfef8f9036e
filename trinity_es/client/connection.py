"""The wire between a client process and the running system: requests, answers, patience.

A request goes to the coordinator and carries an id; when no answer comes, the guardian is asked where the coordinator
is now, and the same request is sent again, under the same id, which the coordinator recognises. Meanwhile every answer
to it counts, however late, and a coordinator that is known stays known until the guardian names another or its port is
closed. So a caller sees a pause where a coordinator died, or where the whole system did and is started again by its
keeper, an error only where nobody will, and nothing at all where a guardian is stopped.
Nothing here waits for a peer to take a message, and a caller's deadline holds whatever happens inside.
Thread-safe: each call in flight has an endpoint of its own (Thespian's `private()`), kept for the next one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from thespian.actors import ActorSystem
from thespian.system.transport import SendStatus, TransmitIntent

from trinity_es.actors.commands import Command, encode
from trinity_es.actors.frames import PROTOCOL, knock
from trinity_es.actors.guardian.actor import NAME, Guardian
from trinity_es.actors.guardian.supervision import ENDED
from trinity_es.actors.messages import Retire
from trinity_es.actors.orphaned import owner_gone
from trinity_es.actors.requests import Reply, Request, Where, WhereReply, unpack
from trinity_es.actors.system_key import key_place, read_key
from trinity_es.actors.transport import AuthenticatedSystemBase, listens_at
from trinity_es.events.errors import LogRewound, NotRunning, TrinityError, VersionMismatch, WrongKey, error_from_dict
from trinity_es.events.processes import process_lives
from trinity_es.events.store.checks.log_end import Mark, told_less
from trinity_es.events.store.payloads.payloads import PayloadStore

__all__ = ["GRACE_SECONDS", "PATIENCE_SECONDS", "Connection", "system_gone"]

PATIENCE_SECONDS = 5.0
"""How long to wait for an answer before asking where the coordinator is, and sending the request again."""
LOOK_SECONDS = 1.0
"""Interval between two looks whether the system still lives, while an answer is waited for."""
GRACE_SECONDS = 1.0
"""How long after a caller's timeout the coordinator's own word is waited for, which tells more."""
CONNECT_SECONDS = 10.0
"""How long the admin of a system that is joined may take to answer."""
LEAST_SECONDS = 0.05
"""Minimum of a wait, in which what has come is read."""
AGAIN_SECONDS = 0.05
"""Pause before asking again where there was no coordinator."""
REJOIN_SECONDS = 300.0
"""How long a system may take to be started again."""
AWAY_SECONDS = 330.0
"""How long a system may be without a coordinator that takes anything before a call gives up."""

A = TypeVar("A")


class _Connected(AuthenticatedSystemBase):
    """A base that joins a running system and never starts one: a dead one must not come back empty."""

    def _startAdmin(self, *_: Any) -> None:
        raise NotRunning("the actor system does not answer: start it again with `trinity-es up`")


def system_gone(admin: dict[str, Any]) -> NotRunning:
    """Return the error for a system that is gone and that nobody starts again, with the reason where it is known."""
    why = owner_gone(admin.get("owner"))
    said = f"the actor system is gone ({why})" if why else "the actor system is gone"
    return NotRunning(f"{said}: `trinity-es up` on the same store goes on with what is open")


class _Gone(Exception):
    """The system that a request was sent to is gone."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A mailbox of its own for a call in flight."""

    system: Any
    stack: ExitStack

    def send(self, to: Any, message: Any, over: Callable[[Any], None] = lambda status: None) -> None:
        """Begin to send. While `next` waits, `over` is told that it was taken, or why not."""
        transport = self.system._systemBase.transport

        def done(status: Any, _: Any) -> None:
            over(status)
            transport.abort_run()

        transport.scheduleTransmit(None, TransmitIntent(to, message, done, done))

    def next(self, seconds: float) -> Any:
        """Return what comes next; None where nothing came for so long, or a message was taken.

        What has come already is read however short the time is.
        """
        return self.system.listen(max(LEAST_SECONDS, seconds))

    def close(self) -> None:
        transport = self.system._systemBase.transport
        self.stack.close()
        _close_sockets(transport)


class _Session:
    """One life of the actor system, joined by this process: everything that ends with it."""

    def __init__(self, admin: dict[str, Any]) -> None:
        """Join it. Raises NotRunning, WrongKey, VersionMismatch."""
        self.admin = admin
        self.coordinator: Any = None
        self._lock = threading.Lock()
        self._idle: list[_Endpoint] | None = []
        self.require()
        if admin.get("protocol") != PROTOCOL:
            raise VersionMismatch(
                f"the actor system (pid {admin['pid']}) was started by another version of trinity_es, which this one "
                "can't ask: `trinity-es down`, then `trinity-es up` goes on with what is open"
            )
        key = read_key(admin["key_file"])
        address = listens_at(admin["pid"], admin["port"])
        fits = self._knock(address, key)
        if fits is False:
            self.require()  # or it died before it could answer
            raise WrongKey(
                f"the key to the actor system does not fit: it is from {key_place(admin['key_file'])}, and the system "
                f"(pid {admin['pid']}) was started with another"
            )
        if fits is None:
            raise NotRunning(
                f"the actor system (pid {admin['pid']}) has not answered for {CONNECT_SECONDS:.0f} s: it is stopped or "
                "hangs; its keeper ends it and starts it again, and so do `trinity-es down` and `trinity-es up`"
            )
        joined: Any = None
        try:
            self.system = joined = ActorSystem(_Connected(address, admin["port"], key), transientUnique=True)
            self.guardian = joined.createActor(Guardian, globalName=NAME)
        except BaseException as e:
            if joined is not None:
                self.leave()
            if isinstance(e, TrinityError) or not isinstance(e, Exception):
                raise
            # Thespian's, for an admin that dies right now
            raise NotRunning(f"the actor system does not answer ({e}): `trinity-es up` starts it again") from e

    def _knock(self, address: str, key: bytes) -> bool | None:
        until = time.monotonic() + CONNECT_SECONDS
        while True:
            fits = knock(address, self.admin["port"], key)
            if fits is not None or time.monotonic() >= until:
                return fits
            self.require()
            time.sleep(AGAIN_SECONDS)

    def lives(self) -> bool:
        return process_lives(self.admin["pid"], self.admin["started"])

    def require(self) -> None:
        if not self.lives():
            raise system_gone(self.admin)

    def take(self) -> _Endpoint:
        """Take an endpoint. Raises _Gone when this process has left it."""
        with self._lock:
            if self._idle is None:
                raise _Gone
            if self._idle:
                return self._idle.pop()
            stack = ExitStack()
            return _Endpoint(stack.enter_context(self.system.private()), stack)

    def give(self, endpoint: _Endpoint) -> None:
        with self._lock:
            if self._idle is not None:
                self._idle.append(endpoint)
                return
        endpoint.close()

    def leave(self) -> None:
        """Let go of it; calls in flight end by themselves."""
        with self._lock:
            idle, self._idle = self._idle or [], None
            for endpoint in idle:
                endpoint.close()
            base, self.system._systemBase = self.system._systemBase, None
            if base is not None:
                _close_sockets(base.transport)


class Connection:
    """Requests to the running system of a store, in each life of it. Raises NotRunning, WrongKey.

    `find` takes the admin of the system that was joined before and is gone, or None. It returns the admin of the
    running system, or None while a keeper starts it, and raises NotRunning if nobody does.
    """

    def __init__(self, payloads: PayloadStore, find: Callable[[dict[str, Any] | None], dict[str, Any] | None]) -> None:
        self._payloads, self._find_admin = payloads, find
        self._lock = threading.Lock()
        self._joining: Future[None] | None = None
        self._closed = False
        self.known: Mark | None = None
        """The end of the log, as it was told last: a log that has it not is refused."""
        self.by = f"a client (pid {os.getpid()} on {socket.gethostname()})"
        self._life = self._next_life(None)

    @property
    def admin(self) -> dict[str, Any]:
        """The admin of the system that is joined now."""
        return self._life.admin

    def _require_open(self) -> None:
        if self._closed:
            raise NotRunning("this client is closed: connect again")

    def _rejoin(self, gone: _Session, deadline: float | None) -> None:
        """Join the system that took the place of one that is gone. Raises NotRunning, TimeoutError, WrongKey."""
        with self._lock:
            if self._life is not gone:
                return
            if self._joining is None or self._joining.done():
                self._joining = Future()  # in a thread of its own: it may take longer than who waits for it has time
                threading.Thread(target=self._join, args=(gone, self._joining), daemon=True).start()
            joining = self._joining
        try:
            joining.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise TimeoutError("no answer in time: the actor system is being started again") from None

    def _next_life(self, gone: dict[str, Any] | None) -> _Session:
        """Join the running system, or wait until its keeper has started it. `gone`: admin of the one before."""
        since = time.monotonic()
        while True:
            self._require_open()
            found = self._find_admin(gone)
            if found is not None and found != gone:
                try:
                    return _Session(found)
                except NotRunning:
                    stays = process_lives(found["pid"], found["started"])
                    if gone is None and stays and time.monotonic() - since >= CONNECT_SECONDS:
                        raise  # it is stopped or hangs; else it died too
            if time.monotonic() - since > REJOIN_SECONDS:
                raise NotRunning(
                    f"the actor system has been gone for {REJOIN_SECONDS:.0f} s, and its keeper could not start it "
                    "again: keeper.log in its log folder tells why"
                )
            time.sleep(0.1)

    def _join(self, gone: _Session, joined: Future[None]) -> None:
        try:
            life = self._next_life(gone.admin)
        except BaseException as e:
            joined.set_exception(e)
            return
        with self._lock:
            self._life = life
        gone.leave()
        if self._closed:  # meanwhile
            life.leave()
        joined.set_result(None)

    def call(self, command: Command[A], timeout: float | None = None, *, id: str = "") -> A:
        """Return the answer to one command. Raises what the system answers, NotRunning, or TimeoutError after `timeout`
        s; DataError for what only this process knows the class of.

        `id`: of a request whose answer did not come in time; the same is asked again.
        """
        answer: A = self.send(command.name, encode(command), timeout, id=id)
        return answer

    def send(self, name: str, args: dict[str, Any], timeout: float | None = None, *, id: str = "") -> Any:
        """Return the answer to a command as it travels: its name, and plain values. See `call`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        request = Request(id or uuid.uuid4().hex, name, args, self.known, self.by)
        while True:
            self._require_open()
            life = self._life
            try:
                endpoint = life.take()
                try:
                    return self._exchange(life, endpoint, request, deadline)
                finally:
                    life.give(endpoint)
            except _Gone:
                pass
            except (TrinityError, TimeoutError):
                raise
            except Exception:  # Thespian's, for a system that dies under it
                if self._life is life and life.lives():
                    raise
            self._rejoin(life, deadline)

    def _exchange(self, life: _Session, endpoint: _Endpoint, request: Request, deadline: float | None) -> Any:
        where = Where(uuid.uuid4().hex)
        taken, again = time.monotonic(), 0.0  # when a coordinator took something last; when to ask again

        def over(to: Any, status: Any) -> None:
            nonlocal taken, again
            if status is SendStatus.Sent:
                taken = time.monotonic()
            elif status is SendStatus.DeadTarget and life.coordinator == to:
                life.coordinator, again = None, time.monotonic() + AGAIN_SECONDS

        asked = False
        while True:
            now = time.monotonic()
            if now >= again:
                coordinator, again = life.coordinator, now + PATIENCE_SECONDS
                if coordinator is not None:
                    endpoint.send(coordinator, replace(request, known=self.known), partial(over, coordinator))
                if coordinator is None or asked:
                    endpoint.send(life.guardian, where)
                asked = True
            wait = min(LOOK_SECONDS, again - now, LOOK_SECONDS if deadline is None else deadline - now)
            answer = endpoint.next(wait)
            if time.monotonic() - now > 3 * LOOK_SECONDS:  # this process stood still
                taken = time.monotonic()
            if isinstance(answer, Reply) and answer.id == request.id:
                self._learn(request, answer)
                if answer.error is not None:
                    raise error_from_dict(answer.error)
                return unpack(answer.value, self._payloads)
            now = time.monotonic()
            if isinstance(answer, WhereReply) and answer.id == where.id:
                if answer.coordinator is None:
                    life.coordinator, again = None, min(again, now + AGAIN_SECONDS)
                elif life.coordinator is None or life.coordinator != answer.coordinator:
                    life.coordinator, again = answer.coordinator, now
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"{request.command}: no answer in time")
            if answer is None and not life.lives():
                raise _Gone
            if now - taken > AWAY_SECONDS:
                why = f"no coordinator has taken anything for {AWAY_SECONDS:.0f} s"
                raise NotRunning(f"{why}; `trinity-es status` tells more")

    def _learn(self, asked: Request, answer: Reply) -> None:
        """Keep how far the log was when it answered. Raises LogRewound where that is less than was known before."""
        wrong = told_less(asked.known, answer.end)  # as it was first asked: this may be the answer to that
        if wrong is not None:
            raise LogRewound(
                f"the system works on a log that lost what was acknowledged: this process knows better: {wrong}. Bring "
                "the better copy back, or say that it is meant with `trinity-es accept-rewind`"
            )
        if answer.end is not None and told_less(self.known, answer.end) is None:  # another thread may know more
            self.known = answer.end

    def where(self, timeout: float = PATIENCE_SECONDS) -> WhereReply:
        """Return what the guardian says: the coordinator's address and the state of every child.

        Empty without an answer. Raises NotRunning, also where a keeper has not started the system again after `timeout`
        seconds.
        """
        self._require_open()
        if not self._life.lives():
            try:
                self._rejoin(self._life, time.monotonic() + timeout)
            except TimeoutError as e:
                raise NotRunning("the actor system is gone; its keeper is starting it again") from e
        life = self._life
        answer = self._where(life, timeout)
        if not answer.status:
            life.require()
        return answer

    def _where(self, life: _Session, timeout: float, before: Any = None) -> WhereReply:
        """Ask the guardian; `before` is sent to it first."""
        try:
            endpoint = life.take()
        except _Gone as e:
            raise NotRunning("the actor system was just started again: ask once more") from e
        try:
            question, until = Where(uuid.uuid4().hex), time.monotonic() + timeout
            for message in (question,) if before is None else (before, question):
                endpoint.send(life.guardian, message)
            while (left := until - time.monotonic()) > 0:
                answer = endpoint.next(min(LOOK_SECONDS, left))
                if isinstance(answer, WhereReply) and answer.id == question.id:
                    return answer
                if answer is None and not life.lives():
                    break
        finally:
            life.give(endpoint)
        return WhereReply("", None, {})

    def tell_guardian(self, message: Any) -> bool:
        """Tell the guardian something; returns whether it answers."""
        return bool(self._where(self._life, PATIENCE_SECONDS, message).status)

    @property
    def knows_coordinator(self) -> bool:
        """True if a coordinator was known that has not been seen to be gone."""
        return self._life.coordinator is not None

    def retire(self, timeout: float = 15.0) -> bool:
        """Bring the joined system down in order: engines stop, the log is closed, the actors end.

        Returns whether it could be told: a guardian or an admin that is stopped or hangs can't.
        """
        life = self._life
        if not life.lives():
            return True
        deadline = time.monotonic() + timeout
        order: Retire | None = Retire()
        children: list[dict[str, Any]] = [{"state": ""}]
        while not all(c["state"] in ENDED for c in children) and time.monotonic() < deadline:
            try:
                told = self._where(life, PATIENCE_SECONDS, order).status
            except TrinityError:
                break
            if not told:
                return not life.lives()
            children, order = told.get("children", []), None
            time.sleep(0.1)
        if life.lives() and not self.answers():
            return False
        life.system.shutdown()
        return True

    def answers(self) -> bool:
        admin = self._life.admin
        return knock(listens_at(admin["pid"], admin["port"]), admin["port"], read_key(admin["key_file"])) is not None

    def close(self) -> None:
        """Give the endpoints back; the system goes on. Calls in flight end by themselves."""
        self._closed = True
        self._life.leave()


def _close_sockets(transport: Any) -> None:
    """Thespian's own `close` shuts its sockets down but leaves the descriptors open."""
    listening = getattr(transport, "socket", None)
    transport.close_oldest_idle_sockets(10_000)
    transport.close()
    if listening is not None:
        listening.close()

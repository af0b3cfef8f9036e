"""The connection between a client process and the running system: requests, answers, retries.

A request goes to the coordinator under an id. If no answer comes, the client asks the guardian for the coordinator's
address and sends the request again under the same id, which the coordinator recognises. A late answer counts too. The
client keeps a coordinator's address until the guardian names another one or the port is closed. While a coordinator or
the whole system restarts, a call only takes longer. It fails if no keeper restarts the system. A stopped guardian alone
does not disturb it. Sending never waits for the peer, and a caller's deadline holds. The class is thread-safe: each
call in flight has its own endpoint (Thespian's `private()`), which later calls reuse.
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
from trinity_es.actors.requests import Reply, Request, Where, WhereReply, unpack
from trinity_es.actors.sealed_transport import AuthenticatedSystemBase, listening_host
from trinity_es.actors.system_end_checks import owner_end_reason
from trinity_es.actors.system_key import key_source, read_key
from trinity_es.events.errors import LogRewound, NotRunning, TrinityError, VersionMismatch, WrongKey, error_from_dict
from trinity_es.events.processes import process_lives
from trinity_es.events.store.checks.log_end import Mark, lost_between
from trinity_es.events.store.payloads.payloads import PayloadStore

__all__ = ["GRACE_SECONDS", "PATIENCE_SECONDS", "Connection", "system_gone"]

PATIENCE_SECONDS = 5.0
"""How long to wait for an answer before asking the guardian for the coordinator and sending the request again."""
LIVENESS_SECONDS = 1.0
"""Interval of the checks that the system is alive, during a wait for an answer."""
GRACE_SECONDS = 1.0
"""Extra wait after a caller's timeout for the coordinator's own timeout error, which says more."""
CONNECT_SECONDS = 10.0
"""Timeout of the admin's first answer."""
MINIMUM_WAIT_SECONDS = 0.05
"""Shortest wait for a message; even at a passed deadline it lets messages that have arrived be read."""
RETRY_SECONDS = 0.05
"""Pause before the next question to the guardian while there is no coordinator."""
REJOIN_SECONDS = 300.0
"""How long a keeper may take to start the system again."""
NO_COORDINATOR_SECONDS = 330.0
"""A call gives up when no coordinator has taken a message for this long."""

A = TypeVar("A")


class _JoiningBase(AuthenticatedSystemBase):
    """Thespian system base that only joins a running system. A system that it started would be empty."""

    def _startAdmin(self, *_: Any) -> None:
        raise NotRunning("the actor system does not answer: start it again with `trinity-es up`")


def system_gone(admin: dict[str, Any]) -> NotRunning:
    """Return the error for a system that has ended and that no keeper restarts. It says if the system's owner ended."""
    reason = f" ({why})" if (why := owner_end_reason(admin.get("owner"))) else ""
    return NotRunning(f"the actor system is gone{reason}: `trinity-es up` on the same store goes on with open batches")


class _SystemGone(Exception):
    """The actor system of a session has ended. `Connection` joins the next one and sends the request again."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """Mailbox of one call in flight."""

    system: Any
    stack: ExitStack

    def send(self, to: Any, message: Any, on_sent: Callable[[Any], None] = lambda status: None) -> None:
        """Queue a message for sending. A later `next_message` sends it and calls `on_sent` with Thespian's status."""
        transport = self.system._systemBase.transport

        def end_listening(status: Any, _: Any) -> None:
            on_sent(status)
            transport.abort_run()  # ends the `listen` of `next_message`

        transport.scheduleTransmit(None, TransmitIntent(to, message, end_listening, end_listening))

    def next_message(self, seconds: float) -> Any:
        """Wait `seconds`, at least MINIMUM_WAIT_SECONDS, for the next message, and return it.

        Returns None if none arrived. Also returns None early, as soon as a message of `send` was delivered or failed.
        """
        return self.system.listen(max(MINIMUM_WAIT_SECONDS, seconds))

    def close(self) -> None:
        transport = self.system._systemBase.transport
        self.stack.close()
        _close_sockets(transport)


class _Session:
    """This process's connection to one actor system, from its start to its end; a restarted system gets a new one."""

    def __init__(self, admin: dict[str, Any]) -> None:
        """Join the system. Raises NotRunning, WrongKey, VersionMismatch."""
        self.admin = admin
        self.coordinator: Any = None
        self._lock = threading.Lock()
        self._idle_endpoints: list[_Endpoint] | None = []
        """Endpoints that no call uses; None once this process has left the session."""
        self.require_alive()
        if admin.get("protocol") != PROTOCOL:
            raise VersionMismatch(
                f"the actor system (pid {admin['pid']}) was started by another version of trinity_es, which this one "
                "can't talk to: run `trinity-es down`, then `trinity-es up`, which continues open batches")
        key = read_key(admin["key_file"])
        address = listening_host(admin["pid"], admin["port"])
        accepts_key = self._accepts_key(address, key)
        if accepts_key is False:
            self.require_alive()  # an admin that dies during the check seems to refuse the key
            raise WrongKey(f"the key from {key_source(admin['key_file'])} is not the key of the actor system (pid "
                           f"{admin['pid']}): give the key with which the system was started")
        if accepts_key is None:
            raise NotRunning(
                f"the actor system (pid {admin['pid']}) has not answered for {CONNECT_SECONDS:.0f} s: it is suspended "
                "or hangs. Wait until its keeper process restarts it, or run `trinity-es down`, then `trinity-es up`")
        system: Any = None
        try:
            self.system = system = ActorSystem(_JoiningBase(address, admin["port"], key), transientUnique=True)
            self.guardian = system.createActor(Guardian, globalName=NAME)
        except BaseException as e:
            if system is not None:
                self.leave()
            if isinstance(e, TrinityError) or not isinstance(e, Exception):
                raise
            # an error of Thespian, because the admin died just now
            raise NotRunning(f"the actor system does not answer ({e}): `trinity-es up` starts it again") from e

    def _accepts_key(self, address: str, key: bytes) -> bool | None:
        """Return whether the admin accepts this key; None if it does not answer within CONNECT_SECONDS."""
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            accepted = knock(address, self.admin["port"], key)
            if accepted is not None or time.monotonic() >= deadline:
                return accepted
            self.require_alive()
            time.sleep(RETRY_SECONDS)

    def is_alive(self) -> bool:
        return process_lives(self.admin["pid"], self.admin["started"])

    def require_alive(self) -> None:
        """Raise NotRunning if the system's admin has ended."""
        if not self.is_alive():
            raise system_gone(self.admin)

    def take_endpoint(self) -> _Endpoint:
        """Return an endpoint that no other call uses. Raises _SystemGone if this process has left the session."""
        with self._lock:
            if self._idle_endpoints is None:
                raise _SystemGone
            if self._idle_endpoints:
                return self._idle_endpoints.pop()
            stack = ExitStack()
            return _Endpoint(stack.enter_context(self.system.private()), stack)

    def give_back(self, endpoint: _Endpoint) -> None:
        """Keep the endpoint for a later call, or close it if this process has left the session."""
        with self._lock:
            if self._idle_endpoints is None:
                endpoint.close()
            else:
                self._idle_endpoints.append(endpoint)

    def leave(self) -> None:
        """Close the session; calls in flight end by themselves."""
        with self._lock:
            endpoints, self._idle_endpoints = self._idle_endpoints or [], None
            for endpoint in endpoints:
                endpoint.close()
            system_base, self.system._systemBase = self.system._systemBase, None
            if system_base is not None:
                _close_sockets(system_base.transport)


class Connection:
    """Sends requests to the running system of a store, and reconnects when the system was restarted.

    `find` returns the admin of the running system, or None while a keeper starts it. Its argument is the admin of the
    previous system, which has ended, or None. It raises NotRunning if no keeper starts a system.
    """

    def __init__(self, payloads: PayloadStore, find: Callable[[dict[str, Any] | None], dict[str, Any] | None]) -> None:
        self._payloads, self._find_admin = payloads, find
        self._lock = threading.Lock()
        self._joining: Future[None] | None = None
        self._closed = False
        self.last_mark: Mark | None = None
        """End of the log in the newest answer. An answer whose log lacks this position raises LogRewound."""
        self.name = f"a client (pid {os.getpid()} on {socket.gethostname()})"
        self._session = self._next_session(None)

    @property
    def admin(self) -> dict[str, Any]:
        """Pid, port and other data of the joined system's admin process."""
        return self._session.admin

    def _require_open(self) -> None:
        if self._closed:
            raise NotRunning("this client is closed: connect again")

    def _rejoin(self, dead_session: _Session, deadline: float | None) -> None:
        """Replace a session whose system has ended by a new one. Raises NotRunning, TimeoutError, WrongKey."""
        with self._lock:
            if self._session is not dead_session:  # another call has joined it
                return
            if self._joining is None or self._joining.done():
                self._joining = Future()  # in its own thread: joining may outlast the deadline of this caller
                threading.Thread(target=self._join, args=(dead_session, self._joining), daemon=True).start()
            joining = self._joining
        try:
            joining.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise TimeoutError("no answer in time, because the actor system is restarting: call again") from None

    def _next_session(self, last_admin: dict[str, Any] | None) -> _Session:
        """Join the running system; while its keeper starts it, wait. `last_admin`: the admin of the ended system."""
        begun_at = time.monotonic()
        while True:
            self._require_open()
            admin = self._find_admin(last_admin)
            if admin is not None and admin != last_admin:
                try:
                    return _Session(admin)
                except NotRunning:
                    is_alive = process_lives(admin["pid"], admin["started"])
                    if last_admin is None and is_alive and time.monotonic() - begun_at >= CONNECT_SECONDS:
                        raise  # it is stopped or hangs; if it had died, the keeper would start another
            if time.monotonic() - begun_at > REJOIN_SECONDS:
                raise NotRunning(f"the actor system has been gone for {REJOIN_SECONDS:.0f} s, and its keeper process "
                                 "could not restart it: see keeper.log in its log folder")
            time.sleep(0.1)

    def _join(self, dead_session: _Session, joining: Future[None]) -> None:
        """Join the restarted system, replace `dead_session`, and complete `joining`. Runs in its own thread."""
        try:
            session = self._next_session(dead_session.admin)
        except BaseException as e:
            joining.set_exception(e)
            return
        with self._lock:
            self._session = session
        dead_session.leave()
        if self._closed:  # `close` came while the thread joined
            session.leave()
        joining.set_result(None)

    def call(self, command: Command[A], timeout: float | None = None, *, id: str = "") -> A:
        """Send a command and return its answer. To repeat an unanswered request, pass its `id`.

        Raises the error with which the system answers, NotRunning if the system is gone, TimeoutError after `timeout`
        seconds, and DataError for a value that can't be encoded.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        request = Request(id or uuid.uuid4().hex, command.name, encode(command), self.last_mark, self.name)
        while True:
            self._require_open()
            session = self._session
            try:
                endpoint = session.take_endpoint()
                try:
                    answer: A = self._exchange(session, endpoint, request, deadline)
                    return answer
                finally:
                    session.give_back(endpoint)
            except _SystemGone:
                pass
            except (TrinityError, TimeoutError):
                raise
            except Exception:  # Thespian raised it, perhaps because the system died during the call
                if self._session is session and session.is_alive():
                    raise
            self._rejoin(session, deadline)

    def _exchange(self, session: _Session, endpoint: _Endpoint, request: Request, deadline: float | None) -> Any:
        """Send the request, again if need be, until its answer comes. Return the answer's value or raise its error.

        Each repetition also asks the guardian for the coordinator's address. Raises TimeoutError after `deadline`,
        NotRunning after NO_COORDINATOR_SECONDS, and _SystemGone.
        """
        where = Where(uuid.uuid4().hex)
        last_taken_at = time.monotonic()  # when a coordinator last took a message
        send_at = 0.0

        def on_sent(to: Any, status: Any) -> None:
            nonlocal last_taken_at, send_at
            if status is SendStatus.Sent:
                last_taken_at = time.monotonic()
            elif status is SendStatus.DeadTarget and session.coordinator == to:
                session.coordinator, send_at = None, time.monotonic() + RETRY_SECONDS

        is_first_sending = True
        while True:
            now = time.monotonic()
            if now >= send_at:
                coordinator, send_at = session.coordinator, now + PATIENCE_SECONDS
                if coordinator is not None:
                    endpoint.send(coordinator, replace(request, known=self.last_mark), partial(on_sent, coordinator))
                if coordinator is None or not is_first_sending:
                    endpoint.send(session.guardian, where)
                is_first_sending = False
            wait_seconds = min(LIVENESS_SECONDS, send_at - now)
            answer = endpoint.next_message(wait_seconds if deadline is None else min(wait_seconds, deadline - now))
            if time.monotonic() - now > 3 * LIVENESS_SECONDS:  # this process was suspended
                last_taken_at = time.monotonic()
            if isinstance(answer, Reply) and answer.id == request.id:
                self._update_mark(request, answer)
                if answer.error is not None:
                    raise error_from_dict(answer.error)
                return unpack(answer.value, self._payloads)
            now = time.monotonic()
            if isinstance(answer, WhereReply) and answer.id == where.id:
                if answer.coordinator is None:
                    session.coordinator, send_at = None, min(send_at, now + RETRY_SECONDS)
                elif session.coordinator is None or session.coordinator != answer.coordinator:
                    session.coordinator, send_at = answer.coordinator, now
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"the coordinator did not answer {request.command} in time: call again")
            if answer is None and not session.is_alive():
                raise _SystemGone
            if now - last_taken_at > NO_COORDINATOR_SECONDS:
                raise NotRunning(f"no coordinator has taken a request for {NO_COORDINATOR_SECONDS:.0f} s: "
                                 "`trinity-es status` says more")

    def _update_mark(self, request: Request, answer: Reply) -> None:
        """Remember the answer's end of the log. Raises LogRewound if the log lost events since the request."""
        loss = lost_between(request.known, answer.end)  # the first sending's mark: the answer may be to that sending
        if loss is not None:
            raise LogRewound(f"the system works on a log that lost acknowledged events: {loss}. Restore a copy of the "
                             "log that has them, or accept the loss with `trinity-es accept-rewind`")
        if answer.end is not None and lost_between(self.last_mark, answer.end) is None:  # a thread's may be newer
            self.last_mark = answer.end

    def where(self, timeout: float = PATIENCE_SECONDS) -> WhereReply:
        """Ask the guardian for the coordinator's address and the state of every child process.

        Returns an empty reply if the guardian does not answer. Raises NotRunning if the system is gone and no keeper
        restarts it within `timeout` seconds.
        """
        self._require_open()
        if not self._session.is_alive():
            try:
                self._rejoin(self._session, time.monotonic() + timeout)
            except TimeoutError as e:
                raise NotRunning("the actor system is gone, and its keeper process is restarting it: call again in "
                                 "some seconds") from e
        session = self._session
        answer = self._ask_guardian(session, timeout)
        if not answer.status:
            session.require_alive()
        return answer

    def _ask_guardian(self, session: _Session, timeout: float, first_message: Any = None) -> WhereReply:
        """Send the guardian `first_message` and then a `Where`; return the reply, or an empty one after `timeout`."""
        try:
            endpoint = session.take_endpoint()
        except _SystemGone as e:
            raise NotRunning("the actor system was just restarted: call again") from e
        try:
            question, deadline = Where(uuid.uuid4().hex), time.monotonic() + timeout
            if first_message is not None:
                endpoint.send(session.guardian, first_message)
            endpoint.send(session.guardian, question)
            while (seconds_left := deadline - time.monotonic()) > 0:
                answer = endpoint.next_message(min(LIVENESS_SECONDS, seconds_left))
                if isinstance(answer, WhereReply) and answer.id == question.id:
                    return answer
                if answer is None and not session.is_alive():
                    break
        finally:
            session.give_back(endpoint)
        return WhereReply("", None, {})

    def tell_guardian(self, message: Any) -> bool:
        """Send the guardian a message. Returns False if the guardian does not answer."""
        return bool(self._ask_guardian(self._session, PATIENCE_SECONDS, message).status)

    @property
    def knows_coordinator(self) -> bool:
        """True if this client has a coordinator's address and no sending to it has failed."""
        return self._session.coordinator is not None

    def retire(self, timeout: float = 15.0) -> bool:
        """Shut the system down in order: engines stop, the log is closed, the actors end.

        Returns False if the guardian or the admin does not answer.
        """
        session = self._session
        if not session.is_alive():
            return True
        deadline = time.monotonic() + timeout
        order: Retire | None = Retire()  # sent before the first question only
        children: list[dict[str, Any]] = [{"state": ""}]
        while not all(c["state"] in ENDED for c in children) and time.monotonic() < deadline:
            try:
                status = self._ask_guardian(session, PATIENCE_SECONDS, order).status
            except TrinityError:
                break
            if not status:
                return not session.is_alive()
            children, order = status.get("children", []), None
            time.sleep(0.1)
        if session.is_alive():
            admin = session.admin
            address = listening_host(admin["pid"], admin["port"])
            if knock(address, admin["port"], read_key(admin["key_file"])) is None:  # it is suspended or hangs
                return False
        session.system.shutdown()
        return True

    def close(self) -> None:
        """Close the endpoints; the system goes on. Calls in flight end by themselves."""
        self._closed = True
        self._session.leave()


def _close_sockets(transport: Any) -> None:
    """Close all sockets of a Thespian transport. Its own `close` shuts them down but leaves the descriptors open."""
    listening_socket = getattr(transport, "socket", None)
    transport.close_oldest_idle_sockets(10_000)
    transport.close()
    if listening_socket is not None:
        listening_socket.close()

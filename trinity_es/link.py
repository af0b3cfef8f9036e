"""The wire between a client process and the running system: requests, answers, patience.

A request goes to the coordinator and carries an id; when no answer comes, or the coordinator is gone, the guardian is
asked where the coordinator is now and the same request is sent again, under the same id, which the coordinator
recognises. So a caller sees a pause where a coordinator died, or where the whole system did and is started again by its
keeper, and an error only where nobody will.
Thread-safe: each call in flight has an endpoint of its own (Thespian's `private()`), kept for the next one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from thespian.actors import ActorSystem

from actors.door import DoorBase, key_place, listens_at, read_key
from actors.frames import knock
from actors.guardian import ENDED, NAME, Guardian
from actors.messages import Reply, Request, Retire, Where, WhereReply, unpack
from events.errors import NotRunning, TrinityError, WrongKey, error_from_dict
from events.payloads import PayloadStore
from events.processes import process_lives

__all__ = ["Link"]

PATIENCE_SECONDS = 5.0
"""Without an answer for this long, ask where the coordinator is and send the request again."""
LOOK_SECONDS = 1.0
"""While waiting for an answer, see this often whether the system still lives."""
REJOIN_SECONDS = 300.0
"""So long may a system take to be started again."""
AWAY_SECONDS = 330.0
"""So long may a system be without a coordinator before a call gives up."""


class _Connected(DoorBase):
    """A base that joins a running system and never starts one: a dead one must not come back empty."""

    def _startAdmin(self, *_: Any) -> None:
        raise NotRunning("the actor system does not answer: start it again with `trinity-es up`")


class _Gone(Exception):
    """The system that a request was sent to is gone."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A mailbox of its own for a call in flight."""

    system: Any
    stack: ExitStack

    def close(self) -> None:
        transport = self.system._systemBase.transport
        self.stack.close()
        _close_sockets(transport)


class _Life:
    """One life of the actor system, joined by this process: everything that ends with it."""

    def __init__(self, admin: dict[str, Any]) -> None:
        """Join it. Raises NotRunning, WrongKey."""
        self.admin = admin
        self.coordinator: Any = None
        self._lock = threading.Lock()
        self._idle: list[_Endpoint] | None = []
        self.require()
        key = read_key(admin["key_file"])
        address = listens_at(admin["pid"], admin["port"])
        if knock(address, admin["port"], key) is False:
            self.require()  # or it died before it could answer
            raise WrongKey(
                f"the key to the actor system does not fit: it is from {key_place(admin['key_file'])}, and the system "
                f"(pid {admin['pid']}) was started with another"
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

    def lives(self) -> bool:
        return process_lives(self.admin["pid"], self.admin["started"])

    def require(self) -> None:
        if not self.lives():
            raise NotRunning("the actor system is gone: `trinity-es up` on the same store goes on with what is open")

    def take(self) -> _Endpoint:
        """Raises _Gone when this process has left it."""
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


class Link:
    """Requests to the system whose admin process is `admin`. Raises NotRunning when it is gone, WrongKey.

    `find` gives the admin of the system that took its place, None while that is being started, and raises NotRunning
    where nobody starts one.
    """

    def __init__(
        self, admin: dict[str, Any], payloads: PayloadStore, find: Callable[[], dict[str, Any] | None]
    ) -> None:
        self._payloads, self._find_admin = payloads, find
        self._joining = threading.Lock()
        self._closed = False
        self._life = _Life(admin)

    @property
    def admin(self) -> dict[str, Any]:
        """Of the system that is joined now."""
        return self._life.admin

    def _require_open(self) -> None:
        if self._closed:
            raise NotRunning("this client is closed: connect again")

    def _rejoin(self, gone: _Life, deadline: float | None) -> None:
        """Join the system that took the place of one that is gone. Raises NotRunning, TimeoutError, WrongKey."""
        with self._joining:
            since = time.monotonic()
            while self._life is gone:
                self._require_open()
                found = self._find_admin()
                if found is not None and found != gone.admin:
                    try:
                        self._life = _Life(found)
                    except NotRunning:  # it died too
                        pass
                    else:
                        gone.leave()
                        if self._closed:  # meanwhile
                            self._life.leave()
                        return
                now = time.monotonic()
                if now - since > REJOIN_SECONDS:
                    raise NotRunning(
                        f"the actor system has been gone for {REJOIN_SECONDS:.0f} s, and its keeper could not start it "
                        "again: keeper.log in its log folder tells why"
                    )
                if deadline is not None and now >= deadline:
                    raise TimeoutError("no answer in time: the actor system is being started again")
                time.sleep(0.1)

    def call(self, command: str, args: dict[str, Any], timeout: float | None = None) -> Any:
        """The answer to one command. Raises what the system answers, NotRunning, or TimeoutError after `timeout` s."""
        deadline = None if timeout is None else time.monotonic() + timeout
        request = Request(uuid.uuid4().hex, command, args)
        while True:
            self._require_open()
            life = self._life
            try:
                endpoint = life.take()
                try:
                    return self._exchange(life, endpoint.system, request, deadline)
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

    def _exchange(self, life: _Life, endpoint: Any, request: Request, deadline: float | None) -> Any:
        away_since: float | None = None
        while True:
            coordinator = life.coordinator = life.coordinator or self._ask_where(life, endpoint).coordinator
            if coordinator is None:
                away_since = away_since or time.monotonic()
                if not life.lives():
                    raise _Gone
                if time.monotonic() - away_since > AWAY_SECONDS:
                    raise NotRunning(
                        f"the system has had no coordinator for {AWAY_SECONDS:.0f} s; `trinity-es status` tells more"
                    )
                time.sleep(0.05)
            else:
                away_since = None
                wait = PATIENCE_SECONDS if deadline is None else min(PATIENCE_SECONDS, deadline - time.monotonic())
                answer = _ask(life, endpoint, coordinator, request, Reply, wait)
                if answer is not None:
                    if answer.error is not None:
                        raise error_from_dict(answer.error)
                    return unpack(answer.value, self._payloads)
                life.coordinator = None
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{request.command}: no answer in time")

    def _ask_where(self, life: _Life, endpoint: Any) -> WhereReply:
        question = Where(uuid.uuid4().hex)
        answer = _ask(life, endpoint, life.guardian, question, WhereReply, PATIENCE_SECONDS)
        return answer or WhereReply(question.id, None, {})

    def where(self) -> WhereReply:
        """What the guardian says: the coordinator's address and the state of every child; empty without an answer.

        Raises NotRunning, also where a keeper is starting the system again.
        """
        self._require_open()
        if not self._life.lives():
            try:
                self._rejoin(self._life, time.monotonic())
            except TimeoutError as e:
                raise NotRunning("the actor system is gone; its keeper is starting it again") from e
        return self._where(self._life)

    def _where(self, life: _Life) -> WhereReply:
        try:
            endpoint = life.take()
        except _Gone as e:
            raise NotRunning("the actor system was just started again: ask once more") from e
        try:
            answer = self._ask_where(life, endpoint.system)
        finally:
            life.give(endpoint)
        if not answer.status:
            life.require()
        return answer

    def retire(self, timeout: float = 15.0) -> None:
        """Bring the joined system down in order: engines stop, the log is closed, the actors end."""
        life = self._life
        if not life.lives():
            return
        life.system.tell(life.guardian, Retire())
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                children = self._where(life).status.get("children", [])
            except TrinityError:
                break
            if all(c["state"] in ENDED for c in children):
                break
            time.sleep(0.1)
        life.system.shutdown()

    def close(self) -> None:
        """Give the endpoints back; the system goes on. Calls in flight end by themselves."""
        self._closed = True
        self._life.leave()


def _ask(life: _Life, endpoint: Any, to: Any, question: Any, kind: type[Any], wait: float) -> Any:
    """The answer of this kind that bears the question's id; None when none came within `wait` seconds."""
    until = time.monotonic() + max(0.0, wait)
    answer = endpoint.ask(to, question, max(0.0, min(LOOK_SECONDS, wait)))
    while not (isinstance(answer, kind) and answer.id == question.id):  # or a late one to another question
        left = until - time.monotonic()
        if left <= 0 or not life.lives():
            return None
        answer = endpoint.listen(min(LOOK_SECONDS, left))
    return answer


def _close_sockets(transport: Any) -> None:
    """Thespian's own `close` shuts its sockets down but leaves the descriptors open."""
    listening = getattr(transport, "socket", None)
    transport.close_oldest_idle_sockets(10_000)
    transport.close()
    if listening is not None:
        listening.close()

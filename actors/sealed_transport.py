"""Transport of the actor system: Thespian's TCP transport, on one address and with sealed frames.

Thespian binds every socket of every process to all interfaces and unpickles what comes in, so anyone who reaches a port
runs code. `AuthenticatedTransport` changes three things:

- It binds to one address, that of the admin: loopback, unless `system.address` says otherwise.
- Every frame is sealed by an HMAC-SHA256 with the key of this system (`system_key.py`). The receiver checks the seal
  before it reads the payload (`frames.py`), let alone unpickles it. If a frame has no valid seal, the receiver closes
  the connection without an answer and logs a warning: in a system's process to standard error, which is the launch log;
  in a client to its logging. Connections without a sealed frame are limited in number and closed after seconds.
- A peer that reads nothing (it is stopped, or hangs) delays no messages to other peers. A message to it is dropped
  after seconds, and few more are queued. Senders repeat every message that may be lost.

A seal also covers the port that the frame goes to, so a frame sent to one process can't be replayed to another.
Nothing is encrypted: whoever can read the traffic (root, or the network if `system.address` is not loopback) reads the
messages, and can replay a frame to the process that it was for.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import select
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
from thespian.actors import ActorAddress
from thespian.system.multiprocTCPBase import ActorSystemBase
from thespian.system.timing import ExpirationTimer, currentTime
from thespian.system.transport import ExternalInterfaceTransportInit, ReceiveEnvelope, SendStatus, TransmitIntent
from thespian.system.transport.errmgmt import err_recv_inprogress
from thespian.system.transport.IPBase import TCPv4ActorAddress
from thespian.system.transport.streamBuffer import ackDataErrPacket, ackPacket
from thespian.system.transport.TCPTransport import (
    ExternalTransportCopy,
    TCPEndpoint,
    TCPTransport,
    _safeSocketShutdown,
    opsKey,
)
from thespian.system.utilis import thesplog

from trinity_es.actors.frames import ANSWER, HEADER, KNOCK, MAX_FRAME, Frame, frame
from trinity_es.actors.system_key import read_key
from trinity_es.events.processes import end_with_parent, raise_file_limit

__all__ = ["AuthenticatedSystemBase", "AuthenticatedTransport", "listening_addresses", "listening_host"]

WARN_SECONDS = 5.0
"""Interval between two warnings of one process, so that constant rubbish does not fill the disk."""

STRANGER_SECONDS = 5.0
"""How long a connection may take to show a sealed header."""
FRAME_SECONDS = 30.0
"""How long the rest of a frame may take after its header."""
BACKLOG = 1024
"""Maximum number of connections that wait to be accepted."""
ACCEPTED = 32
"""Maximum number of connections that are accepted in one turn."""
MAX_UNFINISHED = 64 * 1024 * 1024
"""Maximum number of bytes of incomplete frames, over all connections."""
TRANSMIT_SECONDS = 15.0
"""How long sending a message is tried. Thespian's own 5 minutes would keep messages for a peer that is stopped."""
MAX_PENDING = 1000
"""Maximum number of messages under way, to all peers together; more are queued. With Thespian's own 20, one stopped
peer soon blocks all sending."""
MAX_UNREAD = 16
"""Maximum number of unread messages to a peer that has read nothing for `SILENT_SECONDS`. Further ones are dropped."""
SILENT_SECONDS = 5.0
"""How long a peer may read nothing before `MAX_UNREAD` applies to it."""

MAX_STRANGERS = 256
"""Maximum number of open connections without a valid seal so far. Beyond it the oldest are closed."""

_ADDRESS = "Trinity-ES Address"
"""Key, among the admin's capabilities, of the address to listen on."""

_log = logging.getLogger(__name__)


# --- addresses ------------------------------------------------------------------------------------------------------
def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """Return the addresses and ports on which a process of this user listens; [] if it is gone."""
    with contextlib.suppress(psutil.Error):
        connections = psutil.Process(pid).net_connections("tcp4")
        return [(str(c.laddr.ip), int(c.laddr.port)) for c in connections if c.status == psutil.CONN_LISTEN]
    return []


def listening_host(pid: int, port: int) -> str:
    """Return the address on which a process of this user listens on this port; 127.0.0.1 if it does not listen."""
    return next((host for host, other_port in listening_addresses(pid) if other_port == port), "127.0.0.1")


# --- Thespian's side ------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Unread:
    """Number of unread messages to one peer."""

    last_read_at: float
    """Time at which the peer last read a message; before that, the time of the first message to it."""
    count: int = 0


class AuthenticatedTransport(TCPTransport):  # type: ignore[misc]  # thespian is untyped
    """Thespian's TCP transport, on one address and with sealed frames. A child process gets the transport class of its
    parent, so all processes of a system use this one."""

    def __init__(self, init: Any, *args: Any, key: bytes | None = None) -> None:
        super(TCPTransport, self).__init__()  # TCPTransport's own __init__ binds to all interfaces
        self.enableRXPauseFlowControl(False)  # a busy sender must keep receiving, or two could wait for each other
        place = None
        if isinstance(init, TCPEndpoint):  # the admin, its logger, or an actor
            _, place, self._parentAddr, self._adminAddr, _, _ = init.args
            _release_inherited_files()
            parent = multiprocessing.parent_process()
            if place is None and parent is not None:  # the admin has a place, and outlives the launcher that forked it
                end_with_parent(parent.pid or 0)
            _warn_on_stderr()
        elif isinstance(init, ExternalInterfaceTransportInit):
            self._parentAddr, self._adminAddr = None, self.getAdminAddr(args[0])
        else:  # another endpoint in the same process
            self._parentAddr, self._adminAddr = None, args[0]
        self.txOnly = False
        self._key = key if key is not None else read_key()
        host = self._adminAddr.addressDetails.sockname[0]
        details = (place or _address(host, 0)).addressDetails
        self.socket = socket.socket(*details.socketArgs)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(*details.bindArgs)
        self.socket.listen(BACKLOG)
        self._port = int(self.socket.getsockname()[1])
        self.myAddress = _address(host, self._port)
        self._ack = frame(self._key, ANSWER, pickle.dumps(ackPacket))
        self._not_understood = frame(self._key, ANSWER, pickle.dumps(ackDataErrPacket))
        self._last_warning, self._refused_count = -WARN_SECONDS, 0
        files = raise_file_limit()  # also raises the limit in a trainer and in each command
        self._max_strangers = min(MAX_STRANGERS, max(8, files // 8))  # few enough to leave files for others
        self._max_pending, self._max_idle = min(MAX_PENDING, files // 4), files // 4
        self._unread: dict[Any, _Unread] = {}
        # attributes that Thespian's __init__ sets
        self._transmitIntents: dict[int, Any] = {}
        self._waitingTransmits: list[Any] = []
        self._incomingSockets: dict[int, Any] = {}
        self._incomingEnvelopes: list[Any] = []
        self._finished_intents: list[Any] = []
        self._watches: list[int] = []
        self._openSockets: dict[Any, Any] = {}
        self._checkChildren = self._shutdownSignalled = False

    def childResetFileNumList(self) -> list[int]:
        return []  # _release_inherited_files has done it

    @staticmethod
    def getAdminAddr(capabilities: dict[str, Any]) -> ActorAddress:
        return _address(capabilities[_ADDRESS], capabilities["Admin Port"])

    def external_transport_clone(self) -> AuthenticatedTransport:
        return AuthenticatedTransport(ExternalTransportCopy(), self._adminAddr, key=self._key)

    # --- out ---
    def serializer(self, intent: Any) -> bytes:
        """Return the frame of a message under way. Raises ValueError if it is too large."""
        payload = pickle.dumps((self.myAddress, intent.message))  # first: raises for a receiver without an address
        if len(payload) > MAX_FRAME - HEADER:
            raise ValueError(f"a {type(intent.message).__name__} of {len(payload)} bytes is too large to be sent")
        return frame(self._key, intent.targetAddr.addressDetails.sockname[1], payload)

    def _canSendNow(self) -> bool:
        return bool(self._aTB_numPendingTransmits < self._max_pending)

    def _schedulePreparedIntent(self, intent: Any, has_exclusive_flag: bool = False) -> None:
        """Extend Thespian's method: drop messages to a peer that reads nothing, and limit how long a message waits."""
        peer, now = intent.targetAddr.addressDetails, time.monotonic()
        unread = self._unread.setdefault(peer, _Unread(now))
        if unread.count >= MAX_UNREAD and now - unread.last_read_at > SILENT_SECONDS:
            intent.tx_done(SendStatus.Failed)
            return

        def done(result: Any, _: Any) -> None:
            unread.count -= 1
            if result is SendStatus.Sent:
                unread.last_read_at = time.monotonic()
            if unread.count == 0 and self._unread.get(peer) is unread:
                del self._unread[peer]

        unread.count += 1
        self._close_idle()
        intent.addCallback(done, done)
        intent._quitTime = ExpirationTimer(TRANSMIT_SECONDS)
        super()._schedulePreparedIntent(intent, has_exclusive_flag=has_exclusive_flag)

    def _next_XMIT_2(self, intent: Any) -> bool:
        """Extend Thespian's method: after the last byte, wait for the answer at once, not in the loop's next turn."""
        continues = bool(super()._next_XMIT_2(intent))
        if continues and intent.stage == self._XMITStepShutdownWrite:
            return self._next_XMIT_3(intent)
        return continues

    def _processIntentTimeouts(self) -> None:
        """Call Thespian's method, which visits all messages under way, only if one of them is due."""
        now = currentTime()
        if any(
            "_pauseUntil" in intent.__dict__ or "_retryTime" in intent.__dict__  # it waits to be tried again
            or intent._quitTime._time_to_quit <= now  # it has expired
            or opsKey(intent.targetAddr) in self._openSockets  # it may use a connection that is free now
            for intent in (*self._transmitIntents.values(), *self._waitingTransmits)
        ):
            super()._processIntentTimeouts()

    def _next_XMIT_3(self, intent: Any) -> bool:
        """Extend Thespian's method: receive the answer into a `Frame`, which checks the seal."""
        continues = bool(super()._next_XMIT_3(intent))
        intent.ackbuf = Frame(self._key, ANSWER, self._port)
        return continues

    def _check_XMIT_4_done(self, intent: Any, received: bytes) -> bool:
        """Handle the answer to a frame. After a wrong answer the frame is sent again, on another connection."""
        try:
            if not isinstance(intent.ackbuf, Frame):  # Thespian puts in its own buffer after a frame that crossed ours
                intent.ackbuf = Frame(self._key, ANSWER, self._port)
            if received:
                intent.ackbuf.addMore(received)
            intent.ackbuf._deserialize = lambda _: pickle.loads(intent.ackbuf.payload())
            return bool(super()._check_XMIT_4_done(intent, b""))
        except Exception as e:  # Thespian would drop the intent with its callbacks, and never send there again
            self._log_refusal(intent.socket, f"as an answer: {e}")
            intent.backoffPause(True)
            intent.stage = self._XMITStepRetry
            return bool(self._nextTransmitStep(intent))

    # --- in ---
    def _acceptNewIncoming(self) -> None:
        """Extend Thespian's method: accept several connections a turn, and close the oldest beyond MAX_STRANGERS."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        for _ in range(ACCEPTED):
            super()._acceptNewIncoming()
            self._close_idle()
            if not poll.poll(0):
                break
        strangers = []
        for descriptor, incoming in self._incomingSockets.items():
            self._prepare_buffer(incoming)
            if incoming._rData.port is None:
                strangers.append((incoming._expires._time_to_quit, descriptor))
        for _, descriptor in sorted(strangers)[: -self._max_strangers]:  # our own show their seal while they are young
            self._refuse(self._incomingSockets.pop(descriptor), "too many connections without a seal")

    def _close_idle(self) -> None:
        """Close the connections unused for longest if too many are open. A process without free files would end."""
        excess = len(self._openSockets) - self._max_idle
        if excess > 0:
            self.close_oldest_idle_sockets(excess)

    def close_oldest_idle_sockets(self, num_to_close: int = 1) -> None:
        """Replace Thespian's method, which fails to compare two connections of the same age."""
        expiries = {key: idle.validity._time_to_quit for key, idle in self._openSockets.items()}
        for key in sorted(expiries, key=expiries.__getitem__)[:num_to_close]:
            _safeSocketShutdown(self._openSockets.pop(key))

    def _prepare_buffer(self, incoming: Any) -> None:
        """Give this connection a `Frame` buffer with a deadline, unless it has one."""
        if not isinstance(incoming._rData, Frame):
            incoming._rData = Frame(self._key, self._port)
            incoming._expires = ExpirationTimer(STRANGER_SECONDS)

    def _handlePossibleIncoming(
        self, incoming: Any, fileno: int, closed: bool = False, has_exclusive_flag: bool = False
    ) -> Any:
        """Extend Thespian's method: refuse a connection whose deadline has passed, unless it has bytes to read now."""
        readable = incoming.socket is not None and incoming.socket.fileno() == fileno
        if not closed and not readable and incoming._expires.view().expired():
            return self._refuse(incoming, "the frame did not come in time")
        return super()._handlePossibleIncoming(incoming, fileno, closed, has_exclusive_flag)

    def _handleReadableIncoming(self, incoming: Any, has_exclusive_flag: bool = False) -> Any:
        """Read the bytes of a frame that have arrived, its header first. Refuse the frame if the seal is wrong."""
        self._prepare_buffer(incoming)
        buffer = incoming._rData
        while not buffer.isDone():
            was_stranger = buffer.port is None
            if not was_stranger and self._unfinished_bytes(buffer) > MAX_UNFINISHED:
                return self._refuse(incoming, "too many bytes of incomplete frames")
            try:
                data = incoming.socket.recv(buffer.remainingAmount())
            except OSError as e:
                if err_recv_inprogress(e.errno):
                    return incoming  # continued later, until its time is over
                incoming.close()
                return None
            if not data:  # the other side closed
                incoming.close()
                return None
            try:
                buffer.addMore(data)
            except ValueError as e:
                return self._refuse(incoming, str(e))
            if was_stranger and buffer.port is not None:
                incoming._expires = ExpirationTimer(FRAME_SECONDS)
        return self._addedDataToIncoming(incoming, has_exclusive_flag=has_exclusive_flag)

    def _unfinished_bytes(self, buffer: Frame) -> int:
        """Return how many bytes of incomplete frames are in memory: in `buffer` and in those of other connections."""
        others = [i._rData for i in self._incomingSockets.values() if i._rData is not buffer]
        return len(buffer._buf) + sum(len(other._buf) for other in others)

    def _addedDataToIncoming(self, incoming: Any, skip_finish: bool = False, has_exclusive_flag: bool = False) -> Any:
        """Replace Thespian's method: check the payload before unpickling it, and answer with a sealed frame."""
        buffer = incoming._rData
        if not buffer.isDone():
            return incoming
        try:
            payload = buffer.payload()
            if buffer.port != self._port:
                raise ValueError("the frame is an answer to a message that this process did not send")
        except ValueError as e:
            return self._refuse(incoming, str(e))
        if payload.startswith(KNOCK):
            return self._answer_and_close(incoming, frame(self._key, ANSWER, payload))
        try:
            envelope = ReceiveEnvelope(*pickle.loads(payload))
        except Exception as e:  # a sealed frame, but not for this process; it may hold a password, so log no content
            thesplog("a frame can't be unpickled here: %s", type(e).__name__, level=logging.ERROR)
            return self._answer_and_close(incoming, self._not_understood)
        with contextlib.suppress(OSError):  # the sender is gone, but its message counts
            incoming.socket.send(self._ack)
        incoming.fromAddress = envelope.sender
        self._processReceivedEnvelope(envelope, has_exclusive_flag=has_exclusive_flag)
        if not skip_finish:
            self._finishIncoming(incoming, envelope.sender)
        return None

    def _answer_and_close(self, incoming: Any, answer: bytes) -> None:
        with contextlib.suppress(OSError):
            incoming.socket.send(answer)
        incoming.close()

    def _refuse(self, incoming: Any, why: str) -> None:
        self._log_refusal(incoming.socket, why)
        incoming.close()

    def _log_refusal(self, connection: socket.socket, why: str) -> None:
        """Count a refused frame, and log it unless another one was logged in the last WARN_SECONDS."""
        self._refused_count += 1
        if time.monotonic() - self._last_warning < WARN_SECONDS:
            return
        self._last_warning = time.monotonic()
        try:
            peer = "{}:{}".format(*connection.getpeername())
        except OSError:
            peer = "a peer that is gone"
        _log.warning("port %d refused a frame from %s: %s (%d so far)", self._port, peer, why, self._refused_count)


def _describe_type(self: Any) -> str:
    """Return the type of a message under way. Thespian's own `identify` formats the whole message at each step."""
    return f"{type(self).__name__} of a {type(self.message).__name__}"


def _idle_time(self: TransmitIntent, current_time: float | None = None) -> timedelta:
    """Return how long Thespian may leave a message alone. Its own `delay` makes a dozen objects for each message."""
    now, until = current_time or currentTime(), self._quitTime._time_to_quit
    if getattr(self, "_awaitingTXSlot", False):
        seconds = max(0.01, (until - now) / 2) if until > now else 0.0
        return timedelta(seconds=seconds)
    for name in ("_retryTime", "_pauseUntil"):
        if (timer := self.__dict__.get(name)) is not None:
            until = min(until, timer._time_to_quit)
    return timedelta(seconds=max(0.0, until - now))


ReceiveEnvelope.identify = TransmitIntent.identify = _describe_type  # Thespian's took a sixth of a task's time
TransmitIntent.delay = _idle_time


def _address(host: str, port: int) -> ActorAddress:
    return ActorAddress(TCPv4ActorAddress(host, port))


def _release_inherited_files() -> None:
    """Release the files and ports that a fork inherits. An inherited port would stay open after its owner ended.

    Each descriptor is pointed at /dev/null instead of closed. Objects of the parent, still in this process's memory,
    would later close its number again, when that may belong to another file.
    """
    if multiprocessing.parent_process() is None:
        return  # the endpoint of a test
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or all forks would draw the same numbers; `random` seeds itself
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor > 2 and descriptor != null:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself, closed by now
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)


def _warn_on_stderr() -> None:
    """Log warnings to standard error. Thespian's logging would send each through the transport that warns."""
    if not _log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(process)d %(message)s"))
        _log.addHandler(handler)
        _log.propagate = False


class AuthenticatedSystemBase(ActorSystemBase):  # type: ignore[misc]  # thespian is untyped
    """System base for `ActorSystem`, in place of "multiprocTCPBase"."""

    def __init__(self, address: str, port: int, key: bytes, log_defs: dict[str, Any] | None = None) -> None:
        self.transportType = partial(AuthenticatedTransport, key=key)
        # The launcher's interpreter, the admin and the guardian use neither threads nor a database, so a fork of them
        # is safe, and a new runner or coordinator need not import everything again.
        capabilities = {"Process Startup Method": "fork", "Admin Port": port, _ADDRESS: address}
        super().__init__(SimpleNamespace(capabilities=capabilities), log_defs)

"""The door: where the actor system listens, and who is heard.

Thespian binds every socket of every process to all interfaces and unpickles what comes in, so whoever reaches a port
runs code. `Door` is its transport with two things changed:

- It binds to one address, that of the admin: loopback, unless `system.address` says otherwise.
- Every frame is sealed: HMAC-SHA256, with a key that all processes of one system and its clients share. The seal is
  looked at before anything is unpickled; a frame without it is dropped with its connection, answered by nothing, and
  told as a warning (in a system's process to standard error, which is the launch log; in a client to its logging).

A seal is also for the port that the frame goes to: what one process was sent can't be played to another. Nothing is
encrypted: who can read the traffic (root, or the network where `system.address` is not loopback) reads the messages,
and can play a frame again to the process that it was for.

The key is the environment variable TRINITY_ES_KEY, or the content of a file that its owner alone can read. Forked
processes are told where by the environment, never by a command line.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
from thespian.actors import ActorAddress
from thespian.system.multiprocTCPBase import ActorSystemBase
from thespian.system.transport import ExternalInterfaceTransportInit, ReceiveEnvelope
from thespian.system.transport.errmgmt import err_recv_inprogress
from thespian.system.transport.IPBase import TCPv4ActorAddress
from thespian.system.transport.streamBuffer import ReceiveBuffer, ackDataErrPacket, ackPacket
from thespian.system.transport.TCPTransport import (
    LISTEN_DEPTH,
    MAX_CONSECUTIVE_READ_FAILURES,
    ExternalTransportCopy,
    TCPEndpoint,
    TCPTransport,
)
from thespian.system.utilis import thesplog

from events.errors import WrongKey

__all__ = [
    "FILE_VARIABLE", "KEY_VARIABLE", "Door", "DoorBase", "engine_token", "key_place", "knock", "listens_at", "make_key",
    "read_key",
]

KEY_VARIABLE = "TRINITY_ES_KEY"
"""Environment variable with the key itself; goes before any file."""
FILE_VARIABLE = "TRINITY_ES_KEY_FILE"
"""Environment variable of a system's own processes: the file that their key is in."""

MAX_FRAME = 16 * 1024 * 1024
"""Bytes. A message is some 256 KiB at most; who claims more is not let in, so that nobody fills a process's memory."""
KEY_CHARACTERS = 32
"""A shorter key could be guessed."""
KNOCK_SECONDS = 5.0
WARN_SECONDS = 5.0
"""Between two warnings of one process: who sends rubbish all the time must not fill the disk."""

_SEAL = 32
_HEADER = 20
"""Thespian reads so many bytes to find out how long a frame is."""
_ANSWER = 0
"""What stands for the port in the seal of an answer: it goes back on the connection that the frame came by."""
_KNOCK = b"knock "
_ADDRESS = "Trinity-ES Address"
"""Capability of the admin: where to listen."""

_log = logging.getLogger(__name__)


# --- the key --------------------------------------------------------------------------------------------------------
def make_key(path: str) -> None:
    """Make a key file that only this user can read, unless there is one or the key is in the environment."""
    if os.environ.get(KEY_VARIABLE):
        return
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as e:
        raise WrongKey(f"the key file {path} can't be made ({e.strerror}): set system.key_file to another place") from e
    with os.fdopen(handle, "w") as f:
        f.write(secrets.token_hex(32) + "\n")


def key_place(path: str) -> str:
    """Where `read_key` looks, in words."""
    return f"the environment variable {KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else f"the file {path}"


def read_key(path: str) -> bytes:
    """The key. Raises WrongKey where there is none, or where somebody else could know it."""
    text = os.environ.get(KEY_VARIABLE) or _read(path)
    if len(text) < KEY_CHARACTERS:
        raise WrongKey(f"the key in {key_place(path)} has {len(text)} characters: {KEY_CHARACTERS} or more are needed")
    return text.encode()


def _read(path: str) -> str:
    try:
        with open(path) as f:
            status = os.fstat(f.fileno())
            text = f.read(4096).strip()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise WrongKey(
            f"no key to the actor system: {path} can't be read ({why}), and {KEY_VARIABLE} is not set. It is made when "
            "the system is started; give that system's config (system.log_dir, system.key_file), or the key itself"
        ) from e
    if status.st_mode & 0o077:
        raise WrongKey(f"others can read the key file {path}: `chmod 600 {path}`, then start the system anew")
    if status.st_uid not in (0, os.geteuid()):
        raise WrongKey(f"the key file {path} belongs to another user: set system.key_file to a file of your own")
    return text


def engine_token(key: bytes) -> str:
    """The token of the engines' HTTP endpoints: who has it may ask them, and learns nothing of the key."""
    return hmac.digest(key, b"trinity-es engine token", "sha256").hex()


# --- the seal -------------------------------------------------------------------------------------------------------
def _frame(key: bytes, port: int, payload: bytes) -> bytes:
    """What goes over the wire: length, seal, payload."""
    return b"%d>%b%b" % (_SEAL + len(payload), _seal(key, port, payload), payload)


def _seal(key: bytes, port: int, payload: bytes) -> bytes:
    return hmac.digest(key, b"trinity-es %d " % port + payload, "sha256")


def _opened(key: bytes, port: int, sealed: bytes) -> bytes | None:
    """The payload; None where the seal does not fit."""
    payload = sealed[_SEAL:]
    return payload if hmac.compare_digest(sealed[:_SEAL], _seal(key, port, payload)) else None


def _check_size(buffer: ReceiveBuffer) -> None:
    """Raises ValueError for what can't be the beginning of a frame. Thespian waits for its end, for ever or longer."""
    fine = len(buffer._buf) < _HEADER if buffer._size is None else 0 <= buffer._size <= MAX_FRAME
    if not fine:
        raise ValueError("it is no frame")


def knock(host: str, port: int, key: bytes, timeout: float = KNOCK_SECONDS) -> bool | None:
    """Whether the process behind this port has the same key; None when nobody answers in time."""
    word = _KNOCK + os.urandom(16)
    answer = b""
    try:
        with socket.create_connection((host, port), timeout) as s:
            s.sendall(_frame(key, port, word))
            while data := s.recv(256):
                answer += data
    except OSError:
        return None
    return hmac.compare_digest(answer, _frame(key, _ANSWER, word))


def listens_at(pid: int, port: int) -> str:
    """The address on which a process of this user's listens, whatever today's config says."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.Process(pid).net_connections("tcp4"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return str(connection.laddr.ip)
    return "127.0.0.1"


# --- Thespian's side ------------------------------------------------------------------------------------------------
class Door(TCPTransport):  # type: ignore[misc]  # thespian has no types
    """Thespian's TCP transport, on one address and with sealed frames.

    Processes are given the class of their parent's transport, so all of a system have it.
    """

    def __init__(self, init: Any, *args: Any, key: bytes | None = None) -> None:
        super(TCPTransport, self).__init__()  # not its own, which binds to all interfaces
        place = None
        if isinstance(init, TCPEndpoint):  # the admin, its logger, or an actor
            _, place, self._parentAddr, self._adminAddr, _, _ = init.args
            _give_up_inherited()
            _warn_on_stderr()
        elif isinstance(init, ExternalInterfaceTransportInit):
            self._parentAddr, self._adminAddr = None, self.getAdminAddr(args[0])
        else:  # another endpoint in the same process
            self._parentAddr, self._adminAddr = None, args[0]
        self.txOnly = False
        self._key = key if key is not None else read_key(os.environ.get(FILE_VARIABLE, ""))
        host = self._adminAddr.addressDetails.sockname[0]
        details = (place or _address(host, 0)).addressDetails
        self.socket = socket.socket(*details.socketArgs)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(*details.bindArgs)
        self.socket.listen(LISTEN_DEPTH)
        self._port = int(self.socket.getsockname()[1])
        self.myAddress = _address(host, self._port)
        self._ack = _frame(self._key, _ANSWER, pickle.dumps(ackPacket))
        self._not_understood = _frame(self._key, _ANSWER, pickle.dumps(ackDataErrPacket))
        self._warned, self._refused = -WARN_SECONDS, 0
        # what Thespian's own sets up
        self._transmitIntents: dict[int, Any] = {}
        self._waitingTransmits: list[Any] = []
        self._incomingSockets: dict[int, Any] = {}
        self._incomingEnvelopes: list[Any] = []
        self._finished_intents: list[Any] = []
        self._watches: list[int] = []
        self._openSockets: dict[Any, Any] = {}
        self._checkChildren = self._shutdownSignalled = False

    def childResetFileNumList(self) -> list[int]:
        return []  # see _give_up_inherited

    @staticmethod
    def getAdminAddr(capabilities: dict[str, Any]) -> ActorAddress:
        return _address(capabilities[_ADDRESS], capabilities["Admin Port"])

    def external_transport_clone(self) -> Door:
        return Door(ExternalTransportCopy(), self._adminAddr, key=self._key)

    # --- out ---
    def serializer(self, intent: Any) -> bytes:
        payload = pickle.dumps((self.myAddress, intent.message))  # first: it raises for what has no address yet
        if len(payload) > MAX_FRAME - _SEAL:
            raise ValueError(f"a {type(intent.message).__name__} of {len(payload)} bytes is too large to be sent")
        return _frame(self._key, intent.targetAddr.addressDetails.sockname[1], payload)

    def _check_XMIT_4_done(self, intent: Any, received: bytes) -> bool:
        """The answer to what was sent. A wrong one is none: the frame is sent again, on another connection."""
        try:
            intent.ackbuf.addMore(received)
            _check_size(intent.ackbuf)
            intent.ackbuf._deserialize = self._understand
            return bool(super()._check_XMIT_4_done(intent, b""))
        except Exception as e:  # it would drop the intent and its callbacks, and never send to that address again
            self._warn(intent.socket, f"as an answer: {e}")
            intent.backoffPause(True)
            intent.stage = self._XMITStepRetry
            return bool(self._nextTransmitStep(intent))

    def _understand(self, sealed: bytes) -> Any:
        """An answer, or a frame that crossed ours on the way."""
        payload = _opened(self._key, _ANSWER, sealed) or _opened(self._key, self._port, sealed)
        if payload is None:
            raise ValueError("its seal does not fit")
        return pickle.loads(payload)

    # --- in ---
    def _handleReadableIncoming(self, incoming: Any, has_exclusive_flag: bool = False) -> Any:
        """Thespian's, where a claimed length that is negative would end the process."""
        try:
            data = incoming.socket.recv(min(1024000, incoming.remainingSize()))
        except OSError as e:
            incoming.failCount += 1
            if err_recv_inprogress(e.errno) and incoming.failCount < MAX_CONSECUTIVE_READ_FAILURES:
                incoming.backoffPause(True)
                return incoming
            incoming.close()
            return None
        incoming.failCount = 0
        if not data:  # the other side closed
            incoming.close()
            return None
        try:
            incoming.addData(data)
            _check_size(incoming._rData)
        except ValueError:
            return self._refuse(incoming, "it is no frame")
        return self._addedDataToIncoming(incoming, has_exclusive_flag=has_exclusive_flag)

    def _addedDataToIncoming(self, incoming: Any, skip_finish: bool = False, has_exclusive_flag: bool = False) -> Any:
        """Thespian's, with the seal looked at before the frame is unpickled, and a sealed answer."""
        if not incoming.receivedAllData():
            return incoming
        payload = _opened(self._key, self._port, incoming._rData._buf)
        if payload is None:
            return self._refuse(incoming, "its seal does not fit")
        if payload.startswith(_KNOCK):  # no pickle begins so
            return self._answer_and_close(incoming, _frame(self._key, _ANSWER, payload))
        try:
            envelope = ReceiveEnvelope(*pickle.loads(payload))
        except Exception as e:  # from one of us, but not for this process; it may hold a password, so no word of it
            thesplog("a frame can't be unpickled here: %s", type(e).__name__, level=logging.ERROR)
            return self._answer_and_close(incoming, self._not_understood)
        with contextlib.suppress(OSError):  # the sender is gone, what it said holds
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
        self._warn(incoming.socket, why)
        incoming.close()

    def _warn(self, connection: socket.socket, why: str) -> None:
        self._refused += 1
        if time.monotonic() - self._warned < WARN_SECONDS:
            return
        self._warned = time.monotonic()
        try:
            peer = "{}:{}".format(*connection.getpeername())
        except OSError:
            peer = "a peer that is gone"
        _log.warning("port %d refused a frame from %s: %s (%d refused so far)", self._port, peer, why, self._refused)


def _address(host: str, port: int) -> ActorAddress:
    return ActorAddress(TCPv4ActorAddress(host, port))


def _give_up_inherited() -> None:
    """Let go of what a forked process has from its parent: ports above all, which would stay open after their owner.

    Each descriptor is made one of /dev/null and not closed: the parent's objects, which are still in this process's
    memory, would later close the number again, whosever it is by then.
    """
    if multiprocessing.parent_process() is None:
        return  # the endpoint of a test
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or all would draw the same numbers; Python's own generator does it itself
    nowhere = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) != nowhere:
            with contextlib.suppress(OSError):  # the listing's own, which is closed by now
                os.fstat(int(name))
                os.dup2(nowhere, int(name), inheritable=False)


def _warn_on_stderr() -> None:
    """Not by Thespian's logging, which would send each warning through the transport that warns."""
    if not _log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(process)d %(message)s"))
        _log.addHandler(handler)
        _log.propagate = False


class DoorBase(ActorSystemBase):  # type: ignore[misc]  # thespian has no types
    """What `ActorSystem` is given in place of "multiprocTCPBase"."""

    def __init__(self, address: str, port: int, key: bytes, log_defs: dict[str, Any] | None = None) -> None:
        self.transportType = partial(Door, key=key)
        # The launcher's interpreter, the admin and the guardian have no threads and no database, so to fork them is
        # safe, and a new runner or coordinator does not import everything again.
        capabilities = {"Process Startup Method": "fork", "Admin Port": port, _ADDRESS: address}
        super().__init__(SimpleNamespace(capabilities=capabilities), log_defs)

"""Frames, the format of messages on the wire, and the buffer that refuses bytes from senders without the system's key.

A frame is its length in digits, ">", a header of fixed size, the payload. The header holds the number of this format,
the payload's SHA-256, and a seal: an HMAC-SHA256 over these two, the length, and the receiver's port. The receiver
reads no payload before it has checked the seal, and then checks the payload against its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time

from thespian.system.transport.streamBuffer import ReceiveBuffer

__all__ = ["ANSWER", "HEADER", "KNOCK", "MAX_FRAME", "PROTOCOL", "Frame", "frame", "knock"]

PROTOCOL = 3
"""Number of this format. All processes of a system, and its clients, must have the same."""
MAX_FRAME = 16 * 1024 * 1024
"""Maximum size of a frame in bytes. Messages have at most some 256 KiB."""
HEADER = 1 + 32 + 32
"""Size of a header in bytes."""
ANSWER = 0
"""Port number in the seal of an answer. An answer goes back on the connection of its frame, so it needs no real one."""
KNOCK = b"knock "
"""First bytes of a payload that only asks for an answer (`knock`). No pickled message begins like this."""
KNOCK_SECONDS = 5.0
"""How long to wait for the answer to a knock."""

_LENGTH = 20
"""Maximum bytes of the length with its ">". The buffer reads no further before it has the length."""
_CHUNK = 1024 * 1024
"""Maximum number of bytes in one read."""


def frame(key: bytes, port: int, payload: bytes) -> bytes:
    """Return the frame that carries this payload to the process at this port."""
    size = HEADER + len(payload)
    head = bytes([PROTOCOL]) + hashlib.sha256(payload).digest()
    return b"%d>%b%b%b" % (size, head, _seal(key, port, size, head), payload)


def _seal(key: bytes, port: int, size: int, head: bytes) -> bytes:
    """Return the HMAC of a frame; `head` is its header without this seal."""
    return hmac.digest(key, b"trinity-es %d %d " % (port, size) + head, "sha256")


class Frame(ReceiveBuffer):  # type: ignore[misc]  # thespian is untyped
    """Buffer for one incoming frame. It replaces Thespian's buffer, which keeps all incoming bytes."""

    def __init__(self, key: bytes, *ports: int) -> None:
        """`ports`: this process's ports. A frame is accepted if its sender sealed it for one of them."""
        super().__init__()
        self._key, self._ports = key, ports
        self.port: int | None = None
        """Port for which the frame is sealed; None until the seal was checked."""

    def remainingAmount(self) -> int:
        """Return how many bytes to read next. Until the seal was checked, that is at most the rest of the header."""
        if self._size is None:
            return _LENGTH
        received = len(self._buf)
        if received < HEADER:
            return HEADER - received
        return int(min(_CHUNK, self._size - received))

    def addMore(self, data: bytes) -> None:
        """Add bytes from the connection. Raises ValueError as soon as they can't be a frame for one of the ports."""
        try:
            super().addMore(data)
        except Exception as e:  # the length is not a number
            raise ValueError("these bytes are not a frame") from e
        if self._size is None:
            if len(self._buf) >= _LENGTH:
                raise ValueError("these bytes are not a frame")
        elif not HEADER <= self._size <= MAX_FRAME:
            raise ValueError("these bytes are not a frame")
        elif self.port is None and len(self._buf) >= HEADER:
            head, seal = self._buf[: HEADER - 32], self._buf[HEADER - 32 : HEADER]
            ports = [p for p in self._ports if hmac.compare_digest(seal, _seal(self._key, p, self._size, head))]
            if not ports or head[0] != PROTOCOL:
                raise ValueError("the frame is not sealed for this process: its sender has another key or version")
            self.port = ports[0]

    def payload(self) -> bytes:
        """Return the payload of a complete frame. Raises ValueError if the header names another payload."""
        payload = bytes(self._buf[HEADER:])
        if self.port is None or not hmac.compare_digest(self._buf[1:33], hashlib.sha256(payload).digest()):
            raise ValueError("the payload of the frame does not match its seal")
        return payload


def knock(host: str, port: int, key: bytes, timeout: float = KNOCK_SECONDS) -> bool | None:
    """Ask the process at this port for a sealed answer, and return True if it has the same key.

    Returns False after a wrong answer, None if no answer comes within `timeout` seconds. The loop that handles messages
    sends the answer, so a process that answers does not hang.
    """
    deadline = time.monotonic() + timeout
    payload = KNOCK + os.urandom(16)
    expected = frame(key, ANSWER, payload)
    answer = b""
    try:
        with socket.create_connection((host, port), timeout) as s:
            s.sendall(frame(key, port, payload))
            while len(answer) <= len(expected):
                s.settimeout(max(0.001, deadline - time.monotonic()))
                data = s.recv(256)
                if not data:
                    break
                answer += data
    except OSError:
        return None
    return hmac.compare_digest(answer, expected)

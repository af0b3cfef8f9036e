"""Frames: how a message lies on the wire, and what of a stranger's is ever kept.

A frame is its length in digits, ">", a header of fixed size, the payload. The header holds the number of this format,
the payload's SHA-256, and an HMAC-SHA256 over both, the length and the port that the frame goes to. So who has no key
gets no further than the header: nothing of a payload is read before the header fits, and the payload has to be the one
that the header names.
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
"""Number of this format. All processes of a system, and its clients, have to be of one."""
MAX_FRAME = 16 * 1024 * 1024
"""Maximum size of a frame in bytes. A message is some 256 KiB at most."""
HEADER = 1 + 32 + 32
"""Size of a header in bytes."""
ANSWER = 0
"""Port in the seal of an answer: it goes back on the connection that the frame came by."""
KNOCK = b"knock "
"""Beginning of a payload that is no message; no pickle begins so."""
KNOCK_SECONDS = 5.0
"""How long an answer to a knock is waited for."""

_LENGTH = 20
"""Bytes in which the length has to end, and the most that is read before it is known."""
_CHUNK = 1024 * 1024
"""Maximum number of bytes that are read at once."""


def frame(key: bytes, port: int, payload: bytes) -> bytes:
    """Return what goes over the wire to this port."""
    size = HEADER + len(payload)
    head = bytes([PROTOCOL]) + hashlib.sha256(payload).digest()
    return b"%d>%b%b%b" % (size, head, _seal(key, port, size, head), payload)


def _seal(key: bytes, port: int, size: int, head: bytes) -> bytes:
    return hmac.digest(key, b"trinity-es %d %d " % (port, size) + head, "sha256")


class Frame(ReceiveBuffer):  # type: ignore[misc]  # thespian has no types
    """What has come of a frame, in place of Thespian's buffer, which keeps whatever comes."""

    def __init__(self, key: bytes, *ports: int) -> None:
        """`ports`: those that its seal may be for."""
        super().__init__()
        self._key, self._ports = key, ports
        self.port: int | None = None
        """The one that it is for, as soon as the seal was seen to fit."""

    def remainingAmount(self) -> int:
        """Return how many bytes to read next: none beyond the header before that fits, none beyond the frame."""
        if self._size is None:
            return _LENGTH
        have = len(self._buf)
        return HEADER - have if have < HEADER else int(min(_CHUNK, self._size - have))

    def addMore(self, data: bytes) -> None:
        """Take what was read. Raises ValueError for what is no frame for one of the ports, as soon as that is seen."""
        try:
            super().addMore(data)
        except Exception as e:  # a length that is no number
            raise ValueError("it is no frame") from e
        if self._size is None:
            if len(self._buf) >= _LENGTH:
                raise ValueError("it is no frame")
        elif not HEADER <= self._size <= MAX_FRAME:
            raise ValueError("it is no frame")
        elif self.port is None and len(self._buf) >= HEADER:
            head, seal = self._buf[: HEADER - 32], self._buf[HEADER - 32 : HEADER]
            fits = [p for p in self._ports if hmac.compare_digest(seal, _seal(self._key, p, self._size, head))]
            if not fits or head[0] != PROTOCOL:
                raise ValueError("its seal does not fit")
            self.port = fits[0]

    def payload(self) -> bytes:
        """Return the payload of a frame that is whole. Raises ValueError where it is not the one that was sealed."""
        payload = bytes(self._buf[HEADER:])
        if self.port is None or not hmac.compare_digest(self._buf[1:33], hashlib.sha256(payload).digest()):
            raise ValueError("its seal does not fit")
        return payload


def knock(host: str, port: int, key: bytes, timeout: float = KNOCK_SECONDS) -> bool | None:
    """Return True if the process behind this port has the same key, None when nobody answers within `timeout` s.

    The answer comes from the loop that handles messages: who answers lives, and does not hang.
    """
    until = time.monotonic() + timeout
    word = KNOCK + os.urandom(16)
    expected = frame(key, ANSWER, word)
    answer = b""
    try:
        with socket.create_connection((host, port), timeout) as s:
            s.sendall(frame(key, port, word))
            while len(answer) <= len(expected):
                s.settimeout(max(0.001, until - time.monotonic()))
                data = s.recv(256)
                if not data:
                    break
                answer += data
    except OSError:
        return None
    return hmac.compare_digest(answer, expected)

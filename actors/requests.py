"""What a client and the system say to each other, and how JSON travels in a message: in it, or as a payload.

Commands are inside of requests (`actors/commands`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from trinity_es.events.errors import DataError
from trinity_es.events.store.checks.log_end import Mark
from trinity_es.events.store.payloads.payloads import PayloadStore

__all__ = ["LIMIT", "Parcel", "Reply", "Request", "Where", "WhereReply", "pack", "unpack"]

LIMIT = 128 * 1024
"""Bytes of JSON that may travel inside one message; the pickle around it stays well under 256 KiB."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parcel:
    """JSON bytes, or the digest of the payload that holds them."""

    inline: bytes | None
    digest: str | None = None


def pack(value: Any, payloads: PayloadStore) -> Parcel:
    """Return a JSON value ready to travel. Raises DataError for what JSON can't hold."""
    try:
        data = orjson.dumps(value)
    except TypeError as e:
        raise DataError(f"this can't be sent: {e}") from e
    if len(data) > LIMIT:
        return Parcel(None, payloads.put(data))
    return Parcel(bytes(memoryview(data)))  # a copy: orjson's own keeps 4 KiB, and a coordinator has one for each task


def unpack(parcel: Parcel, payloads: PayloadStore) -> Any:
    """Return the value that `pack` took."""
    if parcel.inline is not None:
        return orjson.loads(parcel.inline)
    assert parcel.digest is not None
    return orjson.loads(payloads.get(parcel.digest))


@dataclass(frozen=True, slots=True)
class Where:
    """Client to guardian: where is the coordinator, and how is everyone?"""

    id: str


@dataclass(frozen=True, slots=True)
class WhereReply:
    id: str
    coordinator: Any
    """An ActorAddress; None while there is none."""
    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """Client to coordinator. `id` is the client's own: a request that is sent again has the same one."""

    id: str
    command: str
    args: dict[str, Any]
    known: Mark | None = None
    """The end of the log as this client knows it: a coordinator whose log lacks it does nothing."""
    by: str = ""
    """Who it is, in words."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the request with this id: a value, or an error as `error_to_dict` writes it."""

    id: str
    value: Parcel
    error: dict[str, Any] | None = None
    end: Mark | None = None
    """The end of the log when it was sent: what it says is up to there."""

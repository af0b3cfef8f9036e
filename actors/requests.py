"""Messages between a client and the system, and the packing of JSON into them. A request carries a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from trinity_es.events.errors import DataError
from trinity_es.events.store.checks.log_end import Mark
from trinity_es.events.store.payloads.payloads import PayloadStore

__all__ = ["LIMIT", "Parcel", "Reply", "Request", "Where", "WhereReply", "pack", "unpack"]

LIMIT = 128 * 1024
"""Maximum bytes of JSON in one message. The pickle of the message stays well under 256 KiB."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A JSON value in a message: its bytes, or the digest of the payload that holds them."""

    inline: bytes | None
    digest: str | None = None


def pack(value: Any, payloads: PayloadStore) -> Parcel:
    """Pack a JSON value for a message. A value above `LIMIT` goes to the payload store. Raises DataError if JSON can't
    hold the value."""
    try:
        data = orjson.dumps(value)
    except TypeError as e:
        raise DataError(f"the value can't be sent as JSON: {e}") from e
    if len(data) > LIMIT:
        return Parcel(None, payloads.put(data))
    return Parcel(bytes(memoryview(data)))  # a copy: orjson's own takes 4 KiB, and a coordinator keeps one per task


def unpack(parcel: Parcel, payloads: PayloadStore) -> Any:
    """Return the value that `pack` packed."""
    if parcel.inline is not None:
        return orjson.loads(parcel.inline)
    assert parcel.digest is not None
    return orjson.loads(payloads.get(parcel.digest))


@dataclass(frozen=True, slots=True)
class Where:
    """Client to guardian: where is the coordinator, and how is each process?"""

    id: str


@dataclass(frozen=True, slots=True)
class WhereReply:
    """Guardian to client: the answer to the `Where` with this id."""

    id: str
    coordinator: Any
    """An ActorAddress; None while there is none."""
    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """Client to coordinator. The client chooses `id`, and repeats it when it sends the request again."""

    id: str
    command: str
    args: dict[str, Any]
    known: Mark | None = None
    """Latest end of the log that this client has seen. A coordinator whose log lacks that event does nothing."""
    by: str = ""
    """Description of the client, for logs."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to the request with this id: a value, or an error as `error_to_dict` writes it."""

    id: str
    value: Parcel
    error: dict[str, Any] | None = None
    end: Mark | None = None
    """End of the log when the answer was made."""

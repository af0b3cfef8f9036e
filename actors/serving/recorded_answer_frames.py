"""Frames that carry an answer together with its record, from an engine's server to the proxy of mode `serve`.

The proxy requests frames by the header `WANTED`, and the answer has this header, too. The body of such an answer is a
sequence of frames. A frame is its kind (1 byte), the length of its data (8 bytes, big-endian), and the data.

| kind | data |
|---|---|
| `r` | a `Record`, before the end of the answer; there is none if nothing is to be recorded |
| `b` | a part of the response's body |
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine
from typing import Any, TypedDict
from uuid import uuid4

import orjson

from trinity_es.actors.serving.request_record import RequestRecord
from trinity_es.events.experience import Experience

__all__ = ["WANTED", "Framed", "Record", "frames", "id_in", "recorded"]

WANTED = "x-trinity-record"
"""Header of a request that wants its answer in frames, and of an answer in frames."""
_HEADER_BYTES = 9
"""Kind and length of a frame."""
_ID = re.compile(rb'"(?:id|request_id)"\s*:\s*"([^"\\]{1,200})"')


class Record(TypedDict):
    """Record of an answer. The answer's experiences follow it in the same frame."""

    message: str
    """The response's id, as its client gets it."""
    versions: list[int]
    """Model versions: those served when the engine was called, then those that made the tokens."""
    prompt_tokens: int
    response_tokens: int
    choices: list[int]
    """Indexes of the answers that have an experience. An answer without a token has none."""


def id_in(body: bytes) -> str:
    """Return the response's id that this part of its body has; empty if it has none."""
    match = _ID.search(body)
    return match[1].decode() if match else ""


class Framed:
    """An ASGI `send` that wraps everything in frames."""

    def __init__(self, send: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self._send = send

    async def __call__(self, message: Any) -> None:
        """Send a message of the application: its headers with WANTED added, or a part of its body as a frame."""
        if message["type"] == "http.response.start":
            headers = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"content-length"]
            await self._send({**message, "headers": [*headers, (WANTED.encode(), b"1")]})
        else:
            await self._send({**message, "body": _frame(b"b", message.get("body", b""))})

    @staticmethod
    def record_data(record: RequestRecord, experiences: list[Experience], response_id: str) -> bytes:
        """Return the data of a record's frame: its header's length, the header as JSON, the experiences."""
        calls = record.generations
        versions = [call.before for call in calls]
        versions += [int(span[0]) for e in experiences for span in e.info.get("version_spans", ())]
        answers = [completion for call in calls for completion in call.completions or ()]
        indexes = [i for i, e in enumerate(experiences) if e.tokens.size > e.prompt_length]
        header = orjson.dumps(Record(
            message=response_id or uuid4().hex, versions=versions,
            prompt_tokens=sum(len(call.completions[0].prompt_token_ids) for call in calls if call.completions),
            response_tokens=sum(len(answer.token_ids) for answer in answers), choices=indexes,
        ))
        payload = Experience.serialize_many([experiences[i] for i in indexes]) if indexes else b""
        return len(header).to_bytes(8, "big") + header + payload

    async def record(self, data: bytes) -> None:
        """Send a frame with a record."""
        await self._send({"type": "http.response.body", "body": _frame(b"r", data), "more_body": True})


def _frame(kind: bytes, data: bytes) -> bytes:
    """Return the bytes of a frame."""
    return kind + len(data).to_bytes(8, "big") + data


async def frames(parts: AsyncIterable[bytes]) -> AsyncGenerator[tuple[str, bytes]]:
    """Yield (kind, data) of each frame of a body. Raises EOFError if the body ends inside a frame."""
    unread = bytearray()
    async for part in parts:
        unread += part
        while len(unread) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(unread[1:_HEADER_BYTES], "big")
            if len(unread) < end:
                break
            yield chr(unread[0]), bytes(unread[_HEADER_BYTES:end])
            del unread[:end]
    if unread:
        raise EOFError("the answer ended in the middle of a frame")


def recorded(data: bytes) -> tuple[Record, bytes]:
    """Return the record in the data of a frame, and its serialized experiences; empty if there are none."""
    end = 8 + int.from_bytes(data[:8], "big")
    record: Record = orjson.loads(data[8:end])
    return record, data[end:]

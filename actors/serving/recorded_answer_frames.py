"""Frames that carry an answer together with its record, from an engine's server to the proxy of mode `serve`.

The proxy requests frames by the header `RECORD_HEADER`, and the answer has this header too. The body of such an answer
is a sequence of frames. A frame is its kind (1 byte), the length of its data (8 bytes, big-endian), and the data.

| kind | data |
|---|---|
| `r` | a `Record` with experiences, before the end of the answer; missing if there is nothing to record |
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

__all__ = ["RECORD_HEADER", "Framed", "Record", "find_response_id", "parse_record", "read_frames"]

RECORD_HEADER = "x-trinity-record"
"""Header of a request for an answer in frames, and of an answer in frames."""
_HEADER_BYTES = 9
"""Size of a frame's kind and length."""
_ID = re.compile(rb'"(?:id|request_id)"\s*:\s*"([^"\\]{1,200})"')


class Record(TypedDict):
    """Record of an answer. The answer's experiences follow it in the same frame."""

    message: str
    """Id of the response, as the client gets it."""
    versions: list[int]
    """Model versions: those served when the engine was called, then those that generated the tokens."""
    prompt_tokens: int
    response_tokens: int
    choices: list[int]
    """Indexes of the answers that have an experience. An answer without a token has none."""


def find_response_id(body: bytes) -> str:
    """Return the response's id if this part of its body has it, else an empty text."""
    match = _ID.search(body)
    return match[1].decode() if match else ""


class Framed:
    """ASGI `send` function that wraps the body's parts in frames."""

    def __init__(self, send: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self._send = send

    async def __call__(self, message: Any) -> None:
        """Send an application's message: the headers with RECORD_HEADER added, or a part of the body as a frame."""
        if message["type"] == "http.response.start":
            headers = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"content-length"]
            await self._send({**message, "headers": [*headers, (RECORD_HEADER.encode(), b"1")]})
        else:
            await self._send({**message, "body": _frame(b"b", message.get("body", b""))})

    @staticmethod
    def record_data(record: RequestRecord, experiences: list[Experience], response_id: str) -> bytes:
        """Return the data of a record's frame: length of the `Record` as JSON, the JSON, serialized experiences."""
        calls = record.generations
        versions = [call.model_version for call in calls]
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
        await self._send({"type": "http.response.body", "body": _frame(b"r", data), "more_body": True})


def _frame(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(8, "big") + data


async def read_frames(parts: AsyncIterable[bytes]) -> AsyncGenerator[tuple[str, bytes]]:
    """Yield (kind, data) of each frame in a body. Raises EOFError if the body ends inside a frame."""
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


def parse_record(data: bytes) -> tuple[Record, bytes]:
    """Return the record in a frame's data, and the serialized experiences; these are empty if there are none."""
    end = 8 + int.from_bytes(data[:8], "big")
    record: Record = orjson.loads(data[8:end])
    return record, data[end:]

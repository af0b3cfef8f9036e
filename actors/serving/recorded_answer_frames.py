"""An answer and what is recorded of it, on one connection: from an engine's server to the proxy of mode `serve`.

The proxy asks for it by a header, which the answer has, too. Its body is frames then: a kind (a byte), a length (8
bytes), and so many bytes.

| kind | |
|---|---|
| `r` | a `Record`: comes before the end of the answer, where there is something to record |
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
"""Header of a request whose answer is to come in frames."""
_HEAD = 9
_ID = re.compile(rb'"(?:id|request_id)"\s*:\s*"([^"\\]{1,200})"')


class Record(TypedDict):
    """Record of an answer, beside its experiences, which follow it in the frame."""

    message: str
    """The response's id, as its client gets it."""
    versions: list[int]
    """Versions served when the engine was asked, and versions of the tokens."""
    prompt_tokens: int
    response_tokens: int
    choices: list[int]
    """Indexes of the answers with an experience: one without a token has none, since there is nothing to learn from it.
    """


def id_in(body: bytes) -> str:
    """Return the response's id, if the first parts of an answer have it."""
    found = _ID.search(body)
    return found[1].decode() if found else ""


class Framed:
    """An ASGI `send` that wraps everything in frames."""

    def __init__(self, send: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self._send = send

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"content-length"]
            await self._send({**message, "headers": [*headers, (WANTED.encode(), b"1")]})
        else:
            await self._send({**message, "body": _frame(b"b", message.get("body", b""))})

    @staticmethod
    def recorded(record: RequestRecord, experiences: list[Experience], message: str) -> bytes:
        """Return the record as its frame has it; `message` is the response's id."""
        versions = [g.before for g in record.generations]
        versions += [int(span[0]) for e in experiences for span in e.info.get("version_spans", ())]
        answers = [c for g in record.generations for c in g.completions or ()]
        some = [i for i, e in enumerate(experiences) if e.tokens.size > e.prompt_length]
        told = orjson.dumps(Record(
            message=message or uuid4().hex, versions=versions,
            prompt_tokens=sum(len(g.completions[0].prompt_token_ids) for g in record.generations if g.completions),
            response_tokens=sum(len(c.token_ids) for c in answers), choices=some,
        ))
        payload = Experience.serialize_many([experiences[i] for i in some]) if some else b""
        return len(told).to_bytes(8, "big") + told + payload

    async def record(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": _frame(b"r", data), "more_body": True})


def _frame(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(8, "big") + data


async def frames(parts: AsyncIterable[bytes]) -> AsyncGenerator[tuple[str, bytes]]:
    """Yield (kind, data) of each frame of a body. Raises EOFError if it ends inside a frame."""
    rest = bytearray()
    async for part in parts:
        rest += part
        while len(rest) >= _HEAD and len(rest) >= (end := _HEAD + int.from_bytes(rest[1:_HEAD], "big")):
            yield chr(rest[0]), bytes(rest[_HEAD:end])
            del rest[:end]
    if rest:
        raise EOFError("the answer ended in the middle of a frame")


def recorded(data: bytes) -> tuple[Record, bytes]:
    """Return a frame's record and its serialized experiences; empty if there are none."""
    end = 8 + int.from_bytes(data[:8], "big")
    told: Record = orjson.loads(data[8:end])
    return told, data[end:]

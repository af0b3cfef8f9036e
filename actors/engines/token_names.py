"""Logprobs of `/inference/v1/generate` for clients of every vLLM: an entry has its token's id and its name.

vLLM 0.32 says `{"token_id": 7, "logprob": ...}` where older versions say `{"token": "token_id:7", "logprob": ...}`,
which the clients that there are read still (verifiers' of renderers 0.1.12, TRL 1.16's). Here an entry has both.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["with_token_names"]

_PATH = "/inference/v1/generate"
_ENTRY = re.compile(rb'\{"token_id":(\d+)(?=[,}])')
"""The begin of an entry: in no text, where quotes would have their backslashes."""


def with_token_names(application: Any) -> Any:
    """Return this ASGI application, with names in what it answers on that path."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") != _PATH:
            await application(scope, receive, send)
            return
        start: Any = None

        async def named(message: Any) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            body = _ENTRY.sub(rb'{"token":"token_id:\1","token_id":\1', message.get("body", b""))
            if start is not None:
                headers = [(k, v) for k, v in start.get("headers", ()) if k.lower() != b"content-length"]
                if not message.get("more_body"):
                    headers.append((b"content-length", str(len(body)).encode()))
                await send({**start, "headers": headers})
                start = None
            await send({**message, "body": body})

        await application(scope, receive, named)

    return answer

"""HTTP client for hundreds of open requests to engines' servers: httpx's API over aiohttp's connections.

httpx's own pool scans all its connections for each request. With 256 open ones that takes 16 ms of a core per request,
and aiohttp takes a fortieth. (The package httpx-aiohttp reports a server that ended during a request as unreachable.)

Every answer has a size limit, since an endless one would fill the runner's memory. Compression is refused, since 2 MiB
can become 10 GB. Requests set their limit with `extensions=size_limit(largest_answer(...))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

__all__ = ["MAX_BYTES", "http_client", "largest_answer", "size_limit"]

KEEP_SECONDS = 15.0
"""How long an idle connection is kept; runners' servers keep it longer."""
MAX_BYTES = 8 * 2**20
"""Maximum size of an error, and of an answer without a limit of its own: `/metrics` of many engines takes 1 MiB."""
_ENTRY_BYTES, _EVENT_BYTES, _ID_BYTES = 256, 1024, 16
"""Upper bounds of mean JSON sizes: a token or logprob with its text, the stream event around it, a token id."""


def largest_answer(
    *, prompt_tokens: int, answers: int = 1, max_tokens: int = 0, logprobs_per_token: int = 0,
    logprobs_per_prompt_token: int = 0, streamed: bool = False,
) -> int:
    """Return the maximum bytes of JSON for the answers to one prompt.

    `max_tokens` is for each answer; `streamed`: each token may come in a stream event of its own.
    """
    token_bytes = (1 + logprobs_per_token) * _ENTRY_BYTES + streamed * _EVENT_BYTES
    prompt_token_bytes = _ID_BYTES + logprobs_per_prompt_token * _ENTRY_BYTES
    return answers * (max_tokens * token_bytes + prompt_tokens * prompt_token_bytes) + MAX_BYTES


def size_limit(max_bytes: int) -> dict[str, int]:
    """Return `extensions` for a request that limit the body of its answer to `max_bytes`."""
    return {"max_bytes": max_bytes}


def http_client(
    *, connect: float, read: float | None = None, base_url: str = "", headers: Mapping[str, str] | None = None,
    trust_env: bool = False, transport: httpx.AsyncBaseTransport | None = None, keep: float = KEEP_SECONDS,
) -> httpx.AsyncClient:
    """Return a client with unlimited connections, to be used on one event loop.

    `connect`, `read`: timeouts in seconds; `keep`: seconds for which an idle connection is kept; `trust_env`: use the
    environment's proxies; `transport`: for tests. Requests raise httpx's ConnectError or ConnectTimeout if the server
    did not get the request, and another TransportError if it may have. They raise EngineError for an answer that is
    compressed, or larger than the limit that the request set by `size_limit` (MAX_BYTES if it set none).
    """
    import httpx

    from trinity_es.actors.engines.http.transport import AiohttpTransport, LimitedTransport

    return httpx.AsyncClient(
        base_url=base_url, headers={"accept-encoding": "identity", **(headers or {})},
        timeout=httpx.Timeout(None, connect=connect, read=read), trust_env=trust_env,
        transport=LimitedTransport(transport or AiohttpTransport(trust_env, keep), MAX_BYTES),
    )

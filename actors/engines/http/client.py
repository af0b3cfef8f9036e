"""HTTP client for hundreds of open requests to engines' servers: httpx's API over aiohttp's connections.

httpx's own pool scans all its connections for each request. With 256 open ones that takes 16 ms of a core per request,
and aiohttp takes a fortieth. (The package httpx-aiohttp reports a server that ended during a request as unreachable.)

Every answer has a size limit, since an endless one would fill the runner's memory. Compression is refused, since 2 MiB
can become 10 GB. Requests set their limit with `extensions=size_limit(largest_answer(...))`.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

from trinity_es.actors.server_addresses import is_loopback
from trinity_es.events.errors import EngineError

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

    return httpx.AsyncClient(
        base_url=base_url, headers={"accept-encoding": "identity", **(headers or {})},
        timeout=httpx.Timeout(None, connect=connect, read=read),
        transport=_limited(transport or _aiohttp_transport(trust_env, keep)), trust_env=trust_env,
    )


def _limited(transport: httpx.AsyncBaseTransport) -> httpx.AsyncBaseTransport:
    """Wrap a transport so that answers that are compressed or too large raise EngineError."""
    import httpx

    class LimitedBody(httpx.AsyncByteStream):
        def __init__(self, body: httpx.AsyncByteStream, max_bytes: int, server: str) -> None:
            self._body, self._max_bytes, self._server = body, max_bytes, server

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in self._body:
                size += len(part)
                if size > self._max_bytes:
                    raise EngineError(
                        f"{self._server} answers with more than {self._max_bytes:,} bytes, the limit for this request: "
                        "check that it is a vLLM server"
                    )
                yield part

        async def aclose(self) -> None:
            await self._body.aclose()

    class LimitedTransport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await transport.handle_async_request(request)
            server = f"{request.url.scheme}://{request.url.netloc.decode()}{request.url.path}"
            encoding = answer.headers.get("content-encoding", "identity")
            if encoding.strip().lower() not in ("identity", ""):
                await answer.aclose()
                raise EngineError(
                    f"{server} answers in the encoding {encoding!r:.80}, which was not requested: switch "
                    "compression off there, or in the proxy before it"
                )
            assert isinstance(answer.stream, httpx.AsyncByteStream)
            max_bytes = request.extensions.get("max_bytes", MAX_BYTES)
            if answer.status_code >= 300:  # an error needs no more, whatever limit the request set
                max_bytes = min(max_bytes, MAX_BYTES)
            answer.stream = LimitedBody(answer.stream, max_bytes, server)
            return answer

        async def aclose(self) -> None:
            await transport.aclose()

    return LimitedTransport()


@contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    """Within this context, raise errors of aiohttp as httpx's errors with the same meaning."""
    import aiohttp
    import httpx

    try:
        yield
    except (aiohttp.ClientError, OSError) as e:
        for aiohttp_error, httpx_error in (
            (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout), (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
            (aiohttp.ClientConnectorError, httpx.ConnectError), (aiohttp.InvalidURL, httpx.UnsupportedProtocol),
            (aiohttp.NonHttpUrlClientError, httpx.UnsupportedProtocol),
            ((aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError),
             httpx.RemoteProtocolError), (Exception, httpx.ReadError),
        ):
            if isinstance(e, aiohttp_error):
                raise httpx_error(str(e) or type(e).__name__, request=request) from e


def _aiohttp_transport(trust_env: bool, keep: float) -> httpx.AsyncBaseTransport:
    """Return a transport for httpx that sends requests over an aiohttp session, which the first request opens."""
    import aiohttp
    import httpx

    class Body(httpx.AsyncByteStream):
        def __init__(self, answer: aiohttp.ClientResponse, request: httpx.Request) -> None:
            self._answer, self._request = answer, request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            with _as_httpx(self._request):
                async for part in self._answer.content.iter_any():
                    yield part

        async def aclose(self) -> None:
            self._answer.release()  # closes the connection if the body was not read to its end

    proxies = getproxies() if trust_env else {}

    def proxy_for(url: httpx.URL) -> str | None:
        proxy = proxies.get(url.scheme) or proxies.get("all")
        if not proxy or is_loopback(url.host) or proxy_bypass(url.host):
            return None
        return proxy if "://" in proxy else f"http://{proxy}"

    class Transport(httpx.AsyncBaseTransport):
        session: aiohttp.ClientSession | None = None

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.session is None:
                self.session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep),
                    cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
                )
            timeouts = request.extensions.get("timeout", {})
            body = await request.aread()
            with _as_httpx(request):
                answer = await self.session.request(
                    request.method, str(request.url), headers=request.headers.multi_items(),
                    data=io.BytesIO(body) if len(body) > 2**20 else body or None, allow_redirects=False,
                    proxy=proxy_for(request.url),  # aiohttp's trust_env would also send passwords from ~/.netrc
                    skip_auto_headers=("content-type", "user-agent", "accept", "accept-encoding"),
                    timeout=aiohttp.ClientTimeout(
                        total=None, sock_connect=timeouts.get("connect"), sock_read=timeouts.get("read")
                    ),
                )
            return httpx.Response(
                answer.status, headers=answer.raw_headers, stream=Body(answer, request), request=request,
            )

        async def aclose(self) -> None:
            if self.session is not None:
                await self.session.close()

    return Transport()

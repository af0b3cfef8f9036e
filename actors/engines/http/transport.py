"""Transports of httpx: one over aiohttp's connections, and one that limits answers. `client.py` imports them on use."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx

from trinity_es.actors.server_addresses import is_loopback
from trinity_es.events.errors import EngineError

__all__ = ["AiohttpTransport", "LimitedTransport"]

_HTTPX_ERRORS = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout), (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientConnectorError, httpx.ConnectError), (aiohttp.InvalidURL, httpx.UnsupportedProtocol),
    (aiohttp.NonHttpUrlClientError, httpx.UnsupportedProtocol),
    ((aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError),
     httpx.RemoteProtocolError), (Exception, httpx.ReadError),
)
"""Errors of aiohttp and httpx's errors with the same meaning; the first that fits counts."""


class LimitedTransport(httpx.AsyncBaseTransport):
    """Transport over another one that raises EngineError for answers that are compressed or too large."""

    def __init__(self, transport: httpx.AsyncBaseTransport, max_bytes: int) -> None:
        """`max_bytes`: limit of an error, and of an answer whose request set no limit of its own."""
        self._transport, self._max_bytes = transport, max_bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        server = f"{request.url.scheme}://{request.url.netloc.decode()}{request.url.path}"
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("identity", ""):
            await answer.aclose()
            raise EngineError(
                f"{server} answers in the encoding {encoding!r:.80}, which was not requested: switch compression off "
                "there, or in the proxy before it"
            )
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        max_bytes = request.extensions.get("max_bytes", self._max_bytes)
        if answer.status_code >= 300:  # an error needs no more, whatever limit the request set
            max_bytes = min(max_bytes, self._max_bytes)
        answer.stream = _LimitedBody(answer.stream, max_bytes, server)
        return answer

    async def aclose(self) -> None:
        await self._transport.aclose()


class _LimitedBody(httpx.AsyncByteStream):
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


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Transport that sends requests over an aiohttp session, which the first request opens."""

    def __init__(self, trust_env: bool, keep: float) -> None:
        """`trust_env`: use the environment's proxies; `keep`: seconds for which an idle connection is kept."""
        self._proxies, self._keep = getproxies() if trust_env else {}, keep
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep),
                cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
            )
        timeouts = request.extensions.get("timeout", {})
        body = await request.aread()
        with _as_httpx(request):
            answer = await self._session.request(
                request.method, str(request.url), headers=request.headers.multi_items(),
                data=io.BytesIO(body) if len(body) > 2**20 else body or None, allow_redirects=False,
                proxy=self._proxy_for(request.url),  # aiohttp's trust_env would also send passwords from ~/.netrc
                skip_auto_headers=("content-type", "user-agent", "accept", "accept-encoding"),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=timeouts.get("connect"), sock_read=timeouts.get("read")
                ),
            )
        stream = _AiohttpBody(answer, request)
        return httpx.Response(answer.status, headers=answer.raw_headers, stream=stream, request=request)

    def _proxy_for(self, url: httpx.URL) -> str | None:
        proxy = self._proxies.get(url.scheme) or self._proxies.get("all")
        if not proxy or is_loopback(url.host) or proxy_bypass(url.host):
            return None
        return proxy if "://" in proxy else f"http://{proxy}"

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _AiohttpBody(httpx.AsyncByteStream):
    def __init__(self, answer: aiohttp.ClientResponse, request: httpx.Request) -> None:
        self._answer, self._request = answer, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx(self._request):
            async for part in self._answer.content.iter_any():
                yield part

    async def aclose(self) -> None:
        self._answer.release()  # closes the connection if the body was not read to its end


@contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    """Within this context, raise errors of aiohttp as httpx's errors with the same meaning."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as e:
        httpx_error = next(error for aiohttp_error, error in _HTTPX_ERRORS if isinstance(e, aiohttp_error))
        raise httpx_error(str(e) or type(e).__name__, request=request) from e

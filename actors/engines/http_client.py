"""A client for engines' servers that holds hundreds of requests open: httpx's API over aiohttp's connections.

httpx's own pool goes through all its connections for each request: 16 ms of a core a request at 256 at once, where
aiohttp takes a fortieth. (The package httpx-aiohttp does the same, and says of a server that ended during a request
that it could not be reached.) httpx and aiohttp are imported where they are used.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx

__all__ = ["http_client"]

KEEP_SECONDS = 15.0
"""How long a connection that nobody uses is kept: less than a runner's server keeps it for."""


def http_client(
    *, connect: float, read: float | None = None, base_url: str = "", headers: Mapping[str, str] | None = None,
    trust_env: bool = False, transport: httpx.AsyncBaseTransport | None = None, keep: float = KEEP_SECONDS,
) -> httpx.AsyncClient:
    """Return a client without a limit of connections. Use it on the event loop on which it is asked first.

    `connect`, `read`: how long these may take, in seconds; `trust_env`: by the proxies of the environment;
    `transport`: instead of aiohttp's, for tests. What it raises are httpx's errors: ConnectError and ConnectTimeout
    for a server that saw nothing of the request, other TransportErrors for one that may have.
    """
    import httpx

    return httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=httpx.Timeout(None, connect=connect, read=read),
        transport=transport or _aiohttp_transport(trust_env, keep), trust_env=trust_env,
    )


@contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    import aiohttp
    import httpx

    try:
        yield
    except aiohttp.ConnectionTimeoutError as e:
        raise httpx.ConnectTimeout(_said(e), request=request) from e
    except aiohttp.ServerTimeoutError as e:
        raise httpx.ReadTimeout(_said(e), request=request) from e
    except aiohttp.ClientConnectorError as e:
        raise httpx.ConnectError(_said(e), request=request) from e
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as e:
        raise httpx.UnsupportedProtocol(_said(e), request=request) from e
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as e:
        raise httpx.RemoteProtocolError(_said(e), request=request) from e
    except (aiohttp.ClientError, OSError) as e:
        raise httpx.ReadError(_said(e), request=request) from e


def _said(e: Exception) -> str:
    return str(e) or type(e).__name__


def _aiohttp_transport(trust_env: bool, keep: float) -> httpx.AsyncBaseTransport:
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
            self._answer.release()  # a body that was not read to its end takes the connection with it

    proxies = getproxies() if trust_env else {}

    def proxy_for(url: httpx.URL) -> str | None:
        found = proxies.get(url.scheme) or proxies.get("all")
        if not found or proxy_bypass(url.host):
            return None
        return found if "://" in found else f"http://{found}"

    class Transport(httpx.AsyncBaseTransport):
        session: aiohttp.ClientSession | None = None

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.session is None:
                self.session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep),
                    cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
                )
            within = request.extensions.get("timeout", {})
            body = await request.aread()
            with _as_httpx(request):
                answer = await self.session.request(
                    request.method, str(request.url), headers=request.headers.multi_items(),
                    data=io.BytesIO(body) if len(body) > 2**20 else body or None, allow_redirects=False,
                    proxy=proxy_for(request.url),  # not by aiohttp's trust_env, which sends what ~/.netrc has, too
                    skip_auto_headers=("content-type", "user-agent", "accept", "accept-encoding"),
                    timeout=aiohttp.ClientTimeout(
                        total=None, sock_connect=within.get("connect"), sock_read=within.get("read")
                    ),
                )
            return httpx.Response(
                answer.status, headers=answer.raw_headers, stream=Body(answer, request), request=request,
            )

        async def aclose(self) -> None:
            if self.session is not None:
                await self.session.close()

    return Transport()

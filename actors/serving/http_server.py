"""HTTP server on the running event loop, for an engine's endpoint and for the proxy of mode `serve`.

It installs no signal handlers, answers unknown routes in OpenAI's form, and cancels a request whose client disconnects.
Starlette and uvicorn are imported in the functions, not here.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from trinity_es.actors.serving.errors import ApiError, error_body
from trinity_es.events.errors import StartupError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]

__all__ = [
    "BODY_LIMIT", "STOP_SECONDS", "Gone", "bearer_header", "json_response", "listen", "make_app",
    "make_server", "no_route_error", "read_body", "run_until_disconnect", "start_serving", "stop_serving",
    "tls_options", "url_of",
]

START_SECONDS = 30.0
STOP_SECONDS = 5
"""How long open connections may take to end when the server stops."""
KEEP_ALIVE_SECONDS = 60
"""How long an idle connection is kept: much longer than clients keep it, because clients must close it first."""

BODY_LIMIT = 32 * 2**20
"""Maximum size of a request's body in bytes. Ten million token ids do not fit, but no model takes so long a prompt."""
BODY_SECONDS = 300.0
"""How long a request's body may take to arrive."""

_T = TypeVar("_T")


class Gone(ApiError):
    """The client has disconnected before it got the answer."""


async def read_body(request: Request) -> bytes:
    """Return the body of a request.

    Raises ApiError with status 413 if the body is larger than `BODY_LIMIT` (without reading it if Content-Length says
    so), with status 408 if it does not arrive within `BODY_SECONDS`; Gone if the client disconnected.
    """
    from starlette.requests import ClientDisconnect

    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= BODY_LIMIT:
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > BODY_LIMIT:
                        break
        except TimeoutError as e:
            raise ApiError(f"the body did not end within {BODY_SECONDS:.0f} s: send it without pauses",
                           status=408, code="body_too_slow") from e
        except ClientDisconnect as e:
            raise Gone("the request was not read to its end: its client is gone", status=503) from e
    if size > BODY_LIMIT:
        known_size = f"{size:,} bytes" if declared else f"more than {BODY_LIMIT:,} bytes"
        raise ApiError(f"the body has {known_size}: the limit is {BODY_LIMIT:,}", status=413, code="body_too_large")
    return b"".join(parts)


def bearer_header(headers: Mapping[bytes, bytes]) -> bytes:
    """Return a request's key as `Bearer <key>`, from `Authorization` or, for Anthropic's clients, from `x-api-key`."""
    return headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")


def listen(address: str, port: int, who: str = "the HTTP server", remedy: str = "") -> socket.socket:
    """Return a socket that listens on this address and port (0: any free port). Raises StartupError."""
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(128)  # from here on the port is taken
    except OSError as e:
        listening.close()
        raise StartupError(f"{who} can't listen on {address}, port {port or '(any)'} ({e.strerror}){remedy}") from e
    return listening


def url_of(listening: socket.socket, tls: bool = False) -> str:
    """Return the URL of a listening socket, such as `http://127.0.0.1:41234`."""
    host, port = listening.getsockname()[:2]
    if host == "0.0.0.0":
        host = "127.0.0.1"
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_options(cert: str, key: str) -> dict[str, Any]:
    """Return uvicorn's options for HTTPS with these PEM files; {} if `cert` is empty.

    Raises StartupError if the files can't be used.
    """
    if not cert:
        return {}
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as e:  # SSLError is an OSError whose own text is the clearest
        reason = getattr(e, "reason", None) or getattr(e, "strerror", None) or e
        raise StartupError(
            f"the certificate {cert} with the private key {key} can't be used ({reason}): give two PEM files that "
            "belong together, which this user may read, the key without a password"
        ) from e
    return {"ssl_certfile": cert, "ssl_keyfile": key}


def no_route_error(method: str, path: str, routes: Mapping[str, str]) -> ApiError:
    """Return the error for a request that matches none of these routes (path -> method). It names a similar route."""
    if path in routes:
        return ApiError(f"{method} {path}: this route takes {routes[path]} only", status=405)
    bare_path = "/" + re.sub(r"^(/v1)+(?=/)", "", path).strip("/")
    similar = next((f" ({routes[p]} {p} is one)" for p in (f"/v1{bare_path}", bare_path) if p in routes), "")
    return ApiError(f"{method} {path}: there is no such route{similar}", status=404)


def make_app(routes: Iterable[tuple[str, str, Handler]]) -> Any:
    """Return an ASGI application with these routes: (path, method, handler). Any thread may call this function."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException

    routes = list(routes)
    methods = {path: method for path, method, _ in routes}

    async def not_found(request: Request, error: Exception) -> Response:
        refusal = no_route_error(request.method, request.url.path, methods)
        return json_response(error_body(refusal, request.url.path), refusal.status)

    app = Starlette()
    app.add_exception_handler(HTTPException, not_found)
    for path, method, handler in routes:
        app.add_route(path, handler, methods=[method])
    return app


def make_server(app: Any, stop_seconds: int = STOP_SECONDS, **tls: Any) -> Any:
    """Return a server of an ASGI application. Requests still open `stop_seconds` after `stop_serving` are cancelled.

    Any thread may call this function. `tls`: result of `tls_options`.
    """
    import uvicorn

    from trinity_es.actors.serving.uvicorn_server import HTTP_PROTOCOL, EmbeddedServer

    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, ws="none", interface="asgi3", proxy_headers=False,
        timeout_graceful_shutdown=stop_seconds, timeout_keep_alive=KEEP_ALIVE_SECONDS, http=HTTP_PROTOCOL, **tls,
    )
    config.load()
    return EmbeddedServer(config)


def stop_serving(server: Any) -> None:
    """Have a server accept no more connections, and end when all requests are answered. Call this on its loop."""
    server.should_exit = True
    server.ending.set()


async def start_serving(server: Any, listening: socket.socket) -> asyncio.Task[None]:
    """Start serving on this socket, and return the server's task once it answers requests. Raises StartupError.

    To end the server, call `stop_serving` and await the task.
    """
    serving: asyncio.Task[None] = asyncio.create_task(server.serve([listening]))
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if serving.done() or time.monotonic() > deadline:
            serving.cancel()
            listening.close()
            raise StartupError(f"the HTTP server on {url_of(listening)} did not start")
        await asyncio.sleep(0.005)
    return serving


async def run_until_disconnect(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. If the client disconnects meanwhile, cancel `work` and raise Gone."""
    client_left = False

    async def cancel_on_disconnect() -> None:
        nonlocal client_left
        while (await receive())["type"] != "http.disconnect":
            pass
        client_left = not work_task.done()
        work_task.cancel()

    work_task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(cancel_on_disconnect())
    try:
        result = await work_task  # awaited directly, which saves a third task that would wait for both
    except asyncio.CancelledError:
        own_task = asyncio.current_task()
        if not client_left or own_task is None or own_task.cancelling():
            raise
    finally:
        listener.cancel()
    if client_left:
        raise Gone("the request was aborted: its client is gone", status=503)
    return result


def json_response(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    headers = {"connection": "close"} if status == 408 else {}  # the rest of the request's body is still to come
    return Response(orjson.dumps(value), status_code=status, media_type="application/json", headers=headers)

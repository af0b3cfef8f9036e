"""The dashboard's server: where it listens, which token it asks for, and its end."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence

from actors.web import listen, url_of
from events.errors import ConfigError, StartupError
from trinity_es.dashboard.access import is_loopback

__all__ = ["serve", "token_for"]


def token_for(address: str, token: str | None) -> str | None:
    """The token to ask for: the one given; else a new one, where others than this machine can reach it.

    Raises ConfigError for one that is too short to be a secret.
    """
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise ConfigError("the token must have 8 or more printable ASCII characters")
    return token if token is not None or is_loopback(address) else secrets.token_urlsafe(24)


def serve(
    url: str, *, address: str = "127.0.0.1", port: int = 0, token: str | None = None, hosts: Sequence[str] = (),
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the log at `url` until SIGINT or SIGTERM. `ready` is told where, with `?token=` when one is needed.

    Raises StartupError where it can't listen there, ConfigError for a bad token.
    """
    import uvicorn

    from trinity_es.dashboard.app import create_app

    token = token_for(address, token)
    try:
        listening: socket.socket = listen(address, port)
    except OSError as e:
        raise StartupError(
            f"the dashboard can't listen on {address}, port {port or '(any)'} ({e.strerror}): give another --port or "
            "--address"
        ) from e
    server: uvicorn.Server
    app = create_app(
        url, token=token, hosts=[address, *hosts], cookie=f"trinity_es_{listening.getsockname()[1]}",
        closing=lambda: server.should_exit,
    )
    server = uvicorn.Server(uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=3, server_header=False,
        proxy_headers=False,
    ))

    async def run() -> None:
        serving = asyncio.create_task(server.serve([listening]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        if server.started:
            ready(url_of(listening) + "/" + (f"?token={token}" if token else ""))
        await serving

    asyncio.run(run())

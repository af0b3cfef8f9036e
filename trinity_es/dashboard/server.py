"""The HTTP server of the dashboard."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from urllib.parse import quote

from trinity_es.actors.server_addresses import is_loopback
from trinity_es.actors.serving.http_server import listen, tls_options, url_of
from trinity_es.events.errors import ConfigError

__all__ = ["Dashboard", "token_for"]


def token_for(address: str, token: str | None, *, no_token: bool = False) -> str | None:
    """Return the token that requests need: `token` or else a new one; None with `no_token`.

    A loopback address needs a token too, because users of the machine who may not read the log's file can reach it.
    Raises ConfigError for a token that is too short, and for `no_token` together with a token or with an address that
    other machines can reach.
    """
    if no_token:
        if token is not None:
            raise ConfigError("--no-token contradicts the token (--token, TRINITY_ES_TOKEN): leave one of them out")
        if not is_loopback(address):
            raise ConfigError(f"--no-token needs a loopback address, but other machines can reach {address}: leave out "
                              "--no-token or --address")
        return None
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise ConfigError("the token is too short or has other characters: use 8 or more printable ASCII characters")
    return token if token is not None else secrets.token_urlsafe(24)


class Dashboard:
    """Server for the log at `url`. The constructor listens; `run` answers requests until `stop`, SIGINT or SIGTERM.

    `token`, `no_token`: see `token_for`. `other`: a second log to compare with. `cert`, `key`: files of a certificate,
    which turn HTTPS on. Raises StartupError if it can't listen or use the certificate, and ConfigError for a bad token.
    """

    def __init__(
        self, url: str, *, address: str = "127.0.0.1", port: int = 0, token: str | None = None,
        no_token: bool = False, hosts: Sequence[str] = (), other: str | None = None, cert: str = "", key: str = "",
    ) -> None:
        import uvicorn

        from trinity_es.actors.serving.uvicorn_server import HTTP_PROTOCOL, CappedServer
        from trinity_es.dashboard.app import create_app

        self.token = token_for(address, token, no_token=no_token)
        if bool(cert) != bool(key):
            raise ConfigError("a certificate needs its private key: give both --cert and --key")
        tls = tls_options(cert, key)
        self._socket = listen(address, port, "the dashboard", ": give another --port or --address")
        self.url = url_of(self._socket, bool(tls))
        """URL of the server, without the token."""
        app = create_app(
            url, token=self.token, hosts=[address, *hosts], other=other,
            cookie=f"trinity_es_{self._socket.getsockname()[1]}",  # as browsers share cookies of all ports
            is_closing=lambda: self._server.should_exit,
        )
        self._server = CappedServer(uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=3, server_header=False,
            proxy_headers=False, http=HTTP_PROTOCOL, **tls,
        ))

    @property
    def entrance(self) -> str:
        """Return the URL to open in a browser, with the token if there is one."""
        return f"{self.url}/?token={quote(self.token)}" if self.token else f"{self.url}/"

    def entrance_at(self, host: str) -> str:
        """Return the URL to open in a browser of another machine. `host`: this machine's name."""
        port = self._socket.getsockname()[1]
        return self.entrance.replace(self.url, f"{self.url.partition(':')[0]}://{host}:{port}", 1)

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`, SIGINT or SIGTERM. Calls `on_ready` when requests are answered."""

        async def main() -> None:
            serving = asyncio.create_task(self._server.serve([self._socket]))
            while not (self._server.started or serving.done()):
                await asyncio.sleep(0.01)
            if self._server.started:
                on_ready()
            await serving

        try:
            asyncio.run(main())
        finally:
            self.close()

    def stop(self) -> None:
        """Make `run` return soon. May be called from any thread."""
        self._server.should_exit = True

    def close(self) -> None:
        """Release the port. Only needed if `run` was not called."""
        self._socket.close()

"""The dashboard's server: where it listens, which token it asks for, and its end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from urllib.parse import quote

from trinity_es.actors.addresses import is_loopback
from trinity_es.actors.serving.http_server import limited_http, listen, server_class, tls_options, url_of
from trinity_es.events.errors import ConfigError

__all__ = ["Dashboard", "token_for"]


def token_for(address: str, token: str | None, no_token: bool = False) -> str | None:
    """Return the token to ask for: the one given, else a new one; None with `no_token`.

    On loopback too, which every user of the machine reaches, also those that may not read the log's file. Raises
    ConfigError for one that is too short to be a secret, and for `no_token` with one, or where other machines get in.
    """
    if no_token:
        if token is not None:
            raise ConfigError("a token (--token, TRINITY_ES_TOKEN) and --no-token are given: leave one of them out")
        if not is_loopback(address):
            raise ConfigError(f"--no-token is for this machine alone, and other machines reach {address}: leave it out")
        return None
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isprintable()):
        raise ConfigError("the token must have 8 or more printable ASCII characters")
    return token if token is not None else secrets.token_urlsafe(24)


class Dashboard:
    """A server for the log at `url`, listening from the start; `run` answers until `stop`, SIGINT or SIGTERM.

    `token`, `no_token`: see `token_for`; `other`: a second log, to compare with; `cert`, `key`: files of a certificate,
    with which it speaks HTTPS. Raises StartupError where it can't listen there or use these, ConfigError for a bad
    token.
    """

    def __init__(
        self, url: str, *, address: str = "127.0.0.1", port: int = 0, token: str | None = None,
        no_token: bool = False, hosts: Sequence[str] = (), other: str | None = None, cert: str = "", key: str = "",
    ) -> None:
        import uvicorn

        from trinity_es.dashboard.app import create_app

        self.token = token_for(address, token, no_token)
        if bool(cert) != bool(key):
            raise ConfigError("a certificate and its private key are given together: --cert FILE --key FILE")
        tls = tls_options(cert, key)
        self._listening = listen(address, port, "the dashboard", ": give another --port or --address")
        self.url = url_of(self._listening, bool(tls))
        """Where it is, without the token."""
        app = create_app(
            url, token=self.token, hosts=[address, *hosts], other=other,
            cookie=f"trinity_es_{self._listening.getsockname()[1]}",  # cookies don't know ports
            closing=lambda: self._server.should_exit,
        )
        self._server = server_class()(uvicorn.Config(
            app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=3, server_header=False,
            proxy_headers=False, http=limited_http(), **tls,
        ))

    @property
    def entrance(self) -> str:
        """The address for a browser: with the token, where one is asked for."""
        return f"{self.url}/?token={quote(self.token)}" if self.token else f"{self.url}/"

    def entrance_at(self, host: str) -> str:
        """Return the same, by another name of this machine."""
        port = self._listening.getsockname()[1]
        return self.entrance.replace(self.url, f"{self.url.partition(':')[0]}://{host}:{port}", 1)

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve. `ready` is called when requests are answered."""

        async def main() -> None:
            serving = asyncio.create_task(self._server.serve([self._listening]))
            while not (self._server.started or serving.done()):
                await asyncio.sleep(0.01)
            if self._server.started:
                ready()
            await serving

        try:
            asyncio.run(main())
        finally:
            self.close()

    def stop(self) -> None:
        """Have `run` return soon. From any thread."""
        self._server.should_exit = True

    def close(self) -> None:
        """Give the port back, where `run` was not called."""
        self._listening.close()

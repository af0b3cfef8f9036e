"""uvicorn's server and protocol, extended. `http_server.py` imports this module on use, since uvicorn takes long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Iterator
from contextvars import Context
from typing import Any

import uvicorn

from trinity_es.events.processes import raise_file_limit

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # uvicorn then has h11's only
    HttpToolsProtocol = object  # type: ignore[assignment, misc]

__all__ = ["HTTP_PROTOCOL", "CappedServer", "EmbeddedServer", "most_connections"]

DATE_SECONDS = 10.0
"""How long responses may repeat the same date header."""
MOST_CONNECTIONS = 16_384
"""Maximum number of connections, lower if this process may open fewer files; further clients wait."""
SPARE_FILES = 256
"""Number of open files reserved for other uses: engines, the log, actors."""
FULL_PAUSE_SECONDS = 0.05
"""Interval between checks if another connection can be accepted."""
IDLE_SECONDS = 1.0
"""Idle time after which a connection is closed if other clients wait."""
WARN_SECONDS = 60.0
"""Minimum interval between two warnings that new clients wait."""

_log = logging.getLogger(__name__)


class CappedProtocol(HttpToolsProtocol):
    """Protocol whose idle connections close for waiting clients, and which frees old requests."""

    _current_cycle: Any = None
    """The request that is being answered; uvicorn's own `cycle` is the last request read."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Extend uvicorn's method: drop waiting requests, and mark the current one as disconnected."""
        self._unset_keepalive_if_required()  # uvicorn leaves this timer after a reset of the connection
        self.pipeline.clear()
        if self._current_cycle is not None and not self._current_cycle.response_complete:
            self._current_cycle.disconnected = True
            self._current_cycle.message_event.set()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        # In an empty context, since a timer or task started here would keep this request's context in memory.
        Context().run(super().on_response_complete)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Extend uvicorn's method: while the server is full, close the connection after the answer."""
        self._current_cycle = cycle
        if getattr(self.server_state, "full", False):
            cycle.keep_alive = False  # the answer's headers say so too
        super()._start_asgi_task(cycle, app)

    def give_way(self) -> None:
        """Close this connection if it has been idle for IDLE_SECONDS."""
        timer = self.timeout_keep_alive_task  # set while the connection is idle
        if timer is not None and timer.when() - self.loop.time() < self.timeout_keep_alive - IDLE_SECONDS:
            self.transport.close()


HTTP_PROTOCOL: Any = CappedProtocol if issubclass(CappedProtocol, asyncio.Protocol) else "h11"
"""Value of uvicorn's option `http`."""


def most_connections(files: int) -> int:
    """Return the maximum of connections for a process with `files` files; each may need a second one, to an engine."""
    return min(MOST_CONNECTIONS, max(1, files // 4, (files - SPARE_FILES) // 2))


class CappedServer(uvicorn.Server):
    """Server that lets new clients wait while it has its maximum of connections.

    asyncio's own server accepts connections until the process can open no file, even for requests, and logs each error.
    """

    arriving = 0
    """Number of connections that are accepted but not handed to uvicorn yet."""
    files = 0
    """Maximum number of files that this process may open."""
    limit = 0
    """Maximum number of open connections."""

    @property
    def connection_count(self) -> int:
        return len(self.server_state.connections) + self.arriving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Extend uvicorn's method: accept the connections of each of these sockets in a task."""
        for listening in sockets or ():
            listening.setblocking(False)
            listening.listen(self.config.backlog)
        await super().startup(sockets=[])
        self.files = raise_file_limit()
        self.limit, self.warned_at = most_connections(self.files), -math.inf
        self.accept_tasks = [asyncio.create_task(self.accept(listening)) for listening in sockets or ()]
        self.serve_tasks: set[asyncio.Task[None]] = set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.accept_tasks:
            task.cancel()
        await asyncio.gather(*self.accept_tasks, return_exceptions=True)
        await super().shutdown(sockets)

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections one after another, but none while `limit` connections are open."""
        loop, state = asyncio.get_running_loop(), self.server_state
        while True:
            is_full = self.connection_count >= self.limit
            state.full = is_full  # type: ignore[attr-defined]  # `CappedProtocol` reads it
            if is_full:
                self.warn(f"{self.connection_count} connections are open, the most that {self.files} open files allow")
                for connection in list(state.connections):
                    getattr(connection, "give_way", lambda: None)()  # h11's connections have no such method
                await asyncio.sleep(FULL_PAUSE_SECONDS)
                continue
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as e:
                self.warn(f"a connection could not be accepted ({e.strerror})")
                await asyncio.sleep(FULL_PAUSE_SECONDS)
                continue
            self.arriving += 1
            task = asyncio.create_task(self.serve_client(client))
            self.serve_tasks.add(task)
            task.add_done_callback(self.serve_tasks.discard)

    async def serve_client(self, client: socket.socket) -> None:
        """Do the TLS handshake of an accepted connection, and hand it to uvicorn."""

        def protocol() -> Any:
            return self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn makes it
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, sock=client, ssl=self.config.ssl)
        except OSError:  # the client left, or speaks no TLS
            client.close()
        finally:
            self.arriving -= 1

    def warn(self, why: str) -> None:
        """Log why new clients wait, at most once in WARN_SECONDS."""
        if (now := time.monotonic()) - self.warned_at >= WARN_SECONDS:
            self.warned_at = now
            _log.warning("%s: new clients wait; raise the limit of open files (ulimit -Hn, LimitNOFILE=)", why)


class EmbeddedServer(CappedServer):
    """Server in a process that handles its signals itself."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Wait for `stop_serving`. uvicorn would check ten times a second: most of the work of an idle runner."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), DATE_SECONDS)

"""The two ends of the connection between a joined host and the head, the host of the coordinator.

Each end is an event loop in its own thread. The head is an HTTPS server (`certificate.py`), and the host holds a
WebSocket to it (`head_client.py`). A client without a token made from the key gets 401 and nothing else. Messages are
pickles: whoever has the key may run code anyway.

Nothing here blocks its actor: outgoing messages go into a queue, and incoming ones to a callable that the actor makes
with `post`. A broken connection loses the messages under way. Runners and the coordinator repeat messages that were not
acknowledged, as they do after a restart of either.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import logging
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import ClientWebSocketResponse, WSMsgType, web

from trinity_es.actors.frames import MAX_FRAME
from trinity_es.actors.hosts.admission_answer import Admission, Items
from trinity_es.actors.hosts.certificate import Certificate
from trinity_es.actors.hosts.folder_sender import FolderSender
from trinity_es.actors.hosts.head_client import HELLO_SECONDS, NAME_HEADER, HeadDialer, Refused, bearer, raise_refusal
from trinity_es.events.errors import WrongKey
from trinity_es.events.store.database.retry import Backoff

__all__ = ["HeadEnd", "HostEnd", "LoopThread"]

BEAT_SECONDS = 1.0
"""Maximum interval between two frames."""
REDIAL_SECONDS = 0.2, 5.0
"""Shortest and longest pause before the next attempt to find the head, or to listen."""
MAX_WAITING = 20_000
"""Maximum number of messages queued for a host. With more, the connection is ended."""
FRAME_BYTES = 128 * 1024
"""A frame of this size takes no further message. On a slow link a larger frame would look like silence."""
SILENCE = 1 / 3, 3.0
"""A connection is replaced if it is silent for this share of the timeout, but at least for this many seconds. A network
that works again is then used at once, while TCP would wait for as long again as the outage lasted."""
WARN_SECONDS = 10.0
"""Interval between two warnings about refused requests."""
_log = logging.getLogger(__name__)


class _Pipe:
    """One open connection, with its outgoing queue and heartbeat."""

    def __init__(
        self, ws: web.WebSocketResponse | ClientWebSocketResponse, connection: Any, take: Callable[[Items], None],
        timeout: float,
    ) -> None:
        """Give incoming messages to `take`. `connection` is the socket of `ws`."""
        self._ws, self._socket, self._take = ws, connection, take
        share, least_seconds = SILENCE
        self._silence_limit = min(timeout, max(share * timeout, least_seconds))
        self._queue: deque[bytes] = deque()
        self._has_messages = asyncio.Event()
        self.heard_at = time.monotonic()
        """Time of the last message received, in monotonic seconds."""

    def put(self, name: str, message: Any) -> None:
        """Queue a message. `name` is its receiver in the head's messages, its sender in a host's. Not thread-safe."""
        self._queue.append(pickle.dumps((name, message), protocol=5))
        self._has_messages.set()

    async def run(self) -> str:
        """Send and receive until the connection ends, and return the reason."""
        tasks = [asyncio.ensure_future(part()) for part in (self._send, self._receive, self._watch)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            self.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _send(self) -> str:
        """Send queued messages, and an empty frame after BEAT_SECONDS without any. Return the reason when it fails."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_messages.wait(), BEAT_SECONDS)
            self._has_messages.clear()
            try:
                await self._ws.send_bytes(self._next_frame())
                while self._queue:
                    await asyncio.sleep(0)  # without it, a long queue would starve other tasks
                    await self._ws.send_bytes(self._next_frame())
            except OSError as e:
                return f"it can't be reached: {e}"

    def _next_frame(self) -> bytes:
        """Return the oldest messages of the queue as a frame; empty if there are none."""
        frame = bytearray()
        while self._queue and len(frame) < FRAME_BYTES:
            frame += self._queue.popleft()
        return bytes(frame)

    async def _receive(self) -> str:
        """Pass incoming messages to the actor until the connection ends, and return the reason."""
        while True:
            message = await self._ws.receive()
            if message.type is not WSMsgType.BINARY:
                error = self._ws.exception()
                return f"the connection broke: {error}" if error else "it ended the connection"
            self.heard_at = time.monotonic()
            frame, items = io.BytesIO(message.data), []
            try:
                while frame.tell() < len(message.data):
                    items.append(pickle.load(frame))
            except Exception as e:  # a message that can't be unpickled here
                return f"a message of it can't be read: {type(e).__name__}"
            if items:
                self._take(items)

    async def _watch(self) -> str:
        """Wait until the other side is silent for too long, or too many messages wait for it. Return the reason."""
        while (silence := time.monotonic() - self.heard_at) < self._silence_limit:
            if len(self._queue) > MAX_WAITING:
                return f"it reads nothing: {len(self._queue)} messages wait for it"
            await asyncio.sleep(min(BEAT_SECONDS, self._silence_limit - silence))
        return f"no message came from it for {self._silence_limit:.0f} s"


class LoopThread:
    """An event loop in a thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine in the loop, from any thread. Does nothing if the loop has ended."""
        try:
            asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # it was closed
            work.close()

    def call(self, function: Callable[[], Any]) -> None:
        """Call `function` in the loop soon, from any thread. Does nothing if the loop has ended."""
        with suppress(RuntimeError):  # it was closed
            self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel all tasks, and end the loop and its thread. Returns at once."""
        self.begin(self._cancel_tasks())

    async def _cancel_tasks(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.loop.stop()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()


class HeadEnd:
    """The head's end: a server with a connection to each admitted host.

    It calls three functions in its thread. `hello(offer, address, answer)` when a host asks for admission: `hello` must
    then call `answer(admission)` once, in any thread. `take(host, epoch, items)` with a host's messages, and once
    without messages when the host is connected. `gone(host, epoch, reason, heard_at)` when a host's connection has
    ended; `heard_at` is the time of its last message in monotonic seconds.
    """

    def __init__(
        self, address: tuple[str, int], key: Callable[[], bytes], certificate: Certificate, timeout: float, *,
        hello: Callable[[Mapping[str, Any], str, Callable[[Admission], None]], None],
        take: Callable[[str, int, Items], None], gone: Callable[[str, int, str, float], None],
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`key()` is called for each request; it may read a file and raise WrongKey. `facts()` returns the head's
        versions and digests for a host that checks before it joins; it may block."""
        self._address, self._key, self._certificate, self._timeout = address, key, certificate, timeout
        self._hello, self._take, self._gone, self._facts = hello, take, gone, facts
        self._pipes: dict[str, tuple[int, _Pipe]] = {}
        self._folders = FolderSender()
        self._thread = LoopThread("hosts")
        self._server: asyncio.Server | None = None
        self._refused_count, self._last_warning = 0, float("-inf")

    def start(self) -> Future[int]:
        """Begin to listen, and retry while an earlier coordinator has the port. The future's result is the port."""
        return asyncio.run_coroutine_threadsafe(self._listen(), self._thread.loop)

    async def _listen(self) -> int:
        app = web.Application(middlewares=[self._admit])
        app.add_routes([
            web.get("/join", self._join), web.post("/check", self._answer_check),
            web.post("/folders", self._answer_folder), *self._folders.routes(),
        ])
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=HELLO_SECONDS)
        await self._runner.setup()
        assert self._runner.server is not None
        pauses = Backoff(*REDIAL_SECONDS)
        while True:
            try:
                self._server = await asyncio.get_running_loop().create_server(
                    self._runner.server, *self._address, ssl=self._certificate.context,
                    ssl_handshake_timeout=HELLO_SECONDS,
                )
            except OSError as e:
                _log.error("can't listen for hosts at %s:%d: %s", *self._address, e)
                await asyncio.sleep(pauses.next(0.0))
            else:
                port: int = self._server.sockets[0].getsockname()[1]
                return port

    def send(self, host: str, to: str, message: Any) -> None:
        """Send a message to a host's process, or drop it if the host is not connected. Any thread may call this."""
        def put() -> None:
            if host in self._pipes:
                _, pipe = self._pipes[host]
                pipe.put(to, message)

        self._thread.call(put)

    def last_heard(self) -> dict[str, float]:
        """Return when each connected host last sent a message, in monotonic seconds. Any thread may call this."""
        return {host: pipe.heard_at for host, (_, pipe) in self._pipes.copy().items()}

    def hang_up(self, host: str, epoch: int) -> None:
        """End the connection of a host if it was admitted with this epoch. Any thread may call this."""
        def end() -> None:
            current_epoch, pipe = self._pipes.get(host, (None, None))
            if pipe is not None and current_epoch == epoch:
                pipe.close()

        self._thread.call(end)

    def stop(self) -> None:
        """Stop listening, and end all connections. Returns at once."""
        def close() -> None:
            if self._server is not None and self._runner.server is not None:
                self._server.close()
                for connection in self._runner.server.connections:
                    if connection.transport is not None:
                        connection.transport.abort()

        self._thread.call(close)
        self._thread.stop()

    # --- requests ---------------------------------------------------------------------------------------------------
    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Pass a request to `handler` if it has the key's token. Raises HTTPUnauthorized, HTTPServiceUnavailable."""
        try:
            token = bearer(await asyncio.to_thread(self._key), self._certificate.digest)
        except WrongKey as e:
            self._count_refusal(request, e.message)
            raise web.HTTPServiceUnavailable from e
        shown = request.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode(errors="surrogateescape"), token.encode()):
            name = request.headers.get(NAME_HEADER, "")[:64]
            other_key = (f"it has another key, and calls itself {name!r}: give that host the head's (hosts.key_file, "
                         "or TRINITY_ES_KEY)")
            self._count_refusal(request, other_key if shown else "it has no key")
            raise web.HTTPUnauthorized
        return await handler(request)

    async def _ask_admission(self, offer: Mapping[str, Any], request: web.Request) -> Admission:
        """Ask the coordinator whether it admits a host. Raises HTTPServiceUnavailable while it can't write the log."""
        decision: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()

        def decide(answer: Admission) -> None:
            if not decision.done():  # otherwise the wait for it is over
                decision.set_result(answer)

        self._hello(offer, request.remote or "", lambda answer: self._thread.call(lambda: decide(answer)))
        try:
            return await asyncio.wait_for(decision, self._timeout)
        except TimeoutError as e:
            raise web.HTTPServiceUnavailable from e

    async def _answer_check(self, request: web.Request) -> web.Response:
        """Answer a host that checks before it joins: whether it would be refused, and the head's `facts`."""
        admission = await self._ask_admission({**await request.json(), "check": True}, request)
        return web.json_response(
            {"would_refuse": admission.refused, "facts": dict(await asyncio.to_thread(self._facts))})

    async def _answer_folder(self, request: web.Request) -> web.Response:
        """Answer a host's request for a folder: with a list of its files, or with the reason of a refusal."""
        body = await request.json()
        admission = await self._ask_admission({"fetch": body.get("fetch"), "build": body.get("build")}, request)
        if admission.refused:
            return web.json_response({"refused": admission.refused, "for_good": admission.for_good})
        return await self._folders.listing_response(Path(admission.folder))

    async def _join(self, request: web.Request) -> web.WebSocketResponse:
        """Admit a host or refuse it, and keep the connection to an admitted one until it ends."""
        connection = request.get_extra_info("socket")  # taken now: later asyncio has none if it has closed
        ws = web.WebSocketResponse(max_msg_size=MAX_FRAME, compress=False, timeout=HELLO_SECONDS)
        await ws.prepare(request)
        with suppress(OSError, web.HTTPServiceUnavailable):  # also a TimeoutError, if it sends nothing
            offer = await _first_message(ws, HELLO_SECONDS)
            admission = await self._ask_admission(offer, request)
            if admission.refused:
                _log.warning("host %s is refused: %s", offer.get("name"), admission.refused)
                await ws.send_json({"refused": admission.refused, "for_good": admission.for_good})
            else:
                await self._serve_host(ws, connection, str(offer["name"]), admission)
        return ws

    async def _serve_host(self, ws: web.WebSocketResponse, connection: Any, host: str, admission: Admission) -> None:
        """Serve the connection of an admitted host until it ends. It replaces an earlier connection of the host."""
        epoch = admission.epoch
        pipe = _Pipe(ws, connection, lambda items: self._take(host, epoch, items), self._timeout)
        earlier_epoch, earlier_pipe = self._pipes.get(host, (0, None))
        if earlier_epoch > epoch:  # the host has a newer epoch already
            return
        self._pipes[host] = epoch, pipe
        if earlier_pipe is not None:
            earlier_pipe.close()
        try:
            await ws.send_json({"epoch": epoch, "coordinator_epoch": admission.coordinator_epoch})
            self._take(host, epoch, [])  # it is connected
            why = await pipe.run()
        except OSError as e:
            why = f"it can't be reached: {e}"
        current_epoch, current_pipe = self._pipes.get(host, (None, None))
        if current_pipe is pipe:
            del self._pipes[host]
        if current_epoch != epoch or current_pipe is pipe:  # otherwise another connection of this epoch replaced it
            self._gone(host, epoch, why, pipe.heard_at)

    def _count_refusal(self, request: web.Request, reason: str) -> None:
        """Count a refused request, and log it unless another one was logged in the last WARN_SECONDS."""
        self._refused_count += 1
        if time.monotonic() - self._last_warning >= WARN_SECONDS:
            self._last_warning = time.monotonic()
            _log.warning("refused a request from %s: %s (%d so far)", request.remote, reason, self._refused_count)


class HostEnd:
    """The host's end: finds the head, connects, and repeats both whenever the connection ends.

    The callables run in its thread: `up(epoch, coordinator_epoch)` when the head has admitted this host, `take(items)`
    with the head's messages, `down(reason)` after each connection and each failed attempt, and `refused(reason)` when
    the head refuses this host for good; then it stops trying.
    """

    def __init__(
        self, hello: Mapping[str, Any], dialer: HeadDialer, *, up: Callable[[int, int], None],
        take: Callable[[Items], None], down: Callable[[str], None], refused: Callable[[str], None],
    ) -> None:
        self._hello, self._dialer = hello, dialer
        self._up, self._take, self._down, self._refused = up, take, down, refused
        self._pipe: _Pipe | None = None
        self._thread = LoopThread("head")

    def start(self) -> None:
        self._thread.begin(self._run())

    def send(self, name: str, message: Any) -> None:
        """Send a message of process `name` to the head, or drop it without a connection. Any thread may call this."""
        def put() -> None:
            if self._pipe is not None:
                self._pipe.put(name, message)

        self._thread.call(put)

    def stop(self) -> None:
        self._thread.stop()

    async def _run(self) -> None:
        """Connect again and again, until the head refuses this host for good."""
        pauses = Backoff(*REDIAL_SECONDS)
        while True:
            try:
                why = await self._serve_connection(pauses)
            except Refused as e:
                why, for_good = e.args
                if for_good:
                    self._refused(why)
                    return
            except Exception as e:  # also of `find`: a database that does not answer
                why = str(e) or "the head did not answer in time"
            self._pipe = None
            self._down(why)
            await asyncio.sleep(pauses.next(0.5))

    async def _serve_connection(self, pauses: Backoff) -> str:
        """Connect to the head, serve the connection until it ends, and return the reason. Raises Refused, OSError."""
        async with self._dialer.session() as session, session.ws_connect("/join", max_msg_size=MAX_FRAME) as ws:
            connection = ws.get_extra_info("socket")
            await ws.send_json(self._hello)
            answer = raise_refusal(await _first_message(ws, HELLO_SECONDS + self._dialer.timeout))
            self._pipe = _Pipe(ws, connection, self._take, self._dialer.timeout)
            pauses.reset()
            self._up(int(answer["epoch"]), int(answer["coordinator_epoch"]))
            return await self._pipe.run()


async def _first_message(ws: web.WebSocketResponse | ClientWebSocketResponse, seconds: float) -> dict[str, Any]:
    """Return the first message of the other side. Raises ConnectionError, TimeoutError."""
    message = await ws.receive(seconds)
    if message.type is not WSMsgType.TEXT:
        raise ConnectionError("the other side closed the connection")
    content: dict[str, Any] = json.loads(message.data)
    return content

"""The two ends of the connection between a host and the head, each an event loop in a thread of its own.

Nothing here blocks its actor: what is to be sent is put into a queue, what comes is handed to a callable, which the
actor makes one of `post`. What was under way when a connection broke is lost: runners and coordinator say again what
was not acknowledged, as they do where either of them was started anew.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_es.actors.config.hosts import HostsTlsConfig
from trinity_es.actors.hosts.folder_sender import FolderSender
from trinity_es.actors.hosts.head_dialer import HELLO_SECONDS, NO_TLS, HeadDialer, Keys
from trinity_es.actors.hosts.sealed_stream import Answer, NotOurs, Refused, SealedStream, accept
from trinity_es.actors.hosts.tls import begin_at_head
from trinity_es.actors.strangers import most_strangers
from trinity_es.events.errors import WrongKey
from trinity_es.events.store.database.retry import Backoff

__all__ = ["Admission", "HeadEnd", "HostEnd", "Items", "LoopThread"]

BEAT_SECONDS = 1.0
"""Interval between two frames, where there is nothing to say."""
REDIAL_SECONDS = 0.2, 5.0
"""Pause before the head is looked for again, or listens again: the first, and the longest."""
MAX_WAITING = 20_000
"""Maximum number of messages that wait for a host which takes none; then its connection is ended."""
FRAME_MESSAGES = 32
"""Maximum number of messages in a frame: each is some 256 KiB at most."""
SILENCE = 1 / 3, 3.0
"""A connection on which nothing was heard for this share of the timeout, or so many seconds where that is more, is made
anew: a link that is back is of use at once, where TCP waits as long again as the link was away."""
KEY_SECONDS = 2.0
"""Interval between two looks at whether the key of a connection was taken away."""
WARN_SECONDS = 10.0
"""Interval between two warnings of strangers."""
NO_ROOM = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM
"""What accept() fails with where the process, or the machine, has no room for a connection."""
_log = logging.getLogger(__name__)

Items = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Admission:
    """What the head says to a host: its epoch there and the coordinator's, or why it is not taken."""

    epoch: int = 0
    coordinator_epoch: int = 0
    refused: str = ""
    for_good: bool = False
    folder: str = ""
    """It does not join: it gets the files of this folder of the head's."""


class _Pipe:
    """One connection at work: a queue out, a beat, and who hears what comes."""

    def __init__(
        self, stream: SealedStream, take: Callable[[Items], None], timeout: float, key: bytes, keys: Keys
    ) -> None:
        """`key`: that of the connection, which ends when it is none of `keys` any more."""
        self.stream, self._take = stream, take
        self._timeout = min(timeout, max(SILENCE[0] * timeout, SILENCE[1]))
        self._key, self._keys = key, keys
        self._out: deque[tuple[str, Any]] = deque()
        self._wake, self._full = asyncio.Event(), asyncio.Event()
        self.heard = time.monotonic()
        """When something last came."""

    def put(self, items: Sequence[tuple[str, Any]]) -> None:
        """In the event loop: have these sent, in this order."""
        self._out.extend(items)
        self._wake.set()
        if len(self._out) > MAX_WAITING:
            self._full.set()

    async def run(self) -> str:
        """Work until the connection ends; returns why."""
        tasks = [asyncio.ensure_future(part()) for part in
                 (self._send, self._receive, self._watch, self._fill, self._keyed)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            self.stream.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self) -> str:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), BEAT_SECONDS)
            self._wake.clear()
            try:
                await self.stream.send(self._next())
                while self._out:
                    await self.stream.send(self._next())
            except (OSError, ValueError) as e:
                return f"it can't be sent to: {e}"

    def _next(self) -> Items:
        return [self._out.popleft() for _ in range(min(FRAME_MESSAGES, len(self._out)))]

    async def _receive(self) -> str:
        while True:
            try:
                items = await self.stream.receive(self._hears)
            except asyncio.IncompleteReadError:
                return "it ended the connection"
            except OSError as e:
                return f"the connection broke: {e}"
            except Exception as e:  # a frame of ours that can't be unpickled here
                return f"it says what is not understood here: {type(e).__name__}"
            self._hears()  # a frame without a payload, too
            if items:
                self._take(items)

    async def _fill(self) -> str:
        await self._full.wait()
        return f"it takes nothing: {len(self._out)} messages wait for it"

    async def _watch(self) -> str:
        while (silent := time.monotonic() - self.heard) < self._timeout:
            await asyncio.sleep(min(BEAT_SECONDS, self._timeout - silent))
        return f"nothing was heard of it for {self._timeout:.0f} s"

    def _hears(self) -> None:
        self.heard = time.monotonic()

    async def _keyed(self) -> str:
        while True:
            await asyncio.sleep(KEY_SECONDS)
            with suppress(WrongKey):
                if self._key not in await asyncio.to_thread(self._keys):
                    return "its key was taken away"


class LoopThread:
    """An event loop in a thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Have this done in the loop."""
        try:
            asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # it was closed
            work.close()

    def call(self, call: Callable[[], Any]) -> None:
        """Have this done in the loop, soon; nothing after its end."""
        with suppress(RuntimeError):  # it was closed
            self.loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Cancel all that goes on in the loop, and end it."""
        self.begin(self._end())

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.loop.stop()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()


class HeadEnd:
    """The head's end: listens, and has a connection to each host that was taken in.

    The callables are called in its thread: `hello(what the host says, its address, answer)`, which calls `answer` with
    an Admission once, from any thread; `take(host, epoch, items)`, first without any, when it is connected;
    `gone(host, epoch, why, when it was last heard, monotonic seconds)`.
    """

    def __init__(
        self, address: tuple[str, int], keys: Keys, timeout: float, *,
        hello: Callable[[Mapping[str, Any], str, Callable[[Admission], None]], None],
        take: Callable[[str, int, Items], None], gone: Callable[[str, int, str, float], None],
        tls: HostsTlsConfig = NO_TLS, facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`facts()`, which may block: what is told to a host that asks and does not join."""
        self._facts = facts
        self._address, self._keys, self._timeout, self._tls = address, keys, timeout, tls
        self._hello, self._take, self._gone = hello, take, gone
        self._pipes: dict[str, tuple[int, _Pipe]] = {}
        self._thread = LoopThread("hosts")
        self._server: asyncio.Server | None = None
        self._meetings: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Those who have not shown the key, the oldest first."""
        self._max_strangers = most_strangers()
        self._thread.loop.set_exception_handler(self._failed)
        self._folders = FolderSender()
        self._refused, self._warned, self._full_warned = 0, float("-inf"), float("-inf")

    def start(self) -> Future[int]:
        """Begin to listen, again and again until it can: a port may still be a predecessor's. Gives the port."""
        return asyncio.run_coroutine_threadsafe(self._listen(), self._thread.loop)

    async def _listen(self) -> int:
        pauses = Backoff(*REDIAL_SECONDS)
        while True:
            try:
                self._server = await asyncio.start_server(self._begin, *self._address, limit=1 << 20)
            except OSError as e:
                _log.error("can't listen for hosts at %s:%d: %s", *self._address, e)
                await asyncio.sleep(pauses.next(0.0))
            else:
                port: int = self._server.sockets[0].getsockname()[1]
                return port

    def send(self, host: str, to: str, message: Any) -> None:
        """Send to a host; from any thread. Dropped where it has no connection now."""
        def put() -> None:
            found = self._pipes.get(host)
            if found is not None:
                found[1].put([(to, message)])

        self._thread.call(put)

    def heard(self) -> dict[str, float]:
        """Return when each host that has a connection was last heard, monotonic seconds; from any thread."""
        return {host: pipe.heard for host, (_, pipe) in self._pipes.copy().items()}

    def hang_up(self, host: str, epoch: int) -> None:
        """End the connection to this epoch of a host; from any thread."""
        def end() -> None:
            found = self._pipes.get(host)
            if found is not None and found[0] == epoch:
                found[1].stream.close()

        self._thread.call(end)

    def stop(self) -> None:
        """Hear nobody any more."""
        def close() -> None:
            if self._server is not None:
                self._server.close()

        self._thread.call(close)
        self._thread.stop()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of ours: asyncio's own of Python 3.11 complains aloud where it is cancelled.
        task = asyncio.ensure_future(self._met(reader, writer))
        self._meetings.add(task)
        task.add_done_callback(self._meetings.discard)
        self._strangers[writer] = None
        if len(self._strangers) > self._max_strangers:  # one of us says who it is before it is old
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            self._warn(oldest, "too many connections that don't show the key")
            oldest.transport.abort()

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said, answer = await asyncio.wait_for(self._hear(reader, writer), HELLO_SECONDS)
        except (NotOurs, OSError, EOFError, TimeoutError, WrongKey) as e:
            if not isinstance(e, asyncio.IncompleteReadError) or e.partial:  # else a probe of a launcher's
                self._warn(writer, str(e) or "it said nothing in time")
            writer.transport.abort()
            return
        finally:
            self._strangers.pop(writer, None)
        asked: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
        self._hello(said, _address_of(writer), lambda found: self._thread.call(lambda: _settle(asked, found)))
        try:
            admission = await asyncio.wait_for(asked, self._timeout)
            if said.get("check"):
                known = await asyncio.to_thread(self._facts)
                with suppress(OSError):
                    await answer.take(refused=admission.refused, facts=dict(known))
                    answer.stream().close()
                return
            if admission.refused:
                _log.warning("host %s is not taken in: %s", said.get("name"), admission.refused)
                with suppress(OSError):
                    await answer.refuse(admission.refused, for_good=admission.for_good)
                return
        except TimeoutError:  # the log can't be written now
            writer.transport.abort()
            return
        if admission.folder:
            await self._send_folder(str(said.get("name")), answer, Path(admission.folder))
            return
        host, epoch = str(said["name"]), admission.epoch
        pipe = _Pipe(answer.stream(), lambda items: self._take(host, epoch, items), self._timeout, answer.key,
                     self._keys)
        before = self._pipes.get(host)
        if before is not None and before[0] > epoch:  # this epoch was over before it was told so
            pipe.stream.close()
            return
        self._pipes[host] = epoch, pipe
        if before is not None:
            before[1].stream.close()
        try:
            await answer.take(epoch=epoch, coordinator_epoch=admission.coordinator_epoch)
            self._take(host, epoch, [])  # it is connected
            why = await pipe.run()
        except OSError as e:
            why = f"it can't be answered: {e}"
        except Exception as e:  # a message that can't be pickled
            why = f"what it is sent or says can't be dealt with: {type(e).__name__}: {e}"
            _log.exception("the connection to host %s #%d is ended", host, epoch)
        pipe.stream.close()
        now = self._pipes.get(host)
        if now == (epoch, pipe):
            del self._pipes[host]
        if now is None or now[0] != epoch or now[1] is pipe:  # else another connection of this epoch took its place
            self._gone(host, epoch, why, pipe.heard)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Mapping[str, Any], Any]:
        await begin_at_head(reader, writer, self._tls)
        return await accept(reader, writer, await asyncio.to_thread(self._keys))

    async def _send_folder(self, host: str, answer: Answer, folder: Path) -> None:
        """Send a folder to a host, over this connection of its own."""
        try:
            await answer.take()
            await self._folders.send(answer.stream(), folder)
        except Exception as e:  # it comes again, and says why to its people
            _log.warning("host %s did not get all of %s: %s", host, folder, str(e) or type(e).__name__)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say now and then that no file is left to accept a connection with; asyncio says it for each that waits."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in NO_ROOM):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._full_warned >= WARN_SECONDS:
            self._full_warned = time.monotonic()
            _log.error("can't take in hosts now: %s", error.strerror)

    def _warn(self, writer: asyncio.StreamWriter, why: str) -> None:
        self._refused += 1
        if time.monotonic() - self._warned >= WARN_SECONDS:
            self._warned = time.monotonic()
            _log.warning("refused who wanted to join from %s: %s (%d refused so far)",
                         _address_of(writer), why, self._refused)


class HostEnd:
    """The host's end: looks for the head, connects, and does so again whenever the connection ends.

    The callables are called in its thread: `up(epoch, coordinator epoch)`; `take(items)`; `down(why)`, also for each
    try that failed; `refused(why)`: the head does not want this host any more, and nothing is tried again.
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
        """Begin to look for the head."""
        self._thread.begin(self._run())

    def send(self, name: str, message: Any) -> None:
        """Send to the head, from the process of this name; from any thread. Dropped where there is no connection."""
        def put() -> None:
            if self._pipe is not None:
                self._pipe.put([(name, message)])

        self._thread.call(put)

    def stop(self) -> None:
        """Look for nobody any more."""
        self._thread.stop()

    async def _run(self) -> None:
        pauses = Backoff(*REDIAL_SECONDS)
        while True:
            try:
                why = await self._once(pauses)
            except Refused as e:
                why, for_good = e.args
                if for_good:
                    self._refused(why)
                    return
            except (NotOurs, OSError, EOFError, TimeoutError) as e:
                why = str(e) or "the head did not answer in time"
            except Exception as e:  # of `find`: a database that does not answer
                why = str(e)
            self._pipe = None
            self._down(why)
            await asyncio.sleep(pauses.next(0.5))

    async def _once(self, pauses: Backoff) -> str:
        said, stream, key = await self._dialer.connect(self._hello)
        self._pipe = _Pipe(stream, self._take, self._dialer.timeout, key, self._dialer.keys)
        pauses.reset()
        self._up(int(said["epoch"]), int(said["coordinator_epoch"]))
        return await self._pipe.run()


def _settle(asked: asyncio.Future[Admission], found: Admission) -> None:
    if not asked.done():
        asked.set_result(found)


def _address_of(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if peer else "a peer that is gone"

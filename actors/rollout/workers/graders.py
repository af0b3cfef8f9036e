"""Functions that judge answers, each call in a process of its own, which can be killed.

A grader is forked from a warm template (`workers/templates.py`) that has imported the function's module, for one call:
what it does to its process, its memory, its signals or its globals is gone with it, and no call finds what another one
left. Where it does not end in time, ends its process, takes more memory than it may or raises, that is a GraderError:
nothing is known of the answer then, so its run fails, with kind `grader`, and is no zero.

It shares the runner's machine, user and network: this holds in what breaks, not who attacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import orjson
import psutil

from trinity_es.actors.rollout.workers.protocol import LENGTH
from trinity_es.actors.rollout.workers.templates import EXIT_SECONDS, Child, Templates, ended
from trinity_es.events.errors import GraderError, StartupError, error_from_dict

__all__ = ["GRADER_BYTES", "GRADER_SECONDS", "Graders"]

GRADER_SECONDS = 10.0
"""How long a call may take, where nobody says otherwise."""
GRADER_BYTES = 2 * 1024**3
"""Maximum memory of a grader, in bytes, where nobody says otherwise."""
ANSWER_BYTES = 4 * 1024**2
"""Maximum size of what a grader gives, in bytes."""
REWARDED = "trinity_es.workflows.rewards:rewarded"
"""What calls a task's reward, whose name errors tell."""
LOOK_SECONDS = 0.03
"""Interval between two looks at a grader's memory. It is not limited beforehand: libraries take a MemoryError for an
answer that they can't read, which then would be wrong."""


class Graders:
    """Graders of one runner, as many at a time as the machine has cores. Call all of it on the loop of `templates`."""

    def __init__(self, templates: Templates) -> None:
        self.templates = templates
        self._room = asyncio.Semaphore(max(2, os.cpu_count() or 1))

    @classmethod
    @contextlib.asynccontextmanager
    async def alone(cls) -> AsyncIterator[Graders]:
        """Give graders with templates of their own, for as long as the context lasts."""
        templates = Templates("")
        try:
            yield cls(templates)
        finally:
            await templates.close()

    async def grade(
        self, function: str, call: bytes, *, imports: str = "", timeout: float = GRADER_SECONDS,
        memory: int = GRADER_BYTES,
    ) -> Any:
        """Return what a function gives, called in a process of its own.

        `function` is its "module:name", `call` the JSON of a list of its arguments and a dict of named ones. The
        process is forked from one that has imported the module of `imports`, else the function's.
        `timeout` is in seconds from when the process is there, `memory` in bytes. What it gives is plain JSON.

        Raises GraderError; what it raises itself where that is a TrinityError; UnknownWorkflow where its module can't
        be imported; StartupError where no process could be started.
        """
        args, kwargs = orjson.loads(call)
        asked = orjson.dumps({"function": function, "args": args, "kwargs": kwargs})
        name = str(args[0]["reward_fn"]) if function == REWARDED else function
        async with self._room:
            child = Child()
            ours, theirs = socket.socketpair()
            writer: asyncio.StreamWriter | None = None
            try:
                with theirs:
                    path = f"{imports}:__name__" if imports and ":" not in imports else imports or function
                    await self.templates.fork(path, child, theirs, "grade")
                reader, writer = await asyncio.open_connection(sock=ours)
                writer.write(LENGTH.pack(len(asked)) + asked)
                said = await _answer(name, child, reader, timeout, memory)
            finally:
                _kill(child)
                if writer is not None:
                    writer.transport.abort()
                else:
                    ours.close()
        if "error" in said:
            raise error_from_dict(said["error"])
        if "raised" in said:
            raise GraderError(f"the grader {name} raised {said['raised']}")
        return said["value"]


async def _answer(
    name: str, child: Child, reader: asyncio.StreamReader, timeout: float, memory: int
) -> dict[str, Any]:
    clock = asyncio.get_running_loop().time
    until = clock() + timeout
    reading = asyncio.create_task(_read(reader))
    either: set[asyncio.Future[Any]] = {reading, child.gone}
    try:
        while True:
            left = until - clock()
            await asyncio.wait(either, timeout=max(0.0, min(left, LOOK_SECONDS)), return_when=asyncio.FIRST_COMPLETED)
            if reading.done() or child.gone.done():
                break
            if left <= 0:
                raise GraderError(f"the grader {name} did not end within {timeout:g} s")
            if (taken := _memory(child)) > memory:
                raise GraderError(f"the grader {name} took {taken >> 20:,} MiB of memory: {memory >> 20:,} are the "
                                  "most")
        await asyncio.wait({reading}, timeout=EXIT_SECONDS)  # what it said last may still be in the socket
        if reading.done() and not reading.exception():
            said: dict[str, Any] = orjson.loads(reading.result())
            return said
    except ValueError:
        raise GraderError(f"the grader {name} wrote into its socket to the runner") from None
    finally:
        reading.cancel()
    await asyncio.wait({child.gone}, timeout=EXIT_SECONDS)
    if not child.gone.done():
        raise GraderError(f"the grader {name} closed its socket to the runner")
    status = child.gone.result()
    if status is None:
        raise StartupError("a grader was ended with the template that it was forked from")
    raise GraderError(f"the grader {name} {ended(status)}")


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > ANSWER_BYTES:
        raise EOFError
    return await reader.readexactly(length)


def _memory(child: Child) -> int:
    """Return how many bytes of memory it has, with those that it shares with its template; 0 where it has ended."""
    pid = child.pid
    try:
        return 0 if pid is None else int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _kill(child: Child) -> None:
    """End a grader and what it started, also where it ended itself and that is left."""
    if not child.forked.done() or child.forked.exception() is not None:
        return  # one that comes yet ends when it finds nobody
    for kill, pid in ((os.kill, child.pid), (os.killpg, child.forked.result())):
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

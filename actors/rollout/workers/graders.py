"""Grader processes: each call of a reward function runs in a process of its own, which can be killed.

A grader is forked for one call from a fork server (`workers/fork_servers.py`) that has imported the function's module,
so calls do not share memory, signals or globals. If a call exceeds its time or memory, ends its process or raises, that
is a GraderError. The answer's reward is then unknown, so its run fails with kind `grader` and does not get a zero.

A grader has the runner's machine, user and network, so it protects against faults, not against attacks.
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

from trinity_es.actors.rollout.workers.fork_servers import EXIT_SECONDS, Child, Templates, describe_exit
from trinity_es.actors.rollout.workers.protocol import LENGTH
from trinity_es.events.errors import GraderError, StartupError, error_from_dict

__all__ = ["GRADER_BYTES", "GRADER_SECONDS", "Graders"]

GRADER_SECONDS = 10.0
GRADER_BYTES = 2 * 1024**3
ANSWER_BYTES = 4 * 1024**2
REWARD_CALLER = "trinity_es.workflows.rewards:rewarded"
"""Function that calls a task's reward. Errors name the reward instead of this function."""
CHECK_SECONDS = 0.03
"""Interval between checks of a grader's memory. An rlimit won't do: libraries take a MemoryError for a wrong answer."""


class Graders:
    """Graders of one runner, at most one per core of the machine, used on the event loop of `templates`."""

    def __init__(self, templates: Templates) -> None:
        self.templates = templates
        self._slots = asyncio.Semaphore(max(2, os.cpu_count() or 1))

    @classmethod
    @contextlib.asynccontextmanager
    async def alone(cls) -> AsyncIterator[Graders]:
        """Make Graders with template processes of their own, which end with this context."""
        templates = Templates("")
        try:
            yield cls(templates)
        finally:
            await templates.close()

    async def grade(
        self, function: str, call: bytes, *, imports: str = "", timeout: float = GRADER_SECONDS,
        memory: int = GRADER_BYTES,
    ) -> Any:
        """Call a function in a process of its own and return its result, which is plain JSON.

        `function`: its "module:name"; `call`: JSON of its list of arguments and dict of keyword arguments; `imports`:
        module that the process has imported before, by default the function's; `timeout`: seconds from the process's
        start; `memory`: limit in bytes.

        Raises GraderError, or the function's own TrinityError; UnknownWorkflow if its module can't be imported;
        StartupError if no process could be started.
        """
        args, kwargs = orjson.loads(call)
        request = orjson.dumps({"function": function, "args": args, "kwargs": kwargs})
        name = str(args[0]["reward_fn"]) if function == REWARD_CALLER else function
        async with self._slots:
            child = Child()
            own_end, grader_end = socket.socketpair()
            writer: asyncio.StreamWriter | None = None
            try:
                with grader_end:
                    path = f"{imports}:__name__" if imports and ":" not in imports else imports or function
                    await self.templates.fork(path, child, grader_end, "grade")
                reader, writer = await asyncio.open_connection(sock=own_end)
                writer.write(LENGTH.pack(len(request)) + request)
                answer = await _answer(name, child, reader, timeout, memory)
            finally:
                _kill(child)
                if writer is not None:
                    writer.transport.abort()
                else:
                    own_end.close()
        if "error" in answer:
            raise error_from_dict(answer["error"])
        if "raised" in answer:
            raise GraderError(f"the grader {name} raised {answer['raised']}")
        return answer["value"]


async def _answer(name: str, child: Child, reader: asyncio.StreamReader, timeout: float, memory: int) -> dict[str, Any]:
    """Return a grader's answer. Raises GraderError if it takes too much time or memory, or ends without an answer."""
    clock = asyncio.get_running_loop().time
    until = clock() + timeout
    reading = asyncio.create_task(_read_answer(reader))
    futures: set[asyncio.Future[Any]] = {reading, child.exit_status}
    try:
        while True:
            seconds_left = until - clock()
            wait_seconds = max(0.0, min(seconds_left, CHECK_SECONDS))
            await asyncio.wait(futures, timeout=wait_seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() or child.exit_status.done():
                break
            if seconds_left <= 0:
                raise GraderError(f"the grader {name} did not end within {timeout:g} s: raise its timeout, or fix it")
            used_memory = _memory_bytes(child)
            if used_memory > memory:
                raise GraderError(f"the grader {name} took {used_memory >> 20:,} MiB of memory: the limit is "
                                  f"{memory >> 20:,} MiB. Raise its memory, or let it use less")
        await asyncio.wait({reading}, timeout=EXIT_SECONDS)  # its answer may still be in the socket
        if reading.done() and not reading.exception():
            answer: dict[str, Any] = orjson.loads(reading.result())
            return answer
    except ValueError:
        raise GraderError(f"the grader {name} wrote to its socket to the runner: use no file but your own") from None
    finally:
        reading.cancel()
    await asyncio.wait({child.exit_status}, timeout=EXIT_SECONDS)
    if not child.exit_status.done():
        raise GraderError(f"the grader {name} closed its socket to the runner: close only files of your own")
    status = child.exit_status.result()
    if status is None:
        raise StartupError("a grader ended because the process that forked it ended")
    raise GraderError(f"the grader {name} {describe_exit(status)}")


async def _read_answer(reader: asyncio.StreamReader) -> bytes:
    """Return the grader's only message. Raises EOFError if it is cut off or too long."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > ANSWER_BYTES:
        raise EOFError
    return await reader.readexactly(length)


def _memory_bytes(child: Child) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    pid = child.pid
    try:
        return 0 if pid is None else int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _kill(child: Child) -> None:
    """Kill a grader and its process group, to which the function's child processes belong."""
    if not child.forked.done() or child.forked.exception() is not None:
        return  # if it is still starting, the closed socket ends it
    for kill, pid in ((os.kill, child.pid), (os.killpg, child.forked.result())):
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

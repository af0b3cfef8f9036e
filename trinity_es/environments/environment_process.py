"""Client of an environment's process, for the event loop of a runner.

A runner has one process for each environment and config. The first run starts it, and it ends with the runner
(see `verifiers_main.py`). If the process dies, or is killed because it stopped responding, its open requests fail at
once and the next run starts another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import os
import socket
import struct
import subprocess
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trinity_es.actors.server_addresses import no_proxy_variables
from trinity_es.actors.system_key import FILE_VARIABLE, KEY_VARIABLE
from trinity_es.environments.installs import Installed, uv
from trinity_es.events.errors import DataError, EnvironmentFailed

__all__ = ["EnvironmentServer", "environment_variables", "server_of"]

START_SECONDS = 300.0
"""Time limit for an environment's start: it may load a data set."""
END_SECONDS = 15.0
"""Time limit for a process to end after its socket was closed."""
SILENT_SECONDS = 30.0
"""Time limit for a process to confirm a cancelled run. Its loop may be blocked, for instance by an endless reward."""

_log = logging.getLogger(__name__)


class EnvironmentServer:
    """Process of one environment and config. It runs `program` and gets `config` as its first message."""

    def __init__(self, installed: Installed, program: Path, config: Mapping[str, Any]) -> None:
        self.name, self._python = installed.name, installed.python
        self._program, self._config = program, config
        self._requests: dict[int, asyncio.Future[Any]] = {}
        """{request number: future of its answer}; number 0 is the start."""
        self._unconfirmed: dict[int, asyncio.TimerHandle] = {}
        """{number of a cancelled request: timer that kills the process unless it confirms the cancellation}."""
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Process id of the child that plays the episodes."""
        self.has_ended = False

    async def start(self) -> None:
        """Start the process. Raises DataError if it can't play this config, EnvironmentFailed if it died."""
        own_end, process_end = socket.socketpair()
        with process_end:
            command = [str(self._python), "-I", str(self._program), "serve", str(process_end.fileno())]
            # Not in a thread: its output goes to the output of this process.
            self._process = subprocess.Popen(
                command, pass_fds=[process_end.fileno()], stdin=subprocess.DEVNULL,
                env=environment_variables(self._python),
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=own_end)
        started = self._requests[0] = asyncio.get_running_loop().create_future()
        # In its own context, since the task outlives the run that starts it.
        self._reader_task = asyncio.get_running_loop().create_task(self._read(reader), context=contextvars.Context())
        self._send(self._config)
        try:
            self.pid = (await asyncio.wait_for(started, START_SECONDS))["pid"]
        except EnvironmentFailed as e:
            if self.has_ended:
                raise
            raise DataError(f"environment {self.name} can't play this config: {e.message}") from e
        except TimeoutError:
            raise EnvironmentFailed(f"environment {self.name} was not ready after {START_SECONDS:.0f} s") from None
        finally:
            if not self.pid:
                self._end()

    async def ask(self, message: Mapping[str, Any]) -> Any:
        """Send a request and return its answer. Cancelling this call cancels the episode.

        Raises EnvironmentFailed if the process died, or (kind `workflow`) if its program raised an error.
        """
        number = next(self._numbers)
        answer = self._requests[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, **message})
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(EnvironmentFailed):
                self._send({"id": number, "cancel": True})
                timer = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._kill_unresponsive)
                self._unconfirmed[number] = timer
            raise
        finally:
            self._requests.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting. Raises EnvironmentFailed if the process has ended."""
        if self._writer is None or self.has_ended:
            raise self._ended_error()
        data = orjson.dumps(message)
        self._writer.write(struct.pack(">I", len(data)) + data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read answers and pass each to its request until the process ends; then fail open requests, and reap it."""
        try:
            while True:
                [size] = struct.unpack(">I", await reader.readexactly(4))
                message = orjson.loads(await reader.readexactly(size))
                if (timer := self._unconfirmed.pop(message["id"], None)) is not None:
                    timer.cancel()
                request = self._requests.get(message["id"])
                if request is None or request.done():
                    continue  # it was cancelled
                if "result" in message:
                    request.set_result(message["result"])
                else:
                    error = message["error"]
                    request.set_exception(
                        EnvironmentFailed(f"{error['type']}: {error['message']}", kind="workflow"))
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self.has_ended:
                _log.warning("the process of environment %s has ended: the next run starts another", self.name)
        except Exception:
            _log.exception("the process of environment %s sent a malformed message: the next run starts another",
                           self.name)
        finally:
            self._end()
        deadline = time.monotonic() + END_SECONDS
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)  # poll reaps the process, else it stays a zombie

    def _kill_unresponsive(self) -> None:
        _log.warning("the process of environment %s did not confirm for %.0f s that a run is over: it is ended, the "
                     "next run starts another", self.name, SILENT_SECONDS)
        self._end()

    def _end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            if self._writer is not None:
                self._writer.close()
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
        while self._unconfirmed:
            _, timer = self._unconfirmed.popitem()
            timer.cancel()
        for request in self._requests.values():
            if not request.done():
                request.set_exception(self._ended_error())

    def _ended_error(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"the process of environment {self.name} has ended")


def environment_variables(python: Path) -> dict[str, str]:
    """Return environment variables for a process of this Python, without this process's paths and the system's key."""
    removed_names = {KEY_VARIABLE, FILE_VARIABLE, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    variables = {name: value for name, value in os.environ.items() if name not in removed_names}
    folders = [str(python.parent), variables.get("PATH", os.defpath)]
    if uv_path := uv():  # verifiers starts programs with it
        folders.append(str(Path(uv_path).parent))
    path = os.pathsep.join(folders)
    return {**variables, **no_proxy_variables(variables), "PATH": path, "TOKENIZERS_PARALLELISM": "false"}


# --- the servers of a loop --------------------------------------------------------------------------------------------
_Key = tuple[str, bytes]
_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, asyncio.Task[EnvironmentServer]]]
_servers = weakref.WeakKeyDictionary()


def _has_failed_or_ended(start: asyncio.Task[EnvironmentServer]) -> bool:
    return start.done() and (start.cancelled() or start.exception() is not None or start.result().has_ended)


async def server_of(installed: Installed, program: Path, config: Mapping[str, Any]) -> EnvironmentServer:
    """Return this event loop's process for an environment and a config, and start one if none is alive.

    Raises the errors of `EnvironmentServer.start`; the next call tries again.
    """
    loop = asyncio.get_running_loop()
    servers = _servers.setdefault(loop, {})
    key = (str(installed.folder), orjson.dumps(config, option=orjson.OPT_SORT_KEYS))
    starting = servers.get(key)
    if starting is None or _has_failed_or_ended(starting):
        async def start() -> EnvironmentServer:
            server = EnvironmentServer(installed, program, config)
            await server.start()
            return server

        starting = servers[key] = loop.create_task(start(), context=contextvars.Context())
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio logs its error
    return await asyncio.shield(starting)  # other runs may wait for it


"""The process that an environment runs in, seen from the event loop that asks it.

One process for each environment and config, for all runs of a runner: started by the first, ended with the runner
(`verifiers_main.py` says how). When it dies, or hears nothing any more and is ended for that, whatever is asked of it
fails at once, and the next run starts another.
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

from trinity_es.actors.addresses import past_proxies
from trinity_es.actors.system_key import FILE_VARIABLE, KEY_VARIABLE
from trinity_es.environments.installed import Installed, uv
from trinity_es.events.errors import DataError, EnvironmentFailed

__all__ = ["EnvironmentServer", "environment_variables", "server_of"]

START_SECONDS = 300.0
"""How long an environment may take to start: it may load a data set."""
END_SECONDS = 15.0
"""How long an environment's process may take to end once it was closed."""
SILENT_SECONDS = 30.0
"""How long an environment's process may not take note that a run is over: its loop is held up, by a reward without end.
"""

_log = logging.getLogger(__name__)


class EnvironmentServer:
    """See the module. `config` is sent to the program first."""

    def __init__(self, installed: Installed, program: Path, config: Mapping[str, Any]) -> None:
        self.name, self._python, self._program, self._config = installed.name, installed.python, program, config
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._unheard: dict[int, asyncio.TimerHandle] = {}
        """Of what was asked to end, by its number: what happens when nothing is heard of it."""
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Of the process that plays."""
        self.ended = False

    async def start(self) -> None:
        """Start the process. Raises DataError where it can't play this config, EnvironmentFailed where it died."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [str(self._python), "-I", str(self._program), "serve", str(theirs.fileno())]
            # Here, not in a thread: what it prints goes where this process prints.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment_variables(self._python)
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        started = self._asked[0] = asyncio.get_running_loop().create_future()
        # In a context of its own: it is no part of the run that happens to be the first.
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), context=contextvars.Context())
        self._send(self._config)
        try:
            self.pid = (await asyncio.wait_for(started, START_SECONDS))["pid"]
        except EnvironmentFailed as e:
            if self.ended:
                raise
            raise DataError(f"environment {self.name} can't play this config: {e.message}") from e
        except TimeoutError:
            raise EnvironmentFailed(f"environment {self.name} was not ready after {START_SECONDS:.0f} s") from None
        finally:
            if not self.pid:
                self._end()

    async def ask(self, message: Mapping[str, Any]) -> Any:
        """Return the answer; where this is cancelled, so is what was asked for.

        Raises EnvironmentFailed: the process died, or (kind `workflow`) its program raised an error.
        """
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, **message})
            return await answer
        except asyncio.CancelledError:
            with contextlib.suppress(EnvironmentFailed):
                self._send({"id": number, "cancel": True})
                self._unheard[number] = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._silent)
            raise
        finally:
            self._asked.pop(number, None)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._writer is None or self.ended:
            raise self._gone()
        data = orjson.dumps(message)
        self._writer.write(struct.pack(">I", len(data)) + data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                [size] = struct.unpack(">I", await reader.readexactly(4))
                message = orjson.loads(await reader.readexactly(size))
                if (unheard := self._unheard.pop(message["id"], None)) is not None:
                    unheard.cancel()
                asked = self._asked.get(message["id"])
                if asked is None or asked.done():
                    continue  # it was cancelled
                if "result" in message:
                    asked.set_result(message["result"])
                else:
                    error = message["error"]
                    failed = EnvironmentFailed(f"{error['type']}: {error['message']}", kind="workflow")
                    asked.set_exception(failed)
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self.ended:
                _log.warning("the process of environment %s has ended: the next run starts another", self.name)
        except Exception:
            _log.exception("the process of environment %s can't be understood: the next run starts another", self.name)
        finally:
            self._end()
        until = time.monotonic() + END_SECONDS
        while self._process is not None and self._process.poll() is None and time.monotonic() < until:
            await asyncio.sleep(0.05)  # or it stays in the table of processes

    def _silent(self) -> None:
        _log.warning("the process of environment %s did not hear for %.0f s that a run is over: it is ended, the next "
                     "run starts another", self.name, SILENT_SECONDS)
        self._end()

    def _end(self) -> None:
        """Have it end, and tell those that wait for an answer."""
        if not self.ended:
            self.ended = True
            if self._writer is not None:
                self._writer.close()
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
        while self._unheard:
            self._unheard.popitem()[1].cancel()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(self._gone())

    def _gone(self) -> EnvironmentFailed:
        return EnvironmentFailed(f"the process of environment {self.name} has ended")


def environment_variables(python: Path) -> dict[str, str]:
    """Return the variables for a process of this Python: not those of ours, and no key to the system."""
    ours = {KEY_VARIABLE, FILE_VARIABLE, "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    tool = uv()  # verifiers starts programs by it
    path = [str(python.parent), kept.get("PATH", os.defpath), *([str(Path(tool).parent)] if tool else [])]
    return {**kept, **past_proxies(kept), "PATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}


# --- one for each environment and config ------------------------------------------------------------------------------
_Key = tuple[str, bytes]
_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, asyncio.Task[EnvironmentServer]]]
_servers = weakref.WeakKeyDictionary()


async def server_of(installed: Installed, program: Path, config: Mapping[str, Any]) -> EnvironmentServer:
    """Return the process of this loop's for an environment and a config, started where there is none that lives.

    Raises what its start raises; the next one who asks has it started again.
    """
    loop = asyncio.get_running_loop()
    mine = _servers.setdefault(loop, {})
    key = (str(installed.folder), orjson.dumps(config, option=orjson.OPT_SORT_KEYS))
    starting = mine.get(key)
    if starting is None or (starting.done() and (starting.cancelled() or starting.exception() or
                                                 starting.result().ended)):
        async def start() -> EnvironmentServer:
            server = EnvironmentServer(installed, program, config)
            await server.start()
            return server

        starting = mine[key] = loop.create_task(start(), context=contextvars.Context())
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
    return await asyncio.shield(starting)  # others wait for it, too


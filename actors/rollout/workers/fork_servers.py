"""The runner's side of template processes (`fork_server_main.py`), from which workers and graders are forked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from trinity_es.actors.rollout.workers.protocol import MOST, note
from trinity_es.actors.system_key import FILE_VARIABLE, KEY_VARIABLE
from trinity_es.events.errors import StartupError, UnknownWorkflow, WorkflowError

__all__ = ["START_SECONDS", "Child", "Templates", "describe_exit"]

START_SECONDS = 120.0
"""Maximum time for a process to become ready, or for the import of a workflow's module."""
FORK_SECONDS = 30.0
EXIT_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Child:
    """Process that a template forks for the runner: a worker, a grader or another template."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.forked: asyncio.Future[int] = loop.create_future()
        """Resolves to the pid; raises StartupError if the process could not be forked."""
        self.exit_status: asyncio.Future[int | None] = loop.create_future()
        """Resolves to the exit status when the process has ended; to None if it ended with its template."""
        self.forked.add_done_callback(lambda f: f.cancelled() or f.exception())

    @property
    def pid(self) -> int | None:
        """Process id; None before the fork, and after the process ended, when another process may have the id."""
        if self.exit_status.done() or not self.forked.done() or self.forked.exception() is not None:
            return None
        return self.forked.result()

    def note_end(self, status: int | None, why: str) -> None:
        """Resolve both futures, since the process ended with this exit status, or was not forked because of `why`."""
        if not self.forked.done():
            self.forked.set_exception(StartupError(f"a worker process could not be started: {why}"))
        if not self.exit_status.done():
            self.exit_status.set_result(status)


class _Template:
    """The runner's side of one template process; `end` is the runner's end of the socket to it."""

    def __init__(self, end: socket.socket, process: Child | subprocess.Popen[bytes]) -> None:
        self.end, self.process = end, process
        self.children: dict[int, Child] = {}
        self.last_number = 0
        self.fork_lock = asyncio.Lock()
        self.first_message: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        """Kind and reason: `ready`, `unsafe` or `refused`; `ended` if the process ended before it sent one of these."""
        self.is_alive = True
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end, self._read)

    async def fork(self, child: Child, child_end: socket.socket, order: str, *arguments: Any) -> None:
        """Have the template fork a child that gets this end of a socket and executes the order. Raises StartupError."""
        async with self.fork_lock:
            if not self.is_alive:
                raise StartupError("a worker process could not be started: the process that forks it ended")
            self.last_number += 1
            self.children[self.last_number] = child
            try:
                socket.send_fds(self.end, [note(order, self.last_number, *arguments)], [child_end.fileno()])
            except OSError as e:
                self.disconnect()
                raise StartupError(f"a worker process could not be started: {e}") from e
            done, _ = await asyncio.wait({child.forked}, timeout=FORK_SECONDS)
            if not done:
                self.close()
                raise StartupError(f"a worker process was not forked within {FORK_SECONDS:.0f} s: the process that "
                                   "forks it hangs, and is killed")
            child.forked.result()

    def close(self) -> None:
        """Kill the template process; the processes that it forked end with it."""
        self.disconnect()
        if isinstance(self.process, Child):
            if (pid := self.process.pid) is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, which was not reported yet
                    os.kill(pid, signal.SIGKILL)
        elif self.process.poll() is None:
            self.process.kill()

    def _read(self) -> None:
        """Read and handle one message of the template process. Called when its socket is readable."""
        try:
            data = self.end.recv(MOST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.disconnect()
            return
        kind, *rest = pickle.loads(data)
        if kind in ("forked", "failed", "ended"):
            number, value = rest  # value: pid, reason or exit status
            child = self.children[number]
            if kind == "forked":
                child.forked.set_result(value)
            else:
                del self.children[number]
                child.note_end(value if kind == "ended" else None, str(value))
        elif not self.first_message.done():
            self.first_message.set_result((kind, *rest, "")[:2])  # `ready` comes without a reason

    def disconnect(self) -> None:
        """Close the socket, which ends the template process, and mark its children as ended."""
        if not self.is_alive:
            return
        self.is_alive = False
        asyncio.get_running_loop().remove_reader(self.end)
        self.end.close()
        for child in self.children.values():
            child.note_end(None, "its template process ended")
        self.children.clear()
        if not self.first_message.done():
            self.first_message.set_result(("ended", ""))


class Templates:
    """Template processes of one runner, started on demand. Workflows log to `log_file`."""

    def __init__(self, log_file: str) -> None:
        self.log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None  # of the first template
        self._templates: dict[str, asyncio.Task[_Template | None]] = {}
        """Template by module; None if each worker imports the module itself. The first template has the key ""."""
        self._newest: _Template | None = None
        """Template that imported a module last. The next template is forked from it, so that they share memory."""

    async def prepare(self, workflow: str) -> bool:
        """Import a workflow's module in a template process. Return False if each worker must import it itself.

        Raises UnknownWorkflow if the import fails, WorkflowError if it hangs or ends the process, StartupError if there
        is no process for it.
        """
        return await self._template(workflow) is not None

    async def fork(self, workflow: str, child: Child, child_end: socket.socket, order: str = "work") -> bool:
        """Fork a worker (`grade`: a grader). Return False if it must import the module. Raises like `prepare`."""
        template = await self._template(workflow)
        await (template or await self._base()).fork(child, child_end, order)
        return template is not None

    def forget(self, workflow: str) -> None:
        """End the template of this workflow's module, which no worker will need. One with children stays."""
        task = self._templates.get(_module(workflow))
        template = task.result() if task is not None and task.done() and not task.exception() else None
        if template is not None and not template.children:
            del self._templates[_module(workflow)]
            template.close()

    async def close(self) -> None:
        """End all template processes; the processes that they forked end with them."""
        for task in self._templates.values():
            task.cancel()
        templates = [t.result() for t in self._templates.values() if t.done() and _is_usable(t)]
        for template in reversed(templates):  # children before their parents
            if template is not None and isinstance(template.process, Child):
                template.close()
                await asyncio.wait({template.process.exit_status}, timeout=EXIT_SECONDS)
        process = self._process
        if process is None:
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, EXIT_SECONDS)

    async def _template(self, workflow: str) -> _Template | None:
        return await self._cached(_module(workflow), lambda: self._fork_template(workflow))

    async def _base(self) -> _Template:
        """Return the first template, which has imported no workflow, and start it if needed."""
        template = await self._cached("", self._start_base)
        assert template is not None
        return template

    async def _cached(self, module: str, make: Callable[[], Coroutine[Any, Any, _Template | None]]) -> _Template | None:
        """Return a module's live template. If there is none, `make` it; concurrent calls share one."""
        task = self._templates.get(module)
        if task is None or (task.done() and not _is_usable(task)):
            task = self._templates[module] = asyncio.create_task(make())
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return await asyncio.shield(task)

    async def _fork_template(self, workflow: str) -> _Template | None:
        """Return a new template that has imported the workflow's module; None if the import makes forks unsafe."""
        parent = self._newest if self._newest is not None and self._newest.is_alive else await self._base()
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child = Child()
        template = _Template(own_end, child)
        try:
            with child_end:
                await parent.fork(child, child_end, "learn", workflow)
            state, why = await asyncio.wait_for(asyncio.shield(template.first_message), START_SECONDS)
            if state == "ready":
                self._newest = template
                return template
            if state == "unsafe":
                _log.warning(
                    "%s %s: each worker process imports it for itself, which takes longer", _module(workflow), why
                )
                return None
            if state == "refused":
                raise UnknownWorkflow(why)
            with contextlib.suppress(TimeoutError):
                status = await asyncio.wait_for(asyncio.shield(child.exit_status), EXIT_SECONDS)
                if status is not None:
                    raise WorkflowError(f"{workflow} can't be imported: the import {describe_exit(status)}")
            raise StartupError(f"{workflow} could not be imported: the process that was importing it ended")
        except TimeoutError:
            raise WorkflowError(f"the import of {workflow} took more than {START_SECONDS:.0f} s: do slow work when a "
                                "run needs it, not on import") from None
        finally:
            if self._newest is not template:
                template.close()

    async def _start_base(self) -> _Template:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        main = "trinity_es.actors.rollout.workers.fork_server_main"
        code = f"import sys; sys.path[:] = {sys.path!r}; from {main} import main; main()"
        arguments = [str(child_end.fileno()), str(os.getpid()), self.log_file]
        environment = {k: v for k, v in os.environ.items() if k not in (KEY_VARIABLE, FILE_VARIABLE)}
        try:
            # Not in a pool's thread, since PDEATHSIG is sent when the thread that started the process ends.
            process = self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code, *arguments], stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()], env=environment,
            )
        except OSError as e:
            own_end.close()
            raise StartupError(f"the process that forks the worker processes could not be started: {e}") from e
        finally:
            child_end.close()
        template = _Template(own_end, process)
        try:
            state, _ = await asyncio.wait_for(asyncio.shield(template.first_message), START_SECONDS)
        except TimeoutError:
            template.close()
            raise StartupError(
                f"the process that forks the worker processes was not ready after {START_SECONDS:.0f} s"
            ) from None
        if state != "ready":
            template.close()
            status = await asyncio.to_thread(process.wait)
            raise StartupError(f"the process that forks the worker processes did not start: it {describe_exit(status)}")
        return template


def _is_usable(task: asyncio.Task[Any]) -> bool:
    """Return True if a finished task's result still holds: a live template, or None for an unsafe module."""
    if task.cancelled() or task.exception() is not None:
        return False
    template = task.result()
    return template is None or template.is_alive


def _module(workflow: str) -> str:
    return workflow.partition(":")[0]


def describe_exit(status: int) -> str:
    """Return how a process ended, as the predicate of a sentence: "ended its process with exit status 1"."""
    if status >= 0:
        return f"ended its process with exit status {status}"
    hint = " (kill -9, or the machine was out of memory)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"

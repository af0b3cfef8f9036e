"""Event loop that a runner shares with the async workflows of its units (a unit: some runs of one task).

A workflow may do anything with its own tasks. It gets a WorkflowError if it cancels tasks of the runner, the engine or
another unit (`for task in asyncio.all_tasks(): task.cancel()`), stops the loop, or changes its executor, task factory
or exception handler. A context variable says whose code runs. `mark_as_runner` sets it for the runner, `unit_context`
for a workflow, and tasks, callbacks and timers inherit it. Code without either, such as a callback from a workflow's
thread, is refused the same.

Each unit has its own threads, so a workflow can't use up those of the runner or of another unit.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from trinity_es.events.errors import WorkflowError

if TYPE_CHECKING:
    from asyncio import SelectorEventLoop as _Loop
else:
    try:
        from uvloop import Loop as _Loop  # installed with vLLM, whose own server uses it
    except ImportError:
        from asyncio import SelectorEventLoop as _Loop

__all__ = ["UNIT", "EngineLoop", "Limits", "mark_as_runner", "unit_context"]

_RUNNER = object()
_OWNER: contextvars.ContextVar[Any] = contextvars.ContextVar("owner", default=None)
"""Owner of the running code: `_RUNNER`, a unit, or None if unknown."""
UNIT: contextvars.ContextVar[Any] = contextvars.ContextVar("unit", default=None)
"""Unit that the runner's code is working for."""

WORKFLOW_THREADS = 32
"""Maximum number of threads for one unit's calls of `run_in_executor(None, ...)`."""

_log = logging.getLogger(__name__)


def mark_as_runner() -> None:
    """Mark this context, and all that inherit from it, as the runner's own code."""
    _OWNER.set(_RUNNER)


def unit_context() -> contextvars.Context:
    """Return a copy of this context, marked as code of the current unit's workflow (unit: runs of one task)."""
    context = contextvars.copy_context()
    context.run(_OWNER.set, UNIT.get())
    return context


class _KeptTask(asyncio.Task[Any]):
    """Asyncio task that the runner created, for itself or for the unit (runs of one task) `owner`."""

    owner: Any = None

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task. Raises WorkflowError if the caller is a workflow that does not own the task."""
        if not self.done() and _OWNER.get() is not _RUNNER and (self.owner is None or _OWNER.get() != self.owner):
            name = getattr(self.get_coro(), "__qualname__", None) or self.get_name()
            raise WorkflowError(
                f"a workflow cancelled a task that is not its own ({name}): cancel only tasks that it made, not "
                "asyncio.all_tasks()"
            )
        return super().cancel(msg)


def _new_task(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
    """Return a new task, as the loop's task factory: a `_KeptTask` for the runner, an ordinary one for a workflow."""
    if _OWNER.get() is not _RUNNER:
        return asyncio.Task(coro, loop=loop, **more)
    task = _KeptTask(coro, loop=loop, **more)
    context = more.get("context")
    owner = None if context is None else context.get(_OWNER)
    task.owner = None if owner is _RUNNER else owner
    return task


def _runner_only(name: str) -> Any:
    """Return a method that calls the loop's method of this name, and raises WorkflowError if a workflow calls it."""

    def method(self: EngineLoop, *args: Any) -> Any:
        self._refuse(name)
        return getattr(_Loop, name)(self, *args)

    return method


class EngineLoop(_Loop):
    """Event loop of a runner, its engine and its workflows. `threads`: maximum for runner and engine together."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._executors: dict[Any, ThreadPoolExecutor] = {}  # by unit
        super().set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="runner"))
        super().set_task_factory(_new_task)

    def run(self) -> None:
        """Run the loop in this thread; return or raise only if the loop itself is broken."""
        while True:
            try:
                self.run_forever()
            except (SystemExit, KeyboardInterrupt) as e:  # from a workflow's callback or task
                _log.error("a workflow's callback raised %s: the runner goes on", type(e).__name__, exc_info=e)
            if self.is_closed():
                return

    def run_in_executor(  # type: ignore[override]  # without the types of its TypeVarTuple
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a function in a thread. Without `executor`, a workflow's function runs in the threads of its unit."""
        owner = _OWNER.get()
        if executor is None and owner is not _RUNNER:
            executor = self._executors.get(owner)
            if executor is None:
                executor = self._executors[owner] = ThreadPoolExecutor(WORKFLOW_THREADS, thread_name_prefix="workflow")
        return super().run_in_executor(executor, func, *args)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Look up a host name in the unit's threads, since uvloop has only few for all units together."""
        return await self.run_in_executor(None, partial(socket.getaddrinfo, host, port, **options))

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> Any:
        return await self.run_in_executor(None, socket.getnameinfo, sockaddr, flags)

    def forget(self, unit: Any) -> None:
        """Let the threads of a finished unit (runs of one task) end when their current calls return."""
        executor = self._executors.pop(unit, None)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        self._refuse("stop")

    close, set_default_executor, set_task_factory = map(
        _runner_only, ("close", "set_default_executor", "set_task_factory"))
    set_exception_handler, shutdown_asyncgens, shutdown_default_executor = map(
        _runner_only, ("set_exception_handler", "shutdown_asyncgens", "shutdown_default_executor"))

    def _refuse(self, method: str) -> None:
        """Raise WorkflowError unless the caller is the runner's own code."""
        if _OWNER.get() is not _RUNNER:
            raise WorkflowError(f"a workflow called {method}() of the event loop, which belongs to its runner: leave "
                                "it alone")

    def current_unit(self) -> Any:
        """Return the unit (runs of one task) whose main asyncio task runs now; None for other tasks. Thread-safe."""
        return getattr(asyncio.current_task(self), "owner", None)


class Limits:
    """Deadlines of the current runs, by unit (runs of one task). A run beyond its deadline ignores its timeout."""

    def __init__(self) -> None:
        self._deadlines: dict[int, tuple[Any, float]] = {}
        """Unit and deadline of each current run, by its number."""
        self._late_since: dict[Any, float] = {}
        self._number = 0

    def begin(self, deadline: float) -> int:
        """Add a run of the current unit, and return its number for `end`."""
        self._number += 1
        self._deadlines[self._number] = (UNIT.get(), deadline)
        return self._number

    def end(self, number: int) -> None:
        self._deadlines.pop(number, None)

    def overdue(self, now: float, patience: float) -> list[Any]:
        """Return the units that had a run beyond its deadline at every call in the last `patience` seconds."""
        late_units = {unit for unit, deadline in self._deadlines.values() if now > deadline and unit is not None}
        self._late_since = {unit: self._late_since.get(unit, now) for unit in late_units}
        return [unit for unit, since in self._late_since.items() if now - since >= patience]

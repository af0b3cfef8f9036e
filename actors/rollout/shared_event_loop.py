"""Event loop that a runner shares with the async workflows of its units.

A workflow may do anything with its own tasks. It gets a WorkflowError if it cancels tasks of the runner, the engine or
another unit (`for task in asyncio.all_tasks(): task.cancel()`), stops the loop, or changes its executor, task factory
or exception handler. A context variable says whose code runs: `as_runner` marks the runner's context, `unit_context`
makes a workflow's, and tasks, callbacks and timers inherit it. Code with neither mark, such as a callback from a
workflow's thread, is refused too.

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

__all__ = ["UNIT", "EngineLoop", "Limits", "as_runner", "unit_context"]

_RUNNER = object()
_OWNER: contextvars.ContextVar[Any] = contextvars.ContextVar("owner", default=None)
"""The owner of the running code: `_RUNNER`, a unit, or None if unknown."""
UNIT: contextvars.ContextVar[Any] = contextvars.ContextVar("unit", default=None)
"""The unit that the runner's code is working for."""

WORKFLOW_THREADS = 32
"""Maximum number of threads of one unit, in the loop's default executor."""

_log = logging.getLogger(__name__)


def as_runner() -> None:
    """Mark this context, and those that inherit from it, as the runner's."""
    _OWNER.set(_RUNNER)


def unit_context() -> contextvars.Context:
    """Return a copy of this context for the workflow of the current unit."""
    context = contextvars.copy_context()
    context.run(_OWNER.set, UNIT.get())
    return context


class _KeptTask(asyncio.Task[Any]):
    """A task that the runner made, for itself or for the unit `owner`."""

    owner: Any = None

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task. Raises WorkflowError in a workflow that is not the task's owner."""
        if not self.done() and _OWNER.get() is not _RUNNER and (self.owner is None or _OWNER.get() != self.owner):
            name = getattr(self.get_coro(), "__qualname__", None) or self.get_name()
            raise WorkflowError(
                f"a workflow cancelled a task that is not its own ({name}): cancel only tasks that it made, not "
                "asyncio.all_tasks()"
            )
        return super().cancel(msg)


def _new_task(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
    """Make a task, the loop's factory: an ordinary one in a workflow's code, else a `_KeptTask`."""
    if _OWNER.get() is not _RUNNER:
        return asyncio.Task(coro, loop=loop, **more)
    task = _KeptTask(coro, loop=loop, **more)
    context = more.get("context")
    owner = None if context is None else context.get(_OWNER)
    task.owner = None if owner is _RUNNER else owner
    return task


def _for_the_runner(name: str) -> Any:
    """Return the loop's method of this name with a WorkflowError if a workflow calls it."""

    def method(self: EngineLoop, *args: Any) -> Any:
        self._refuse(name)
        return getattr(_Loop, name)(self, *args)

    return method


class EngineLoop(_Loop):
    """The loop of a runner, its engine and its workflows. `threads`: maximum for the runner and the engine."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._executors: dict[Any, ThreadPoolExecutor] = {}  # by unit
        super().set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="runner"))
        super().set_task_factory(_new_task)

    def run(self) -> None:
        """Run for ever in this thread; returns or raises only if the loop itself is broken."""
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
        """Run a function in a thread: a workflow's in its unit's threads, unless it names an executor."""
        owner = _OWNER.get()
        if executor is None and owner is not _RUNNER:
            executor = self._executors.get(owner)
            if executor is None:
                executor = self._executors[owner] = ThreadPoolExecutor(WORKFLOW_THREADS, thread_name_prefix="workflow")
        return super().run_in_executor(executor, func, *args)

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Look up a name in the unit's threads; uvloop has few for all units together."""
        return await self.run_in_executor(None, partial(socket.getaddrinfo, host, port, **options))

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> Any:
        return await self.run_in_executor(None, socket.getnameinfo, sockaddr, flags)

    def forget(self, unit: Any) -> None:
        """End the threads of a unit that is over, once their calls have returned."""
        executor = self._executors.pop(unit, None)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        self._refuse("stop")

    close, set_default_executor, set_task_factory = map(
        _for_the_runner, ("close", "set_default_executor", "set_task_factory"))
    set_exception_handler, shutdown_asyncgens, shutdown_default_executor = map(
        _for_the_runner, ("set_exception_handler", "shutdown_asyncgens", "shutdown_default_executor"))

    def _refuse(self, method: str) -> None:
        """Raise WorkflowError unless the runner's own code runs."""
        if _OWNER.get() is not _RUNNER:
            raise WorkflowError(f"a workflow called {method}() of the event loop, which belongs to its runner: leave "
                                "it alone")

    def playing(self) -> Any:
        """Return the unit whose workflow the loop executes now; None if unknown. Callable in any thread."""
        return getattr(asyncio.current_task(self), "owner", None)


class Limits:
    """Deadlines of the playing runs, by unit. A run beyond its deadline was not ended by its own timeout."""

    def __init__(self) -> None:
        self._deadlines: dict[int, tuple[Any, float]] = {}
        """Unit and deadline of each playing run, by its number."""
        self._late_since: dict[Any, float] = {}
        self._number = 0

    def begin(self, deadline: float) -> int:
        """Add a run of the current unit; returns its number for `end`."""
        self._number += 1
        self._deadlines[self._number] = (UNIT.get(), deadline)
        return self._number

    def end(self, number: int) -> None:
        self._deadlines.pop(number, None)

    def overdue(self, now: float, patience: float) -> list[Any]:
        """Return the units that were late in all calls of the last `patience` seconds."""
        late_units = {unit for unit, deadline in self._deadlines.values() if now > deadline and unit is not None}
        self._late_since = {unit: self._late_since.get(unit, now) for unit in late_units}
        return [unit for unit, since in self._late_since.items() if now - since >= patience]

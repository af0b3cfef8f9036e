"""The event loop that a runner lives on, and that async workflows play on beside it.

A workflow may do with its own tasks what it likes. What is not its own it is refused, with an error where it tries: to
cancel tasks of the runner, of the engine or of another unit (`for task in asyncio.all_tasks(): task.cancel()`), to stop
the loop, to change its executor, its task factory or its handler of exceptions. Whose code runs is known by a context
variable: `as_runner` marks the runner's own, and every callback and task that comes of it; a workflow's context is made
by `unit_context`, and tasks, callbacks and timers that come of it are that unit's. What comes with neither, such as a
callback from a thread that a workflow started, is refused too.

The threads of each unit are its own, so a workflow that uses them up takes none from the runner or from another unit.
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
        from uvloop import Loop as _Loop  # vLLM brings it, and its own server runs on it
    except ImportError:
        from asyncio import SelectorEventLoop as _Loop

__all__ = ["UNIT", "EngineLoop", "Limits", "as_runner", "unit_context"]

_RUNNER = object()
_OWNER: contextvars.ContextVar[Any] = contextvars.ContextVar("owner", default=None)
"""Whose code runs: `_RUNNER`, a unit, or nobody that is known."""
UNIT: contextvars.ContextVar[Any] = contextvars.ContextVar("unit", default=None)
"""The unit that the runner's code works for now."""

WORKFLOW_THREADS = 32
"""Maximum number of threads of one unit that names no executor of its own."""

_log = logging.getLogger(__name__)


def as_runner() -> None:
    """Mark what runs in this context from here on, and comes of it, as the runner's own."""
    _OWNER.set(_RUNNER)


def unit_context() -> contextvars.Context:
    """Return the context for the workflow of the unit that the runner works for now."""
    context = contextvars.copy_context()
    context.run(_OWNER.set, UNIT.get())
    return context


class _KeptTask(asyncio.Task[Any]):
    """A task that the runner made: for itself, or for the unit that it belongs to."""

    owner: Any = None

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel it. Raises WorkflowError for whoever is neither its owner nor the runner."""
        if not self.done() and _OWNER.get() is not _RUNNER and (self.owner is None or _OWNER.get() != self.owner):
            raise WorkflowError(
                f"a workflow cancelled a task that is not its own ({_named(self)}): cancel only tasks that it made, "
                "not asyncio.all_tasks()"
            )
        return super().cancel(msg)


def _named(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", None) or task.get_name()


def _made(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
    """Return the task factory: what a workflow makes is an ordinary task."""
    if _OWNER.get() is not _RUNNER:
        return asyncio.Task(coro, loop=loop, **more)
    task = _KeptTask(coro, loop=loop, **more)
    context = more.get("context")
    owner = None if context is None else context.get(_OWNER)
    task.owner = None if owner is _RUNNER else owner
    return task


def _runners_alone(name: str) -> Any:
    """Return this method of a loop, refused to workflows."""

    def called(self: EngineLoop, *args: Any) -> Any:
        self._refuse(name)
        return getattr(_Loop, name)(self, *args)

    return called


class EngineLoop(_Loop):
    """See the module. `threads`: how many the runner and the engine have at most."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads: dict[Any, ThreadPoolExecutor] = {}
        super().set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="runner"))
        super().set_task_factory(_made)

    def run(self) -> None:
        """Run for ever, in this thread. Returns, or raises, only where the loop itself is broken."""
        while True:
            try:
                self.run_forever()
            except (SystemExit, KeyboardInterrupt) as e:  # out of a workflow's callback, or a task of its own
                _log.error("a workflow's callback raised %s: the runner goes on", type(e).__name__, exc_info=e)
            if self.is_closed():
                return

    def run_in_executor(  # type: ignore[override]  # the types of a TypeVarTuple, which nobody misses here
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run a function in a thread: a workflow's in those of its unit, where it names no executor."""
        owner = _OWNER.get()
        if executor is None and owner is not _RUNNER:
            executor = self._threads.get(owner)
            if executor is None:
                executor = self._threads[owner] = ThreadPoolExecutor(WORKFLOW_THREADS, thread_name_prefix="workflow")
        return super().run_in_executor(executor, func, *args)

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        """Look a name up in a thread, as asyncio's own loop does: uvloop has few for all units together."""
        return await self.run_in_executor(None, partial(socket.getaddrinfo, host, port, **how))

    async def getnameinfo(self, sockaddr: Any, flags: int = 0) -> Any:
        return await self.run_in_executor(None, socket.getnameinfo, sockaddr, flags)

    def forget(self, unit: Any) -> None:
        threads = self._threads.pop(unit, None)
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        self._refuse("stop")

    close, set_default_executor, set_task_factory = map(
        _runners_alone, ("close", "set_default_executor", "set_task_factory"))
    set_exception_handler, shutdown_asyncgens, shutdown_default_executor = map(
        _runners_alone, ("set_exception_handler", "shutdown_asyncgens", "shutdown_default_executor"))

    def _refuse(self, what: str) -> None:
        if _OWNER.get() is not _RUNNER:
            raise WorkflowError(f"a workflow called {what}() of the event loop, which is its runner's: leave it alone")

    def playing(self) -> Any:
        """Return the unit whose workflow's main task the loop is busy with, None where that is not known.

        From any thread: this is for who finds that the loop answers no more.
        """
        return getattr(asyncio.current_task(self), "owner", None)


class Limits:
    """When the runs that play now have to be over, by unit: what is beyond that is not ended by its own timeout."""

    def __init__(self) -> None:
        self._deadlines: dict[int, tuple[Any, float]] = {}
        self._late: dict[Any, float] = {}
        self._number = 0

    def begin(self, deadline: float) -> int:
        """Begin a run of this unit, to be over at a time; returns its number, for `end`."""
        self._number += 1
        self._deadlines[self._number] = (UNIT.get(), deadline)
        return self._number

    def end(self, number: int) -> None:
        self._deadlines.pop(number, None)

    def overdue(self, now: float, patience: float) -> list[Any]:
        """Return units that have been seen to be late for so many seconds, by looks at a loop that ran meanwhile."""
        late = {unit for unit, deadline in self._deadlines.values() if now > deadline and unit is not None}
        self._late = {unit: self._late.get(unit, now) for unit in late}
        return [unit for unit, since in self._late.items() if now - since >= patience]

"""Doubles of the parts of os, threading and asyncio that the actors use, under virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.simulation.world import here, world
from trinity_es.events.errors import LogUnavailable


# --- the operating system -------------------------------------------------------------------------------------------
class SimOs:
    """Double of `os` with the functions that actors use."""

    path = SimpleNamespace(join=lambda *parts: "/".join(parts))
    environ: ClassVar[dict[str, str]] = {}
    """Environment variables. The actors set some and read none."""

    @staticmethod
    def getpid() -> int:
        return here().pid

    @staticmethod
    def getppid() -> int:
        parent = here().parent
        return 10_000 + here().system if parent is None else parent.pid

    @staticmethod
    def getpgid(pid: int) -> int:
        return here().pid

    @staticmethod
    def umask(mask: int) -> int:
        return mask  # there are no files

    @staticmethod
    def kill(pid: int, sig: int) -> None:
        if world().effect(here()):
            world().kill_pid(pid)

    killpg = kill

    @staticmethod
    def _exit(status: int) -> None:
        world().kill(here())


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        SimOs.kill(pid, 9)


def process_start_time(pid: int) -> str | None:
    if pid > 10_000:
        return str(pid)  # an admin
    process = world().processes.get(pid)
    return str(process.started) if process is not None and process.alive else None


class InlineThread:
    """Thread that calls its target in `start`. The targets of `SimWriter` and `SimEngineSide` don't block."""

    def __init__(self, target: Callable[[], None], name: str = "", daemon: bool = False) -> None:
        self.target = target

    def start(self) -> None:
        self.target()

    def join(self, timeout: float | None = None) -> None:
        """Return at once: the thread has ended."""


class Event:
    """Double of threading.Event, on which no thread waits."""

    def __init__(self) -> None:
        self.flag = False

    def set(self) -> None:
        self.flag = True

    def is_set(self) -> bool:
        return self.flag

    def wait(self, timeout: float | None = None) -> bool:
        return self.flag


class Condition:
    """Double of threading.Condition, on which no thread waits."""

    def __enter__(self) -> None:
        """Do nothing: there is one thread."""

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is one thread."""

    def notify(self) -> None:
        """Do nothing: no thread waits."""


threads = SimpleNamespace(Thread=InlineThread, Event=Event, Condition=Condition)


# --- event loops ----------------------------------------------------------------------------------------------------
class SimLoop(asyncio.AbstractEventLoop):
    """Event loop with the methods that tasks, queues, semaphores and sleep need. Its turns are effects of a process."""

    def __init__(self) -> None:
        self.process = here()
        self.ready: deque[asyncio.Handle] = deque()
        self.awake = False
        self.tasks: list[Any] = []
        world().loops.append(self)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.process.alive:  # tasks are discarded after their process died
            return handle
        self.ready.append(handle)
        if not self.awake:
            self.awake = True
            world().later(0.0002, self.process, "", self.turn)
        return handle

    call_soon_threadsafe = call_soon

    def forget(self, unit: Any) -> None:
        """Do nothing: there are no threads of units."""

    def turn(self) -> None:
        asyncio._set_running_loop(self)
        try:
            while self.ready:
                handle = self.ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
            self.awake = False

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.TimerHandle(world().now + delay, callback, args, self, context)
        world().later(delay, self.process, "", lambda: self._ring(handle))
        return handle

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_later(when - world().now, callback, *args, context=context)

    def _ring(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self.ready.append(handle)
            self.turn()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""

    def time(self) -> float:
        return world().now

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = asyncio.Task(coro, loop=self, name=name or "sim", context=context)
        task._log_destroy_pending = False
        self.tasks.append(task)  # kept until the end, because a discarded task of a dead process would run on
        return task

    def create_future(self) -> Any:
        return asyncio.Future(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Call a function after a delay, and retry it while the database is away, as `patiently` does."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except LogUnavailable:
                world().later(0.5, self.process, "", work)
                return
            except BaseException as e:
                future.set_exception(e)
            else:
                future.set_result(result)

        world().later(world().between(0.0005, 0.01), self.process, "", work)
        return future

    def close(self) -> None:
        """Close all coroutines. Discarded later, they would run on in another world."""
        asyncio._set_running_loop(self)
        for task in self.tasks:
            for _ in range(3):  # a coroutine may catch GeneratorExit once and wait again
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        asyncio._set_running_loop(None)
        self.tasks.clear()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore errors, which come only from tasks of dead processes."""


class SimAsyncio:
    """The module asyncio, except for the event loop."""

    new_event_loop = SimLoop

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

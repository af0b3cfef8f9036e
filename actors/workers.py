"""Sync workflows in processes of their own, which can be killed.

A `WorkerPool` starts interpreters as they are needed, up to its `places`, and keeps them: a worker plays one run at a
time (or all runs of a `can_repeat` workflow) in its main thread, with `WorkflowRunner.execute` itself, so stamps,
metrics, kinds of failure and `can_reset` are the same as in the runner. What ends its process (os._exit, a segfault,
kill -9) fails that run alone, with kind `workflow`. At a timeout, when cancelled, and when the pool is closed, the
worker is stopped at once and killed, with the processes that it started and that still are its descendants.

A worker is in the runner's process group, and ends by itself when the runner is gone. A pool serves one event loop.

What such a process does is in `worker.py`, what goes over the pipe between the two in `worker_pipe.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from actors.execution import Execution
from actors.model import Model
from actors.worker_pipe import LENGTH, frame
from events.errors import EngineError, StartupError, TrinityError, WorkflowError, error_from_dict, error_to_dict
from events.experience import Experience
from events.values import BatchId

__all__ = ["WorkerPool"]

START_SECONDS = 120.0
"""So long may a worker take until it can play, and so long to import a workflow's module."""
LOOK_SECONDS = 1.0
"""Between two looks whether a worker lives: where it left its end of the pipe to a child, the pipe doesn't tell."""
EXIT_SECONDS = 5.0
"""So long may a process take to end that is ending."""

_T = TypeVar("_T")


class WorkerPool:
    """At most `places` workers. `log_file`: what workflows log goes there. Call all of it on one event loop."""

    def __init__(self, places: int, *, log_file: str | None = None) -> None:
        self.log_file = log_file
        self._room = asyncio.Semaphore(places)
        self._idle: list[_Worker] = []
        self._alive: set[_Worker] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._killer = ThreadPoolExecutor(1, thread_name_prefix="killer")
        self._closed = False

    def pids(self) -> list[int]:
        """The workers that are alive, or were when last used."""
        return sorted(worker.process.pid for worker in self._alive)

    async def run(
        self,
        task: dict[str, Any],
        *,
        batch_id: BatchId,
        task_id: int | str,
        runs: range,
        models: Sequence[Model],
        timeout: float | None = None,
    ) -> tuple[Execution, str | None]:
        """Play these runs of a task (`task_to_dict`), and tell why its engine is dead, if a run found that it is.

        `models` are the workflow's: the model and the auxiliary ones. `timeout` counts from when a worker is there
        and has imported the workflow, which is paid once by each worker.
        Raises TimeoutError, StartupError where no worker could be started, WorkflowError for one that ended.
        """
        async with self._room:
            worker = await self._worker()
            try:
                await worker.prepare(task["workflow"])
                async with asyncio.timeout(timeout):
                    done = await worker.play(task, batch_id, task_id, runs, models)
            except BaseException:
                self._end(worker)
                raise
            self._idle.append(worker)
            return done

    async def close(self) -> None:
        """Kill all workers, whatever they do; returns when they are gone."""
        self._closed = True
        for worker in list(self._alive):
            self._end(worker)
        await asyncio.gather(*self._endings, return_exceptions=True)
        self._killer.shutdown(wait=False)

    async def _worker(self) -> _Worker:
        """The one that was used last, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.poll() is None:
                return worker
            self._end(worker)
        if self._closed:
            raise StartupError("the worker processes were ended with their runner")
        worker = self._start()
        try:
            await asyncio.wait_for(worker.started(), START_SECONDS)
        except BaseException as e:
            self._end(worker)
            if isinstance(e, TimeoutError | WorkflowError):
                why = e if isinstance(e, WorkflowError) else f"it was not ready after {START_SECONDS:.0f} s"
                raise StartupError(f"a worker process did not start: {why}") from e
            raise
        return worker

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from actors.worker import main; main()"
        arguments = [str(theirs.fileno()), str(os.getpid()), self.log_file or ""]
        try:
            # Here, not in a thread of a pool: PDEATHSIG comes when the thread ends that started a process.
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", code, *arguments], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        except OSError as e:
            ours.close()
            raise StartupError(f"a worker process could not be started: {e}") from e
        finally:
            theirs.close()
        worker = _Worker(process, ours)
        self._alive.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        if worker not in self._alive:
            return
        self._alive.discard(worker)
        if worker.process.poll() is not None:
            worker.disconnect()
            return
        worker.process.send_signal(signal.SIGSTOP)  # from here on it does nothing
        ending = asyncio.create_task(self._killed(worker))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _killed(self, worker: _Worker) -> None:
        await asyncio.get_running_loop().run_in_executor(self._killer, _kill, worker.process)
        worker.disconnect()  # not before: it would end by itself, and what it started would be nobody's child


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a stopped worker and what it started. Takes a while: psutil reads every process of the machine.

    Nobody has waited for the process yet, so its pid is still its own, whatever became of it.
    """
    import psutil

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in family:
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_SECONDS)


class _Worker:
    """One worker process, as the runner sees it."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self.process, self.end = process, end
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter | None = None
        self.number = 0
        self.imported: set[str] = set()

    async def started(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=self.end)
        await self._alive(self._told("ready"))

    def disconnect(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self.end.close()

    def write(self, *message: Any) -> None:
        assert self.writer is not None
        self.writer.write(frame(*message))

    async def prepare(self, workflow: str) -> None:
        """Have it import a workflow; whether that went well is told when it plays."""
        if workflow in self.imported:
            return
        self.write("import", workflow)
        try:
            await asyncio.wait_for(self._alive(self._told("imported")), START_SECONDS)
        except TimeoutError:
            raise WorkflowError(f"{workflow} was not imported after {START_SECONDS:.0f} s") from None
        self.imported.add(workflow)

    async def play(
        self, task: dict[str, Any], batch_id: BatchId, task_id: int | str, runs: range, models: Sequence[Model]
    ) -> tuple[Execution, str | None]:
        self.number += 1
        seen = [(model.name, model.sampling, model.model_version) for model in models]
        self.write("run", self.number, task, batch_id, task_id, runs, seen)
        return await self._alive(self._serve(models))

    async def _alive(self, reading: Coroutine[Any, Any, _T]) -> _T:
        """What `reading` gives, unless the process ends before. Raises WorkflowError then."""
        task = asyncio.create_task(reading)
        try:
            while not task.done() and self.process.poll() is None:
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
            await asyncio.wait({task}, timeout=LOOK_SECONDS)  # it ended: what it said last may still be in the pipe
            if task.done():
                return task.result()
        except (EOFError, OSError):
            pass
        finally:
            task.cancel()
        raise WorkflowError(await self._last_words())

    async def _last_words(self) -> str:
        deadline = asyncio.get_running_loop().time() + EXIT_SECONDS
        while self.process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        status = self.process.returncode
        if status is None:
            return "the worker process closed its pipe to the runner"
        if status >= 0:
            return f"the workflow ended its process with exit status {status}: raise an Exception to fail a run"
        hint = " (kill -9, or the machine was out of memory)" if status == -signal.SIGKILL else ""
        return f"the workflow's process was ended by {signal.Signals(-status).name}{hint}"

    async def _read(self) -> tuple[Any, ...]:
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        message: tuple[Any, ...] = pickle.loads(await self.reader.readexactly(length))
        return message

    async def _told(self, what: str) -> None:
        while (await self._read())[0] != what:
            pass  # a call of a thread that a workflow left behind: it was given up in the worker

    async def _serve(self, models: Sequence[Model]) -> tuple[Execution, str | None]:
        """Answer the worker's calls until its run is over."""
        calls: set[asyncio.Task[None]] = set()
        try:
            while True:
                kind, number, *said = await self._read()
                if number != self.number:
                    continue  # as in `_told`
                if kind == "done":
                    done, data, dead = said
                    done.experiences = Experience.deserialize_many(data)
                    return done, dead
                call = asyncio.create_task(self._answer(models, number, *said))
                calls.add(call)
                call.add_done_callback(calls.discard)
        finally:
            for call in calls:
                call.cancel()

    async def _answer(
        self, models: Sequence[Model], number: int, call: int, index: int, what: str, name: str, arguments: bytes
    ) -> None:
        model = models[index]
        ok = True
        try:
            data = pickle.dumps(await _done(model, what, name, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as e:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the run is over
            ok, data = False, _packed(e)
        self.write("answer", number, call, ok, data, index, model.model_version, model.usage)


async def _done(model: Model, what: str, name: str, arguments: bytes) -> Any:
    """What a call of the worker's gives; of a tokenizer's attribute whether it is a method, or its value."""
    target = model if what == "model" else model.tokenizer
    value = getattr(target, name)
    if what == "attribute":
        return callable(value), None if callable(value) else value
    args, kwargs = pickle.loads(arguments)
    value = value(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _packed(error: BaseException) -> bytes:
    """An error that any process can read, and that an `except` in a workflow finds."""
    if isinstance(error, asyncio.CancelledError):
        error = EngineError("the engine cancelled the request")
    elif type(error).__module__ != "builtins":
        error = error_from_dict(error_to_dict(error))
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(TrinityError(f"{type(error).__name__}: {error}"))

"""Pool of worker processes that run sync workflows and can be killed.

A `WorkerPool` forks workers from fork servers (`workers/fork_servers.py`) on demand, up to its `places`, and keeps
them. A worker (`workers/main.py`) runs the workflows of one module in its main thread, one run at a time (or all runs
of a `can_repeat` workflow). If its process ends (os._exit, a segfault, kill -9), only that run fails, with kind
`workflow`. At a timeout, a cancellation, and the end of the pool a worker is suspended at once and killed with its
descendants. It is in the runner's process group, and ends by itself after the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workers.fork_servers import EXIT_SECONDS, START_SECONDS, Child, Templates, describe_exit
from trinity_es.actors.rollout.workers.graders import Graders
from trinity_es.actors.rollout.workers.protocol import LENGTH, frame
from trinity_es.events import errors
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId

__all__ = ["WorkerPool"]

LAST_MESSAGE_SECONDS = 1.0
"""How long the runner reads on from the pipe of a process that ended, for its last message."""

_T = TypeVar("_T")


class WorkerPool:
    """Pool of at most `places` worker processes, for one event loop. Workflows log to `log_file`."""

    def __init__(self, places: int, *, log_file: str | None = None) -> None:
        self.places = places
        self._free_places = asyncio.Semaphore(places)
        self.templates = Templates(log_file or "")
        self.graders = Graders(self.templates)
        self._idle_workers: list[_Worker] = []
        """Workers that wait for a run, the most recently used last."""
        self._live_workers: set[_Worker] = set()
        self._kill_tasks: set[asyncio.Task[None]] = set()
        self._kill_thread = ThreadPoolExecutor(1, thread_name_prefix="killer")
        self._closed = False

    def pids(self) -> list[int]:
        return sorted(worker.child.pid for worker in self._live_workers if worker.child.pid is not None)

    @property
    def full(self) -> bool:
        """True if a new run has to wait for a worker."""
        return self._free_places.locked()

    async def warm(self, workflows: Iterable[str]) -> None:
        """Import the modules of these workflows into template processes in advance. Errors show at the first run."""
        for workflow in workflows:
            with contextlib.suppress(errors.TrinityError):
                await self.templates.prepare(workflow)

    async def run(
        self, task: dict[str, Any], *, batch_id: BatchId, task_id: int | str, runs: range, models: Sequence[Model],
        timeout: float | None = None, on_begin: Callable[[], None] = lambda: None,
    ) -> tuple[UnitResult, str | None]:
        """Execute these runs of a task (a dict of `task_to_dict`) in a worker.

        Return the result, and why the engine is dead, if a run noticed that. The time limit `timeout` starts, and
        `on_begin` is called, when a worker has imported the workflow. Raises TimeoutError, StartupError if no worker
        could be started, WorkflowError if the worker ended.
        """
        async with self._free_places:
            while True:
                worker = await self._take_worker(task["workflow"])
                is_new = worker.play_number == 0
                try:
                    await worker.prepare(task["workflow"])
                    on_begin()
                    async with asyncio.timeout(timeout):
                        result = await worker.play(task, batch_id, task_id, runs, models)
                except (errors.WorkflowError, errors.StartupError):
                    self._end_worker(worker)
                    if is_new or worker.has_begun:
                        raise
                    continue  # the worker ended before it took this run, so another worker gets the run
                except BaseException:
                    self._end_worker(worker)
                    raise
                if worker.child.exit_status.done():
                    self._end_worker(worker)
                else:
                    self._idle_workers.append(worker)
                return result

    async def close(self) -> None:
        """End all workers and their template processes, and wait until they have ended."""
        self._closed = True
        for worker in list(self._live_workers):
            self._end_worker(worker)
        await asyncio.gather(*self._kill_tasks, return_exceptions=True)
        await self.templates.close()
        self._kill_thread.shutdown(wait=False)

    async def _take_worker(self, workflow: str) -> _Worker:
        """Return a worker for this workflow's module: an idle one, or a new one. Raises StartupError."""
        module = workflow.partition(":")[0]
        for worker in self._idle_workers[::-1]:
            if worker.module != module:
                continue
            if worker.is_disconnected():
                self._end_worker(worker)
                continue
            self._idle_workers.remove(worker)
            return worker
        if self._closed:
            raise errors.StartupError("the worker processes were ended with their runner")
        while self._idle_workers and len(self._live_workers) >= self.places:
            self._end_worker(self._idle_workers.pop(0))
        own_end, worker_end = socket.socketpair()
        worker = _Worker(module, Child(), own_end)
        self._live_workers.add(worker)
        worker.child.exit_status.add_done_callback(lambda _: self._end_if_idle(worker))
        try:
            with worker_end:
                worker.imported = await self.templates.fork(workflow, worker.child, worker_end)
            await asyncio.wait_for(worker.wait_until_ready(), START_SECONDS)
        except BaseException as e:
            self._end_worker(worker)
            if isinstance(e, TimeoutError):
                raise errors.StartupError(
                    f"a worker process did not start: it was not ready after {START_SECONDS:.0f} s"
                ) from e
            raise
        return worker

    def _end_if_idle(self, worker: _Worker) -> None:
        if worker in self._idle_workers:
            self._end_worker(worker)

    def _end_worker(self, worker: _Worker) -> None:
        """Take a worker out of the pool, suspend its process at once, and kill it in the background."""
        if worker in self._idle_workers:
            self._idle_workers.remove(worker)
        if worker not in self._live_workers:
            return
        self._live_workers.discard(worker)
        pid = worker.child.pid
        if pid is None:
            worker.disconnect()  # it ended or never started; if it is still starting, the closed pipe ends it
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)  # at once, since the kill takes a while
        task = asyncio.create_task(self._kill_and_wait(worker, pid))
        self._kill_tasks.add(task)
        task.add_done_callback(self._kill_tasks.discard)

    async def _kill_and_wait(self, worker: _Worker, pid: int) -> None:
        """Kill a suspended worker with its descendants, wait for its end, and close its pipe."""
        await asyncio.get_running_loop().run_in_executor(self._kill_thread, _kill, pid)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(worker.child.exit_status), EXIT_SECONDS)
        worker.disconnect()  # not earlier, or it would end by itself, and its children would lose their parent


def _kill(pid: int) -> None:
    """Kill a suspended worker and its descendants. Slow, since psutil reads all processes of the machine."""
    import psutil

    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.Error):
            process.kill()


class _Worker:
    """The runner's side of one worker process, which runs the workflows of one module."""

    def __init__(self, module: str, child: Child, end: socket.socket) -> None:
        self.module, self.child, self.end = module, child, end
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter | None = None
        self.play_number = 0
        self.has_begun = False
        """True if the worker has received its current run."""
        self.imported = False

    async def wait_until_ready(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=self.end)
        await self._unless_ended(self._wait_for("ready"))

    def is_disconnected(self) -> bool:
        """Return True if the worker has closed its end of the pipe. Its template may report its end later."""
        poll = select.poll()
        poll.register(self.end.fileno(), 0)
        return bool(poll.poll(0))

    def disconnect(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self.end.close()

    def write(self, *message: Any) -> None:
        assert self.writer is not None
        self.writer.write(frame(*message))

    async def prepare(self, workflow: str) -> None:
        """Have the worker import a workflow. An error of the import shows when the workflow is run."""
        if self.imported:
            return
        self.write("import", workflow)
        try:
            await asyncio.wait_for(self._unless_ended(self._wait_for("imported")), START_SECONDS)
        except TimeoutError:
            raise errors.WorkflowError(f"the import of {workflow} took more than {START_SECONDS:.0f} s: do slow work "
                                       "when a run needs it, not on import") from None
        self.imported = True

    async def play(
        self, task: dict[str, Any], batch_id: BatchId, task_id: int | str, runs: range, models: Sequence[Model]
    ) -> tuple[UnitResult, str | None]:
        """Execute runs, and return what `WorkerPool.run` returns. Raises WorkflowError if the worker ended."""
        self.play_number += 1
        self.has_begun = False
        facts = [(model.name, model.sampling, model.model_version) for model in models]
        self.write("run", self.play_number, task, batch_id, task_id, runs, facts)
        return await self._unless_ended(self._serve(models))

    async def _unless_ended(self, reading: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `reading`.

        Raises WorkflowError if the worker process ends before that, StartupError if its template process does.
        """
        task, exit_status = asyncio.create_task(reading), self.child.exit_status
        try:
            # If a child process has inherited the worker's end of the pipe, that stays open after the worker's end.
            futures: set[asyncio.Future[Any]] = {task, exit_status}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({task}, timeout=LAST_MESSAGE_SECONDS)  # its last message may still be in the pipe
            if task.done():
                return task.result()
        except (EOFError, OSError):
            pass  # the pipe was closed: below is checked how the process ended
        finally:
            task.cancel()
        await asyncio.wait({exit_status}, timeout=EXIT_SECONDS)
        if not exit_status.done():
            raise errors.WorkflowError("the worker process closed its pipe to the runner: close only files of your own")
        status = exit_status.result()
        if status is None:
            raise errors.StartupError("the worker process ended because the process that forked it ended")
        if status >= 0:
            raise errors.WorkflowError(f"the workflow {describe_exit(status)}: raise an Exception to fail a run")
        raise errors.WorkflowError(f"the workflow's process {describe_exit(status)}")

    async def _read(self) -> tuple[Any, ...]:
        """Return the worker's next message. Raises EOFError or OSError at the end of the pipe."""
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        message: tuple[Any, ...] = pickle.loads(await self.reader.readexactly(length))
        return message

    async def _wait_for(self, kind: str) -> None:
        while (await self._read())[0] != kind:
            pass  # a call from a thread that an earlier run left behind

    async def _serve(self, models: Sequence[Model]) -> tuple[UnitResult, str | None]:
        """Answer the worker's calls until the run is over. Return what `WorkerPool.run` returns."""
        answer_tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                kind, number, *rest = await self._read()
                if number != self.play_number:  # a thread that an earlier run left behind sent it
                    continue
                if kind == "begun":
                    self.has_begun = True
                    continue
                if kind == "done":
                    result, experiences, engine_dead = rest
                    result.experiences = Experience.deserialize_many(experiences)
                    return result, engine_dead
                task = asyncio.create_task(self._answer(models, number, *rest))
                answer_tasks.add(task)
                task.add_done_callback(answer_tasks.discard)
        finally:
            for task in answer_tasks:
                task.cancel()

    async def _answer(
        self, models: Sequence[Model], number: int, call: int, index: int, what: str, name: str, arguments: bytes
    ) -> None:
        """Execute a worker's call and send back its result or error. `workers/protocol.py` has the arguments."""
        model = models[index]
        ok = True
        try:
            data = pickle.dumps(await _call_result(model, what, name, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as e:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the run is over, and no worker waits for the result
                raise
            ok, data = False, _pickled_error(e)
        self.write("answer", number, call, ok, data, index, model.model_version, model.usage)


async def _call_result(model: Model, what: str, name: str, arguments: bytes) -> Any:
    """Call the method `name` of the model or its part `what`, and return the result.

    If `what` is "attribute", return for an attribute of the tokenizer True if it is a method, and its value if not.
    """
    target = {"model": model, "leases": model.leases, "steps": model.steps}.get(what) or model.tokenizer
    attribute = getattr(target, name)
    if what == "attribute":
        return callable(attribute), None if callable(attribute) else attribute
    args, kwargs = pickle.loads(arguments)
    result = attribute(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _pickled_error(error: BaseException) -> bytes:
    """Return an error, pickled so that a worker can unpickle it and an `except` in the workflow catches it."""
    if isinstance(error, asyncio.CancelledError):
        error = errors.EngineError("the engine cancelled the request")
    elif type(error).__module__ != "builtins":
        error = errors.error_from_dict(errors.error_to_dict(error))
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(errors.TrinityError(f"{type(error).__name__}: {error}"))

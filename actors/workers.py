"""Sync workflows in processes of their own, which can be killed.

A `WorkerPool` starts interpreters as they are needed, up to its `places`, and keeps them: a worker plays one run at a
time (or all runs of a `can_repeat` workflow) in its main thread, with `WorkflowRunner.execute` itself, so stamps,
metrics, kinds of failure and `can_reset` are the same as in the runner. What ends its process (os._exit, a segfault,
kill -9) fails that run alone, with kind `workflow`. At a timeout, when cancelled, and when the pool is closed, the
worker is stopped at once and killed, with the processes that it started and that still are its descendants.

A worker is in the process group of the runner. It ends by itself when the runner is gone: by PDEATHSIG (Linux; the
runner's thread that has the event loop counts as the runner) and by the end of its pipe. A pool serves one event loop.

The pipe is a socket; a message is its length and a pickled tuple. Every model call goes over it, the tokenizer's
methods and attributes too, and the runner answers from the run's real `Model` on its event loop: no engine, tokenizer
or torch is in the worker. `generate`, `chat` and so on block the calling thread, and any thread may call; the `*_async`
methods may be awaited on any event loop that the workflow runs itself. OpenAI clients ask the runner's endpoint by
HTTP; where that is, and what it kept of the run, comes through the pipe. `model.model_version` is that of the last
answer through the pipe, `model.usage` as well; `model.engine` has nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import inspect
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from actors.engines import Engine, Sampling
from actors.execution import Execution, WorkflowRunner, resolve
from actors.model import Model
from actors.openai_clients import Endpoint
from events.errors import EngineError, StartupError, TrinityError, WorkflowError, error_from_dict, error_to_dict
from events.experience import Experience
from events.values import BatchId, Task, task_from_dict

__all__ = ["WorkerPool", "main"]

START_SECONDS = 120.0
"""So long may a worker take until it can play, and so long to import a workflow's module."""
LOOK_SECONDS = 1.0
"""Between two looks whether a worker lives: where it left its end of the pipe to a child, the pipe doesn't tell."""
EXIT_SECONDS = 5.0
"""So long may a process take to end that is ending."""

_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!Q")

_T = TypeVar("_T")


def _frame(*message: Any) -> bytes:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


# --- the runner's side ----------------------------------------------------------------------------------------------
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
        code = f"import sys; sys.path[:] = {sys.path!r}; from actors.workers import main; main()"
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
        self.writer.write(_frame(*message))

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
        (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
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


# --- the worker's side ----------------------------------------------------------------------------------------------
class _Link:
    """The worker's end of the pipe: a thread reads it, any thread calls."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.stream = end, end.makefile("rb")
        self.pid = os.getpid()
        self.sending = threading.Lock()
        self.calls = itertools.count()
        self.waiting: dict[int, Future[Any]] = {}
        self.orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.number = 0
        self.models: dict[int, _RemoteModel] = {}

    def send(self, *message: Any) -> None:
        if os.getpid() != self.pid:  # a workflow forked, and this copy of it came back from `run`
            os._exit(1)
        data = _frame(*message)
        with self.sending:
            self.end.sendall(data)

    def read(self) -> None:
        try:
            while len(head := self.stream.read(_LENGTH.size)) == _LENGTH.size:
                kind, *said = pickle.loads(self.stream.read(*_LENGTH.unpack(head)))
                if kind == "answer":
                    self.answered(*said)
                else:
                    self.orders.put((kind, *said))
        except OSError:
            pass
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # the runner is gone, and with it whoever would want a result

    def answered(self, number: int, call: int, ok: bool, data: bytes, index: int, version: int, usage: Any) -> None:
        future = self.waiting.pop(call, None)
        if future is None:
            return  # `over` was faster
        model = self.models.get(index)
        if model is not None and number == self.number:
            model.saw(version, usage)
        try:
            value = pickle.loads(data)
        except Exception as e:
            ok, value = False, e
        if ok:
            future.set_result(value)
        else:
            future.set_exception(value)

    def call(self, number: int, index: int, what: str, name: str, args: Any = (), kwargs: Any = None) -> Future[Any]:
        if os.getpid() != self.pid:
            raise WorkflowError("a process that a workflow forked can't call its model: call it from the workflow")
        arguments = pickle.dumps((args, kwargs or {}), protocol=pickle.HIGHEST_PROTOCOL)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # from here on it can't be cancelled, and any answer fits
        call = next(self.calls)
        self.waiting[call] = future
        if number != self.number:
            self.waiting.pop(call, None)
            raise WorkflowError("the run is over: its model answers no more")
        self.send("call", number, call, index, what, name, arguments)
        return future

    def over(self) -> None:
        """No call of this run is answered any more."""
        self.number, self.models = 0, {}
        for call in list(self.waiting):
            future = self.waiting.pop(call, None)
            if future is not None:
                future.set_exception(WorkflowError("the run is over: its model answers no more"))


class _RemoteTokenizer:
    """The engine's tokenizer; values of attributes are copies."""

    def __init__(self, model: _RemoteModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method, value = self._model.remote("attribute", name).result()
        return (lambda *args, **kwargs: self._call(name, *args, **kwargs)) if method else value

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._model.remote("tokenizer", name, args, kwargs).result()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("encode", *args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("decode", *args, **kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("apply_chat_template", *args, **kwargs)


class _RemoteEngine:
    """What is known here of an engine."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = "rollout"
        self.model_version = 0
        self.sampling = Sampling()


def _twins(name: str) -> tuple[Any, Any]:
    """This method of the runner's model, to be awaited, and its blocking twin."""

    async def awaited(self: _RemoteModel, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(self.remote("model", name, args, kwargs))

    def called(self: _RemoteModel, *args: Any, **kwargs: Any) -> Any:
        return self.remote("model", name, args, kwargs).result()

    return awaited, called


class _RemoteModel(Model):
    """A model whose calls are answered by the runner's."""

    def __init__(self, link: _Link, engine: _RemoteEngine) -> None:
        super().__init__(cast(Engine, engine), name=engine.name)
        self.sampling = engine.sampling
        self._link, self._number, self._seen = link, link.number, engine
        self._tokenizer = _RemoteTokenizer(self)
        self._endpoint: Endpoint | None = None

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def saw(self, version: int, usage: Any) -> None:
        self._seen.model_version, self.usage = version, usage

    def remote(self, what: str, name: str, args: Any = (), kwargs: Any = None) -> Future[Any]:
        return self._link.call(self._number, self._seen.index, what, name, args, kwargs)

    chat_async, chat = _twins("chat_async")
    generate_async, generate = _twins("generate_async")
    logprobs_async, logprobs = _twins("logprobs_async")
    experience_from_messages_async, experience_from_messages = _twins("experience_from_messages_async")

    def tokenized(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote("model", "tokenized", args, kwargs).result()

    def openai_endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = self.remote("model", "openai_endpoint").result()
        return self._endpoint

    def extract_experience_from_history(self, clear_history: bool = True) -> Any:
        return self.remote("model", "extract_experience_from_history", (clear_history,)).result()

    def served_error(self) -> EngineError | None:
        return cast(EngineError | None, self.remote("model", "served_error").result())

    async def aclose(self) -> None:
        self._close_client()  # nothing that waits: see `_driven`; the runner forgets the session


class _Player(WorkflowRunner):
    """The runner's own way to play, in this thread: nothing in it waits for an event loop."""

    def __init__(self, link: _Link) -> None:
        self.link = link
        self.engines = [_RemoteEngine(0)]
        self.asked: list[_RemoteEngine] = []
        super().__init__(cast(Engine, self.engines[0]), concurrent_mode="sequential")

    def play(
        self,
        number: int,
        task: dict[str, Any],
        batch_id: BatchId,
        task_id: int | str,
        runs: range,
        seen: list[tuple[str, Sampling, int]],
    ) -> None:
        self.link.number = number
        self.engines += [_RemoteEngine(index) for index in range(len(self.engines), len(seen))]
        for engine, (name, sampling, version) in zip(self.engines, seen, strict=False):
            engine.name, engine.sampling, engine.model_version = name, sampling, version
        self.asked = self.engines[1 : len(seen)]
        self.engine_dead = None
        done = _driven(self.execute(task_from_dict(task, batch_id=batch_id, task_id=task_id), batch_id, runs))
        self.link.over()
        try:
            data = Experience.serialize_many(done.experiences)
        except TrinityError as e:
            data = Experience.serialize_many([])
            done.failures += [(result.run, "data", str(e)) for result in done.results]
            done.results = []
        done.experiences = []
        self.link.send("done", number, done, data, self.engine_dead)

    def _auxiliary_models(self, task: Task) -> list[Model]:
        return [self._model(cast(Engine, engine), task, 0) for engine in self.asked]

    def _model(self, engine: Engine, task: Task, run: int) -> Model:
        known = cast(_RemoteEngine, engine)
        model = self.link.models[known.index] = _RemoteModel(self.link, known)
        return model

    async def _off_loop(self, workflow: Any, timeout: float | None) -> Any:
        return self._called(workflow)


def _driven(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that never waits. No event loop runs meanwhile, so what it calls may run its own."""
    try:
        coroutine.send(None)
    except StopIteration as e:
        return cast(_T, e.value)
    raise RuntimeError("it waits for something")


def main() -> None:
    """A worker process: `fd of the pipe, pid of the runner, log file`."""
    _, fd, parent, log_file = sys.argv
    del sys.argv[1:]  # a workflow that reads arguments is to find none
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the runner decides
    faulthandler.enable()
    if log_file:
        form = "%(asctime)s %(levelname)s %(name)s %(message)s"
        logging.basicConfig(filename=log_file, format=form, level=logging.WARNING)
    os.set_inheritable(int(fd), False)
    link = _Link(socket.socket(fileno=int(fd)))
    player = _Player(link)
    threading.Thread(target=link.read, name="pipe", daemon=True).start()
    try:
        link.send("ready")
        while True:
            kind, *said = link.orders.get()
            if kind == "import":
                with contextlib.suppress(Exception):
                    resolve(str(said[0]), {}, "workflow")
                link.send("imported")
            else:
                player.play(*said)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # threads that a workflow left behind would keep the process

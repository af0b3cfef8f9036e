"""Worker process, which runs sync workflows and sends their model calls over a pipe to the runner (`protocol.py`).

It ends by itself after the runner: by PDEATHSIG (Linux), with its template process, and at the end of its pipe.

Any thread may call the blocking `generate`, `chat` and the like; the `*_async` methods work on any event loop that the
workflow starts. `model.model_version` and `model.usage` are those of the last answer over the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import queue
import socket
import threading
import traceback
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from typing import Any, cast

from trinity_es.actors.engines.interface import Engine, Sampling
from trinity_es.actors.openai_clients import Endpoint
from trinity_es.actors.plugin_lookup import resolve
from trinity_es.actors.rollout.leases import RunLeases, run_without_loop
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.recorded_steps import RunSteps
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.actors.rollout.workers.protocol import LENGTH, frame
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events.errors import TrinityError, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.values import BatchId, Task, task_from_dict

__all__ = ["play"]

_RUN_OVER = "the run is over, and its model can't answer: let `run` wait for the workflow's threads"


class _RunnerConnection:
    """The worker's end of the pipe to the runner. One thread reads it; any thread may send calls."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.stream = end, end.makefile("rb")
        self.pid = os.getpid()
        self.send_lock = threading.Lock()
        self.call_numbers = itertools.count()
        self.results: dict[int, Future[Any]] = {}
        """Future result of each unanswered call, by the call's number."""
        self.orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.play_number = 0
        """Number of the current run; 0 if there is none."""
        self.models: dict[int, _RemoteModel] = {}

    def send(self, *message: Any) -> None:
        """Send a message to the runner. In a process that the workflow forked, exit instead."""
        if os.getpid() != self.pid:  # a fork by the workflow, which returned from `run`
            os._exit(1)
        data = frame(*message)
        with self.send_lock:
            self.end.sendall(data)

    def read(self) -> None:
        """Read the runner's messages until the pipe is closed, then end the process. Runs in a thread of its own."""
        try:
            while len(head := self.stream.read(LENGTH.size)) == LENGTH.size:
                kind, *rest = pickle.loads(self.stream.read(*LENGTH.unpack(head)))
                if kind == "answer":
                    self.take_answer(*rest)
                else:
                    self.orders.put((kind, *rest))
        except OSError:
            pass
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # the runner is gone

    def take_answer(
        self, play_number: int, call: int, ok: bool, data: bytes, index: int, version: int, usage: Any
    ) -> None:
        """Set the result of a call from the runner's answer. `version`, `usage`: those of the model at `index`."""
        future = self.results.pop(call, None)
        if future is None:
            return
        model = self.models.get(index)
        if model is not None and play_number == self.play_number:
            model.update(version, usage)
        try:
            value = pickle.loads(data)
        except Exception as e:
            ok, value = False, e
        if ok:
            future.set_result(value)
        else:
            future.set_exception(value)

    def call(
        self, play_number: int, index: int, what: str, name: str, args: Any = (), kwargs: Any = None
    ) -> Future[Any]:
        """Call a method of the runner's model at `index`, or of its part `what`; return the future result.

        Raises WorkflowError if the run with this number is over.
        """
        if os.getpid() != self.pid:
            raise WorkflowError("a process that a workflow forked can't call its model: call it from the workflow")
        arguments = pickle.dumps((args, kwargs or {}), protocol=pickle.HIGHEST_PROTOCOL)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # so that it can't be cancelled, and setting its result never fails
        call = next(self.call_numbers)
        self.results[call] = future
        if play_number != self.play_number:  # checked after the entry above, so that `end_run` misses no call
            self.results.pop(call, None)
            raise WorkflowError(_RUN_OVER)
        self.send("call", play_number, call, index, what, name, arguments)
        return future

    def end_run(self) -> None:
        """End the run. Its unanswered calls, and all later ones, raise WorkflowError."""
        self.play_number, self.models = 0, {}
        for call in list(self.results):
            future = self.results.pop(call, None)
            if future is not None:
                future.set_exception(WorkflowError(_RUN_OVER))


class _RemoteTokenizer:
    """The engine's tokenizer, called over the pipe. Values of its attributes are copies."""

    def __init__(self, model: _RemoteModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        """Return a method that calls the runner's tokenizer, or a copy of another attribute's value."""
        if name.startswith("__"):
            raise AttributeError(name)
        is_method, value = True, None
        if name not in ("encode", "decode", "apply_chat_template"):
            is_method, value = self._model.remote("attribute", name).result()
        return partial(self._call, name) if is_method else value

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._model.remote("tokenizer", name, args, kwargs).result()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("__call__", *args, **kwargs)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return int(self._call("__len__"))


class _RemoteLeases(RunLeases):
    """Leases of a run in a worker process. Each change is sent over the pipe to the runner, which records it."""

    def __init__(self, model: _RemoteModel) -> None:
        super().__init__()
        self._model = model

    def report(self, lease: str, what: str, **more: Any) -> Future[Any]:
        return self._model.remote("leases", "report_and_wait", (lease, what, more))

    def close(self) -> None:
        """Do nothing, since the runner closes the leases however the run ends."""


class _RemoteSteps(RunSteps):
    """Recorded steps (`self.step`) of a run in a worker process. The runner writes them into its journal."""

    def __init__(self, model: _RemoteModel) -> None:
        super().__init__()
        self._model = model

    def _record_future(self, method: str, *args: Any) -> Future[Any]:
        return self._model.remote("steps", "record", (method, *args))


class _RemoteEngine:
    """Name, version and sampling of the engine behind the run's model `index`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = "rollout"
        self.model_version = 0
        self.sampling = Sampling()


def _async_method(name: str) -> Any:
    async def method(self: _RemoteModel, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.wrap_future(self.remote("model", name, args, kwargs))

    return method


def _sync_method(name: str) -> Any:
    """Return a method that calls the runner's method of this name and blocks until it returns."""

    def method(self: _RemoteModel, *args: Any, **kwargs: Any) -> Any:
        return self.remote("model", name, args, kwargs).result()

    return method


class _RemoteModel(Model):
    """Model in a worker process that forwards its calls to the runner's model."""

    def __init__(self, link: _RunnerConnection, engine: _RemoteEngine) -> None:
        super().__init__(cast(Engine, engine), name=engine.name)
        self.sampling = engine.sampling
        self._link, self._play_number, self._remote_engine = link, link.play_number, engine
        self._tokenizer = _RemoteTokenizer(self)
        self._endpoint: Endpoint | None = None
        self.leases = _RemoteLeases(self)
        self.steps = _RemoteSteps(self)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def update(self, version: int, usage: Any) -> None:
        self._remote_engine.model_version, self.usage = version, usage

    def remote(self, what: str, name: str, args: Any = (), kwargs: Any = None) -> Future[Any]:
        return self._link.call(self._play_number, self._remote_engine.index, what, name, args, kwargs)

    chat_async, chat = _async_method("chat_async"), _sync_method("chat_async")
    generate_async, generate = _async_method("generate_async"), _sync_method("generate_async")
    logprobs_async, logprobs = _async_method("logprobs_async"), _sync_method("logprobs_async")
    grade_async, grade = _async_method("grade_async"), _sync_method("grade_async")
    experience_from_messages_async = _async_method("experience_from_messages_async")
    experience_from_messages = _sync_method("experience_from_messages_async")
    convert_messages_to_experience_async = experience_from_messages_async
    convert_messages_to_experience = experience_from_messages
    set_workflow_state, get_workflow_state = _async_method("set_workflow_state"), _async_method("get_workflow_state")
    clean_workflow_state = _async_method("clean_workflow_state")
    get_message_token_len = _async_method("get_message_token_len")
    next_number, tokenized = _sync_method("next_number"), _sync_method("tokenized")
    served_error = _sync_method("served_error")
    extract_experience_from_history = _sync_method("extract_experience_from_history")

    def openai_endpoint(self) -> Endpoint:
        """Return the endpoint of the runner's model, which the first call fetches."""
        if self._endpoint is None:
            self._endpoint = self.remote("model", "openai_endpoint").result()
        return self._endpoint

    async def aclose(self) -> None:
        self._close_client()  # nothing here may wait (see `run_without_loop`); the runner closes the session


class _Player(WorkflowRunner):
    """WorkflowRunner that runs workflows in this thread. Nothing in it waits for an event loop."""

    def __init__(self, link: _RunnerConnection) -> None:
        self.link = link
        self.engines = [_RemoteEngine(0)]
        self.auxiliary_engines: list[_RemoteEngine] = []
        super().__init__(cast(Engine, self.engines[0]), concurrent_mode="sequential")

    def play(
        self, number: int, task: dict[str, Any], batch_id: BatchId, task_id: int | str, runs: range,
        models: list[tuple[str, Sampling, int]],
    ) -> None:
        """Execute runs of a task and send the result. `models`: name, sampling and version of each model."""
        self.link.send("begun", number)
        self.link.play_number = number
        self.engines += [_RemoteEngine(index) for index in range(len(self.engines), len(models))]
        for engine, (name, sampling, version) in zip(self.engines, models, strict=False):
            engine.name, engine.sampling, engine.model_version = name, sampling, version
        self.auxiliary_engines = self.engines[1 : len(models)]
        self.engine_dead = None
        own_task = task_from_dict(task, batch_id=batch_id, task_id=task_id)
        result = run_without_loop(self.execute(own_task, batch_id, runs))
        self.link.end_run()
        try:
            data = Experience.serialize_many(result.experiences)
        except TrinityError as e:
            data = Experience.serialize_many([])
            result.failures += [(r.run, "data", str(e)) for r in result.results]
            result.results = []
        result.experiences = []
        self.link.send("done", number, result, data, self.engine_dead)

    def _auxiliary_models(self, task: Task, journal: RunJournal | None) -> list[Model]:
        return [self._model(cast(Engine, engine), task, 0, journal) for engine in self.auxiliary_engines]

    def _model(self, engine: Engine, task: Task, run: int, journal: RunJournal | None) -> Model:
        """Return a model that forwards to the runner's, which has the task's sampling and the journal."""
        remote = cast(_RemoteEngine, engine)
        model = self.link.models[remote.index] = _RemoteModel(self.link, remote)
        return model

    async def _run_in_thread(self, workflow: Any, timeout: float | None, context: Context) -> Any:
        return context.run(self._run_sync, workflow)


def refuse_group_signals() -> None:
    """Make signals to the own process group (`os.kill(0, ...)`) raise PermissionError, since it is the runner's."""
    kill, killpg = os.kill, os.killpg

    def refuse_own_group(group: int) -> None:
        if group in (0, 1, os.getpgrp()):
            raise PermissionError(
                "a workflow can't signal its process group, which is its runner's: start child processes with "
                "start_new_session=True, and signal that group"
            )

    def guarded_kill(pid: int, sig: int, /) -> None:
        if pid <= 0:
            refuse_own_group(-pid)
        kill(pid, sig)

    def guarded_killpg(pgid: int, sig: int, /) -> None:
        refuse_own_group(pgid)
        killpg(pgid, sig)

    os.kill, os.killpg = guarded_kill, guarded_killpg


def play(end: socket.socket) -> None:
    """Work as a worker process on this end of the pipe, until the other end is closed or an error occurs."""
    link = _RunnerConnection(end)
    player = _Player(link)
    threading.Thread(target=link.read, name="pipe", daemon=True).start()
    try:
        link.send("ready")
        while True:
            kind, *rest = link.orders.get()
            if kind == "import":
                with contextlib.suppress(Exception):
                    resolve(str(rest[0]), {}, "workflow")
                link.send("imported")
            else:
                player.play(*rest)
    except BaseException:
        traceback.print_exc()

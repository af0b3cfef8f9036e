"""Program that plays verifiers' environments (0.4) in their own Python, started by `environment_process.py`.

trinity_es is not installed there, so nothing of it is imported.

    verifiers_main.py load TASKSET        exit with 0 if this taskset can be loaded, else print the reason
    verifiers_main.py tasks FILE LIMIT    read the config from stdin, write its tasks, a JSON object per line
    verifiers_main.py serve DESCRIPTOR    play episodes for the process at the other end of this socket

Each message is a length (4 bytes, big-endian) and JSON. The client's first message is the environment's config. Then
each request `{"id", "run": {...}}` gets one answer, `{"id", "result"}` or `{"id", "error"}`. `{"id", "cancel": true}`
cancels the episode with this id. The answer `{"id", "heard": true}` follows at once and shows that this process still
responds.

The client may die at any time, so `serve` forks: one process plays, the other watches it and the socket. When the
client is gone, the playing process has `LEAVING_SECONDS` to release its resources. When it has ended, every process
that it started is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import itertools
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

LEAVING_SECONDS = 10.0
"""Time limit for an environment to release its resources after its client is gone."""
TASKS_AT_MOST = 1_000_000
_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)."""


# --- the config and the tasks -----------------------------------------------------------------------------------------
def resolve_config(config: dict[str, Any]) -> Any:
    """Return verifiers' config object for an environment, with defaults for its roles.

    A role gets the harness `null`, which only chats, if neither the role nor the taskset names a harness. A role whose
    harness does not execute code runs as a plain subprocess, without a sandbox.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils import loaders

    taskset = config["taskset"]["id"]
    taskset_harness = loaders.default_harness_id(taskset)
    fields = loaders.env_config_type(taskset, config.get("id") or "").model_fields
    for name, default in ((name, f.default) for name, f in fields.items() if isinstance(f.default, AgentConfig)):
        role = dict(config.get(name) or {})
        harness_id = (role.get("harness") or {}).get("id") or (default.harness and default.harness.id)
        if harness_id is None and taskset_harness == "bash":  # verifiers' default: the taskset names none
            role["harness"] = {**(role.get("harness") or {}), "id": "null"}
        harness = loaders.harness_class(harness_id or ("null" if taskset_harness == "bash" else taskset_harness))
        if not ("runtime" in role or "runtime" in default.model_fields_set or harness.EXECUTES_CODE):
            role["runtime"] = {"type": "subprocess"}
        config[name] = role
    return loaders.resolve_env_config(config)


def write_tasks(file: str, limit: str) -> None:
    """Write tasks into `file`, each with the key `prompt`, at most `limit` ("0": all). The config is on stdin."""
    from verifiers.v1.utils import loaders

    taskset = loaders.load_taskset(resolve_config(json.load(sys.stdin)).taskset)
    if not (taskset.bounded or int(limit)):
        raise SystemExit("the environment has endlessly many tasks: set how many to take (workflow_args: "
                         "{tasks: 1000})")
    with open(file, "wb") as out:
        for task in itertools.islice(taskset, int(limit) or TASKS_AT_MOST):
            row = task.data.model_dump(mode="json", exclude_defaults=True)
            out.write(as_json({"prompt": None, **row}) + b"\n")


# --- episodes ---------------------------------------------------------------------------------------------------------
def share_http_client(endpoints: dict[str, dict[str, str]]) -> None:
    """Make all runs share one HTTP client. `endpoints` has each run's URL and key by its trace id.

    Without this, verifiers keeps a client with its connections for each address, and each run has its own address.
    """
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.interception import server

    class Shared(TrainClient):  # type: ignore[misc]  # verifiers is not installed where types are checked
        async def get_response(self, *args: Any, session_id: str | None = None, **options: Any) -> Any:
            run_client = copy.copy(self)
            run_client.client = self.client.with_options(**endpoints[session_id or ""])
            return await TrainClient.get_response(run_client, *args, session_id=session_id, **options)

    resolve_other = server.resolve_client
    server.resolve_client = lambda config: Shared(config) if config.type == "train" else resolve_other(config)


class Server:
    """Player of one environment's episodes, all at the same time."""

    def __init__(self, env: Any, writer: asyncio.StreamWriter) -> None:
        self.env, self.writer = env, writer
        self.endpoints: dict[str, dict[str, str]] = {}
        """{id of an open trace: URL and key of its model}."""
        self.episodes: dict[int, asyncio.Task[None]] = {}
        """{request id: task of the running episode}."""
        self.is_leaving = False

    def handle(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if "run" in message:
            self.episodes[number] = asyncio.create_task(self.play(number, message["run"]))
            return
        self.writer.write(as_frame({"id": number, "heard": True}))
        episode = self.episodes.get(number)
        if episode is not None:
            episode.cancel()

    async def leave(self) -> None:
        self.is_leaving = True
        tasks = list(self.episodes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def play(self, number: int, run: dict[str, Any]) -> None:
        try:
            answer = as_frame({"id": number, "result": await self.episode(run)})
        except asyncio.CancelledError:
            answer = as_frame({"id": number, "error": {"type": "Cancelled", "message": "it was cancelled"}})
        except Exception as e:
            answer = as_frame({"id": number, "error": {"type": type(e).__name__, "message": error_text(e)}})
        finally:
            self.episodes.pop(number, None)
        if not self.is_leaving:
            self.writer.write(answer)

    async def episode(self, run: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.types import SamplingConfig

        # No real address and no token: this config is written into traces. `share_http_client` sets them for each call.
        client = TrainClientConfig(
            base_url="http://run", api_key_var="", renderer_model_name=run["tokenizer"], renderer=run.get("renderer"),
        )
        task = type(self.env.taskset).task_type()
        data = task.data_type().model_validate(run["task"])
        [slot] = self.env.slots(task(data, self.env.config.taskset.task))
        context = ModelContext(client=client, model=run["model"], sampling=SamplingConfig())
        trace_ids: list[str] = []

        def on_trace(trace: Any) -> None:
            trace_ids.append(trace.id)
            self.endpoints[trace.id] = {"base_url": run["base_url"], "api_key": run["token"]}

        try:
            episode = await self.env.run_slot(slot, context, on_trace=on_trace)
        finally:
            for trace_id in trace_ids:
                del self.endpoints[trace_id]
        return {
            "complete": bool(self.env.complete(episode)), "is_timeout": episode.is_timeout,
            "errors": [] if episode.ok else [error_json(e) for e in episode.errors[-1:]],
            "traces": [trace_json(t) for t in episode.traces],
        }


def trace_json(trace: Any) -> dict[str, Any]:
    """Return the trace of one agent as JSON. A branch has token ids and the spans that the model generated."""
    return {
        "agent": trace.agent.name, "trainable": trace.agent.trainable, "ok": trace.ok, "is_timeout": trace.is_timeout,
        "errors": [] if trace.ok else [error_json(e) for e in trace.errors[-1:]], "stop": trace.stop_condition,
        "unanswered": unanswered_errors(trace.calls),
        "reward": as_number(trace.reward),
        "rewards": {name: as_number(reward.value) for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: as_number(value) for name, value in trace.metrics.items() if value is not None},
        "branches": [
            {"tokens": branch.token_ids, "answers": sampled_spans(branch.nodes),
             "messages": [message.model_dump(mode="json", exclude_none=True) for message in branch.messages]}
            for branch in trace.branches if branch.trainable
        ],
    }


def as_number(value: float) -> float | str:
    """Return the number; infinity and NaN as text, since JSON can't hold them."""
    return value if math.isfinite(value) else str(value)


def unanswered_errors(calls: list[Any]) -> list[dict[str, Any]]:
    """Return the errors of model calls that failed after the last successful call.

    A harness may have taken such an error for the end of the episode. Calls that the server refused (a status below
    500) or that the harness cancelled do not count.
    """
    last_success = max((call.time.start for call in calls if call.error is None), default=0.0)
    failed = [call for call in calls if call.error is not None
              and call.error.type != "CancelledError" and (call.error.status_code or 502) >= 500]
    return [error_json(call.error) for call in failed if call.time.end > last_success]


def sampled_spans(nodes: list[Any]) -> list[tuple[int, int]]:
    """Return (begin, end) of the sampled ids of each message in a branch. They are the last ids of the message."""
    spans, end = [], 0
    for node in nodes:
        end += len(node.token_ids)
        sampled_count = sum(node.mask)
        if sampled_count:
            spans.append((end - sampled_count, end))
    return spans


def error_json(error: Any) -> dict[str, Any]:
    return {"type": error.type, "message": error.message}


def error_text(error: Exception) -> str:
    """Return an error's message. Input values in pydantic's errors are left out, since they may be secrets."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    texts = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(map(str, problem["loc"]))
        texts.append(f"{field}: {problem['msg']}" if field else problem["msg"])
    return "; ".join(texts)


# --- the socket -------------------------------------------------------------------------------------------------------
def as_json(message: dict[str, Any]) -> bytes:
    """Return a message as strict JSON. A lone surrogate becomes a question mark."""
    return json.dumps(message, ensure_ascii=False, allow_nan=False).encode(errors="replace")


def as_frame(message: dict[str, Any]) -> bytes:
    data = as_json(message)
    return struct.pack(">I", len(data)) + data


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Return the next message. Raises IncompleteReadError when the other end is closed."""
    [size] = struct.unpack(">I", await reader.readexactly(4))
    return json.loads(await reader.readexactly(size))


async def serve(client_socket: socket.socket) -> None:
    """Play episodes until the client is gone or SIGTERM arrives. The client's first message is the config."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)  # type: ignore[union-attr]
    reader, writer = await asyncio.open_unix_connection(sock=client_socket)
    with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
        try:
            from verifiers.v1.utils import loaders

            config = resolve_config(await read_message(reader))
            env = loaders.load_environment(config)
        except Exception as e:
            writer.write(as_frame({"id": 0, "error": {"type": type(e).__name__, "message": error_text(e)}}))
            await writer.drain()
            return
        async with env.serving():
            server = Server(env, writer)
            share_http_client(server.endpoints)
            writer.write(as_frame({"id": 0, "result": {"pid": os.getpid()}}))
            try:
                while True:
                    server.handle(await read_message(reader))
            finally:
                await server.leave()


# --- two processes ----------------------------------------------------------------------------------------------------
def watch(player_pid: int, client_socket: socket.socket) -> None:
    """Wait until the playing process has ended, then kill every process that it started.

    If the client is gone, the playing process gets SIGTERM, and SIGKILL after `LEAVING_SECONDS`.
    """
    polling = select.poll()
    deadline = float("inf")
    polling.register(client_socket, 0)  # reports only that it was closed
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    while player_pid not in reap_children():
        if deadline == float("inf") and (signals or polling.poll(0)):
            deadline = time.monotonic() + LEAVING_SECONDS
            os.kill(player_pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            os.kill(player_pid, signal.SIGKILL)
        time.sleep(0.05)
    while True:  # orphans become children of this process, a subreaper, whatever their session
        for child in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
        except ChildProcessError:
            return


def reap_children() -> list[int]:
    """Reap the children that have ended since the last call, adopted orphans included, and return their pids."""
    pids: list[int] = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            pids.append(pid)
    return pids


def children() -> list[int]:
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def main() -> None:
    """Run the command line's command; `serve` forks a process that plays, and watches it."""
    if sys.argv[1] in ("load", "tasks"):
        from pydantic import ValidationError

        try:
            if sys.argv[1] == "load":
                resolve_config({"taskset": {"id": sys.argv[2]}})
            else:
                write_tasks(*sys.argv[2:])
        except ValidationError as e:
            raise SystemExit(f"{type(e).__name__}: {error_text(e)}") from None
        return
    client_socket = socket.socket(fileno=int(sys.argv[2]))
    os.setsid()  # a signal to the runner's process group must not end this one before it has cleaned up
    _prctl(_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    player_pid = os.fork()
    if player_pid:
        watch(player_pid, client_socket)
        return
    _prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() == parent:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(serve(client_socket))


if __name__ == "__main__":
    main()

"""External engine servers for tests, in their own processes: stand-ins for vLLM, and the real one."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.paths import ROOT
from trinity_es import Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.testing import wait_until

EXTENSION = "trinity_es.actors.engines.vllm.weights.WorkerExtension"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class ServerProcess:
    """Server process that can be killed, and started again on its port."""

    def __init__(self, command: list[str], port: int, log: Path, **environment: str) -> None:
        self.command, self.port, self.log, self.environment = command, port, log, environment
        self.url = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        # A bound socket that does not listen keeps the port from other tests while the server is down. It lets a server
        # bind that reuses addresses.
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # the first server has it
            self._kept.bind(("127.0.0.1", port))

    def start(self, *changes: str) -> ServerProcess:
        """Start the server. `changes` are arguments that precede its own."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *changes], stdout=log, stderr=log, start_new_session=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
            )
        return self

    def ready(self, timeout: float = 30.0) -> ServerProcess:
        def answers() -> bool:
            assert self.process.poll() is None, f"it ended: {self.log.read_text()[-2000:]}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
            return False

        wait_until(answers, f"{self.url} to serve", timeout)
        return self

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
            return json.loads(answer.read())

    def tell(self, path: str, **told: Any) -> None:
        asked = urllib.request.Request(f"{self.url}{path}", json.dumps(told).encode(), method="POST")
        urllib.request.urlopen(asked, timeout=5).close()


def stand_in(model: Path, log: Path, *arguments: str, port: int = 0) -> ServerProcess:
    """Return a stand-in for vLLM, not started yet."""
    port = port or free_port()
    command = [sys.executable, "-m", "tests.helpers.vllm_stand_in", "--port", str(port), "--model", str(model)]
    return ServerProcess([*command, *arguments], port, log)


@contextlib.contextmanager
def restarted_by_command(model: Path, folder: Path) -> Iterator[tuple[ServerProcess, str, Path]]:
    """Yield a stand-in that accepts no weights, a command that replaces it by another, and a file with their pids."""
    server, pids, script = stand_in(model, folder / "server.log", "--no-dev").start(), folder / "pids", folder / "sh"
    pids.write_text(f"{server.process.pid}\n")
    script.write_text(
        f"kill -9 $(tail -n 1 {pids})\ncd {ROOT}\n"
        f"nohup {shlex.join(server.command)} --model \"$1\" >> {server.log} 2>&1 &\necho $! >> {pids}\n"
    )
    try:
        yield server.ready(), f"sh {script} {{path}}", pids
    finally:
        server.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)


def real_server(model: Path, log: Path, *arguments: str, dev: bool = True) -> ServerProcess:
    """Return `vllm serve`, started as a module, because the command needs a package `vllm`, unlike the CPU build."""
    port = free_port()
    command = [
        sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port",
        str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "64",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", *arguments,
    ]
    return ServerProcess(
        command, port, log, VLLM_SERVER_DEV_MODE="1" if dev else "0", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1",
    )


@contextlib.contextmanager
def ended(*servers: ServerProcess) -> Iterator[None]:
    """End these servers after the block."""
    try:
        yield
    finally:
        for server in servers:
            server.kill()


def over_http(tiny: Path, **servers: Any) -> dict[str, Any]:
    return {
        "max_concurrency": 4,
        "rollout_model": {"engine_type": "http", "model_path": str(tiny), "max_response_tokens": 8, "servers": servers},
    }


def letters(count: int) -> list[Task]:
    return [
        Task(workflow="single_turn", repeat_times=2, reward_fn="examples.grpo.reward:letter_share",
             raw_task={"prompt": f"{i}=", "answer": "a"}, rollout_args={"seed": i, "ignore_eos": True})
        for i in range(count)
    ]


def runs_by(client: RolloutClient, batch: int) -> Counter[str]:
    """Return the number of runs of a batch by runner. Fails unless each run finished once."""
    made = [
        (e.event.runner, e.event.task, r.run) for e in client.log.events(batch_id=batch)
        if isinstance(e.event, ev.RunsFinished) for r in e.event.runs
    ]
    assert len({(task, run) for _, task, run in made}) == len(made), "a run was finished twice"
    return Counter(runner for runner, *_ in made)

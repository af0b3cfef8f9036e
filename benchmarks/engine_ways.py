"""Which costs less: a vLLM engine inside of a runner, or `vllm serve` beside it over HTTP?

Two systems have the same model and settings: one with `engine_type: vllm`, one with `engine_type: http` and a server
that this benchmark starts, as a runner would start its child. They are measured in turn with the cases of
`benchmarks.overhead`, alternating which goes first, while the other's processes are stopped. The figures are tokens per
second and CPU seconds of all processes per thousand tokens, as ratios (server / in the runner) with the interval that
holds 95 % of the medians of 10,000 resamples. It first checks that every run has all of its tokens and that both logs
are sound.

`python -m benchmarks.engine_ways [CASE ...] [--json FILE] [--quick] [--rounds N]`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

import trinity_es
from benchmarks.compared import Row, Spread, Watch, family_of, options_of, pairs, pids_of, report, resting, sound
from benchmarks.overhead import CASES, pin, prompts, spread, through_system
from examples.grpo.tiny_model import make_tiny_model
from tests.helpers.servers import free_port
from trinity_es.system import lifecycle

LENGTH = 256
"""Maximum tokens of a conversation."""
SERVER_SECONDS = 180.0
"""Time limit for a server's start."""


def serve(model: str, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start vLLM's own server with the settings that a runner gives its engine."""
    port = free_port()
    words = [
        sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host",
        "127.0.0.1", "--port", str(port), "--max-model-len", str(LENGTH), "--enable-scale-out", "--logprobs-mode",
        "processed_logprobs", "--max-logprobs", "-1", "--gpu-memory-utilization", "0.3", "--disable-uvicorn-access-log",
        "--worker-extension-cls", "trinity_es.actors.engines.vllm.weights.WorkerExtension",
    ]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                   "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True, env=os.environ | environment)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + SERVER_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return process, url
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise SystemExit(f"vLLM's server did not start: {log.read_text()[-2000:]}")


def cpu(pids: list[int]) -> float:
    """Seconds of CPU that all processes of these sessions have used."""
    spent = 0.0
    for pid in pids:
        for process in family_of(pid):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                spent += times.user + times.system
    return spent


def main() -> int:
    options = options_of(__doc__, [
        ("cases", {"nargs": "*", "choices": [*CASES, []], "help": "default: all"}),
        ("--tasks", {"type": int, "default": 64}), ("--runs", {"type": int, "default": 8}),
        ("--tokens", {"type": int, "default": 160}), ("--rounds", {"type": int, "default": 24}),
    ])
    watch, rounds = Watch(), 2 if options.quick else options.rounds
    found: dict[str, dict[str, list[tuple[float, float]]]] = {case: {} for case in options.cases or CASES}
    with tempfile.TemporaryDirectory(prefix="ways-") as folder, ExitStack() as stack:
        model = str(make_tiny_model(Path(folder) / "model", seed=0))
        server, url = serve(model, Path(folder) / "server.log")
        stack.callback(lambda: os.killpg(server.pid, signal.SIGKILL))
        engines: dict[str, dict[str, Any]] = {
            "in the runner": {"gpu_memory_utilization": 0.3},
            "server": {"engine_type": "http", "servers": {"urls": [url]}},
        }
        clients, processes = {}, {}
        for way, engine in engines.items():
            home = Path(folder) / way.replace(" ", "-")
            home.mkdir()
            config = trinity_es.Config.from_dict({
                "mode": "explore", "model": {"model_path": model},
                "explorer": {"max_concurrency": options.tasks, "rollout_model": {"max_model_len": LENGTH, **engine}},
            }, folder=str(home))
            lifecycle.start(config)
            client = clients[way] = stack.enter_context(trinity_es.connect(config))
            stack.callback(client.shutdown)
            client.wait_ready()
            processes[way] = pids_of(client) + ([server.pid] if way == "server" else [])
            pin(*(p for pid in processes[way] for p in family_of(pid)))
        batch = 0
        for number in range(rounds + 1):
            for case, figures in found.items():
                for way in list(engines) if number % 2 else list(reversed(engines)):
                    batch += 1
                    [other] = engines.keys() - {way}
                    with resting(*processes[other]):
                        before = cpu(processes[way])
                        rate = through_system(
                            clients[way], case, batch, prompts(options.tasks, batch), options.tokens, options.runs
                        )
                        spent = cpu(processes[way]) - before
                    if number:  # the first pair warms up
                        figures.setdefault(way, []).append((rate, 1000 * spent / (
                            options.tasks * options.runs * options.tokens)))
            print(f"  pair {number} of {rounds} done" if number else "  warm", file=sys.stderr, flush=True)
        for client in clients.values():
            sound(client.config.store.url)
    return report(
        f"{options.tasks} tasks of {options.runs} runs of {options.tokens} tokens",
        [row for case, figures in found.items() for row in rows(case, figures)], watch, [], options.json,
    )


def rows(case: str, figures: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Return the rows of a case: speed, what it costs, and the lower end of the interval of the first."""
    (mine, mine_cpu), (theirs, theirs_cpu) = (zip(*figures[way], strict=True) for way in ("server", "in the runner"))
    ratio = spread([a / b for a, b in zip(mine, theirs, strict=True)])
    return [
        pairs(f"{CASES[case]}: vllm serve", "tokens/s", mine, "in the runner", theirs, aim=0.98),
        Row(f"  its median in 95 % of resamples, {ratio['median_from']:.3f} - {ratio['median_to']:.3f}: lower end",
            "of in the runner", Spread.of([ratio["median_from"]])),
        pairs("  CPU of all processes", "s a 1,000 tokens", mine_cpu, "in the runner", theirs_cpu, most=True, aim=1.02),
    ]


if __name__ == "__main__":
    sys.exit(main())

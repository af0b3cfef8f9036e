"""What do the HTTP servers of trinity_es cost? The same completions through vLLM's own server and through ours.

One process has an engine. Its event loop runs vLLM's application as `vllm serve` mounts it ("vllm"; "logprobs": with
token ids and logprobs in the answers) and a runner's server over the same engine ("door"; "session": within a run,
which keeps each answer as an experience, with ids and logprobs). With `--system` there is a second engine, in a runner
of mode `serve`: its server ("runner"), and the proxy before it ("proxy"), which records each answer in the log before
it returns it. Each round measures all servers, in another order, so a drift of the machine's speed affects all; the
others are idle. A client in its own process holds many connections open, and sends the next request on each after an
answer; its share of a core is printed. The figure is the median over the rounds of the ratio of tokens per second to
"vllm", or to "logprobs" for servers that record answers.

`python -m benchmarks.door [--json FILE] [--quick] [--system] [--model DIR]`. Without `--model` a tiny model is made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import yaml

import trinity_es
from benchmarks.child_processes import piped
from benchmarks.compared import Watch, about, load_text, options_of, write_json
from benchmarks.overhead import spread
from benchmarks.systems import TINY
from examples.grpo.tiny_model import make_tiny_model
from trinity_es.actors.commands import GetRoutes
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.engines.vllm import server as vllm_server
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.serving.engine_server import EngineServer
from trinity_es.actors.serving.http_server import listen, start_serving, url_of
from trinity_es.actors.system_key import engine_token, read_key
from trinity_es.config.config import load_config
from trinity_es.system import running_system
from trinity_es.testing import wait_until

NAME, TOKEN = "tiny", "secret"
IN_ONE_PROCESS = ("vllm", "logprobs", "door", "session")
AGAINST = {"door": "vllm", "session": "logprobs", "runner": "vllm", "proxy": "logprobs"}
EXTRA_FIELDS: dict[str, dict[str, Any]] = {"logprobs": {"logprobs": 0, "return_token_ids": True}}


# --- the servers of one engine ----------------------------------------------------------------------------------------
def run_servers(config: EngineConfig, uvloop: bool, pipe: Connection) -> None:
    """Run an engine and its servers in this process. Send {name: URL} over the pipe, and end at the first message."""
    if uvloop:
        import uvloop as fast

        fast.run(serve(config, pipe))
    else:
        asyncio.run(serve(config, pipe))


async def serve(config: EngineConfig, pipe: Connection) -> None:
    import uvicorn

    engine = VLLMEngine(config)
    await engine.start()
    llm: Any = engine._llm
    build_app, init_app_state, args = vllm_server._server_parts(config.model_path, NAME, {})
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # the benchmark ends it itself
    serving = await start_serving(server, listening)
    door = EngineServer(engine, name=NAME, token=TOKEN)
    url = await door.start()
    runs = Model(engine)
    session = door.open(runs)
    alone = url_of(listening)
    pipe.send({"vllm": alone, "logprobs": alone, "door": url, "session": f"{url}/s/{session}"})
    while not await asyncio.to_thread(pipe.poll, 0.2):
        runs._history.clear()  # a real run would end and free it
    server.should_exit = True
    await serving
    await door.stop()
    await engine.stop()


@contextlib.contextmanager
def system(folder: Path, model: str) -> Iterator[dict[str, tuple[str, str]]]:
    """Run a system in mode `serve`. Yields {"runner": (url, key), "proxy": (url, key)}."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"mode": "serve", "explorer": {"rollout_model": {"model_path": model, **TINY}}}))
    command = [sys.executable, "-m", "trinity_es", "serve", str(file), "--json"]
    process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = ""
        while "}" not in lines:
            line = process.stdout.readline()
            assert line, "the proxy ended"
            lines += line
        proxy = json.loads(lines)
        config = load_config(file)
        with trinity_es.connect(config) as client:
            [engine] = client.request(GetRoutes(proxy="benchmark", url="", knows=-1))["engines"]
        token = engine_token(read_key(running_system.key_file(config)))
        yield {"runner": (engine["endpoint"], token),
               "proxy": (proxy["base_url"].removesuffix("/v1"), proxy["api_key"])}
    finally:
        process.terminate()
        process.wait(60)


# --- the client -------------------------------------------------------------------------------------------------------
def run_client(connections: int, each: int, tokens: int, pipe: Connection) -> None:
    """Run a client in this process. For each (url, key, model, seed, more fields) it sends (seconds, CPU seconds)."""
    import uvloop

    while (request := pipe.recv()) is not None:
        url, key, model, number, fields = request
        pipe.send(uvloop.run(send_requests(url, key, {"model": model, **fields}, number, connections, each, tokens)))


async def send_requests(
    url: str, key: str, more: dict[str, Any], number: int, connections: int, each: int, tokens: int
) -> tuple[float, float]:
    parts, chance = urlsplit(url), random.Random(number)

    def request() -> bytes:
        prompt = [chance.randrange(256) for _ in range(16)]  # in no prefix cache
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}).encode()
        head = (f"POST {parts.path}/v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n")
        return head.encode() + body

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: list[bytes]) -> None:
        for one in requests:
            writer.write(one)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r")[0])
            body = await reader.readexactly(length)
            assert head.startswith(b"http/1.1 200"), body
            assert f'"completion_tokens":{tokens}'.encode() in body, body

    opened = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(connections)]
    requests = [[request() for _ in range(each)] for _ in opened]
    started, own = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask(*one, some) for one, some in zip(opened, requests, strict=True)))
    seconds, own = time.perf_counter() - started, time.process_time() - own
    for _, writer in opened:
        writer.close()
    return seconds, own


def main() -> int:
    options = options_of(__doc__, [
        ("--system", {"action": "store_true", "help": "a runner of a whole system, and its proxy, too"}),
        ("--uvloop", {"action": "store_true", "help": "the first engine on the loop of `vllm serve`"}),
        ("--model", {"help": "a model folder in HF format"}),
        ("--each", {"type": int, "default": 2, "help": "requests of each connection in a round"}),
        ("--tokens", {"type": int, "default": 32, "help": "tokens of each answer"}),
    ], connections=256, rounds=20)
    rounds, each = (2, 1) if options.quick else (options.rounds, options.each)
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="door-") as folder, contextlib.ExitStack() as stack:
        model = options.model or str(make_tiny_model(Path(folder) / "model", seed=0))
        config = EngineConfig(model_path=model, **TINY)
        pipe, pid = stack.enter_context(piped(run_servers, config, options.uvloop))
        clients, _ = stack.enter_context(piped(run_client, options.connections, each, options.tokens))
        ways = {name: (url, TOKEN, NAME) for name, url in pipe.recv().items()}
        if options.system:
            routes = stack.enter_context(system(Path(folder), model))
            ways |= {name: (url, key, model) for name, (url, key) in routes.items()}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        shares: dict[str, list[float]] = {name: [] for name in ways}
        cores: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name in random.Random(number).sample(list(ways), len(ways)):
                wait_until_idle()
                before = cpu_seconds(pid)
                clients.send((*ways[name], number, EXTRA_FIELDS.get(name, {})))
                seconds, own = clients.recv()
                if number:  # the first round warms up
                    speeds[name].append(options.connections * each * options.tokens / seconds)
                    shares[name].append(own / seconds)
                    cores[name].append(1000 * (cpu_seconds(pid) - before) / options.connections / each)
        clients.send(None)
        pipe.send("end")
    return print_figures(options, rounds, speeds, shares, cores, watch)


def wait_until_idle() -> None:
    """Wait until the machine is idle, so the previous case's work, such as writes to the log, is done."""
    time.sleep(0.3)
    wait_until(lambda: psutil.cpu_percent(0.5) <= 5, "the machine to be idle between the cases", 30)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process without its children (vLLM's engine is one)."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def print_figures(
    options: argparse.Namespace, rounds: int, speeds: dict[str, list[float]], shares: dict[str, list[float]],
    cores: dict[str, list[float]], watch: Watch,
) -> int:
    """Print the figures. CPU time is steadier than wall time if other processes use the same cores."""
    figures: dict[str, Any] = about(watch) | {
        "connections": options.connections, "tokens": options.tokens, "uvloop": options.uvloop, "speeds": speeds,
        "server_ms": {name: cores[name] for name in IN_ONE_PROCESS},
    }
    print(f"{options.connections} connections, {options.tokens} tokens an answer, {rounds} rounds")
    for name, rates in speeds.items():
        share = statistics.median(shares[name])
        cost = f", the server {statistics.median(cores[name]):.2f} ms a request" if name in IN_ONE_PROCESS else ""
        print(f"  {name:8} {statistics.median(rates):8.0f} tokens/s   the client takes {share:.2f} of a core{cost}")
        if name in AGAINST:
            ratio = figures[name] = spread([b / a for a, b in zip(speeds[AGAINST[name]], rates, strict=True)])
            print(f"           to {AGAINST[name]} {ratio['median']:.3f} ({ratio['min']:.3f} - {ratio['max']:.3f}), "
                  f"the median within {ratio['median_from']:.3f} - {ratio['median_to']:.3f} in 95 % of resamples")
    print(f"  checked: every answer was whole. {load_text(figures['beside'])}")
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Do places that follow the engine's load (`explorer.max_concurrency: auto`) give what the best fixed number gives?

Three workloads through the whole system, on real vLLM engines of a tiny model whose KV cache is kept small: short
answers; long ones, of which 64 units at once fill the KV cache nearly twice; and conversations of two turns with a tool
between them that takes its time. One system with `auto` is up all the time and gets the workloads in turn, so it meets
each with the places that the one before left. Beside it there is one system after the other with a fixed number of
places, and the two are measured in turn; who goes first changes. The figures: of each workload and number of places
the median over the rounds of the ratio (auto / fixed) of tokens per second, with its range; and the least of these
medians, which is the ratio to the best fixed number.

Each batch is checked: every run has all its tokens. `python -m benchmarks.adaptive [--json FILE] [--quick]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trinity_es
from examples.grpo.tiny_model import make_tiny_model
from trinity_es import MultiTurnWorkflow
from trinity_es.events.experience import Experience
from trinity_es.events.vocabulary import ConcurrencyChanged
from trinity_es.system import lifecycle

FIXED = (4, 8, 16, 32, 64)
BLOCKS = 512
"""Blocks of the KV cache, of 32 tokens each."""


class WithTool(MultiTurnWorkflow):
    """Asks, calls a tool that takes `seconds`, and asks again with what it said."""

    can_reset, can_repeat, is_async = False, False, True

    async def run_async(self) -> list[Experience]:
        prompt, args = self.task.raw_task["prompt"], self.task.workflow_args
        messages = [{"role": "user", "content": prompt}]
        [first] = await self.model.chat_async(messages)
        await asyncio.sleep(args["seconds"])
        messages += [{"role": "assistant", "content": first.response_text or ""}, {"role": "user", "content": "tool"}]
        [second] = await self.model.chat_async(messages)
        for experience in (first, second):
            experience.reward = 0.0
        return [first, second]


def no_reward(response: str, prompt: str, truth: str | None) -> float:
    return 0.0


@dataclass(frozen=True)
class Workload:
    """One batch: so many tasks of so many runs, each of `turns` answers of one of these lengths."""

    tasks: int
    runs: int
    tokens: tuple[int, ...]
    turns: int = 1
    tool_seconds: tuple[float, ...] = (0.0,)

    def batch(self, number: int) -> list[trinity_es.Task]:
        """Return its tasks; other prompts for each number, so that no prefix cache knows them."""
        return [self._task(number, i) for i in range(self.tasks)]

    def _task(self, number: int, i: int) -> trinity_es.Task:
        more: dict[str, Any] = {"workflow": "single_turn", "reward_fn": "benchmarks.adaptive:no_reward"}
        if self.turns > 1:
            seconds = self.tool_seconds[i % len(self.tool_seconds)]
            more = {"workflow": "benchmarks.adaptive:WithTool", "workflow_args": {"seconds": seconds}}
        return trinity_es.Task(
            raw_task={"prompt": f"{number}:{i}="}, repeat_times=self.runs,
            rollout_args={"max_tokens": self.tokens[i % len(self.tokens)], "ignore_eos": True}, **more,
        )

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens[i % len(self.tokens)] for i in range(self.tasks)) * self.runs * self.turns


WORKLOADS = {
    "short": Workload(tasks=256, runs=4, tokens=(16,)),
    "long": Workload(tasks=96, runs=2, tokens=(160, 224)),
    "mixed": Workload(tasks=128, runs=2, tokens=(16, 64), turns=2, tool_seconds=(0.2, 1.0)),
}


class System:
    """One system, on one engine."""

    def __init__(self, folder: str, model: str, places: int | str, stack: ExitStack) -> None:
        os.makedirs(folder)
        self.config = trinity_es.Config.from_dict(
            {
                "mode": "explore",
                "model": {"model_path": model},
                "explorer": {
                    "max_concurrency": places,
                    "rollout_model": {
                        "max_model_len": 256, "gpu_memory_utilization": 0.3,
                        "engine_args": {"block_size": 32, "num_gpu_blocks_override": BLOCKS},
                    },
                },
            },
            folder=folder,
        )
        assert lifecycle.start(self.config)
        self.client = stack.enter_context(trinity_es.connect(self.config))
        stack.callback(self.client.shutdown)
        self.client.wait_ready()
        self.number = 0

    def run(self, load: Workload) -> float:
        """Return tokens per second from submit to the return of finalize."""
        self.number += 1
        tasks = load.batch(self.number)
        started = time.perf_counter()
        self.client.submit_batch(batch_id=self.number, tasks=tasks, batch_type="train")
        self.client.finalize_train_batch(self.number, timeout=600)
        seconds = time.perf_counter() - started
        tokens = sum(r.response_tokens for t in self.client.batch(self.number).tasks for r in t.done.values())
        assert tokens == load.all_tokens, (tokens, load.all_tokens)
        return tokens / seconds

    @property
    def places(self) -> int:
        [runner] = self.client.status()["runners"]
        return int(runner["places"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one round against one fixed number: does it run at all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fixed", type=int, nargs="*", default=list(FIXED))
    options = parser.parse_args()
    rounds, fixed = (1, [16]) if options.quick else (options.rounds, options.fixed)
    rows = []
    with tempfile.TemporaryDirectory(prefix="adaptive-") as folder, ExitStack() as stack:
        model = str(make_tiny_model(Path(folder) / "model", seed=0))
        auto = System(f"{folder}/auto", model, "auto", stack)
        for places in fixed:
            with ExitStack() as its_own:
                rows += compare(auto, System(f"{folder}/{places}", model, places, its_own), places, rounds)
        with trinity_es.open_log(auto.config.store.url) as log:
            changes = [r.event for r in log.read(types=["ConcurrencyChanged"])]
            assert log.verify() == []
    had = [e.places for e in changes if isinstance(e, ConcurrencyChanged)]
    least = {name: min((r for r in rows if r["workload"] == name), key=lambda r: r["ratio"]) for name in WORKLOADS}
    for name, row in least.items():
        print(f"{name}: {row['ratio']:.3f} of the best fixed number, {row['places']} places")
    print(f"{len(had)} changes of places, to {min(had, default=0)} - {max(had, default=0)}; the last: {had[-8:]}")
    if options.json:
        machine = {"python": platform.python_version(), "system": platform.platform(), "load": os.getloadavg()}
        Path(options.json).write_text(json.dumps(
            {"machine": machine, "rows": rows, "least": least, "changes": had}, indent=2
        ))
    return 0


def compare(auto: System, other: System, places: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row a workload, after one round that warms up."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in WORKLOADS}
    left: dict[str, list[int]] = {name: [] for name in WORKLOADS}
    for number in range(rounds + 1):
        for name, load in WORKLOADS.items():
            if number % 2:
                there = other.run(load)
                here = auto.run(load)
            else:
                here = auto.run(load)
                there = other.run(load)
            if number:
                pairs[name].append((here, there))
            left[name].append(auto.places)
    rows = []
    for name, found in pairs.items():
        ratios = [a / b for a, b in found]
        row = {
            "workload": name, "places": places, "ratio": statistics.median(ratios), "min": min(ratios),
            "max": max(ratios), "auto": [a for a, _ in found], "fixed": [b for _, b in found], "left": left[name],
        }
        rows.append(row)
        print(
            f"{name:6} auto {statistics.median(row['auto']):7.0f} tokens/s   {places:3} places "
            f"{statistics.median(row['fixed']):7.0f} tokens/s   ratio {row['ratio']:.3f} ({row['min']:.3f} - "
            f"{row['max']:.3f})   places of auto then {left[name]}", flush=True,
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())

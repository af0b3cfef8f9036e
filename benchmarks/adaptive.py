"""Is `explorer.max_concurrency: auto`, which follows the engine's load, as fast as the best fixed number of places?

A runner plays as many units at once as it has places. Three workloads run through the whole system, on real vLLM
engines of a tiny model with a small KV cache: short answers; long answers, of which 64 units fill the KV cache nearly
twice; and conversations of two turns with a slow tool between them. Systems with fixed numbers of places and a system
with `auto` are up all the time, suspended while they are not measured. For each workload the best fixed number is found
first. Then it and `auto` are measured again in alternating pairs, since the best of several was partly luck. `auto`
plays one workload after the other, so it starts each with the places that the previous one left, and its first batch
counts.

The benchmark checks that every run of each batch has all its tokens. `python -m benchmarks.adaptive [--json FILE]
[--quick]`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import trinity_es
from benchmarks.compared import Row, Spread, Watch, alternate, options_of, pairs, pids_of, report
from benchmarks.systems import TINY, explore_config, running, token_rate
from examples.grpo.tiny_model import make_tiny_model
from trinity_es import MultiTurnWorkflow
from trinity_es.events.experience import Experience
from trinity_es.events.vocabulary import ConcurrencyChanged

AUTO = "auto"
AIM = 0.95
FIXED = (16, 32, 64, 128, 256)
BLOCKS = 512
"""Number of blocks of the KV cache, each of 32 tokens."""


class WithTool(MultiTurnWorkflow):
    """Conversation of two turns, with a tool call between them that takes `seconds`."""

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
    """Size of a batch: `tasks` tasks of `runs` runs, each with `turns` answers of one of the lengths in `tokens`."""

    tasks: int
    runs: int
    tokens: tuple[int, ...]
    turns: int = 1
    tool_seconds: tuple[float, ...] = (0.0,)

    def batch(self, number: int) -> list[trinity_es.Task]:
        """Return the tasks of batch `number`. Their prompts depend on it, so that none is in the prefix cache."""
        return [self._task(number, i) for i in range(self.tasks)]

    def _task(self, number: int, i: int) -> trinity_es.Task:
        kind: dict[str, Any] = {"workflow": "single_turn", "reward_fn": "benchmarks.adaptive:no_reward"}
        if self.turns > 1:
            seconds = self.tool_seconds[i % len(self.tool_seconds)]
            kind = {"workflow": "benchmarks.adaptive:WithTool", "workflow_args": {"seconds": seconds}}
        return trinity_es.Task(
            raw_task={"prompt": f"{number}:{i}="}, repeat_times=self.runs,
            rollout_args={"max_tokens": self.tokens[i % len(self.tokens)], "ignore_eos": True}, **kind,
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
    def __init__(self, folder: str, model: str, places: int | str, stack: ExitStack) -> None:
        os.makedirs(folder)
        cache = {"block_size": 32, "num_gpu_blocks_override": BLOCKS}
        self.config = explore_config(folder, places, {**TINY, "engine_args": cache}, model={"model_path": model})
        self.client = stack.enter_context(running(self.config))
        self.number = 0

    def run(self, load: Workload) -> float:
        self.number += 1
        return token_rate(self.client, self.number, load.batch(self.number), load.all_tokens)

    @property
    def pids(self) -> list[int]:
        return pids_of(self.client)

    @property
    def places(self) -> int:
        [runner] = self.client.status()["runners"]
        return int(runner["places"])


def main() -> int:
    options = options_of(__doc__, [
        ("--rounds", {"type": int, "default": 8, "help": "pairs of `auto` and the best fixed number, a workload"}),
        ("--search", {"type": int, "default": 3, "help": "rounds of the search for the best fixed number"}),
        ("--fixed", {"type": int, "nargs": "*", "default": list(FIXED)}),
        ("--workloads", {"nargs": "*", "default": list(WORKLOADS)}),
    ])
    search, rounds, fixed = (1, 1, [16, 64]) if options.quick else (options.search, options.rounds, options.fixed)
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="adaptive-") as folder, ExitStack() as stack:
        model = str(make_tiny_model(Path(folder) / "model", seed=0))
        systems = {str(n): System(f"{folder}/{n}", model, n, stack) for n in [*fixed, AUTO]}
        for system in systems.values():
            for name in options.workloads:
                system.run(WORKLOADS[name])  # warms up
        rows = []
        for name in options.workloads:
            speeds = alternate({n: partial(systems[n].run, WORKLOADS[name]) for n in map(str, fixed)}, search, systems)
            for n, rates in speeds.items():
                rows.append(Row(f"{name}: {n} places", "tokens/s", Spread.of(rates)))
                print(rows[-1].as_text(), flush=True)
            best = max(speeds, key=lambda n: statistics.median(speeds[n]))
            rows.append(compare_auto(systems, name, best, rounds))
            print(rows[-1].as_text(), flush=True)
        with trinity_es.open_log(systems[AUTO].config.store.url) as log:
            changes = [cast(ConcurrencyChanged, r.event).places for r in log.read(types=["ConcurrencyChanged"])]
            assert log.verify() == []
        for places, system in systems.items():
            with trinity_es.open_log(system.config.store.url) as log:
                if len(log.runner_lives()) != 1:
                    raise SystemExit(f"the runner of {places} places was started again during the measurement")
        batches = systems[AUTO].number
        rows.append(Row("changes of places by auto", "a batch", Spread.of([len(changes) / batches])))
        print(f"the places that auto had, over {batches} batches: {changes}")
        return report("places that follow the load", rows, watch, [], options.json)


def compare_auto(systems: dict[str, System], name: str, best: str, rounds: int) -> Row:
    speeds = alternate({n: partial(systems[n].run, WORKLOADS[name]) for n in (AUTO, best)}, rounds, systems)
    what = f"{name}: auto, at last {systems[AUTO].places} places"
    return pairs(what, "tokens/s", speeds[AUTO], f"{best} places", speeds[best], aim=AIM)


if __name__ == "__main__":
    sys.exit(main())

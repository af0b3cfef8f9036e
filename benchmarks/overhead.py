"""What does the whole system cost over the bare engine? The same prompts through vLLM alone and through trinity_es.

Two engines of the same settings are up, each in a process of its own: one is vLLM's own `AsyncLLM`, called with token
ids; the other is behind a runner actor, and gets its prompts as the tasks of a batch that is submitted, run by the
`single_turn` workflow, scored, logged, stored durably, put through the pipeline and finalized. They are measured in
turn, so that a machine whose speed drifts drifts for both; the engine that waits is idle, and who goes first changes
from pair to pair. The figure is the median over the pairs of the ratio of tokens per second, with its range, its
quartiles, and the interval that holds 95 % of the medians of 10,000 resamples of the pairs (bootstrap, fixed seed).

With `--door` the workflow asks its runner over HTTP, with the OpenAI client, as an agent does.

`python -m benchmarks.overhead [--json FILE] [--quick] [--door] [--model DIR]`. Without `--model` a tiny model is made.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import trinity_es
from examples.grpo.tiny_model import make_tiny_model
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.engines.vllm_engine import VLLMEngine
from trinity_es.events.experience import Experience
from trinity_es.system import lifecycle
from trinity_es.workflows import SingleTurnWorkflow

SYSTEM = "You write numbers."


def reward(response: str, prompt: str, truth: str | None) -> float:
    """The cheapest reward there is: what is measured is the way, not the scoring."""
    return float(len(response) % 2)


def prompts(n: int, round_: int) -> list[str]:
    """Different in every round, so that the prefix cache of neither engine knows them."""
    return [f"{round_}:{i}=" for i in range(n)]


class ThroughDoor(SingleTurnWorkflow):
    """Asks as single_turn does, over HTTP; what was answered is taken from the runner's record."""

    async def run_async(self) -> list[Experience]:
        asked = self.model.get_openai_async_client()
        await asked.chat.completions.create(
            model=self.model.model_name, messages=self.prompt_messages(), n=self.repeat_times
        )
        experiences: list[Experience] = self.model.extract_experience_from_history()
        for i, experience in enumerate(experiences):
            experience.eid.run = self.run_id_base + i
            experience.reward = sum(self.reward(experience.response_text or "").values())
        return experiences


class Bare:
    """vLLM alone: all prompts at once, each awaited as vLLM's own examples do."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = VLLMEngine(config)

    async def start(self) -> None:
        await self.engine.start()
        self.llm: Any = self.engine._llm
        self.count = 0

    async def run(self, texts: list[str], max_tokens: int, runs: int) -> float:
        """Tokens per second."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, logprobs=0, n=runs, output_kind=RequestOutputKind.FINAL_ONLY
        )

        async def one(text: str) -> int:
            self.count += 1
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            ids = self.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            tokens = 0
            async for output in self.llm.generate({"prompt_token_ids": ids}, params, f"bare-{self.count}"):
                tokens = sum(len(o.token_ids) for o in output.outputs)
            return tokens

        started = time.perf_counter()
        total = sum(await asyncio.gather(*(one(t) for t in texts)))
        return total / (time.perf_counter() - started)


def bare_process(config: EngineConfig, pipe: Connection) -> None:
    """Answers (texts, max_tokens, runs) with tokens per second until None comes. The process of the bare engine.

    It is a session of its own, as the actor system is one: Linux groups processes by session when it shares out cores
    (sched_autogroup_enabled), and on two cores that alone was worth 10 %.
    """
    os.setsid()

    async def serve() -> None:
        bare = Bare(config)
        await bare.start()
        gc.unfreeze()  # our engine freezes what it loaded, AsyncLLM alone does not
        pipe.send("ready")
        try:
            while (order := await asyncio.to_thread(pipe.recv)) is not None:
                pipe.send(await bare.run(*order))
        finally:
            await bare.engine.stop()

    asyncio.run(serve())


def through_system(
    client: trinity_es.RolloutClient, workflow: str, batch: int, texts: list[str], max_tokens: int, runs: int
) -> float:
    """Tokens per second from submit to the return of finalize."""
    tasks = [
        trinity_es.Task(
            workflow=workflow,
            repeat_times=runs,
            raw_task={"prompt": text},
            format_args={"system_prompt": SYSTEM},
            rollout_args={"max_tokens": max_tokens, "ignore_eos": True},
            reward_fn="benchmarks.overhead:reward",
        )
        for text in texts
    ]
    started = time.perf_counter()
    client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
    client.finalize_train_batch(batch, timeout=600)
    seconds = time.perf_counter() - started
    tokens = sum(r.response_tokens for t in client.batch(batch).tasks for r in t.done.values())
    assert tokens == len(texts) * runs * max_tokens, tokens
    return tokens / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="two short rounds: does it run at all")
    parser.add_argument("--door", action="store_true", help="the workflow asks over HTTP, with the OpenAI client")
    parser.add_argument("--model", help="a model folder in HF format")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--runs", type=int, default=4, help="runs of each task")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each run")
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        model = options.model or str(make_tiny_model(Path(folder) / "model", seed=0))
        config = trinity_es.Config.from_dict(
            {
                "mode": "explore",
                "model": {"model_path": model},
                "explorer": {
                    "max_concurrency": options.tasks,
                    "rollout_model": {"max_model_len": 256, "gpu_memory_utilization": 0.3},
                },
            },
            folder=folder,
        )
        pairs = measure(config, options, rounds)
    ratios = [b / a for a, b in pairs]
    found = spread(ratios)
    figures = {
        "machine": {"python": platform.python_version(), "system": platform.platform()},
        "tasks": options.tasks,
        "runs": options.runs,
        "tokens": options.tokens,
        "door": options.door,
        "bare_tokens_per_s": [a for a, _ in pairs],
        "system_tokens_per_s": [b for _, b in pairs],
        "ratio": found,
    }
    how = ", asked over HTTP" if options.door else ""
    print(f"{options.tasks} tasks of {options.runs} runs of {options.tokens} tokens{how}, {rounds} pairs")
    for a, b in pairs:
        print(f"  vLLM alone {a:8.0f} tokens/s   through trinity_es {b:8.0f} tokens/s   ratio {b / a:.3f}")
    print(
        f"  ratio: median {found['median']:.3f} ({found['min']:.3f} - {found['max']:.3f}), quartiles "
        f"{found['lower_quartile']:.3f} and {found['upper_quartile']:.3f}; the median is within "
        f"{found['median_from']:.3f} - {found['median_to']:.3f} in 95 % of resamples"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return 0


def measure(config: trinity_es.Config, options: argparse.Namespace, rounds: int) -> list[tuple[float, float]]:
    """Tokens per second of (vLLM alone, the whole system), a pair a round."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=bare_process, args=(config.explorer.rollout_model.engine_config(), theirs))
    process.start()
    theirs.close()  # so that a death of the process ends a recv

    def bare(texts: list[str], *sizes: int) -> float:
        pipe.send((texts, *sizes))
        return float(pipe.recv())

    workflow = "benchmarks.overhead:ThroughDoor" if options.door else "single_turn"
    pairs = []
    try:
        assert pipe.recv() == "ready"
        assert lifecycle.start(config)
        with trinity_es.connect(config) as client:
            client.wait_ready()
            for number in range(rounds + 1):
                texts = prompts(options.tasks, number)
                sizes = (options.tokens, options.runs)
                if number % 2:  # who goes first changes from pair to pair
                    whole = through_system(client, workflow, number + 1, texts, *sizes)
                    alone = bare(texts, *sizes)
                else:
                    alone = bare(texts, *sizes)
                    whole = through_system(client, workflow, number + 1, texts, *sizes)
                if number:  # the first pair warms up
                    pairs.append((alone, whole))
            client.shutdown()
        pipe.send(None)
        process.join(60)
    finally:
        process.kill()
        pipe.close()
    return pairs


def spread(ratios: list[float], seed: int = 0) -> dict[str, float]:
    """Median, range, quartiles and the bootstrap's 95 % interval of the median."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(10_000))
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return {
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "lower_quartile": lower,
        "upper_quartile": upper,
        "median_from": medians[250],
        "median_to": medians[-251],
    }


if __name__ == "__main__":
    sys.exit(main())

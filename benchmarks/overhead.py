"""What does the whole system cost over the bare engine? The same prompts through vLLM alone and through trinity_es.

Two engines have the same settings, each in its own process. One is vLLM's own `AsyncLLM`, called with token ids. The
other is behind a runner actor, and gets its prompts as tasks of a batch that is submitted, run by the `single_turn`
workflow, scored, logged, stored durably, put through the pipeline and finalized. They are measured in turn, so that a
drift of the machine's speed affects both; the waiting engine is idle, and the first one alternates. With two cores or
more, both engines' vLLM workers are pinned to the last core, and all other processes to the rest. Otherwise the speed
of one engine varies by half, depending on where Linux puts its three processes, two of which busy-wait. The figure is
the median over the pairs of the ratio of tokens per second, with its range, its quartiles, and the interval that holds
95 % of the medians of 10,000 resamples of the pairs (bootstrap, fixed seed).

The cases are `single`, one turn and several runs per task; `conversation`, four turns of a quarter of the tokens each,
with a user message after each; and `door`, in which the workflow of `single` calls its runner over HTTP with the OpenAI
client, as an agent does. The benchmark checks that every run has all of its tokens and that the log is sound.

`python -m benchmarks.overhead [CASE ...] [--json FILE] [--quick] [--model DIR]`. Without a model a tiny one is made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

import trinity_es
from benchmarks.child_processes import piped
from benchmarks.compared import Row, Spread, Watch, coordinator_of, family_of, options_of, pairs, report, sound
from benchmarks.systems import TINY, explore_config, running, token_rate
from examples.grpo.tiny_model import make_tiny_model
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.events.experience import Experience
from trinity_es.workflows import SingleTurnWorkflow

SYSTEM, NEXT = "You write numbers.", "more"
TURNS = 4
CASES = {
    "single": "single turn", "conversation": f"a conversation of {TURNS} turns", "door": "single turn, asked over HTTP",
}
WORKFLOWS = {
    "single": "single_turn", "conversation": "benchmarks.overhead:Conversation",
    "door": "benchmarks.overhead:ThroughDoor",
}
AIMS, LOWER_AIM = {"single": 0.98, "conversation": 0.96, "door": 0.98}, 0.95


def reward(response: str, prompt: str, truth: str | None) -> float:
    """Return a cheap reward, since scoring is not measured."""
    return float(len(response) % 2)


def prompts(n: int, round_: int) -> list[str]:
    """Return `n` prompts that differ in every round, so that no engine has them in its prefix cache."""
    return [f"{round_}:{i}=" for i in range(n)]


class ThroughDoor(SingleTurnWorkflow):
    """Workflow `single_turn` over HTTP, which takes the answers from the runner's history."""

    async def run_async(self) -> list[Experience]:
        client = self.model.get_openai_async_client()
        await client.chat.completions.create(
            model=self.model.model_name, messages=self.prompt_messages(), n=self.repeat_times
        )
        experiences: list[Experience] = self.model.extract_experience_from_history()
        for i, experience in enumerate(experiences):
            experience.eid.run = self.run_id_base + i
            experience.reward = sum(self.reward(experience.response_text or "").values())
        return experiences


class Conversation(SingleTurnWorkflow):
    """Workflow with several answers in each run, and a user message between them."""

    async def run_async(self) -> list[Experience]:
        runs = await asyncio.gather(*(self.one(self.run_id_base + i) for i in range(self.repeat_times)))
        return [experience for run in runs for experience in run]

    async def one(self, run: int) -> list[Experience]:
        messages, turns = [dict(m) for m in self.prompt_messages()], list[Experience]()
        for turn in range(TURNS):
            [answer] = await self.model.chat_async(messages, n=1)
            text = answer.response_text or ""
            answer.eid.run, answer.eid.step, answer.reward = run, turn, sum(self.reward(text).values())
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": NEXT}]
            turns.append(answer)
        return turns


async def play_bare(engine: VLLMEngine, case: str, texts: list[str], max_tokens: int, runs: int) -> float:
    """Play all prompts at once with vLLM alone, as in its own examples, and return tokens per second."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    turns = TURNS if case == "conversation" else 1
    params = SamplingParams(
        max_tokens=max_tokens // turns, ignore_eos=True, logprobs=0, n=runs if turns == 1 else 1,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    def ids_of(*messages: tuple[str, str]) -> list[int]:
        chat = [{"role": role, "content": content} for role, content in messages]
        return list(engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    async def answer(ids: list[int]) -> list[list[int]]:
        llm: Any = engine._llm
        async for output in llm.generate({"prompt_token_ids": ids}, params, uuid4().hex):
            found = [list(o.token_ids) for o in output.outputs]
        return found

    async def one(text: str) -> int:
        ids, tokens = ids_of(("system", SYSTEM), ("user", text)), 0
        for turn in range(turns):
            if turn:
                ids += ids_of(("user", NEXT))
            found = await answer(ids)
            tokens += sum(map(len, found))
            ids = ids + found[0]
        return tokens

    started = time.perf_counter()
    total = sum(await asyncio.gather(*(one(t) for t in texts for _ in range(runs if turns > 1 else 1))))
    seconds = time.perf_counter() - started
    assert total == len(texts) * runs * max_tokens, total
    return total / seconds


def bare_process(config: EngineConfig, pipe: Connection) -> None:
    """Run the bare engine. Answer each (case, texts, max_tokens, runs) with tokens per second, until None comes.

    The process is its own session, like the actor system, because Linux assigns cores by session
    (sched_autogroup_enabled). On two cores this alone made a difference of 10 %.
    """
    os.setsid()

    async def serve() -> None:
        engine = VLLMEngine(config)
        await engine.start()  # also calls gc.freeze, as `vllm serve` does
        pipe.send("ready")
        try:
            while (order := await asyncio.to_thread(pipe.recv)) is not None:
                pipe.send(await play_bare(engine, *order))
        finally:
            await engine.stop()

    asyncio.run(serve())


def through_system(
    client: trinity_es.RolloutClient, case: str, batch: int, texts: list[str], max_tokens: int, runs: int,
    workflow: str = "",
) -> float:
    """Play a batch, and return tokens per second from submit to finalize. `workflow` replaces the case's workflow."""
    each = max_tokens // (TURNS if case == "conversation" else 1)
    tasks = [
        trinity_es.Task(
            workflow=workflow or WORKFLOWS[case], repeat_times=runs, raw_task={"prompt": text},
            format_args={"system_prompt": SYSTEM}, rollout_args={"max_tokens": each, "ignore_eos": True},
            reward_fn="benchmarks.overhead:reward",
        )
        for text in texts
    ]
    return token_rate(client, batch, tasks, len(texts) * runs * max_tokens)


def main() -> int:
    options = options_of(__doc__, [
        ("cases", {"nargs": "*", "choices": [*CASES, []], "help": "default: all"}),
        ("--model", {"help": "a model folder in HF format"}),
        ("--runs", {"type": int, "default": 8, "help": "runs of each task"}),
        ("--tokens", {"type": int, "default": 160, "help": "tokens of each run"}),
    ], tasks=64, rounds=24)
    watch, rounds = Watch(), 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        model = options.model or str(make_tiny_model(Path(folder) / "model", seed=0))
        found = measure(explore_config(folder, options.tasks, TINY, model={"model_path": model}), options, rounds)
    return report(
        f"{options.tasks} tasks of {options.runs} runs of {options.tokens} tokens", rows(found), watch, [],
        options.json, {"tasks": options.tasks, "runs": options.runs, "tokens": options.tokens},
    )


def rows(found: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """Return two rows for each case: the ratio, and the lower end of its median's interval."""
    table_rows = []
    for case, pair in found.items():
        bare, whole = [a for a, _ in pair], [b for _, b in pair]
        ratio = spread([b / a for a, b in pair])
        table_rows += [
            pairs(CASES[case], "tokens/s", whole, "vLLM alone", bare, aim=AIMS[case]),
            Row(f"  its median in 95 % of resamples, {ratio['median_from']:.3f} - {ratio['median_to']:.3f}: lower end",
                "of vLLM alone", Spread.of([ratio["median_from"]]), aim=LOWER_AIM),
        ]
    return table_rows


def measure(
    config: trinity_es.Config, options: argparse.Namespace, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return {case: pairs of tokens per second of (vLLM alone, the whole system)}, a pair per round."""
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in options.cases or CASES}
    batch, engine = 0, config.explorer.rollout_model.engine_config()
    with piped(bare_process, engine) as (pipe, pid):
        def bare(*order: Any) -> float:
            pipe.send(order)
            return float(pipe.recv())

        assert pipe.recv() == "ready"
        with running(config) as client:
            pin(*family_of(pid), *family_of(coordinator_of(client)))
            for number in range(rounds + 1):
                for case, pair in found.items():
                    batch += 1
                    texts, sizes = prompts(options.tasks, batch), (options.tokens, options.runs)
                    if number % 2:  # the first of a pair alternates
                        whole = through_system(client, case, batch, texts, *sizes)
                        alone = bare(case, texts, *sizes)
                    else:
                        alone = bare(case, texts, *sizes)
                        whole = through_system(client, case, batch, texts, *sizes)
                    if number:  # the first pair warms up
                        pair.append((alone, whole))
                print(f"  pair {number} of {rounds} done" if number else "  warm", file=sys.stderr, flush=True)
        sound(config.store.url)
        pipe.send(None)
    return found


def pin(*processes: psutil.Process) -> None:
    """Pin vLLM's workers among these processes to the last core, and all others and this process to the other cores."""
    *others, last = sorted(os.sched_getaffinity(0))
    if others:
        for process in {*processes, psutil.Process()}:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {last} if process.name().startswith("VLLM::Worker") else others)


def spread(ratios: list[float], seed: int = 0) -> dict[str, float]:
    """Return median, range, quartiles and the 95 % bootstrap interval of the median."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(10_000))
    lower, _, upper = statistics.quantiles(ratios, n=4)
    return {
        "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "lower_quartile": lower,
        "upper_quartile": upper, "median_from": medians[250], "median_to": medians[-251],
    }


if __name__ == "__main__":
    sys.exit(main())

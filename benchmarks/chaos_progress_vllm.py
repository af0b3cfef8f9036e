"""A real vLLM engine whose attempts die: does a continued answer equal the undisturbed one, or its distribution?

The engine has a tiny model with random weights. Its runner is killed once, in the middle of a greedy answer. For the
distributions real kills would take too long, since the engine starts for 15 s. So attempts are cancelled inside one
process: each of `n` answers loses its attempt at a random token, perhaps several times, and the next attempt gets the
journal. Their lengths, rewards and finish reasons are compared with those of as many undisturbed answers
(Kolmogorov-Smirnov).
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos_progress_engine import show_progress, system, task
from benchmarks.systems import TINY
from examples.grpo.tiny_model import make_tiny_model
from tests.helpers.journals import RUN, Written, ask
from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.events import vocabulary as ev
from trinity_es.events.journal import kept_runs
from trinity_es.events.store.journal_store import open_journals
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.projections.reading.log_reader import open_log

PLAIN = Sampling(max_tokens=48, stop=tuple("aeioubcdfg"))
"""Each stop is one of 261 tokens of about equal probability, so most answers end before 48 tokens."""
BEGINS_AGAIN = "presence_penalty 0.5, which begins again"
"""Sampling whose answers start over after a death. Lengths may differ, since short attempts end before they die."""
SAMPLING = {
    "plain": PLAIN, "top_p 0.9": replace(PLAIN, top_p=0.9), "a seed": replace(PLAIN, seed=0),
    "repetition_penalty 1.3": replace(PLAIN, repetition_penalty=1.3),
    BEGINS_AGAIN: replace(PLAIN, presence_penalty=0.5),
}
AT_ONCE = 64
Answer = tuple[Completion, int, int, int]
"""An answer, its deaths, its kept tokens, and 1 if those are wrong."""
ALARM = 0.01
"""p value below which distributions count as different, for all comparisons together (Bonferroni)."""


def kolmogorov_smirnov(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov distance of two samples, and its asymptotic p value."""
    a, b = sorted(one), sorted(other)
    distance = max(abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)) for x in {*a, *b})
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (root + 0.12 + 0.11 / root) * distance
    terms = [2 * (-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101)]
    return distance, 1.0 if x < 0.2 else min(1.0, max(0.0, sum(terms)))


@dataclass(frozen=True)
class Compared:
    """Comparison of answers whose attempts died with undisturbed answers, for one kind of sampling."""

    sampling: str
    answers: int
    deaths: int
    kept: int
    """Tokens that were not generated again."""
    tokens: int
    p: dict[str, float]
    """p values of lengths, rewards (the mean token id) and finish reasons."""
    wrong: int
    """Answers whose continued tokens or logprobs differ from the journal."""


async def answer_with_deaths(
    engine: VLLMEngine, number: int, sampling: Sampling, chance: random.Random | None
) -> Answer:
    """Return an answer. Without `chance` no attempt dies."""
    if sampling.seed is not None:
        sampling = replace(sampling, seed=number)
    kept, data, deaths = None, b"", 0
    while chance is not None and chance.random() < 0.5:
        writer, least = Written(), chance.randrange(1, 24)
        attempt = asyncio.ensure_future(ask(engine, RunJournal(RUN, writer, kept), prompt(engine, number), sampling))
        while not attempt.done() and sum(len(r) for call in writer.open for r in call.recorded.values()) < least:
            await asyncio.sleep(0.003)
            writer.look()
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        deaths, data = deaths + 1, data + writer.data
        kept = kept_runs([data]).get(0)
    [answer] = await ask(engine, RunJournal(RUN, Written(), kept), prompt(engine, number), sampling)
    parts = [] if kept is None else [a for of_call in kept.calls.values() for a in of_call.values()]
    parts = [a for a in parts if a.finish or not a.forbids]
    wrong = any(answer.token_ids[: len(a.tokens)] != a.tokens or (answer.logprobs or [])[: len(a.tokens)] != a.logprobs
                for a in parts)
    return answer, deaths, sum(len(a.tokens) for a in parts), int(wrong)


def prompt(engine: VLLMEngine, number: int) -> list[int]:
    return engine.tokenizer.encode(f"{number}=")


async def answer_all(engine: VLLMEngine, n: int, sampling: Sampling, seed: int | None) -> list[Answer]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Answer:
        async with places:
            chance = None if seed is None else random.Random(f"{seed}/{number}")
            return await answer_with_deaths(engine, number, sampling, chance)

    return await asyncio.gather(*(one(i) for i in range(n)))


async def compare(engine: VLLMEngine, name: str, n: int, seed: int) -> Compared:
    calm = [a for a, *_ in await answer_all(engine, n, SAMPLING[name], None)]
    rough = await answer_all(engine, n, SAMPLING[name], seed)
    figures = {
        "lengths": lambda a: len(a.token_ids), "rewards": lambda a: statistics.mean(a.token_ids),
        "finish reasons": lambda a: float(a.finish_reason == "stop"),
    }
    p = {what: kolmogorov_smirnov([of(a) for a in calm], [of(a) for a, *_ in rough])[1] for what, of in figures.items()}
    return Compared(name, n, sum(r[1] for r in rough), sum(r[2] for r in rough),
                    sum(len(a.token_ids) for a, *_ in rough), p, sum(r[3] for r in rough))


async def first_token_times(engine: VLLMEngine, kept: int = 220, repeats: int = 20) -> dict[str, float]:
    """Return the ms to the first token after 8 tokens, and after `kept` tokens, in the prefix cache and not."""

    async def first(ids: list[int]) -> float:
        began = time.perf_counter()
        async for _ in engine.stream(ids, Sampling(max_tokens=1, temperature=0.0)):
            return 1e3 * (time.perf_counter() - began)
        raise RuntimeError("no token came")

    chance, times = random.Random(kept), dict[str, list[float]]()
    for _ in range(repeats):
        ids = [chance.randrange(256) for _ in range(kept)]
        for name, prompt_ids in (("8 tokens", ids[::-1][:8]), ("cold", ids), ("cached", ids)):
            times.setdefault(name, []).append(await first(prompt_ids))
    return {name: statistics.median(of) for name, of in times.items()}


def kill_once(length: int = 240, interval: float = 0.01) -> dict[str, Any]:
    """Kill the runner of a vLLM engine in the middle of a greedy answer. Return how the continued answer differs."""
    with tempfile.TemporaryDirectory(prefix="chaos-progress-") as name:
        settings = {"engine_type": "vllm", "model_path": str(make_tiny_model(Path(name) / "model", seed=0)),
                    "max_model_len": length + 8, "gpu_memory_utilization": 0.3}
        url = f"sqlite:///{name}/log.sqlite"
        with system(url, interval, retries=2, **settings) as on, closing(open_journals(url)) as journals:

            def begun() -> bool:
                runs = [run for life in journals.lives() for run in kept_runs(journals.read(life)).values()]
                answers = [a for run in runs for of_call in run.calls.values() for a in of_call.values()]
                return any(len(a.tokens) >= length // 8 for a in answers)

            for batch in range(1, 7):  # the first is undisturbed; on a busy machine a kill may come too late
                kill = on.killer("runner")
                on.submit(batch, [task("c=", temperature=0.0, max_tokens=length, ignore_eos=True)])
                if batch > 1:
                    until = time.monotonic() + 20.0
                    while not begun() and time.monotonic() < until:
                        time.sleep(0.001)  # the whole answer takes a second
                    kill()
                on.finalize(batch)
                [answer] = on.experiences(batch)
                if batch == 1:
                    expected = answer
                elif "splices" in answer.info:
                    break
            with open_log(url) as log:
                event = [r.event for r in log.events(batch) if isinstance(r.event, ev.AttemptKept)][-1]
            [run] = kept_runs([open_payloads(url).get(event.payload)]).values()
            [[kept]] = [list(of_call.values()) for of_call in run.calls.values()]
    assert answer.logprobs is not None
    assert kept.logprobs is not None
    return {
        "tokens": length, "kept": len(kept.tokens), "splices": answer.info.get("splices"),
        "tokens that differ": int((answer.tokens != expected.tokens).sum()),
        "kept logprobs that differ": int((answer.logprobs[: len(kept.tokens)] != kept.logprobs).sum()),
    }


# --- all of it --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OnVLLM:
    killed: dict[str, Any]
    first_tokens: dict[str, float]
    compared: list[Compared]

    @property
    def bad(self) -> list[str]:
        going_on = [c for c in self.compared if c.sampling != BEGINS_AGAIN]
        least = ALARM / sum(len(c.p) for c in going_on)
        found = [f"vLLM: {name} {self.killed[name]}" for name in self.killed if "differ" in name and self.killed[name]]
        found += ["vLLM: the answer ended before the kill"] if not self.killed["splices"] else []
        found += [f"vLLM, {c.sampling}: {c.wrong} answers without what was kept" for c in self.compared if c.wrong]
        return found + [f"vLLM, {c.sampling}: {what} differ, p {p:.2g}"
                        for c in going_on for what, p in c.p.items() if p < least]

    def report(self) -> list[str]:
        ms = {name: f"{value:.1f} ms" for name, value in self.first_tokens.items()}
        lines = [
            f"a real vLLM engine: {', '.join(f'{name} {value}' for name, value in self.killed.items())}",
            f"  first token after 220 kept tokens: {ms['cold']}, from the prefix cache {ms['cached']}; after 8 "
            f"{ms['8 tokens']}",
            "  p of a KS test, answers whose attempts died in their engine's process against undisturbed ones",
        ]
        return lines + [
            f"    {c.sampling:<42}{', '.join(f'{what} {p:.2f}' for what, p in c.p.items())} ({c.answers:,} answers, "
            f"{c.deaths:,} deaths, {c.kept:,} of {c.tokens:,} tokens kept)" for c in self.compared
        ]


async def compare_distributions(n: int, seed: int) -> tuple[dict[str, float], list[Compared]]:
    with tempfile.TemporaryDirectory(prefix="chaos-progress-") as name:
        engine = VLLMEngine(EngineConfig(model_path=str(make_tiny_model(Path(name) / "model", seed=0)), **TINY))
        await engine.start()
        try:
            found = list[Compared]()
            for sampling in SAMPLING:
                show_progress(f"vLLM: {n} answers with deaths and {n} without, {sampling}")
                found.append(await compare(engine, sampling, n, seed))
            return await first_token_times(engine), found
        finally:
            await engine.stop()


def measure_vllm(*, quick: bool, seed: int) -> OnVLLM:
    """Kill an engine's runner, then measure distributions with another engine in this process."""
    show_progress("vLLM: the runner of a greedy answer is killed")
    return OnVLLM(kill_once(), *asyncio.run(compare_distributions(200 if quick else 2_000, seed)))

"""Real engines."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tests.helpers.journals import RUN, Written, ask
from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.actors.engines.vllm.engine import VLLMEngine
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.events.experience import Experience
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.events.journal import KeptRun


def largest_difference(trainer: Any, experiences: list[Experience]) -> float:
    """Return the largest difference between a sampled token's logprob and torch's."""
    import torch

    with torch.no_grad():
        ours = trainer.logprobs(ExperienceColumns.of(experiences)).numpy()
    return max(
        float(np.abs(ours[i, e.prompt_length - 1 : e.tokens.size - 1] - e.logprobs)[e.action_mask].max())
        for i, e in enumerate(experiences)
    )


T = TypeVar("T")


START_SECONDS = 600.0  # 15 s on an idle machine, minutes on a busy one


class Live:
    """Engine on an event loop in another thread, called from the test's thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine = VLLMEngine(config)  # raises before it starts anything
        try:
            self.run(self.engine.start(), timeout=START_SECONDS)
        except BaseException:
            self.close()
            raise

    def spawn(self, work: Coroutine[Any, Any, T]) -> Any:
        """Start a coroutine; its future can be cancelled as a runner cancels a unit."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        return self.spawn(work).result(timeout)

    def close(self) -> None:
        self.run(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        gc.collect()  # vLLM leaves a ZMQ context to the garbage collector, whose warning this test ignores


PROMPT = "c="


def tokens_of(kept: KeptRun | None) -> list[int]:
    return [] if kept is None else [len(a.tokens) for answers in kept.calls.values() for a in answers.values()]


async def cut_off(
    live: Live, sampling: Sampling, least: int, meanwhile: Callable[[], Any] | None = None, earlier: bytes = b"",
) -> Written:
    """Call the model, and end the attempt when the journal has this many tokens of each answer."""
    writer = Written()
    writer.data = earlier
    prompt = live.engine.tokenizer.encode(PROMPT)
    asking = asyncio.ensure_future(ask(live.engine, RunJournal(RUN, writer, writer.kept()), prompt, sampling))
    while not (sizes := tokens_of(writer.kept())) or len(sizes) < sampling.n or min(sizes) < least:
        assert not asking.done(), "the answer was there before it could be cut off"
        await asyncio.sleep(0.001)
        writer.look()
        if meanwhile is not None and sizes and min(sizes) >= least // 2:
            await meanwhile()
            meanwhile = None
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return writer


def again(live: Live, sampling: Sampling, writer: Written) -> list[Completion]:
    prompt = live.engine.tokenizer.encode(PROMPT)
    return live.run(ask(live.engine, RunJournal(RUN, Written(), writer.kept()), prompt, sampling))


class SharedEngine:
    """Engine for many tests, started on first use, and again after a test ended it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._live: Live | None = None

    def get(self) -> Live:
        if self._live is not None and self._live.engine.dead:
            self.close()
        if self._live is None:
            self._live = Live(self.config)
        return self._live

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.close()


class StandIn:
    """Part of AsyncLLM for VLLMEngine. `fail` maps a call (reload:NAME, pause, a worker method) to its error."""

    errored = False

    def __init__(self) -> None:
        self.paused, self.shut_down = False, False
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.finite = True
        self.slow = 0.0

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fail:
            raise self.fail[call]

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = False) -> None:
        assert (mode, clear_cache) == ("keep", True)
        self.paused = True
        self.note("pause")

    async def resume_generation(self) -> None:
        self.note("resume")
        self.paused = False

    async def collective_rpc(self, method: str, args: Any = (), kwargs: Any = None) -> list[Any]:
        assert self.paused, "weights are changed only while it is paused"
        await asyncio.sleep(self.slow)
        self.note(f"reload:{Path(kwargs['weights_path']).name}" if method == "reload_weights" else method)
        return [self.finite if method == "trinity_weights_finite" else None]

    async def update_weight_version(self, version: str) -> None:
        self.note(f"label:{version}")

    def shutdown(self) -> None:
        self.shut_down = True

"""An engine that continues a prefix always in the same way, and a journal writer in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trinity_es.actors.engines.interface import REQUEST_NAME, Completion, Sampling
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.run_journal import OpenCall, RunJournal
from trinity_es.events.journal import KeptRun, Run, kept_runs
from trinity_es.testing import ByteTokenizer

RUN: Run = (7, "s", 0, 0)
WORDS = "naïve café — twelve ☕ cups; "


class Steady:
    """Engine whose tokens depend only on the ids before, so a continued answer equals an undisturbed one.

    `tick` gives every open request one more token. Nothing happens by itself.
    """

    def __init__(self, *, version: int = 0, alphabet: bytes = WORDS.encode()) -> None:
        self.model_version, self.alphabet = version, alphabet
        self.tokenizer, self.adapters = ByteTokenizer(), dict[str, int]()
        self.asked: list[tuple[list[int], Sampling]] = []
        self.generated = 0
        self._open: dict[str, list[Completion]] = {}
        self._moved = asyncio.Event()

    def next(self, ids: list[int], choice: int, seed: int | None) -> tuple[int, float]:
        digest = hashlib.sha256(repr((ids, choice if seed is None else seed + choice)).encode()).digest()
        return self.alphabet[digest[0] % len(self.alphabet)], float(np.float32(-digest[1] / 97))

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        request = REQUEST_NAME.get()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.asked.append((ids, sampling))
        new = Completion(prompt_token_ids=ids, token_ids=[], logprobs=[] if sampling.logprobs else None, text="",
                         finish_reason="")
        answers = self._open[request] = [new] * sampling.n
        try:
            while not all(a.finish_reason for a in answers):
                self._moved.clear()
                await self._moved.wait()
                for i, answer in enumerate(answers):
                    if not answer.finish_reason:
                        answers[i] = self._longer(answer, i, sampling)
            return list(answers)
        finally:
            del self._open[request]

    def _longer(self, answer: Completion, choice: int, sampling: Sampling) -> Completion:
        token, logprob = self.next([*answer.prompt_token_ids, *answer.token_ids], choice, sampling.seed)
        self.generated += 1
        tokens = [*answer.token_ids, token]
        spans = [list(span) for span in answer.version_spans] or [[self.model_version, 0, 0]]
        if spans[-1][0] != self.model_version:
            spans.append([self.model_version, len(tokens) - 1, 0])
        spans[-1][2] = len(tokens)
        text, finish = self.tokenizer.decode(tokens), "length" if len(tokens) >= sampling.max_tokens else ""
        places = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        if places:
            text, finish = text[: min(places)], "stop"
        return replace(
            answer, token_ids=tokens, text=text, finish_reason=finish,
            logprobs=None if answer.logprobs is None else [*answer.logprobs, logprob],
            version_spans=tuple((v, start, end) for v, start, end in spans),
        )

    def partial(self, request: str, start: Mapping[int, int]) -> dict[int, Completion]:
        return {
            i: replace(a, token_ids=a.token_ids[start.get(i, 0) :], text="", finish_reason="",
                       logprobs=None if a.logprobs is None else a.logprobs[start.get(i, 0) :])
            for i, a in enumerate(self._open.get(request, ())) if not a.finish_reason
        }

    def text_of(self, prompt: list[int], token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)

    async def tick(self, times: int) -> None:
        """Give open requests this many more tokens."""
        for _ in range(times):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self._moved.set()
            await asyncio.sleep(0)


class Written:
    """Journal writer that keeps the bytes. `look` records the progress of all open calls."""

    def __init__(self) -> None:
        self.open: set[OpenCall] = set()
        self.data = b""

    async def write(self, records: Sequence[bytes], *, durable: bool = False) -> None:
        self.data += b"".join(records)

    def look(self) -> None:
        self.data += b"".join(record for call in self.open for record in call.progress())

    def kept(self) -> KeptRun | None:
        return kept_runs([self.data]).get(RUN[3])


async def ask(engine: Any, journal: RunJournal, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
    """Call the engine as a run's model does."""
    return await Model(engine, journal=journal).completions(prompt, sampling)


async def whole(engine: Any, journal: RunJournal, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
    """Call the engine, tick until the call is answered, and return the answer."""
    asking = asyncio.ensure_future(ask(engine, journal, prompt, sampling))
    while not asking.done():
        await engine.tick(1)
    return asking.result()


async def cut_off(
    engine: Any, journal: RunJournal, writer: Written, prompt: str | list[int], sampling: Sampling, tokens: int
) -> None:
    """Call the engine, and end the attempt after this many tokens as a kill does, without further records."""
    asking = asyncio.ensure_future(ask(engine, journal, prompt, sampling))
    await engine.tick(tokens)
    writer.look()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

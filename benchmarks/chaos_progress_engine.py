"""The engine of `chaos_progress`, which counts, and the notes that outlive it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from trinity_es import Workflow
from trinity_es.actors.engines.interface import REQUEST_NAME, Completion, Sampling
from trinity_es.events.experience import Experience
from trinity_es.testing import ScriptedEngine

NOTES = "CHAOS_PROGRESS_NOTES"
"""Environment variable with the folder of the engine's notes."""
TICK = 0.005
"""Seconds between two steps of the engine."""


def prompt_of(number: int, length: int, seconds: float) -> str:
    """Return the prompt of an answer of this length, which the engine gives over `seconds`."""
    return f"{number} {length} {seconds}:"


def length_of(prompt: str) -> int:
    return int(prompt.split()[1])


def answer_to(prompt: str) -> tuple[list[int], list[float]]:
    """Return the only right answer: its tokens, and logprobs that float32 holds exactly."""
    chance = random.Random(prompt)
    size = length_of(prompt)
    return [chance.randrange(97, 123) for _ in range(size)], [-chance.randrange(1, 4096) / 256 for _ in range(size)]


class Counting(ScriptedEngine):
    """Engine that gives answers token by token, and notes how many it has given. It goes on from any part of one."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        first = ids.index(ord(":")) + 1
        asked, kept = bytes(ids[:first]).decode(), len(ids) - first
        (tokens, logprobs), pace = answer_to(asked), float(asked[:-1].split()[2]) / length_of(asked)
        if bytes(ids[first:]) != bytes(tokens[:kept]):
            raise ValueError("an answer goes on from tokens that this engine never gave")
        whole = Completion(prompt_token_ids=ids, token_ids=tokens[kept:], logprobs=logprobs[kept:], text="",
                           finish_reason="stop")
        began, count, request = time.monotonic(), -1, REQUEST_NAME.get() or uuid4().hex
        with open(Path(os.environ[NOTES]) / uuid4().hex, "wb", buffering=0) as note:
            while count < len(whole.token_ids):
                count = min(len(whole.token_ids), int((time.monotonic() - began) / pace))
                self._open[request] = began, pace, count, [whole]
                note.seek(0)
                note.write(f"{asked}{kept} {count:>6}".encode())
                await asyncio.sleep(TICK)
        del self._open[request]
        return [replace(whole, text=self.tokenizer.decode(whole.token_ids))]

    def partial(self, request: str, start: Mapping[int, int]) -> dict[int, Completion]:
        """Return the tokens given since the last look, which are never more than the engine has noted."""
        if request not in self._open:
            return {}
        _, _, count, [whole] = self._open[request]
        first, spans = start.get(0, 0), ((self.model_version, 0, count),)
        if not first < count < len(whole.token_ids):
            return {}
        return {0: replace(whole, token_ids=whole.token_ids[first:count], finish_reason="", version_spans=spans,
                           logprobs=None if whole.logprobs is None else whole.logprobs[first:count])}


class Answers(Workflow):
    """Asks for one answer after the other, and returns the last."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        for prompt in self.task.workflow_args["prompts"]:
            [answer] = await self.model.generate_async(prompt)
        answer.reward = 1.0
        return [answer]


@dataclass
class Notes:
    """The engine's notes, read from their folder."""

    folder: Path

    def given(self) -> dict[str, list[tuple[int, int]]]:
        """Return for each prompt its requests: how many tokens the request began with, and how many it got."""
        found = defaultdict(list)
        for file in self.folder.iterdir():
            asked, _, counts = file.read_text().partition(":")
            if counts:
                kept, count = map(int, counts.split())
                found[f"{asked}:"].append((kept, count))
        return found

    def generated(self) -> dict[str, int]:
        """Return the number of tokens that were generated for each prompt."""
        return {prompt: sum(count for _, count in requests) for prompt, requests in self.given().items()}

    def clear(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()

"""The engine of `chaos_progress`, the notes in which it counts tokens, and systems with this engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import trinity_es
from benchmarks.chaos_hosts_trainer import repeat_until_answered
from tests.helpers.systems import kill_all, pid_of, scripted
from trinity_es import Config, Task, Workflow
from trinity_es.actors.engines.interface import REQUEST_NAME, Completion, Sampling
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.client.teardown import end_system
from trinity_es.events.experience import Experience
from trinity_es.events.store.journal_store import open_journals
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.system import lifecycle, running_system
from trinity_es.testing import ScriptedEngine

NOTES = "CHAOS_PROGRESS_NOTES"
"""Environment variable with the folder of the engine's notes."""
MOST = 8192
"""`max_tokens` of each request, more than any answer has."""
TICK = 0.01
"""Seconds between two steps of the engine."""


def prompt_of(number: int, length: int, seconds: float) -> str:
    """Return a prompt whose answer has this length and takes `seconds`."""
    return f"{number} {length} {seconds}:"


def length_of(prompt: str) -> int:
    """Return the length of the answer to a prompt, or to the last message of a conversation."""
    return int(prompt.split()[-2])


def narrate(*words: str) -> None:
    """Add a line to the story, a file with the actions of all processes in the order in which they happened."""
    with open(f"{os.environ[NOTES]}.story", "ab", buffering=0) as story:
        story.write(f"{' '.join(words)}\n".encode())


def digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def answer_to(prompt: str) -> tuple[list[int], list[float]]:
    """Return the tokens and logprobs of the only right answer to a prompt. float32 holds the logprobs exactly."""
    chance = random.Random(prompt)
    size = length_of(prompt)
    return [chance.randrange(97, 123) for _ in range(size)], [-chance.randrange(1, 4096) / 256 for _ in range(size)]


class Counting(ScriptedEngine):
    """Engine that generates answers token by token, and notes their number. It can continue any partial answer."""

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        first = len(ids) - ids[::-1].index(ord(":"))
        first += ids[first : first + 1] == [ord("\n")]  # the chat template ends messages with a newline
        asked, kept = bytes(ids[:first]).decode(), len(ids) - first
        (tokens, logprobs), pace = answer_to(asked), float(asked.rstrip(":\n").split()[-1]) / length_of(asked)
        narrate("asked", digest_of(asked))
        if bytes(ids[first:]) != bytes(tokens[:kept]):
            raise ValueError("an answer goes on from tokens that this engine never gave")
        whole = Completion(prompt_token_ids=ids, token_ids=tokens[kept:], logprobs=logprobs[kept:], text="",
                           finish_reason="stop")
        began, count, request = time.monotonic(), -1, REQUEST_NAME.get() or uuid4().hex
        with open(Path(os.environ[NOTES]) / uuid4().hex, "wb", buffering=0) as note:
            note.write(f"{0:>6} {kept:>6} {began:.4f} {asked}".encode())
            while count < len(whole.token_ids):
                count = min(len(whole.token_ids), int((time.monotonic() - began) / pace))
                self._open_requests[request] = began, pace, count, [whole]
                note.seek(0)
                note.write(f"{count:>6}".encode())
                await asyncio.sleep(TICK)
        del self._open_requests[request]
        return [replace(whole, text=self.tokenizer.decode(whole.token_ids))]

    def partial(self, request: str, start: Mapping[int, int]) -> dict[int, Completion]:
        """Return the tokens after `start` that the engine has generated and noted."""
        if request not in self._open_requests:
            return {}
        _, _, count, [whole] = self._open_requests[request]
        first, spans = start.get(0, 0), ((self.model_version, 0, count),)
        if not first < count < len(whole.token_ids):
            return {}
        return {0: replace(whole, token_ids=whole.token_ids[first:count], finish_reason="", version_spans=spans,
                           logprobs=None if whole.logprobs is None else whole.logprobs[first:count])}


class Answers(Workflow):
    """Workflow that requests one answer after the other, and returns the last."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        for prompt in self.task.workflow_args["prompts"]:
            [answer] = await self.model.generate_async(prompt)
        answer.reward = 1.0
        return [answer]


def task(*prompts: str, **sampling: Any) -> Task:
    return Task(workflow="benchmarks.chaos_progress_engine:Answers", workflow_args={"prompts": prompts},
                rollout_args={"max_tokens": MOST, **sampling})


class Request(NamedTuple):
    """A request to the engine: tokens that it continued from, tokens generated, and monotonic time of its start."""

    kept: int
    given: int
    began: float


@dataclass
class Notes:
    folder: Path

    def requests(self) -> dict[str, list[Request]]:
        found = defaultdict(list)
        for file in self.folder.iterdir():
            if note := file.read_text():  # empty while it is being written
                count, kept, began, asked = note.split(maxsplit=3)
                found[asked].append(Request(int(kept), int(count), float(began)))
        return found

    def generated(self) -> dict[str, int]:
        return {prompt: sum(r.given for r in requests) for prompt, requests in self.requests().items()}

    @property
    def _story(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.story")

    def story(self) -> list[list[str]]:
        return [line.split() for line in self._story.read_text().splitlines()]

    def clear(self) -> None:
        for file in [*self.folder.iterdir(), self._story]:
            file.unlink(missing_ok=True)


# --- systems ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class System:
    """A system without a keeper, so that only this benchmark restarts it."""

    config: Config
    notes: Notes

    def client(self) -> RolloutClient:
        client = trinity_es.connect(self.config)
        client.wait_ready(600)
        return client

    def killer(self, killed: str) -> Callable[[], None]:
        """Return a function that at once kills an actor, or all processes, after which it restarts the system."""
        with self.client() as client:
            pid = pid_of(client, "runner-0" if killed == "runner" else "coordinator")
            processes = running_system.processes(client._link.admin)

        def everything() -> None:
            kill_all(processes)
            running_system.wait_gone(processes, 15)
            lifecycle.start(self.config)

        return everything if killed == "everything" else lambda: os.kill(pid, signal.SIGKILL)

    def submit(self, batch: int, tasks: Sequence[Task]) -> None:
        with self.client() as client:
            client.submit_batch(batch_id=batch, tasks=list(tasks), batch_type="train")

    def finalize(self, batch: int, seconds: float = 300.0) -> None:
        """Finalize a batch, with a new try whenever the system was restarted."""
        repeat_until_answered(self.config, lambda c: c.finalize_train_batch(batch, timeout=seconds), seconds)

    def experiences(self, batch: int) -> list[Experience]:
        with trinity_es.open_log(self.config.store.url) as log:
            state = log.replay(batch)
        return read_experiences(open_payloads(self.config.store.url), state.experiences)

    def journal_bytes(self) -> int:
        with closing(open_journals(self.config.store.url)) as journals:
            return sum(len(part) for life in journals.lives() for part in journals.read(life))


@contextmanager
def system(url: str, interval: float, retries: int, places: int = 16, **model: Any) -> Iterator[System]:
    """Run a system for this block. `interval`: seconds between two records of the journal, 0: none; `model`: engine."""
    model = model or {"engine_type": "benchmarks.chaos_progress_engine:Counting"}
    with tempfile.TemporaryDirectory(prefix="chaos-progress-") as name:
        notes = Notes(Path(name) / "notes")
        notes.folder.mkdir()
        os.environ[NOTES] = str(notes.folder)
        config = scripted(
            Path(name), store={"url": url}, system={"restarts": 10_000, "restart_pause": 1e-6},  # doubled by each
            explorer={"max_concurrency": places, "max_retry_times": retries, "progress": {"seconds": interval},
                      "rollout_model": model},
        )
        lifecycle.start(config)
        try:
            yield System(config, notes)
        finally:
            end_system(config)


def show_progress(doing: str) -> None:
    print(f"\r  {doing:<70}", end="", file=sys.stderr, flush=True)

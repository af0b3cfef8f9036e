"""For tests of your own, without a GPU: an engine that plays a script, a clock that you move, workflows that do little.

`ScriptedEngine` is chosen by `rollout_model.engine_type: scripted`; its script is `rollout_model.script`.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trinity_es.actors.engines.interface import Completion, EngineConfig, Sampling
from trinity_es.events.errors import ConfigError, EngineError, SyncError
from trinity_es.events.experience import EID, Array, Experience
from trinity_es.events.values import Task
from trinity_es.workflows.workflow import Workflow

__all__ = ["ByteTokenizer", "ManualClock", "ScriptedEngine", "SleepWorkflow", "sampled", "wait_until"]


class ByteTokenizer:
    """One token a UTF-8 byte; a chat template that is just the contents, a line each."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        text = "".join(f"{m['content']}\n" for m in messages)
        return self.encode(text) if kwargs.get("tokenize", True) else text

    def save_pretrained(self, folder: str | Path) -> None:
        """Write it as transformers loads it, for clients that make token ids themselves."""
        shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
        others = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in shown)}
        bytes_alone: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                "use_regex": True},
            "model": {"type": "BPE", "vocab": {others.get(b, chr(b)): b for b in range(256)}, "merges": []},
        }
        template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        files = {
            "tokenizer": bytes_alone, "config": {"model_type": "gpt2"},
            "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template},
        }
        for name, content in files.items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(content))


_SCRIPT: dict[str, Any] = {
    "load_seconds": 0.0,
    "latency_seconds": 0.0,
    "token_seconds": 0.0,
    "response": None,
    "tokens": None,
    "rules": [],
}


class ScriptedEngine:
    """Completions, latencies and faults from a script; the same for the same seed, prompt, version and sampling.

    Script (`EngineConfig.options`), all optional:
    `load_seconds`: start and reload take so long; `latency_seconds`: a number, or [low, high], of each request;
    `token_seconds`: each token of an answer takes so long on top;
    `response`: the text of every answer (else letters that depend on prompt, seed and version);
    `tokens`: length of an answer (else `max_tokens`);
    `rules`: a list; the first whose `prompt` (a substring) matches rules the request: `response`, `latency_seconds`,
    `token_seconds`, `tokens`, or a fault: `error` (EngineError with this text), `hang: true` (never returns),
    `block: true` (the loop stands still), `exit: true` (the process ends at once), each with `times: n` to happen only
    the first n times.
    Penalties, `min_tokens`, `min_p` and `json_schema` change nothing: the script says what is written.
    Loading a path that does not exist, or whose name ends in "bad", is a SyncError; so it is with LoRA adapters, whose
    names and versions change the letters. Raises ConfigError for an unknown
    key of the script.
    """

    def __init__(self, config: EngineConfig) -> None:
        unknown = set(config.options) - set(_SCRIPT)
        if unknown:
            raise ConfigError(f"unknown key {sorted(unknown)[0]!r} in the script: there are {', '.join(_SCRIPT)}")
        self.script = {**_SCRIPT, **config.options}
        self.seed, self.max_model_len = config.seed, config.max_model_len
        self.model_version = config.initial_version
        script = hashlib.sha256(json.dumps(self.script, sort_keys=True).encode()).hexdigest()[:8]
        self.version = f"script {script}"
        self.adapters: dict[str, int] = {}
        self.tokenizer = ByteTokenizer()
        self._used: dict[int, int] = {}
        self._stopped = False

    @staticmethod
    def load_tokenizer(config: EngineConfig) -> ByteTokenizer:
        return ByteTokenizer()

    async def start(self) -> None:
        await asyncio.sleep(self.script["load_seconds"])

    def _rule(self, text: str) -> dict[str, Any]:
        for index, rule in enumerate(self.script["rules"]):
            if rule.get("prompt", "") in text:
                used = self._used.get(index, 0)
                if "times" in rule and used >= rule["times"]:
                    continue
                self._used[index] = used + 1
                return dict(rule)
        return {}

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        answers, token_seconds = await self._play(prompt, sampling)
        if token_seconds:
            await asyncio.sleep(token_seconds * max(len(a.token_ids) for a in answers))
        return answers

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        [whole], token_seconds = await self._play(prompt, replace(sampling, n=1))
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        count = len(whole.token_ids)
        for i in range(max(count, 1)):
            if token_seconds:
                await asyncio.sleep(token_seconds)
            new = whole.token_ids[i : i + 1]
            last = i + 1 >= count
            yield replace(
                whole,
                token_ids=new,
                logprobs=None if whole.logprobs is None else whole.logprobs[i : i + 1],
                top_logprobs=None if whole.top_logprobs is None else whole.top_logprobs[i : i + 1],
                text=text.decode(bytes(t for t in new if t < 256), final=last),
                finish_reason=whole.finish_reason if last else "",
            )

    async def _play(self, prompt: str | list[int], sampling: Sampling) -> tuple[list[Completion], float]:
        """Return what the script says to a request, and how long each token of it takes."""
        if self._stopped:
            raise EngineError("the engine is stopped")
        adapter = self._adapter(sampling.adapter)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if self.max_model_len is not None:
            room = self.max_model_len - len(ids)
            if room < 1:
                raise EngineError(
                    f"a prompt of {len(ids)} tokens leaves no room for an answer in max_model_len {self.max_model_len}",
                    refused=True,
                )
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        text = self.tokenizer.decode(ids)
        rule = {**self.script, **self._rule(text)}
        if rule.get("exit"):
            os._exit(9)
        if rule.get("block"):
            time.sleep(3600)
        if rule.get("hang"):
            await asyncio.Event().wait()
        chance = self._chance(text, sampling, adapter)
        latency = rule["latency_seconds"]
        await asyncio.sleep(chance.uniform(*latency) if isinstance(latency, list) else latency)
        if rule.get("error"):
            raise EngineError(str(rule["error"]))
        answers = [self._completion(ids, rule, sampling, chance) for _ in range(sampling.n)]
        return [replace(answer, adapter=adapter) for answer in answers], rule["token_seconds"]

    def _adapter(self, name: str) -> tuple[str, int] | None:
        """Return the adapter of this name and the version that a request gets now."""
        if name and name not in self.adapters:
            there = ", ".join(self.adapters) or "none"
            raise EngineError(f"there is no adapter {name!r}: this engine serves {there}", refused=True)
        return (name, self.adapters[name]) if name else None

    def _chance(self, text: str, sampling: Sampling, adapter: tuple[str, int] | None) -> random.Random:
        key = f"{self.seed}/{self.model_version}/{sampling.seed}/{text}{adapter or ''}"
        return random.Random(hashlib.sha256(key.encode()).digest())

    def _completion(
        self, prompt: list[int], rule: dict[str, Any], sampling: Sampling, chance: random.Random
    ) -> Completion:
        if rule["response"] is not None:
            tokens = self.tokenizer.encode(rule["response"])[: sampling.max_tokens]
        else:
            count = min(rule["tokens"] or sampling.max_tokens, sampling.max_tokens)
            tokens = [chance.randrange(97, 123) for _ in range(count)]
        return Completion(
            prompt_token_ids=prompt,
            token_ids=tokens,
            logprobs=[-chance.random() for _ in tokens] if sampling.logprobs else None,
            text=self.tokenizer.decode(tokens),
            finish_reason="length" if len(tokens) >= sampling.max_tokens else "stop",
            top_logprobs=self._top(tokens, sampling) if sampling.top_logprobs and sampling.logprobs else None,
        )

    def _top(self, tokens: list[int], sampling: Sampling) -> list[list[tuple[int, float]]]:
        """Return the token of the script, as likely as can be, and some that it did not write."""
        return [
            [(t, 0.0), *((other, -9.0) for other in range(1, sampling.top_logprobs + 1) if other != t)]
            [: sampling.top_logprobs] for t in tokens
        ]

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0, adapter: str = "") -> list[float]:
        self._adapter(adapter)
        chance = random.Random(hashlib.sha256(bytes(t % 256 for t in token_ids)).digest())
        return [-chance.random() / max(temperature, 1e-6) for _ in token_ids[1:]]

    async def load_weights(self, version: int, path: str) -> None:
        await asyncio.sleep(self.script["load_seconds"])
        if not Path(path).exists() or path.endswith("bad"):
            raise SyncError(f"no weights at {path}")
        self.model_version = version

    async def load_adapter(self, name: str, version: int, path: str, digest: str = "") -> None:
        if not Path(path).exists() or path.endswith("bad"):
            raise SyncError(f"no adapter at {path}")
        self.adapters[name] = version

    async def remove_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)

    async def stop(self) -> None:
        self._stopped = True


def sampled(seed: int, size: int) -> tuple[Array, Array]:
    """Return `size` tokens, and logprobs for the second half of them: random, the same for the same seed."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 151_643, size, dtype=np.int32)
    return tokens, -random.exponential(0.4, size - size // 2).astype(np.float32)


class SleepWorkflow(Workflow):
    """Asks no model: sleeps `workflow_args["seconds"]` and returns experiences of a given size.

    `workflow_args`: `seconds` (0), `tokens` (8: length of an experience, half of it response), `experiences` (1),
    `reward` (1.0), `fail` (an error's text), `count_file` (a line is appended for every run: who ran how often),
    `sampled` (false: tokens and logprobs are those that the function `sampled` gives for the number of the task).
    """

    can_reset = True
    is_async = True

    def reset(self, task: Task) -> None:
        self.task = task

    async def run_async(self) -> list[Experience]:
        args = self.task.workflow_args
        if "count_file" in args:
            with open(args["count_file"], "a") as f:
                f.write(f"{self.task.batch_id} {self.task.task_id}\n")
        await asyncio.sleep(args.get("seconds", 0.0))
        if "fail" in args:
            raise RuntimeError(args["fail"])
        size = args.get("tokens", 8)
        prompt = size // 2
        reward = float(args.get("reward", 1.0))
        tokens, logprobs = np.arange(size, dtype=np.int32), np.full(size - prompt, -0.5, dtype=np.float32)
        if args.get("sampled"):
            tokens, logprobs = sampled(int(self.task.task_id), size)
        return [
            Experience(
                eid=EID(step=step),
                tokens=tokens,
                prompt_length=prompt,
                logprobs=logprobs,
                reward=reward,
                metrics={"reward": reward},
            )
            for step in range(args.get("experiences", 1))
        ]


class ManualClock:
    """A clock that stands still until it is moved: for code that takes its clock as an argument."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 30.0) -> Any:
    """Wait for a condition and return what it returned. Raises TimeoutError that says what was waited for.

    After each look it waits nine times as long as the look took, at least 0.01 s and at most 0.25 s.
    """
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout} s for {what}; last: {value!r}")
        time.sleep(min(max(0.01, 9 * (time.monotonic() - began)), 0.25))

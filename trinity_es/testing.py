"""Helpers for your tests, without a GPU: a scripted engine, a clock that you set, a workflow that only sleeps.

`rollout_model.engine_type: scripted` chooses `ScriptedEngine`; its script is `rollout_model.script`.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import json
import math
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trinity_es.actors.engines.interface import REQUEST_NAME, Completion, EngineConfig, Sampling
from trinity_es.events.errors import ConfigError, EngineError, SyncError
from trinity_es.events.experience import EID, Array, Experience
from trinity_es.events.values import Task
from trinity_es.workflows.workflow import Workflow

__all__ = ["ByteTokenizer", "ManualClock", "ScriptedEngine", "SleepWorkflow", "sampled", "wait_until"]


class ByteTokenizer:
    """Tokenizer with one token per UTF-8 byte; its chat template is the messages' contents, a line each."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        text = "".join(f"{m['content']}\n" for m in messages)
        return self.encode(text) if kwargs.get("tokenize", True) else text

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files from which transformers loads this tokenizer, for clients that make token ids themselves."""
        # GPT-2's byte-level BPE writes a printable byte as its Latin-1 character, any other as one from 256 on.
        printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
        stand_ins = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
        tokenizer: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                "use_regex": True},
            "model": {"type": "BPE", "vocab": {stand_ins.get(b, chr(b)): b for b in range(256)}, "merges": []},
        }
        template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        files = {
            "tokenizer": tokenizer, "config": {"model_type": "gpt2"},
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


def _check_times(values: Mapping[str, Any], where: str) -> None:
    for name in ("load_seconds", "latency_seconds", "token_seconds"):
        value = values.get(name, 0.0)
        numbers = value if isinstance(value, list) and len(value) == 2 and name == "latency_seconds" else [value]
        if not all(isinstance(n, int | float) and 0.0 <= n < math.inf for n in numbers):
            pair = ", or two of them" if name == "latency_seconds" else ""
            raise ConfigError(f"{name} is {value!r} in {where}: give a number of seconds, at least 0{pair}")


class ScriptedEngine:
    """Engine that takes completions, latencies and faults from a script.

    Equal seeds, prompts, versions and sampling give equal answers. Keys of the script (`EngineConfig.options`), all
    optional:
    `load_seconds`: duration of start and reload; `latency_seconds`: of each request, a number or [low, high];
    `token_seconds`: added for each token of an answer;
    `response`: the text of every answer (default: letters that depend on prompt, seed, version and adapter);
    `tokens`: length of an answer (default: `max_tokens`);
    `rules`: a list; the first rule whose `prompt` is a substring of the request's sets its `response`,
    `latency_seconds`, `token_seconds`, `tokens`, or a fault: `error` (EngineError with this text), `hang: true` (never
    returns), `block: true` (blocks the event loop), `exit: true` (the process exits), each with `times: n` for only
    the first n times.
    Penalties, `min_tokens`, `min_p` and `json_schema` are ignored. Loading weights or an adapter raises SyncError if
    the path does not exist or ends in "bad". Raises ConfigError for an unknown key of the script.
    """

    def __init__(self, config: EngineConfig) -> None:
        unknown = set(config.options) - set(_SCRIPT)
        if unknown:
            raise ConfigError(f"the engine's script has the unknown key {sorted(unknown)[0]!r}: known keys are "
                              f"{', '.join(_SCRIPT)}")
        self.script = {**_SCRIPT, **config.options}
        for number, rule in enumerate([self.script, *self.script["rules"]]):
            _check_times(rule, f"rule {number} of the script" if number else "the script")
        self.seed, self.max_model_len = config.seed, config.max_model_len
        self.model_version = config.initial_version
        script = hashlib.sha256(json.dumps(self.script, sort_keys=True).encode()).hexdigest()[:8]
        self.version = f"script {script}"
        self.adapters: dict[str, int] = {}
        self.tokenizer = ByteTokenizer()
        self._use_counts: dict[int, int] = {}
        """How often each rule of the script was used, by its index."""
        self._open_requests: dict[str, tuple[float, float, int, list[Completion]]] = {}
        """Start, seconds per token, weights version and whole answers of each open request, by its name."""
        self._stopped = False

    @staticmethod
    def load_tokenizer(config: EngineConfig) -> ByteTokenizer:
        return ByteTokenizer()

    async def start(self) -> None:
        await asyncio.sleep(self.script["load_seconds"])

    def _use_rule(self, prompt: str) -> dict[str, Any]:
        """Return the first rule for this prompt that is not used up, and count its use; empty if there is none."""
        for index, rule in enumerate(self.script["rules"]):
            if rule.get("prompt", "") in prompt:
                use_count = self._use_counts.get(index, 0)
                if "times" in rule and use_count >= rule["times"]:
                    continue
                self._use_counts[index] = use_count + 1
                return dict(rule)
        return {}

    async def generate(self, prompt: str | list[int], sampling: Sampling) -> list[Completion]:
        """Return `sampling.n` answers after the script's delays; meanwhile `partial` returns their tokens."""
        answers, token_seconds = await self._play(prompt, sampling)
        if token_seconds:
            request = REQUEST_NAME.get()
            self._open_requests[request] = time.monotonic(), token_seconds, self.model_version, answers
            try:
                await asyncio.sleep(token_seconds * max(len(answer.token_ids) for answer in answers))
            finally:
                self._open_requests.pop(request, None)  # requests outside of a journal have no name
        return answers

    def partial(self, request: str, start: Mapping[int, int]) -> dict[int, Completion]:
        """Return the tokens generated so far of each answer of an open request, from `start[i]` on for answer i."""
        if request not in self._open_requests:
            return {}
        started_at, token_seconds, version, answers = self._open_requests[request]
        count = int((time.monotonic() - started_at) / token_seconds)
        spans = ((version, 0, count),) if version == self.model_version else ()
        parts = {}
        for i, answer in enumerate(answers):
            first = start.get(i, 0)
            if first < count < len(answer.token_ids):
                logprobs = None if answer.logprobs is None else answer.logprobs[first:count]
                parts[i] = replace(answer, token_ids=answer.token_ids[first:count], version_spans=spans, text="",
                                   finish_reason="", logprobs=logprobs, top_logprobs=None)
        return parts

    def text_of(self, prompt: list[int], token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)

    async def stream(self, prompt: str | list[int], sampling: Sampling) -> AsyncGenerator[Completion]:
        """Yield the answer token by token, or one empty part. A multi-byte character comes with its last token."""
        [answer], token_seconds = await self._play(prompt, replace(sampling, n=1))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        count = len(answer.token_ids)
        for i in range(max(count, 1)):
            if token_seconds:
                await asyncio.sleep(token_seconds)
            token = answer.token_ids[i : i + 1]  # empty for an empty answer
            is_last = i + 1 >= count
            yield replace(
                answer,
                token_ids=token,
                logprobs=None if answer.logprobs is None else answer.logprobs[i : i + 1],
                top_logprobs=None if answer.top_logprobs is None else answer.top_logprobs[i : i + 1],
                text=decoder.decode(bytes(t for t in token if t < 256), final=is_last),
                finish_reason=answer.finish_reason if is_last else "",
            )

    async def _play(self, prompt: str | list[int], sampling: Sampling) -> tuple[list[Completion], float]:
        """Wait for the script's latency or act out its fault; return the answers and the seconds per token."""
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
        rule = {**self.script, **self._use_rule(text)}
        if rule.get("exit"):
            os._exit(9)
        if rule.get("block"):
            time.sleep(3600)
        if rule.get("hang"):
            await asyncio.Event().wait()
        key = f"{self.seed}/{self.model_version}/{sampling.seed}/{text}{adapter or ''}"
        rng = random.Random(hashlib.sha256(key.encode()).digest())
        latency = rule["latency_seconds"]
        await asyncio.sleep(rng.uniform(*latency) if isinstance(latency, list) else latency)
        if rule.get("error"):
            raise EngineError(str(rule["error"]))
        answers = [self._completion(ids, rule, sampling, rng) for _ in range(sampling.n)]
        return [replace(answer, adapter=adapter) for answer in answers], rule["token_seconds"]

    def _adapter(self, name: str) -> tuple[str, int] | None:
        """Return name and version of an adapter; None for the empty name. Raises EngineError if it is not loaded."""
        if name and name not in self.adapters:
            adapters = ", ".join(self.adapters) or "none"
            raise EngineError(f"there is no adapter {name!r}: this engine serves {adapters}", refused=True)
        return (name, self.adapters[name]) if name else None

    def _completion(
        self, prompt: list[int], rule: dict[str, Any], sampling: Sampling, rng: random.Random
    ) -> Completion:
        """Return an answer with the rule's text, or with random letters, as many as its `tokens`."""
        if rule["response"] is not None:
            tokens = self.tokenizer.encode(rule["response"])[: sampling.max_tokens]
        else:
            count = min(rule["tokens"] or sampling.max_tokens, sampling.max_tokens)
            tokens = [rng.randrange(97, 123) for _ in range(count)]
        return Completion(
            prompt_token_ids=prompt,
            token_ids=tokens,
            logprobs=[-rng.random() for _ in tokens] if sampling.logprobs else None,
            text=self.tokenizer.decode(tokens),
            finish_reason="length" if len(tokens) >= sampling.max_tokens else "stop",
            top_logprobs=self._top_logprobs(tokens, sampling) if sampling.top_logprobs and sampling.logprobs else None,
        )

    def _top_logprobs(self, tokens: list[int], sampling: Sampling) -> list[list[tuple[int, float]]]:
        """Return for each position the token itself with logprob 0, then tokens 1, 2, ... with -9."""
        return [
            [(t, 0.0), *((other, -9.0) for other in range(1, sampling.top_logprobs + 1) if other != t)]
            [: sampling.top_logprobs] for t in tokens
        ]

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0, adapter: str = "") -> list[float]:
        self._adapter(adapter)
        rng = random.Random(hashlib.sha256(bytes(t % 256 for t in token_ids)).digest())
        return [-rng.random() / max(temperature, 1e-6) for _ in token_ids[1:]]

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
    """Return `size` random tokens and logprobs for the second half of them; equal seeds give equal results."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 151_643, size, dtype=np.int32)
    return tokens, -random.exponential(0.4, size - size // 2).astype(np.float32)


class SleepWorkflow(Workflow):
    """Workflow that asks no model: it sleeps, then returns experiences of a given size.

    `workflow_args` with their defaults: `seconds` (0), `tokens` (8: length of an experience, half of it response),
    `experiences` (1), `reward` (1.0), `fail` (text of an error to raise), `count_file` (file to which every run appends
    a line with its batch and task), `sampled` (false; true takes tokens and logprobs from the function `sampled`, with
    the task's number as seed).
    """

    can_reset = True
    is_async = True

    def reset(self, task: Task) -> None:
        self.task = task

    async def run_async(self) -> list[Experience]:
        """Append to `count_file`, sleep, then fail or return the experiences, as the `workflow_args` say."""
        args = self.task.workflow_args
        if "count_file" in args:
            with open(args["count_file"], "a") as f:
                f.write(f"{self.task.batch_id} {self.task.task_id}\n")
        await asyncio.sleep(args.get("seconds", 0.0))
        if "fail" in args:
            raise RuntimeError(args["fail"])
        size = args.get("tokens", 8)
        prompt_length = size // 2
        reward = float(args.get("reward", 1.0))
        tokens = np.arange(size, dtype=np.int32)
        logprobs = np.full(size - prompt_length, -0.5, dtype=np.float32)
        if args.get("sampled"):
            tokens, logprobs = sampled(int(self.task.task_id), size)
        return [
            Experience(
                eid=EID(step=step),
                tokens=tokens,
                prompt_length=prompt_length,
                logprobs=logprobs,
                reward=reward,
                metrics={"reward": reward},
            )
            for step in range(args.get("experiences", 1))
        ]


class ManualClock:
    """Clock that moves only when you advance it, for code that takes its clock as an argument."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 30.0) -> Any:
    """Wait until a condition holds and return its value. Raises TimeoutError, which names `what`.

    Between two checks it sleeps nine times as long as a check takes, at least 0.01 s and at most 0.25 s.
    """
    deadline = time.monotonic() + timeout
    while True:
        check_began_at = time.monotonic()
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout} s for {what}; last value: {value!r}")
        time.sleep(min(max(0.01, 9 * (time.monotonic() - check_began_at)), 0.25))

"""What the proxy of mode `serve` tells the coordinator: its answers, as experiences with exact token ids, and rewards.

An answer is recorded before its client gets the end of it, many in one group: the experiences as one payload, and one
command that names them. So whoever has a message id can post a reward for it, whatever died meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from trinity_es.actors.commands import Command, DeliverAnswers, RecordAnswers
from trinity_es.actors.coordinator.handlers.serve_answers import BATCH
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import DataError, EngineError
from trinity_es.events.experience import EID, Experience
from trinity_es.events.vocabulary import Answer, PayloadRef
from trinity_es.serve.engines import Backend

__all__ = ["CompletionRecorder", "RecordedCompletion", "StreamedAnswer", "given"]

GROUP = 256
"""Answers in one command, at most: it stays well under the limit of a message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """An answer as it is to be recorded; its payload is not known yet."""

    answer: Answer
    experiences: list[Experience]


class CompletionRecorder:
    """The coordinator's commands for answers, from an event loop. `run` has to be running."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="proxy")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="commit")  # they wait for the pipeline: nothing else may
        self._queue: asyncio.Queue[tuple[RecordedCompletion, asyncio.Future[None]]] = asyncio.Queue()

    async def ask(self, command: Command[T]) -> T:
        """Return the coordinator's answer to a command. Raises what it answers."""
        pool = self._slow if isinstance(command, DeliverAnswers) else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: self._client.request(command))

    async def record(self, given: RecordedCompletion) -> None:
        """Record an answer; returns when it is durable. Raises what the log does."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((given, done))
        await done

    async def run(self) -> None:
        """Write what is to be recorded, group by group: while one is written the next one gathers."""
        while True:
            group = [await self._queue.get()]
            while len(group) < GROUP and not self._queue.empty():
                group.append(self._queue.get_nowait())
            error: Exception | None = None
            try:
                await asyncio.get_running_loop().run_in_executor(self._pool, self._write, [g for g, _ in group])
            except Exception as e:
                error = e
            for _, done in group:
                if done.done():  # its client is gone
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)

    def _write(self, group: list[RecordedCompletion]) -> None:
        experiences = [e for g in group for e in g.experiences]
        digest = self._client._payloads.put(Experience.serialize_many(experiences)) if experiences else ""
        rows, first = [], 0
        for g in group:
            lie = PayloadRef(digest=digest, first=first, count=len(g.experiences)) if g.experiences else None
            first += len(g.experiences)
            rows.append(replace(g.answer, payload=lie))
        self._client.request(RecordAnswers(answers=rows))

    def close(self) -> None:
        for pool in (self._pool, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)


# --- from an engine's response to experiences -----------------------------------------------------------------------
class StreamedAnswer:
    """The chunks of a stream, put together to what the whole response would have been."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"index": 0, "token_ids": [], "finish_reason": None, "version_spans": []}
        self._text: list[str] = []
        self._logprobs: list[float] = []
        self._chat = False

    def add(self, chunk: Mapping[str, Any]) -> bool:
        """Take one more chunk; true when its choice is complete with it."""
        self._head = {**chunk, **self._head}
        for choice in chunk.get("choices", []):
            self._chat = "delta" in choice
            self._text.append((choice["delta"].get("content") if self._chat else choice["text"]) or "")
            self._choice["token_ids"] += choice.get("token_ids") or []
            self._logprobs += _logprobs(choice) or []
            self._choice["version_spans"] = choice.get("version_spans") or self._choice["version_spans"]
            self._choice["finish_reason"] = choice.get("finish_reason") or self._choice["finish_reason"]
        return self._choice["finish_reason"] is not None

    def whole(self) -> dict[str, Any]:
        """Return the response."""
        text = "".join(self._text)
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        logprobs = {"token_logprobs": self._logprobs} if self._logprobs else None
        return {**self._head, "choices": [{**self._choice, **said, "logprobs": logprobs}]}


def given(response: Mapping[str, Any], asked: Mapping[str, Any], way: Backend) -> RecordedCompletion:
    """Return what is recorded of an engine's response to the request `asked`. Raises EngineError where it can't be."""
    try:
        return _given(response, asked, way)
    except (KeyError, TypeError, ValueError, IndexError) as e:  # DataError is a ValueError
        what = str(e) if isinstance(e, DataError) else f"{type(e).__name__}: {e}"
        raise EngineError(f"the answer of {way.runner} can't be recorded: {what}") from e


def _given(response: Mapping[str, Any], asked: Mapping[str, Any], way: Backend) -> RecordedCompletion:
    message = str(response["id"])
    prompt = response["prompt_token_ids"]
    version = int(response["model_version"])
    oldest, newest = version, version
    experiences = []
    for index, choice in enumerate(response["choices"]):
        spans = choice.get("version_spans") or []
        versions = [int(span[0]) for span in spans] or [version]
        oldest, newest = min(oldest, *versions), max(newest, *versions)
        if not choice["token_ids"]:
            continue  # not one token: nothing that could be learnt from
        found = _logprobs(choice)
        said = choice.get("message")
        info: dict[str, Any] = {
            "message_id": message, "runner": way.runner, "model_version": versions[0],
            "model_version_drift": versions[-1] - versions[0], "use_count": 0,
        }
        if spans:
            info["version_spans"] = spans
        experiences.append(Experience(
            eid=EID(batch=BATCH, task=message, suffix=message if index == 0 else f"{message}-{index}"),
            tokens=np.array([*prompt, *choice["token_ids"]], dtype=np.int32),
            prompt_length=len(prompt),
            logprobs=None if found is None else np.array(found, dtype=np.float32),
            truncate_status="response_truncated" if choice.get("finish_reason") == "length" else None,
            info=info,
            prompt_text=asked["prompt"] if isinstance(asked.get("prompt"), str) else None,
            response_text=said["content"] if said is not None else choice["text"],
            messages=None if said is None else [*asked["messages"], dict(said)],
            tools=asked.get("tools"),
        ))
    tokens = sum(len(choice["token_ids"]) for choice in response["choices"])
    answer = Answer(
        message=message, runner=way.runner, incarnation=way.incarnation, model_version=oldest,
        model_version_end=newest, payload=None, prompt_tokens=len(prompt), response_tokens=tokens,
    )
    return RecordedCompletion(answer, experiences)


def _logprobs(choice: Mapping[str, Any]) -> list[float] | None:
    """Return the logprobs of the sampled tokens, as chat and text completions write them."""
    found = choice.get("logprobs")
    if found is None:
        return None
    if "token_logprobs" in found:
        return list(found["token_logprobs"])
    return [token["logprob"] for token in found["content"]]

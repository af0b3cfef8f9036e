"""Recorder of the proxy of mode `serve`: it sends answers, as experiences with exact token ids, to the coordinator.

Answers are written in groups: one payload with all experiences, and one command that refers to it. An answer is
recorded before its client gets the end of it, so a client that has a message id can always post a reward for it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from trinity_es.actors.commands import Command, DeliverAnswers, RecordAnswers
from trinity_es.actors.coordinator.handlers.serve_answers import BATCH
from trinity_es.actors.engines.http.pool import Backend
from trinity_es.actors.serving.recorded_answer_frames import Record
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import EngineError, TrinityError
from trinity_es.events.experience import EID, Experience
from trinity_es.events.vocabulary import Answer, PayloadRef

__all__ = ["CompletionRecorder", "RecordedCompletion", "recorded_completion"]

GROUP = 256
"""Maximum number of answers in a command, which keeps it well under the limit of a message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """Answer to record, whose payload is not written yet."""

    answer: Answer
    experiences: list[Experience]


class CompletionRecorder:
    """The coordinator's commands for answers, for an event loop on which `run` is running."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="proxy")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="commit")  # commits wait for the pipeline
        self._queue: asyncio.Queue[tuple[RecordedCompletion, asyncio.Future[None]]] = asyncio.Queue()

    async def ask(self, command: Command[T]) -> T:
        """Return the coordinator's answer to a command. Raises the coordinator's errors."""
        pool = self._slow if isinstance(command, DeliverAnswers) else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: self._client.request(command))

    async def record(self, completion: RecordedCompletion) -> None:
        """Record an answer; return when it is durable. Raises the log's errors."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((completion, done))
        await done

    async def run(self) -> None:
        """Write the queue, group by group: while one group is written the next one gathers."""
        while True:
            group = [await self._queue.get()]
            while len(group) < GROUP and not self._queue.empty():
                group.append(self._queue.get_nowait())
            writing = asyncio.get_running_loop().run_in_executor(self._pool, self._write, [g for g, _ in group])
            await asyncio.wait({writing})
            error = writing.exception()
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
            payload = PayloadRef(digest=digest, first=first, count=len(g.experiences)) if g.experiences else None
            first += len(g.experiences)
            rows.append(replace(g.answer, payload=payload))
        self._client.request(RecordAnswers(answers=rows))

    def close(self) -> None:
        for pool in (self._pool, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)


def recorded_completion(record: Record, payload: bytes, engine: Backend) -> RecordedCompletion:
    """Return an engine's answer to record, from the record that its server sent with it. Raises EngineError."""
    try:
        experiences = Experience.deserialize_many(payload) if payload else []
    except TrinityError as e:
        raise EngineError(f"the answer of {engine.runner} can't be recorded: {e}") from e
    message = record["message"]
    for index, experience in zip(record["choices"], experiences, strict=True):
        oldest, newest = experience.model_versions
        experience.eid = EID(batch=BATCH, task=message, suffix=message if index == 0 else f"{message}-{index}")
        experience.info = {
            **experience.info, "message_id": message, "runner": engine.runner, "model_version": oldest,
            "model_version_drift": newest - oldest, "use_count": 0,
        }
    answer = Answer(
        message=message, runner=engine.runner, incarnation=engine.incarnation, model_version=min(record["versions"]),
        model_version_end=max(record["versions"]), payload=None, prompt_tokens=record["prompt_tokens"],
        response_tokens=record["response_tokens"],
    )
    return RecordedCompletion(answer, experiences)

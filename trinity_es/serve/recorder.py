"""Recorder of the proxy of mode `serve`: it sends answers, as experiences with exact token ids, to the coordinator.

Answers are written in groups: one payload with all experiences, and one command that refers to the payload. An answer
is recorded before its client gets the end of the answer, so the client can always post a reward for a message id.
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

MAX_ANSWERS = 256
"""Maximum number of answers in a command, so that the command stays far below the size limit of a message."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """Answer to record, with experiences that are not in the payload store yet."""

    answer: Answer
    experiences: list[Experience]


class CompletionRecorder:
    """Records answers through the coordinator. The event loop of its callers has to run `run`."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="proxy")
        self._commit_pool = ThreadPoolExecutor(2, thread_name_prefix="commit")
        """Threads of their own for commits, which wait for the pipeline and would block other commands."""
        self._queue: asyncio.Queue[tuple[RecordedCompletion, asyncio.Future[None]]] = asyncio.Queue()
        """Answers to write, each with the future that its caller awaits."""

    async def ask(self, command: Command[T]) -> T:
        """Send the coordinator a command and return its answer. Raises the coordinator's errors."""
        pool = self._commit_pool if isinstance(command, DeliverAnswers) else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: self._client.request(command))

    async def record(self, completion: RecordedCompletion) -> None:
        """Record an answer, and return when it is durable. Raises the log's errors."""
        when_recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((completion, when_recorded))
        await when_recorded

    async def run(self) -> None:
        """Write queued answers for ever, group by group. The next group collects while one is written."""
        while True:
            group = [await self._queue.get()]
            while len(group) < MAX_ANSWERS and not self._queue.empty():
                group.append(self._queue.get_nowait())
            completions = [completion for completion, _ in group]
            writing = asyncio.get_running_loop().run_in_executor(self._pool, self._write, completions)
            await asyncio.wait({writing})
            error = writing.exception()
            for _, when_recorded in group:
                if when_recorded.done():  # its client has disconnected
                    continue
                if error is None:
                    when_recorded.set_result(None)
                else:
                    when_recorded.set_exception(error)

    def _write(self, group: list[RecordedCompletion]) -> None:
        experiences = [experience for completion in group for experience in completion.experiences]
        digest = self._client._payloads.put(Experience.serialize_many(experiences)) if experiences else ""
        answers, first = [], 0
        for completion in group:
            count = len(completion.experiences)
            payload = PayloadRef(digest=digest, first=first, count=count) if count else None
            first += count
            answers.append(replace(completion.answer, payload=payload))
        self._client.request(RecordAnswers(answers=answers))

    def close(self) -> None:
        for pool in (self._pool, self._commit_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def recorded_completion(record: Record, payload: bytes, engine: Backend) -> RecordedCompletion:
    """Build the answer to record from the record and experiences that an engine's server sent. Raises EngineError."""
    try:
        experiences = Experience.deserialize_many(payload) if payload else []
    except TrinityError as e:
        raise EngineError(f"the answer of {engine.runner} can't be recorded: {e}") from e
    message_id = record["message"]
    for index, experience in zip(record["choices"], experiences, strict=True):
        oldest, newest = experience.model_versions
        suffix = message_id if index == 0 else f"{message_id}-{index}"
        experience.eid = EID(batch=BATCH, task=message_id, suffix=suffix)
        experience.info = {
            **experience.info, "message_id": message_id, "runner": engine.runner, "model_version": oldest,
            "model_version_drift": newest - oldest, "use_count": 0,
        }
    answer = Answer(
        message=message_id, runner=engine.runner, incarnation=engine.incarnation, model_version=min(record["versions"]),
        model_version_end=max(record["versions"]), payload=None, prompt_tokens=record["prompt_tokens"],
        response_tokens=record["response_tokens"],
    )
    return RecordedCompletion(answer, experiences)

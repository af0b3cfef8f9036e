"""The experience pipeline off the actor's loop: one thread that reads payloads, runs operators, writes the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from actors.pipeline import Pipeline
from events.errors import CorruptPayload
from events.experience import Experience
from events.payloads import PayloadStore
from events.vocabulary import PayloadRef

__all__ = ["PipelineDone", "PipelineJob", "PipelineJobs", "read_experiences"]

PER_PAYLOAD = 1024
"""Experiences that go into one payload of what was delivered."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """Run the pipeline over these experiences; `done` gets a PipelineDone, or the exception, in the actor's loop."""

    refs: list[PayloadRef]
    done: Callable[[Any], None]
    prepare: Callable[[list[Experience]], None] | None = None
    """What is done to them first, in the pipeline's thread."""


@dataclass(frozen=True, slots=True)
class PipelineDone:
    metrics: dict[str, float]
    refs: list[PayloadRef]
    selected: int
    dropped: int
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    model_versions: list[tuple[int, int]] = field(default_factory=list)
    """As in BatchFinalized."""


def read_experiences(payloads: PayloadStore, refs: list[PayloadRef]) -> list[Experience]:
    """The experiences that these refs name, in their order; each payload is read and decoded once.

    Raises PayloadNotFound, CorruptPayload.
    """
    decoded: dict[str, list[Experience]] = {}
    out: list[Experience] = []
    for ref in refs:
        if ref.digest not in decoded:
            decoded[ref.digest] = Experience.deserialize_many(payloads.get(ref.digest))
        found = decoded[ref.digest][ref.first : ref.first + ref.count]
        if len(found) != ref.count:
            raise CorruptPayload(f"payload {ref.digest} holds fewer experiences than the log says")
        out.extend(found)
    return out


class PipelineJobs:
    """Jobs in the order of `run`, one at a time: operators need not be thread-safe."""

    def __init__(
        self, operators: list[dict[str, Any]], payloads: PayloadStore, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._pipeline = Pipeline(operators)
        self._payloads = payloads
        self._post = post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pipeline")

    def run(self, job: PipelineJob) -> None:
        self._pool.submit(self._work, job)

    def _work(self, job: PipelineJob) -> None:
        result: Any
        try:
            result = self._process(job)
        except BaseException as e:
            result = e
        self._post(lambda: job.done(result))

    def _process(self, job: PipelineJob) -> PipelineDone:
        experiences = read_experiences(self._payloads, job.refs)
        if job.prepare is not None:
            job.prepare(experiences)
        experiences.sort(key=lambda e: (e.eid.task, e.eid.run, e.eid.step))
        result = self._pipeline.run(experiences, time.perf_counter)
        out = []
        for first in range(0, len(result.experiences), PER_PAYLOAD):
            chunk = result.experiences[first : first + PER_PAYLOAD]
            out.append(
                PayloadRef(digest=self._payloads.put(Experience.serialize_many(chunk)), first=0, count=len(chunk))
            )
        return PipelineDone(
            result.metrics, out, len(result.experiences), result.dropped, result.dropped_by,
            _versions(result.experiences),
        )


def _versions(experiences: list[Experience]) -> list[tuple[int, int]]:
    """(count, version) of each stretch of experiences of one version of the weights; 0 where they don't say."""
    versions = (v if type(v := e.info.get("model_version")) is int else 0 for e in experiences)
    return [(len(list(same)), version) for version, same in groupby(versions)]

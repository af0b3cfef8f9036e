"""The pipeline's thread: it reads payloads, runs the operators and writes the result, outside the actor's loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from trinity_es.actors.coordinator.delivery.pipeline import Pipeline, StalenessLimit
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.experiences import read_experiences, write_delivered
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.vocabulary import PayloadRef

__all__ = ["PipelineDone", "PipelineJob", "PipelineThread"]


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """Experiences to process; `done` gets a PipelineDone or the exception, in the actor's loop."""

    refs: list[PayloadRef]
    done: Callable[[Any], None]
    prepare: Callable[[list[Experience]], None] | None = None
    """Function that changes the experiences before the operators run, in the pipeline's thread."""
    refer: bool = False
    """True if delivered experiences may refer to the payloads of `refs`, which are then kept as long."""
    limit: StalenessLimit | None = None
    """Limit beyond which experiences are dropped before the operators run; None: there is none."""
    groups: int = 0
    """Minimum number of tasks in the result; with fewer nothing is written."""


@dataclass(frozen=True, slots=True)
class PipelineDone:
    metrics: dict[str, float]
    refs: list[PayloadRef]
    selected: int
    dropped: int
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    model_versions: list[tuple[int, int]] = field(default_factory=list)
    """`BatchFinalized.model_versions`."""
    usable: int = 0
    """Number of tasks in the result."""
    lost: dict[str, int] = field(default_factory=dict)
    """Tasks of which nothing is in the result, by the last cause in `dropped_by`."""


class PipelineThread:
    """Pipeline that runs jobs one at a time, in the order of `run`, so operators need not be thread-safe."""

    def __init__(
        self,
        operators: list[dict[str, Any]],
        payloads: PayloadStore,
        post: Callable[[Callable[[], None]], None],
        models: Callable[[], Mapping[str, list[Any]]] = dict,
    ) -> None:
        """`models` returns the auxiliary models' clients; it is called in the pipeline's thread and may wait."""
        self._pipeline = Pipeline(operators, models)
        self._payloads = payloads
        self._post = post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pipeline")
        self._closing: Future[list[str]] | None = None

    def run(self, job: PipelineJob) -> None:
        self._pool.submit(self._work, job)

    def close(self, problem: Callable[[str], None]) -> bool:
        """Begin to close the operators, and return True once all are closed; call it again until it returns True.

        `problem` is called in the actor's loop for each operator that could not be closed.
        """
        if not self._pipeline.has_open_operators and self._closing is None:
            return True
        if self._closing is None:
            self._closing = self._pool.submit(self._pipeline.close)
            self._closing.add_done_callback(lambda closing: self._post(lambda: _report_each(closing.result(), problem)))
        return self._closing.done()

    def _work(self, job: PipelineJob) -> None:
        result: Any
        try:
            result = self._process(job)
        except BaseException as e:
            result = e
        self._post(lambda: job.done(result))

    def _process(self, job: PipelineJob) -> PipelineDone:
        raw: dict[str, bytes] = {}
        experiences = read_experiences(self._payloads, job.refs, raw if job.refer else None)
        if job.prepare is not None:
            job.prepare(experiences)
        experiences.sort(key=lambda e: (e.eid.task, e.eid.run, e.eid.step))
        tasks = {e.eid.uid: e.eid.task for e in experiences}
        result = self._pipeline.run(experiences, time.perf_counter, job.limit)
        usable = {e.eid.task for e in result.experiences}
        causes = {tasks[uid]: cause for cause, uids in result.dropped_by.items() for uid in uids if uid in tasks}
        refs = write_delivered(self._payloads, result.experiences, raw) if len(usable) >= job.groups else []
        return PipelineDone(
            result.metrics, refs, len(result.experiences), result.dropped, result.dropped_by,
            _versions(result.experiences), len(usable),
            dict(Counter(cause for task, cause in causes.items() if task not in usable)),
        )


def _report_each(problems: list[str], report: Callable[[str], None]) -> None:
    for problem in problems:
        report(problem)


def _versions(experiences: list[Experience]) -> list[tuple[int, int]]:
    """Return (count, version) of each stretch of experiences with one weights version; 0: they name none."""
    versions = (v if type(v := e.info.get("model_version")) is int else 0 for e in experiences)
    return [(len(list(stretch)), version) for version, stretch in groupby(versions)]

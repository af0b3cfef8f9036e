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
    may_refer: bool = False
    """True if delivered experiences may refer to the payloads of `refs`, which are then kept as long."""
    limit: StalenessLimit | None = None
    """Limit beyond which experiences are dropped before the operators run; None: there is none."""
    min_groups: int = 0
    """Minimum number of tasks in the result; with fewer nothing is written."""


@dataclass(frozen=True, slots=True)
class PipelineDone:
    """Result of a job; fields without a text are those of BatchFinalized (`metrics` its `pipeline_metrics`)."""

    metrics: dict[str, float]
    refs: list[PayloadRef]
    """`BatchFinalized.experiences`; empty if `usable` is less than the job's `min_groups`."""
    selected: int
    dropped: int
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    model_versions: list[tuple[int, int]] = field(default_factory=list)
    usable: int = 0
    """Number of tasks in the result."""
    lost_counts: dict[str, int] = field(default_factory=dict)
    """Number of tasks of which nothing is in the result, by the last cause in `dropped_by`."""


class PipelineThread:
    """Pipeline that runs jobs one at a time, in the order of `run`, so operators need not be thread-safe."""

    def __init__(
        self, operators: list[dict[str, Any]], payloads: PayloadStore, post: Callable[[Callable[[], None]], None],
        models: Callable[[], Mapping[str, list[Any]]] = dict,
    ) -> None:
        """`models` returns the auxiliary models' clients; it is called in the pipeline's thread and may wait."""
        self._pipeline, self._payloads, self._post = Pipeline(operators, models), payloads, post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pipeline")
        self._closing: Future[list[str]] | None = None

    def run(self, job: PipelineJob) -> None:
        self._pool.submit(self._work, job)

    def close(self, report_problem: Callable[[str], None]) -> bool:
        """Begin to close the operators, and return True once all are closed; call it again until it returns True.
        `report_problem` is called in the actor's loop for each operator that could not be closed."""
        if not self._pipeline.has_open_operators and self._closing is None:
            return True
        if self._closing is None:
            closing = self._closing = self._pool.submit(self._pipeline.close)

            def report_problems() -> None:
                for problem in closing.result():
                    report_problem(problem)

            closing.add_done_callback(lambda _: self._post(report_problems))
        return self._closing.done()

    def _work(self, job: PipelineJob) -> None:
        """Process a job in the pipeline's thread, and post its result or the exception."""
        result: Any
        try:
            result = self._process(job)
        except BaseException as e:
            result = e
        self._post(lambda: job.done(result))

    def _process(self, job: PipelineJob) -> PipelineDone:
        """Read a job's experiences, run the operators, and write what is left if that is enough."""
        payload_bytes: dict[str, bytes] = {}  # of the payloads to which delivered experiences may refer, by digest
        experiences = read_experiences(self._payloads, job.refs, payload_bytes if job.may_refer else None)
        if job.prepare is not None:
            job.prepare(experiences)
        experiences.sort(key=lambda e: (e.eid.task, e.eid.run, e.eid.step))
        task_by_uid = {e.eid.uid: e.eid.task for e in experiences}
        result = self._pipeline.run(experiences, time.perf_counter, job.limit)
        usable_tasks = {e.eid.task for e in result.experiences}
        cause_by_task = {
            task_by_uid[uid]: cause for cause, uids in result.dropped_by.items() for uid in uids if uid in task_by_uid
        }
        lost_counts = Counter(cause for task, cause in cause_by_task.items() if task not in usable_tasks)
        refs: list[PayloadRef] = []
        if len(usable_tasks) >= job.min_groups:
            refs = write_delivered(self._payloads, result.experiences, payload_bytes)
        return PipelineDone(
            metrics=result.metrics, refs=refs, selected=len(result.experiences), dropped=result.dropped,
            dropped_by=result.dropped_by, model_versions=_version_stretches(result.experiences),
            usable=len(usable_tasks), lost_counts=dict(lost_counts),
        )


def _version_stretches(experiences: list[Experience]) -> list[tuple[int, int]]:
    """Return (count, version) of each stretch of experiences with one weights version; 0: they name none."""
    versions = (v if type(v := e.info.get("model_version")) is int else 0 for e in experiences)
    return [(len(list(stretch)), version) for version, stretch in groupby(versions)]

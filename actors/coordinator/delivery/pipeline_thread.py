"""The pipeline's thread, which reads payloads, runs the operators and writes the result, outside the actor's loop."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any

from trinity_es.actors.coordinator.delivery.pipeline import Pipeline, PipelineResult, ProcessedPart, StalenessLimit
from trinity_es.events.errors import DataError
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.experiences import (
    ExperienceKey,
    StoredPayloads,
    key_of,
    read_experiences,
    write_delivered,
)
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.vocabulary import PayloadRef

__all__ = ["PipelineDone", "PipelineJob", "PipelineThread"]


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """Experiences to process. `done` is called with a PipelineDone or the exception, in the actor's loop."""

    refs: list[PayloadRef]
    done: Callable[[Any], None]
    prepare: Callable[[list[Experience]], None] | None = None
    """Function that changes the experiences before the operators run, in the pipeline's thread."""
    may_refer: bool = False
    """True if the delivery may refer to the payloads of `refs` instead of copying unchanged parts of them."""
    limit: StalenessLimit | None = None
    """Limit beyond which experiences are dropped before the operators run; None: no limit."""
    min_groups: int = 0
    """Minimum number of tasks in the result. With fewer, nothing is written."""


@dataclass(frozen=True, slots=True)
class PipelineDone:
    """Result of a job. Undocumented fields have the meaning of BatchFinalized (`metrics` is its `pipeline_metrics`)."""

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
    """Last cause in `dropped_by` -> number of tasks without any experience in the result."""


class PipelineThread:
    """Thread that runs jobs one at a time, in the order of `run`, so operators need not be thread-safe."""

    most_at_once, part_size = 32_768, 4096
    """A batch with more experiences than the first number is processed in parts of roughly the second, which saves
    memory and takes half as much CPU again."""

    def __init__(
        self, operators: list[dict[str, Any]], payloads: PayloadStore, post: Callable[[Callable[[], None]], None],
        models: Callable[[], Mapping[str, list[Any]]] = dict,
    ) -> None:
        """`models` returns the auxiliary models' clients. It is called in the pipeline's thread, and may block."""
        self._pipeline, self._payloads, self._post = Pipeline(operators, models), payloads, post
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pipeline")
        self._closing: Future[list[str]] | None = None

    def run(self, job: PipelineJob) -> None:
        self._pool.submit(self._work, job)

    def close(self, report_problem: Callable[[str], None]) -> bool:
        """Close the operators in the thread. Returns True once all are closed, so call it again until then.
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
        """Process a job, and post its result or the exception to the actor's loop."""
        result: Any
        try:
            result = self._process(job)
        except BaseException as e:
            result = e
        self._post(lambda: job.done(result))

    def _process(self, job: PipelineJob) -> PipelineDone:
        """Process a job in parts if it is large and all operators have `by_task`, otherwise as a whole."""
        if self._pipeline.by_task and job.prepare is None and sum(ref.count for ref in job.refs) > self.most_at_once:
            try:
                return self._process_parts(job)
            except Exception as e:  # a part may fail where the whole batch loses some runs
                log = logging.getLogger("trinity_es.pipeline")  # not at import: Thespian silences existing loggers
                log.warning("a batch goes through the pipeline as a whole, since a part of it failed: %s", e)
        return self._process_whole(job)

    def _process_whole(self, job: PipelineJob) -> PipelineDone:
        """Read a job's experiences, run the operators, and write the result if it has `min_groups` tasks."""
        payload_bytes: dict[str, bytes] = {}  # of the payloads to which delivered experiences may refer, by digest
        experiences = read_experiences(self._payloads, job.refs, payload_bytes if job.may_refer else None)
        if job.prepare is not None:
            job.prepare(experiences)
        experiences.sort(key=_sort_key)
        task_by_uid = {e.eid.uid: e.eid.task for e in experiences}
        result = self._pipeline.run(experiences, time.perf_counter, job.limit)
        summary = _Summary()
        summary.add(task_by_uid, result.experiences, result.dropped_by)
        del experiences
        refs: list[PayloadRef] = []
        if summary.usable >= job.min_groups:
            refs = write_delivered(self._payloads, result.experiences, payload_bytes)
        return summary.to_result(result, refs)

    def _process_parts(self, job: PipelineJob) -> PipelineDone:
        """Process a job part by part, so that memory holds one part: once for the result, and once more to write it."""
        summary, processed, keys = _Summary(), list[ProcessedPart](), list[ExperienceKey]()
        for experiences in self._parts(job):
            task_by_uid = {e.eid.uid: e.eid.task for e in experiences}
            part = self._pipeline.process(experiences, time.perf_counter, job.limit, is_part=True)
            summary.add(task_by_uid, part.experiences, part.dropped_by)
            keys += map(key_of, part.experiences)
            part.experiences = []
            processed.append(part)
        refs: list[PayloadRef] = []
        if summary.usable >= job.min_groups:
            again = (self._pipeline.process(part, time.perf_counter, job.limit, is_part=True).experiences
                     for part in self._parts(job))
            raw = StoredPayloads(self._payloads, (ref.digest for ref in job.refs if job.may_refer))
            refs = write_delivered(self._payloads, chain.from_iterable(again), raw, keys)
        return summary.to_result(self._pipeline.join_parts(processed, []), refs)

    def _parts(self, job: PipelineJob) -> Iterator[list[Experience]]:
        """Yield the experiences of a job in parts of whole tasks. Raises DataError if `refs` are not in task order."""
        kept: list[Experience] = []  # of the last task, of which the next refs may have more
        for refs in _ref_groups(job.refs, self.part_size):
            last_task: Any = kept[-1].eid.task if kept else None
            kept += read_experiences(self._payloads, refs)
            kept.sort(key=_sort_key)
            if last_task is not None and kept and kept[0].eid.task < last_task:
                raise DataError("the tasks of this batch are not in order")
            part = [e for e in kept if e.eid.task != kept[-1].eid.task]
            kept = kept[len(part):]
            if part:
                yield part
            del part
        yield kept


class _Summary:
    """Counts of a batch's experiences and tasks after the operators, added up over its parts."""

    def __init__(self) -> None:
        self.selected = self.usable = 0
        self._lost_counts: Counter[str] = Counter()
        self._stretches: list[tuple[int, int]] = []

    def add(
        self, task_by_uid: Mapping[str, int | str], experiences: list[Experience], dropped_by: Mapping[str, list[str]]
    ) -> None:
        """Add a part: the task of each incoming experience, the remaining experiences, and the causes of the drops."""
        usable_tasks = {e.eid.task for e in experiences}
        cause_by_task = {
            task_by_uid[uid]: cause for cause, uids in dropped_by.items() for uid in uids if uid in task_by_uid
        }
        self._lost_counts.update(cause for task, cause in cause_by_task.items() if task not in usable_tasks)
        self.usable += len(usable_tasks)
        self.selected += len(experiences)
        for count, version in _version_stretches(experiences):
            if self._stretches and self._stretches[-1][1] == version:
                count += self._stretches.pop()[0]
            self._stretches.append((count, version))

    def to_result(self, result: PipelineResult, refs: list[PayloadRef]) -> PipelineDone:
        """Return the result of the job, with these counts."""
        return PipelineDone(
            metrics=result.metrics, refs=refs, selected=self.selected, dropped=result.dropped,
            dropped_by=result.dropped_by, model_versions=self._stretches, usable=self.usable,
            lost_counts=dict(self._lost_counts),
        )


def _ref_groups(refs: list[PayloadRef], size: int) -> Iterator[list[PayloadRef]]:
    """Yield groups of consecutive refs with roughly `size` experiences each."""
    numbers = accumulate((ref.count for ref in refs), initial=0)
    for _, stretch in groupby(zip(refs, numbers, strict=False), lambda pair: pair[1] // size):
        yield [ref for ref, _ in stretch]


def _sort_key(e: Experience) -> tuple[Any, int, int]:
    """Return the key by which a batch's experiences are sorted."""
    return e.eid.task, e.eid.run, e.eid.step


def _version_stretches(experiences: list[Experience]) -> list[tuple[int, int]]:
    """Return (count, version) for each series of experiences with the same weights version; 0 if they have none."""
    versions = (v if type(v := e.info.get("model_version")) is int else 0 for e in experiences)
    return [(len(list(stretch)), version) for version, stretch in groupby(versions)]

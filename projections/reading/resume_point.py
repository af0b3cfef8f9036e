"""State that an explorer needs to resume a run.

It comes from read models and short streams, so its cost grows with the number of steps and not of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import ConfigError
from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.events.vocabulary import TasksetResolved, TasksetSource
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.batch_queries import BatchRow

__all__ = ["ResumePoint", "is_over", "resume_point", "sources_of", "was_dropped_stale"]



@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Progress of an explorer's run. Steps are train batches 1, 2, ..."""

    submitted: int = 0
    finished: int = 0
    """Last step N such that steps 1 to N were all finalized, or aborted by a person."""
    open: frozenset[int] = frozenset()
    """Submitted steps that are not over (see `is_over`)."""
    trained: int = 0
    """Last step N such that steps 1 to N were all trained, or aborted by a person."""
    cursors: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """(epoch, offset) of each taskset after each step."""
    evals: dict[BatchId, bool] = field(default_factory=dict)
    """Submitted eval -> True if it has ended."""
    version: int = 0
    """Current weights version; 0 is the original model."""
    path: str = ""
    checkpoint: str = ""
    """Path of the newest weights on a disk, from which a trainer can start; "" for the original model."""
    checkpoint_version: int = 0
    """Version of `checkpoint`, which may be older than `version`."""
    sources: dict[tuple[str, bool], TasksetSource] = field(default_factory=dict)
    """(taskset name, is eval) -> resolved source of the taskset, as recorded with its first batch."""
    position: int = 0
    """Log position at which this was read."""


def resume_point(log: Log, tasksets: Sequence[str]) -> ResumePoint:
    """Read the progress of an explorer with these tasksets. Raises ConfigError if the log holds another run."""
    position = log.head().position
    rows = {b.batch_id: b for b in log.batches()}
    train = {b.batch_id: b for b in rows.values() if b.batch_type == "train"}
    advanced: dict[int, dict[str, tuple[int, int]]] = {}
    for taskset in tasksets:
        for recorded in log.read(stream=f"taskset/{taskset}"):
            event = recorded.event
            if isinstance(event, ev.TasksetAdvanced) and isinstance(event.batch_id, int) and event.batch_id in train:
                cursors_of_step = advanced.setdefault(event.batch_id, {})
                cursors_of_step[taskset] = max(cursors_of_step.get(taskset, (0, 0)), (event.epoch, event.offset))
    steps = list(range(1, len(train) + 1))
    if set(train) != set(steps) or set(advanced) != set(steps):
        names = ", ".join(map(repr, tasksets))
        raise ConfigError(
            f"the log {log.url} already holds another run ({len(rows)} batches), not an explorer's on taskset "
            f"{names}. Choose another `name` (or `--set name=...`), or another `store.url` if the config sets one"
        )
    cursors: dict[int, dict[str, tuple[int, int]]] = {0: {}}
    for step in steps:
        before = cursors[step - 1]  # may be further on, if tasks were added to that step after this one's submission
        cursors[step] = {name: max(before.get(name, (0, 0)), advanced[step].get(name, (0, 0)))
                         for name in before | advanced[step]}
    ended = [
        train[step].state == BatchLifecycleState.FINALIZED
        or (train[step].state == BatchLifecycleState.ABORTED and not was_dropped_stale(log, step)) for step in steps
    ]
    settled = [ended[i] and (train[step].trained_step is not None or train[step].state == BatchLifecycleState.ABORTED)
               for i, step in enumerate(steps)]
    version, path = 0, ""
    checkpoint, checkpoint_version = "", 0
    for recorded in log.read(stream="weights"):
        if isinstance(recorded.event, ev.WeightsPublished):
            version, path = recorded.event.version, recorded.event.path
            if recorded.event.method == "checkpoint":
                checkpoint, checkpoint_version = path, version
    return ResumePoint(
        submitted=len(steps), finished=_first_false(ended),
        open=frozenset(step for step in steps if not is_over(log, train[step])), trained=_first_false(settled),
        cursors=cursors, version=version, path=path, checkpoint=checkpoint, checkpoint_version=checkpoint_version,
        evals={b.batch_id: BatchLifecycleState(b.state).ended for b in rows.values() if b.batch_type == "eval"},
        sources=sources_of(log), position=position,
    )


def sources_of(log: Log) -> dict[tuple[str, bool], TasksetSource]:
    """Return {(taskset name, is eval): resolved source}, from the TasksetResolved events."""
    events = (recorded.event for recorded in log.read(stream=TasksetResolved.stream))
    sources = (event.source for event in events if isinstance(event, TasksetResolved))
    return {(source.taskset, source.is_eval): source for source in sources}


def _first_false(values: list[bool]) -> int:
    """Return the index of the first False, or the length if there is none."""
    return [*values, False].index(False)


def is_over(log: Log, row: BatchRow) -> bool:
    """Return True if a resumed run does not submit the step again: a run of it succeeded, or a person aborted it."""
    if row.state == BatchLifecycleState.ABORTED:
        return not was_dropped_stale(log, row.batch_id)
    if row.state != BatchLifecycleState.FINALIZED:
        return False
    if row.finished or row.trained_step is not None:
        return True  # most batches need no fold
    state = log.current(row.batch_id)
    return state is not None and state.state.ended and not state.failed_whole


def was_dropped_stale(log: Log, batch_id: BatchId) -> bool:
    """Return True if the recovery aborted the batch's last submission, because its weights were too old."""
    is_stale = False
    for recorded in log.events(batch_id):
        event = recorded.event
        if isinstance(event, ev.BatchSubmitted):
            is_stale = False
        elif isinstance(event, ev.RecoveryDecided) and event.decision == "drop_stale":
            is_stale = True
    return is_stale

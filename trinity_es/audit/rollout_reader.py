"""Reading of single runs: their rows in a batch's events, and their experiences in the payload store.

A payload that was freed (`store.retention`), is missing or corrupt is reported as text and not raised, since the events
are still worth showing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.store.payloads.payloads import PayloadStore, open_lazily
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import RunRow
from trinity_es.projections.reading.log_reader import Log

__all__ = ["FREED", "NOT_KEPT", "RunExperiences", "read_runs", "submitted_task", "written_experiences"]

NOT_KEPT = "experiences of evals are not kept"
FREED = "its payload was freed (store.retention)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExperiences:
    """Experiences of one run, or the reason why there are none."""

    experiences: list[Experience] = field(default_factory=list)
    """The run's experiences by step: as the pipeline delivered them, or else as the runner wrote them."""
    delivered: dict[str, ev.PayloadRef] = field(default_factory=dict)
    """Reference to each delivered experience in the payload store, by `eid.uid`."""
    missing: str = ""
    """Why there are no experiences: NOT_KEPT, FREED, or the error of their payload."""
    trouble: str = ""
    """Why the delivered experiences can't be read."""


def submitted_task(log: Log, batch_id: BatchId, task: int) -> dict[str, Any] | None:
    """Return a submitted task with its workflow and data sample; None if the log does not have it, or no longer."""
    with contextlib.suppress(TrinityError):
        return log.task(batch_id, task) or None
    return None


def written_experiences(payloads: PayloadStore, row: RunRow) -> list[Experience]:
    """Read the experiences of a run as the runner wrote them. Raises PayloadNotFound, CorruptPayload."""
    assert row.payload is not None
    experiences = [e for e in read_experiences(payloads, [row.payload]) if e.eid.run == row.run]
    return sorted(experiences, key=lambda e: e.eid.step)


def read_runs(
    log: Log, batch_id: BatchId, rows: Sequence[RunRow], delivered: Sequence[ev.PayloadRef], task_count: int = 0
) -> list[RunExperiences]:
    """Read the experiences of each of these runs. `delivered`: references to what the batch's pipeline delivered.

    With the batch's `task_count`, the search in `delivered` ends when it has found every experience that the run wrote.
    Without it, experiences that a pipeline operator added for the run are found too.
    """
    is_freed = any(row.payload is not None for row in rows) and log.was_freed(batch_id)
    with closing(open_lazily(log.payloads)) as payloads:
        return [_read_run(payloads, delivered, row, task_count, is_freed=is_freed) for row in rows]


def _read_run(
    payloads: PayloadStore, delivered: Sequence[ev.PayloadRef], row: RunRow, task_count: int, *, is_freed: bool
) -> RunExperiences:
    if row.payload is None:
        return RunExperiences(missing=NOT_KEPT)
    if is_freed:
        return RunExperiences(missing=FREED)
    try:
        written = written_experiences(payloads, row)
    except TrinityError as error:
        return RunExperiences(missing=error.message)
    uids, runs = {e.eid.uid for e in written}, {(e.eid.task, e.eid.run) for e in written}
    refs: dict[str, ev.PayloadRef] = {}
    processed: dict[str, Experience] = {}
    trouble = ""
    try:
        for ref in _nearest_first(delivered, written[0].eid.task if written else 0, task_count):
            if task_count and uids <= processed.keys():
                break
            for i, e in enumerate(read_experiences(payloads, [ref])):
                if e.eid.uid in uids or (not task_count and (e.eid.task, e.eid.run) in runs):
                    refs[e.eid.uid] = ev.PayloadRef(digest=ref.digest, first=ref.first + i, count=1)
                    processed[e.eid.uid] = e
    except TrinityError as error:
        trouble = error.message
    experiences = [processed.pop(e.eid.uid, e) for e in written]
    return RunExperiences(experiences=[*experiences, *processed.values()], delivered=refs, trouble=trouble)


def _nearest_first(refs: Sequence[ev.PayloadRef], task: Any, task_count: int) -> Sequence[ev.PayloadRef]:
    """Sort references by their distance from the likely index of the task, as deliveries are in order of tasks."""
    likely_index = int(task / task_count * len(refs)) if task_count and isinstance(task, int) else 0
    return [ref for _, ref in sorted(enumerate(refs), key=lambda item: abs(item[0] - likely_index))]

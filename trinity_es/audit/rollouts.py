"""Reading single rollouts: from the events of a batch to what its payloads hold.

What was freed (`store.retention`), is missing or corrupt is told in words, not raised: the events around it are still
worth showing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.events.experience import Experience
from trinity_es.events.store.payloads.experiences import read_experiences
from trinity_es.events.store.payloads.payloads import PayloadStore
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import RunRow
from trinity_es.projections.reading.log_reader import Log

__all__ = ["FREED", "NOT_KEPT", "Found", "experiences_of", "read_runs", "task_asked"]

NOT_KEPT = "experiences of evals are not kept"
FREED = "its payload was freed (store.retention)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The experiences of one run, or why there are none."""

    experiences: list[Experience] = field(default_factory=list)
    """In order of their step: as the runner wrote them; where the pipeline delivered one, as it left it."""
    delivered: dict[str, ev.PayloadRef] = field(default_factory=dict)
    """`eid.uid` -> where it lies as the pipeline left it."""
    missing: str = ""
    """Why there are none: NOT_KEPT, FREED, or what is wrong with their payload."""
    trouble: str = ""
    """Why what the pipeline delivered can't be read."""


def task_asked(log: Log, batch_id: BatchId, task: int) -> dict[str, Any] | None:
    """Return a task as it was handed in, workflow and data sample; None where the log does not hold it (any more)."""
    with contextlib.suppress(TrinityError):
        return log.task(batch_id, task) or None
    return None


def experiences_of(payloads: PayloadStore, row: RunRow) -> list[Experience]:
    """Return what the runner wrote of a run. Raises PayloadNotFound, CorruptPayload."""
    assert row.payload is not None
    found = [e for e in read_experiences(payloads, [row.payload]) if e.eid.run == row.run]
    return sorted(found, key=lambda e: e.eid.step)


def read_runs(
    log: Log, batch_id: BatchId, rows: Sequence[RunRow], delivered: Sequence[ev.PayloadRef], tasks: int = 0
) -> list[Found]:
    """Return what each of these runs of a batch produced, and what became of it in what the batch `delivered`.

    With `tasks`, how many the batch has, a run's deliveries are looked for only until all that it wrote was found;
    without, what an operator of the pipeline added for it is found too.
    """
    with ExitStack() as stack:
        payloads, missing = None, ""
        try:
            if any(row.payload is not None for row in rows):
                if log.was_freed(batch_id):
                    missing = FREED
                else:
                    payloads = stack.enter_context(closing(log.payloads()))
        except TrinityError as e:
            missing = e.message
        return [_read_run(payloads, missing, delivered, row, tasks) for row in rows]


def _read_run(
    payloads: PayloadStore | None, missing: str, delivered: Sequence[ev.PayloadRef], row: RunRow, tasks: int
) -> Found:
    if row.payload is None:
        return Found(missing=NOT_KEPT)
    if payloads is None:
        return Found(missing=missing)
    try:
        written = experiences_of(payloads, row)
    except TrinityError as error:
        return Found(missing=error.message)
    wanted, own = {e.eid.uid for e in written}, {(e.eid.task, e.eid.run) for e in written}
    where: dict[str, ev.PayloadRef] = {}
    changed: dict[str, Experience] = {}
    trouble = ""
    try:
        for ref in _likely_first(delivered, written[0].eid.task if written else 0, tasks):
            if tasks and wanted <= changed.keys():
                break
            for i, e in enumerate(read_experiences(payloads, [ref])):
                if e.eid.uid in wanted or (not tasks and (e.eid.task, e.eid.run) in own):
                    where[e.eid.uid] = ev.PayloadRef(digest=ref.digest, first=ref.first + i, count=1)
                    changed[e.eid.uid] = e
    except TrinityError as error:
        trouble = error.message
    ours = [changed.pop(e.eid.uid, e) for e in written]
    return Found(experiences=[*ours, *changed.values()], delivered=where, trouble=trouble)


def _likely_first(refs: Sequence[ev.PayloadRef], task: Any, tasks: int) -> Sequence[ev.PayloadRef]:
    """Begin where this task probably is, since deliveries are in order of tasks: so one payload is read, not all."""
    guess = int(task / tasks * len(refs)) if tasks and isinstance(task, int) else 0
    return [ref for _, ref in sorted(enumerate(refs), key=lambda numbered: abs(numbered[0] - guess))]

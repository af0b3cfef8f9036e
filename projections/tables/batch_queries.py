"""Filtered and sorted queries for the rows of batches in the read models."""

from __future__ import annotations

from dataclasses import dataclass, fields

import orjson
from sqlalchemy import ColumnElement, Connection, func, select

from trinity_es.events.values import BatchId
from trinity_es.projections.tables import read_models

__all__ = ["SORTS", "BatchRow", "count_batches", "read_batches"]

_C = read_models.batches.c
SORTS = {
    "position": _C.first_position, "changed": _C.last_position, "submitted": _C.submitted_at, "ended": _C.ended_at,
    "step": _C.trained_step, "trained": _C.trained_at, "type": _C.batch_type, "seconds": _C.ended_at - _C.submitted_at,
    **{name: _C[name] for name in (
        "state", "tasks", "finished", "failed", "dropped", "failed_attempts", "experiences", "prompt_tokens",
        "response_tokens", "reward", "model_version", "staleness")},
}
"""Sort keys of batches. Rows without a value come last, and rows with equal values in the order of submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch, as of its latest submission."""

    batch_id: BatchId
    batch_type: str
    state: str
    tasks: int
    finished: int
    failed_attempts: int
    experiences: int
    response_tokens: int
    reward: float | None
    """Mean reward; None until the batch is finalized."""
    model_version: int | None
    submitted_at: float
    """Unix seconds."""
    ended_at: float | None
    first_position: int
    last_position: int
    trained_step: int | None
    trained_at: float | None
    failed: int
    """Number of tasks with a run that failed for good."""
    dropped: int
    """Number of tasks given up unfinished, because the batch had enough or was aborted."""
    sent: int
    """Number of tasks with a unit that was sent to a runner. The others were never tried."""
    prompt_tokens: int
    staleness: float | None
    """Mean number of versions by which the delivered experiences lagged behind the weights at finalization."""


_COLUMNS = [_C[f.name] for f in fields(BatchRow)]


def read_batches(
    connection: Connection, *, stream: str | None = None, state: str | None = None, batch_type: str | None = None,
    sort: str = "position", descending: bool = False, limit: int | None = None, offset: int = 0,
) -> list[BatchRow]:
    """Return the rows of batches, sorted by a key in `SORTS`. `stream`, `state` and `batch_type` are filters."""
    key = SORTS[sort]
    query = select(*_COLUMNS).where(*_conditions(stream=stream, state=state, batch_type=batch_type))
    query = query.order_by(key.is_(None), key.desc() if descending else key.asc(), _C.first_position)
    rows = connection.execute(query.limit(limit).offset(offset)).mappings()
    return [BatchRow(**{**row, "batch_id": orjson.loads(row["batch_id"])}) for row in rows]


def count_batches(connection: Connection, *, state: str | None = None, batch_type: str | None = None) -> int:
    query = select(func.count()).select_from(read_models.batches)
    return int(connection.execute(query.where(*_conditions(state=state, batch_type=batch_type))).scalar_one())


def _conditions(**values: str | None) -> list[ColumnElement[bool]]:
    """Return the condition `column = value` for each column whose value is not None."""
    return [_C[name] == value for name, value in values.items() if value is not None]

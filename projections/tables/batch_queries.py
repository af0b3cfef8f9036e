"""List of batches, one row each, filtered and sorted in the read models' tables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import orjson
from sqlalchemy import Connection, Select, func, select

from trinity_es.events.values import BatchId
from trinity_es.projections.tables import read_models

__all__ = ["SORTS", "BatchRow", "count_batches", "read_batches"]

SORTS = {
    name: getattr(read_models.batches.c, column)
    for name, column in {
        "position": "first_position", "changed": "last_position", "submitted": "submitted_at", "ended": "ended_at",
        "step": "trained_step", "trained": "trained_at",
        **{name: name for name in (
            "state", "tasks", "finished", "failed", "dropped", "failed_attempts", "experiences", "prompt_tokens",
            "response_tokens", "reward", "model_version", "staleness",
        )},
    }.items()
} | {"type": read_models.batches.c.batch_type,
     "seconds": read_models.batches.c.ended_at - read_models.batches.c.submitted_at}
"""Sort keys of a list of batches. Rows without a value come last, equal ones in the order of submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """Row of a batch's latest submission."""

    batch_id: BatchId
    batch_type: str
    state: str
    tasks: int
    finished: int
    failed_attempts: int
    experiences: int
    response_tokens: int
    reward: float | None
    """Mean reward; None until it is finalized."""
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
    """Number of tasks with a unit that a runner got; the others were never tried."""
    prompt_tokens: int
    staleness: float | None
    """Mean number of versions that its delivered experiences were behind the current weights when it was finalized."""


_NAMES = [f.name for f in fields(BatchRow) if f.name != "batch_id"]
_COLUMNS = [read_models.batches.c[name] for name in ("batch_id", *_NAMES)]


def read_batches(
    connection: Connection, *, stream: str | None = None, state: str | None = None, batch_type: str | None = None,
    sort: str = "position", descending: bool = False, limit: int | None = None, offset: int = 0,
) -> list[BatchRow]:
    """Return batches of one stream or all, in the order of their first submission or another order of `SORTS`."""
    key, c = SORTS[sort], read_models.batches.c
    query = _filtered(select(*_COLUMNS), state, batch_type)
    if stream is not None:
        query = query.where(c.stream == stream)
    query = query.order_by(key.is_(None), key.desc() if descending else key.asc(), c.first_position)
    return [
        BatchRow(batch_id=orjson.loads(batch_id), **dict(zip(_NAMES, values, strict=True)))
        for batch_id, *values in connection.execute(query.limit(limit).offset(offset)).all()
    ]


def count_batches(connection: Connection, *, state: str | None = None, batch_type: str | None = None) -> int:
    query = _filtered(select(func.count()).select_from(read_models.batches), state, batch_type)
    return int(connection.execute(query).scalar_one())


def _filtered(query: Select[Any], state: str | None, batch_type: str | None) -> Select[Any]:
    c = read_models.batches.c
    if state is not None:
        query = query.where(c.state == state)
    return query if batch_type is None else query.where(c.batch_type == batch_type)

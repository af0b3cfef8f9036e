"""Queries on the names and versions of streams, which read no events."""

from __future__ import annotations

from sqlalchemy import BigInteger, cast, func, select

from trinity_es.events.store.database import schema
from trinity_es.events.store.log import EventLog

__all__ = ["greatest_batch_id", "other_streams"]

_S = schema.streams.c
_BATCH = func.substr(_S.stream, 1, 6) == "batch/"


def other_streams(log: EventLog) -> dict[str, int]:
    """Return the version of each stream that is not a batch's, by name. Every log has few of them."""
    query = select(_S.stream, _S.version).where(~_BATCH)
    return log.query(lambda c: {row.stream: row.version for row in c.execute(query)})


def greatest_batch_id(log: EventLog) -> int:
    """Return the greatest numeric batch id of all batches, open or ended; 0 if there is none."""
    name = func.substr(_S.stream, 7)
    query = select(func.max(cast(name, BigInteger))).where(_BATCH, func.ltrim(name, "0123456789") == "", name != "")
    return log.query(lambda c: c.execute(query).scalar_one_or_none()) or 0

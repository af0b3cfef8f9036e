"""Queries for events of rare types, through a partial index, and for positions by time.

Nine of ten events are of a few bulk types (`schema.BULK`): units dispatched or finished, answers of a proxy. Queries
seldom need them, so the index leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select, union_all

from trinity_es.events.errors import LogCorrupt
from trinity_es.events.store.database import schema
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.events.vocabulary import EVENTS

__all__ = ["RARE", "position_at", "rare_page", "require_rare"]

RARE = tuple(sorted(EVENTS.keys() - set(schema.BULK)))

_E = schema.events.c


def require_rare(types: Sequence[str] | None) -> tuple[str, ...]:
    """Return these types without repetitions, or all rare ones. Raises ValueError for a bulk type."""
    rare_types = tuple(dict.fromkeys(RARE if types is None else types))
    if bulk_types := set(rare_types) & set(schema.BULK):
        raise ValueError(f"{', '.join(sorted(bulk_types))}: bulk types have no index; use `read`")
    return rare_types


def rare_page(
    connection: Connection, types: Sequence[str], *, after: int = 0, before: int | None = None, size: int = 1000,
    descending: bool = False,
) -> list[Row[Any]]:
    """Return at most `size` rows of these rare types with `after` < position < `before`, ordered by position."""
    if not types:
        return []
    between = [_E.position > after] + ([] if before is None else [_E.position < before])
    order = _E.position.desc() if descending else _E.position.asc()
    # Merges the first rows of each type, so that no type's entries are read further than the page needs.
    of_rare = select(_E.position).where(schema.IS_RARE, *between).order_by(order).limit(size)
    union = union_all(*(select(of_rare.where(_E.type == name).subquery()) for name in types)).subquery()
    union_order = union.c.position.desc() if descending else union.c.position.asc()
    positions = connection.execute(select(union.c.position).order_by(union_order).limit(size)).scalars().all()
    rows = select(schema.events).where(_E.position.in_(positions)).order_by(order)
    return list(connection.execute(rows).all())


def position_at(connection: Connection, url: str, time: float, steps: Sequence[Recorded]) -> int:
    """Return the position of the last event recorded at or before `time` (unix seconds); 0 if there is none.

    `steps` are the log's `ClockStepped` events. If there are any, search only the last stretch between two steps that
    began by then. Raises LogCorrupt.
    """
    begin = max((s.position for s in steps if s.recorded_at <= time), default=0)
    end = min((s.position for s in steps if s.position > begin), default=None)
    head = connection.execute(select(schema.heads.c.last_position)).scalar_one()
    low, high = begin, head if end is None else end - 1
    while low < high:  # recorded_at never falls within a stretch, so this needs no index
        middle = (low + high + 1) // 2
        recorded_at = connection.execute(select(_E.recorded_at).where(_E.position == middle)).scalar_one_or_none()
        if recorded_at is None:
            raise LogCorrupt(f"{url}: position {middle} is missing; run `trinity-es verify`", position=middle)
        low, high = (middle, high) if recorded_at <= time else (low, middle - 1)
    return int(low)

"""Queries for events that are not bulk (`schema.BULK`), by an index of these events alone.

Nine of ten events say that units were dispatched or finished, or record a proxy's answers; queries rarely want those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select, union_all

from trinity_es.events.store.database import schema
from trinity_es.events.vocabulary import EVENTS

__all__ = ["RARE", "page", "require_rare"]

RARE = tuple(sorted(EVENTS.keys() - set(schema.BULK)))

_E = schema.events.c


def require_rare(types: Sequence[str] | None) -> tuple[str, ...]:
    """Return these types without repetitions, or all rare ones. Raises ValueError for a bulk type."""
    chosen = tuple(dict.fromkeys(RARE if types is None else types))
    if bulk := set(chosen) & set(schema.BULK):
        raise ValueError(f"{', '.join(sorted(bulk))}: a bulk type has no index; read() goes through all events")
    return chosen


def page(
    connection: Connection, types: Sequence[str], *, after: int, before: int | None, size: int, descending: bool
) -> list[Row[Any]]:
    """Return at most `size` rows of these rare types with `after` < position < `before`, in order of position."""
    if not types:
        return []
    between = [_E.position > after] + ([] if before is None else [_E.position < before])
    order = _E.position.desc() if descending else _E.position.asc()
    rows = select(schema.events).order_by(order)
    # The first rows of each type, then the first of those: no type's entries are read further than the page needs.
    of_rare = select(_E.position).where(schema.IS_RARE, *between).order_by(order).limit(size)
    union = union_all(*(select(of_rare.where(_E.type == name).subquery()) for name in types)).subquery()
    first = union.c.position.desc() if descending else union.c.position.asc()
    positions = connection.execute(select(union.c.position).order_by(first).limit(size)).scalars().all()
    return list(connection.execute(rows.where(_E.position.in_(positions))).all())

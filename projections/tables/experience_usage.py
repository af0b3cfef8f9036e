"""Read models of deliveries of train batches, and of the uses of their experiences by trainers.

A use is a training step. All experiences of a batch are used when a trainer acknowledges it (`BatchTrained`), and an
experience in the queue is used when a trainer takes it. If a trainer goes back to an older checkpoint, its uses since
then are undone, because their weights are lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson
import sqlalchemy as sa

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.database.prepared import Gathered, Prepared
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections import experience_queue
from trinity_es.projections.freed_payloads import EXPERIENCES

__all__ = ["STREAMS", "USED", "Usage", "Used", "apply", "metadata", "next_delivered", "read_usage"]

STREAMS = (experience_queue.STREAM, EXPERIENCES)
"""Streams with events about uses, besides those of batches."""
USED = (ev.BatchFinalized, ev.BatchTrained)
"""Batch events that record deliveries and uses."""

metadata = sa.MetaData()

_deliveries = sa.Table(
    "rm_delivery", metadata,
    sa.Column("stream", sa.String(255), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),  # stream version of the BatchFinalized
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("batch_id", sa.Text, nullable=False),
    sa.Column("experiences", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)

_uses = sa.Table(
    "rm_use", metadata,
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # index within the event
    sa.Column("stream", sa.String(255), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("taken", sa.Boolean, nullable=False),  # true: taken from the queue; false: the whole batch was trained
    sa.Column("first", sa.Integer, nullable=False),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("step", sa.Integer),
    sa.Column("undone", sa.Boolean, nullable=False),
    sqlite_with_rowid=False,
)


_NEW_DELIVERY = Prepared(sa.insert(_deliveries))
_NEW_USE = Prepared(sa.insert(_uses))
_LATEST = Prepared(
    sa.select(_deliveries.c.version, _deliveries.c.experiences).where(_deliveries.c.stream == sa.bindparam("stream"))
    .order_by(_deliveries.c.version.desc()).limit(1)
)


@dataclass(frozen=True, slots=True)
class Used:
    """Consecutive experiences that were used more than once."""

    batch_id: BatchId
    first: int
    """Index of the first one in the batch's delivery."""
    count: int
    steps: list[int | None]
    """Steps that used them; None for a step that the trainer did not report."""
    positions: list[int]
    """Positions of the events that recorded these uses."""


@dataclass(slots=True, kw_only=True)
class Usage:
    """Numbers of experiences that train batches delivered: all, and by how often they were used."""

    delivered: int = 0
    once: int = 0
    never: int = 0
    twice: list[Used] = field(default_factory=list)
    redone: int = 0
    """Number of uses that were undone because a trainer went back to an older checkpoint."""

    @property
    def more(self) -> int:
        """Number of experiences that were used more than once."""
        return sum(used.count for used in self.twice)


def apply(group: Gathered, item: Recorded) -> None:
    """Apply an event whose type is in USED or whose stream is in STREAMS."""
    match item.event:
        case ev.BatchFinalized(result=result, selected=selected) if result.get("batch_type") == "train":
            group.add(_NEW_DELIVERY, {
                "stream": item.stream, "version": item.version, "position": item.position,
                "batch_id": orjson.dumps(result["batch_id"]).decode(), "experiences": selected})
        case ev.BatchTrained(step=step):
            if (delivery := _last_delivery(group, item.stream)) is not None:
                _add_uses(group, item, step, [{"stream": item.stream, "version": delivery[0], "taken": False,
                                               "first": 0, "count": delivery[1]}])
        case ev.ExperiencesTaken(items=items, step=step):
            _add_uses(group, item, step, [
                {"stream": batch_stream(part.batch_id), "version": part.version, "taken": True, "first": part.first,
                 "count": part.count} for part in items
            ])
        case ev.ExperiencesReturned(step=step):
            group.write().execute(sa.update(_uses).where(_uses.c.taken, _uses.c.step > step).values(undone=True))
        case ev.ExperiencesRedelivered(batches=batches):
            for stream in map(batch_stream, batches):
                if (delivery := _last_delivery(group, stream)) is not None:
                    batch_uses = _uses.c.stream == stream, _uses.c.version == delivery[0], _uses.c.taken.is_(False)
                    group.write().execute(sa.update(_uses).where(*batch_uses).values(undone=True))


def _last_delivery(group: Gathered, stream: str) -> tuple[int, int] | None:
    """Return (stream version, number of experiences) of a batch's last delivery; None before the first."""
    for unwritten in reversed(group.waiting(_NEW_DELIVERY)):
        if unwritten["stream"] == stream:
            return unwritten["version"], unwritten["experiences"]
    row = _LATEST.first(group.connection, {"stream": stream})
    return None if row is None else (row[0], row[1])


def next_delivered(log: EventLog, after: int) -> tuple[BatchId, int] | None:
    """Return the first train batch that was finalized after a position, and the position of its BatchFinalized."""
    c = _deliveries.c
    query = sa.select(c.batch_id, c.position).where(c.position > after).order_by(c.position).limit(1)
    row = log.query(lambda connection: connection.execute(query).one_or_none())
    return None if row is None else (orjson.loads(row.batch_id), row.position)


def _add_uses(group: Gathered, item: Recorded, step: int | None, uses: list[dict[str, Any]]) -> None:
    shared_fields = {"position": item.position, "step": step, "undone": False}
    group.add(_NEW_USE, *(shared_fields | {"number": number} | use for number, use in enumerate(uses)))


def read_usage(connection: sa.Connection) -> Usage:
    usage = Usage()
    uses: dict[tuple[str, int], list[Any]] = {}
    for row in connection.execute(sa.select(_uses).order_by(_uses.c.position, _uses.c.number)):
        uses.setdefault((row.stream, row.version), []).append(row)
    for delivery in connection.execute(sa.select(_deliveries).order_by(_deliveries.c.position)):
        _count_uses(delivery, uses.get((delivery.stream, delivery.version), []), usage)
    return usage


def _count_uses(delivery: Any, uses: list[Any], usage: Usage) -> None:
    total = delivery.experiences
    usage.delivered += total
    usage.redone += sum(use.count for use in uses if use.undone)
    # A trainer that takes from the queue may then acknowledge the batch to free its payloads; that is no use.
    first_take = next((use.position for use in uses if use.taken), math.inf)
    uses = [use for use in uses if (use.taken or use.position < first_take) and not use.undone]
    # Between two of these bounds all experiences have the same uses.
    bounds = sorted({0, total, *(use.first for use in uses), *(use.first + use.count for use in uses)})
    for start, end in pairwise(bounds):
        covering_uses = [use for use in uses if use.first <= start and use.first + use.count >= end]
        if not covering_uses:
            usage.never += end - start
        elif len(covering_uses) == 1:
            usage.once += end - start
        else:
            steps, positions = [use.step for use in covering_uses], [use.position for use in covering_uses]
            usage.twice.append(Used(orjson.loads(delivery.batch_id), start, end - start, steps, positions))

"""The answers of the proxy (mode `serve`): given, rewarded, delivered. The fold of the stream `answers`.

A table that is kept up to date in the transaction of each append, so that neither a reward for an answer of last week
nor a start costs more for all that were ever given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import (
    Column,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from trinity_es.events import vocabulary as ev

__all__ = [
    "STREAM", "AnswerState", "apply", "counts", "create", "find", "read_all", "reset", "to_deliver",
]

STREAM = "answers"
PAGE = 500
"""Maximum number of message ids in one query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerState:
    message: str
    payload: ev.PayloadRef | None
    model_version: int
    reward: float | None = None
    """None: nobody posted one yet."""
    task: str | None = None
    run: int | None = None
    delivered: bool = False


_metadata = MetaData()

_RECORDED, _REWARDED, _DELIVERED = "recorded", "rewarded", "delivered"

_table = Table(
    "rm_answer",
    _metadata,
    Column("number", Integer, primary_key=True),  # the order in which they were recorded
    Column("message", String(255), nullable=False, unique=True),
    Column("state", String(16), nullable=False),
    Column("digest", String(128)),
    Column("first", Integer, nullable=False),
    Column("choices", Integer, nullable=False),
    Column("model_version", Integer, nullable=False),
    Column("reward", Float),
    Column("task", String(255)),
    Column("run", Integer),
    Index("rm_answer_state", "state", "number"),
)


def create(connection: Connection) -> None:
    _metadata.create_all(connection, checkfirst=True)


def reset(connection: Connection) -> None:
    connection.execute(delete(_table))


def apply(connection: Connection, event: ev.Event) -> None:
    """Apply one more event, in the transaction that appends it."""
    match event:
        case ev.AnswersRecorded():
            last = connection.execute(select(func.max(_table.c.number))).scalar() or 0
            rows = [_new_row(last + i, a) for i, a in enumerate(event.answers, 1)]
            if rows:
                connection.execute(insert(_table), rows)
        case ev.AnswersRewarded():
            new = {"state": _REWARDED, "reward": event.reward, "task": event.task, "run": event.run}
            _change(connection, event.messages, new)
        case ev.AnswersDelivered():
            _change(connection, event.messages, {"state": _DELIVERED})


def _new_row(number: int, answer: ev.Answer) -> dict[str, object]:
    ref = answer.payload
    return {
        "number": number, "message": answer.message, "state": _RECORDED, "digest": None if ref is None else ref.digest,
        "first": 0 if ref is None else ref.first, "choices": 0 if ref is None else ref.count,
        "model_version": answer.model_version,
    }


def _change(connection: Connection, messages: Sequence[str], new: dict[str, object]) -> None:
    statement = update(_table).where(_table.c.message == bindparam("key")).values(new)
    if messages:
        connection.execute(statement, [{"key": m} for m in messages])


def find(connection: Connection, messages: Sequence[str]) -> dict[str, AnswerState]:
    found: dict[str, AnswerState] = {}
    for first in range(0, len(messages), PAGE):
        rows = connection.execute(select(_table).where(_table.c.message.in_(messages[first : first + PAGE])))
        found |= {row.message: _state(row) for row in rows}
    return found


def read_all(connection: Connection) -> dict[str, AnswerState]:
    """Return every answer by its message id, in the order in which they were recorded."""
    rows = connection.execute(select(_table).order_by(_table.c.number))
    return {row.message: _state(row) for row in rows}


def to_deliver(connection: Connection) -> list[AnswerState]:
    """Return answers rewarded and not delivered, in the order in which they were recorded."""
    query = select(_table).where(_table.c.state == _REWARDED).order_by(_table.c.number)
    return [_state(row) for row in connection.execute(query)]


def counts(connection: Connection) -> dict[str, int]:
    """Return how many are `recorded` (and wait for a reward), `rewarded`, `delivered`."""
    rows = connection.execute(select(_table.c.state, func.count()).group_by(_table.c.state))
    return dict.fromkeys((_RECORDED, _REWARDED, _DELIVERED), 0) | {row[0]: row[1] for row in rows}


def _state(row: Row[tuple[object, ...]]) -> AnswerState:
    ref = None if row.digest is None else ev.PayloadRef(digest=row.digest, first=row.first, count=row.choices)
    return AnswerState(
        message=row.message, payload=ref, model_version=row.model_version, reward=row.reward, task=row.task,
        run=row.run, delivered=row.state == _DELIVERED,
    )

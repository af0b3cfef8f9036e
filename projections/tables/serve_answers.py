"""Read model of the proxy's answers (mode `serve`), folded from stream `answers`.

With the table, neither a start nor a reward for an old answer has to read the whole stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from trinity_es.events import vocabulary as ev

__all__ = ["STREAM", "AnswerState", "apply", "counts", "find", "metadata", "read_all", "to_deliver"]

STREAM = "answers"
PAGE = 500
"""Maximum number of message ids in one query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerState:
    message: str
    payload: ev.PayloadRef | None
    model_version: int
    reward: float | None = None
    """None until a client posts a reward."""
    task: str | None = None
    run: int | None = None
    delivered: bool = False


metadata = sa.MetaData()

_RECORDED, _REWARDED, _DELIVERED = "recorded", "rewarded", "delivered"

_table = sa.Table(
    "rm_answer", metadata,
    sa.Column("number", sa.Integer, primary_key=True),  # order of recording
    sa.Column("message", sa.String(255), nullable=False, unique=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("digest", sa.String(128)),
    sa.Column("first", sa.Integer, nullable=False),
    sa.Column("choices", sa.Integer, nullable=False),
    sa.Column("model_version", sa.Integer, nullable=False),
    sa.Column("reward", sa.Float),
    sa.Column("task", sa.String(255)),
    sa.Column("run", sa.Integer),
    sa.Index("rm_answer_state", "state", "number"),
)


def apply(connection: sa.Connection, event: ev.Event) -> None:
    match event:
        case ev.AnswersRecorded():
            last_number = connection.execute(sa.select(sa.func.max(_table.c.number))).scalar() or 0
            rows = [
                {"number": number, "message": answer.message, "state": _RECORDED, "model_version": answer.model_version,
                 "digest": ref and ref.digest, "first": ref.first if ref else 0, "choices": ref.count if ref else 0}
                for number, answer in enumerate(event.answers, last_number + 1) for ref in [answer.payload]
            ]
            if rows:
                connection.execute(sa.insert(_table), rows)
        case ev.AnswersRewarded():
            columns = {"state": _REWARDED, "reward": event.reward, "task": event.task, "run": event.run}
            _update_rows(connection, event.messages, columns)
        case ev.AnswersDelivered():
            _update_rows(connection, event.messages, {"state": _DELIVERED})


def _update_rows(connection: sa.Connection, messages: Sequence[str], columns: dict[str, object]) -> None:
    statement = sa.update(_table).where(_table.c.message == sa.bindparam("key")).values(columns)
    if messages:
        connection.execute(statement, [{"key": m} for m in messages])


def find(connection: sa.Connection, messages: Sequence[str]) -> dict[str, AnswerState]:
    """Return the answers with these message ids, by id. Unknown ids are left out."""
    states: dict[str, AnswerState] = {}
    for first in range(0, len(messages), PAGE):
        rows = connection.execute(sa.select(_table).where(_table.c.message.in_(messages[first : first + PAGE])))
        states |= {row.message: _to_state(row) for row in rows}
    return states


def read_all(connection: sa.Connection) -> dict[str, AnswerState]:
    """Return all answers by message id, in the order in which they were recorded."""
    return {row.message: _to_state(row) for row in connection.execute(sa.select(_table).order_by(_table.c.number))}


def to_deliver(connection: sa.Connection) -> list[AnswerState]:
    """Return the answers that have a reward and are not delivered, in the order in which they were recorded."""
    query = sa.select(_table).where(_table.c.state == _REWARDED).order_by(_table.c.number)
    return [_to_state(row) for row in connection.execute(query)]


def counts(connection: sa.Connection) -> dict[str, int]:
    """Return the number of answers in each state: `recorded` (without a reward), `rewarded`, `delivered`."""
    rows = connection.execute(sa.select(_table.c.state, sa.func.count()).group_by(_table.c.state))
    return dict.fromkeys((_RECORDED, _REWARDED, _DELIVERED), 0) | {row[0]: row[1] for row in rows}


def _to_state(row: sa.Row[tuple[object, ...]]) -> AnswerState:
    ref = None if row.digest is None else ev.PayloadRef(digest=row.digest, first=row.first, count=row.choices)
    return AnswerState(
        message=row.message, payload=ref, model_version=row.model_version, reward=row.reward, task=row.task,
        run=row.run, delivered=row.state == _DELIVERED,
    )

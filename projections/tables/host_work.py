"""Number of tasks that ended on each host that joined: a table of the read models.

The table has one row for each host, and a commit takes one statement for each. All other tasks ended on the head's own
runners, so a run on one host writes nothing here.
"""

from __future__ import annotations

from collections import Counter

import orjson
from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, func, insert, select, update

from trinity_es.events.store.database import schema
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.projections.host_states import host_of

__all__ = ["FORGET_TYPES", "NAME", "flush", "forget", "metadata", "read_finished"]

NAME = "rm_host_work"
FORGET_TYPES = ("BatchSubmitted", "TaskFinished", "TaskReopened")
"""Types of a batch's events that `forget` reads from the log."""

metadata = MetaData()

_work = Table(
    NAME, metadata,
    Column("host", String(255), primary_key=True),
    Column("finished", BigInteger, nullable=False),  # tasks, counting each batch since its last submission
    sqlite_with_rowid=False,
)


def flush(connection: Connection, finished: Counter[str]) -> None:
    """Add these counts to the table and clear them."""
    for host, count in finished.items():
        changed = update(_work).where(_work.c.host == host).values(finished=_work.c.finished + count)
        if connection.execute(changed).rowcount == 0:
            connection.execute(insert(_work), [{"host": host, "finished": count}])
    finished.clear()


def forget(connection: Connection, item: Recorded, task: int | None = None) -> None:
    """Subtract the tasks (or one task) of a batch that ended before this event.

    Reads the log, which costs little because such events are rare.
    """
    if not connection.execute(select(func.count()).select_from(_work)).scalar_one():
        return
    e = schema.events.c
    began = select(func.max(e.version)).where(
        e.stream == item.stream, e.type == "BatchSubmitted", e.version < item.version).scalar_subquery()
    ended: dict[int, str] = {}
    rows = connection.execute(
        select(e.type, e.data).where(
            e.stream == item.stream, e.type.in_(("TaskFinished", "TaskReopened")), e.version > began,
            e.version < item.version,
        ).order_by(e.version)
    )
    for name, data in rows:
        event = orjson.loads(data)
        if name == "TaskFinished":
            ended[event["task"]] = event["runner"]
        else:  # subtracted at that event
            ended.pop(event["task"], None)
    counts = Counter(host_of(runner) for number, runner in ended.items() if task in (None, number) and host_of(runner))
    flush(connection, Counter({host: -count for host, count in counts.items()}))


def read_finished(connection: Connection) -> dict[str, int]:
    return {row.host: int(row.finished) for row in connection.execute(select(_work).order_by(_work.c.host))}

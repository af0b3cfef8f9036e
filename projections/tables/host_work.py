"""Read model of the number of tasks that finished on each joined host.

The table has a row for each joined host. All other tasks finished on the head's own runners, so a run on a single host
writes nothing here.
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
"""Event types that `forget` reads from a batch's stream."""

metadata = MetaData()

_E = schema.events.c

_work = Table(
    NAME, metadata,
    Column("host", String(255), primary_key=True),
    Column("finished", BigInteger, nullable=False),  # tasks in the last submission of each batch
    sqlite_with_rowid=False,
)


def flush(connection: Connection, finished: Counter[str]) -> None:
    """Add these counts of tasks by host to the table, and clear them."""
    for host, count in finished.items():
        increment = update(_work).where(_work.c.host == host).values(finished=_work.c.finished + count)
        if connection.execute(increment).rowcount == 0:
            connection.execute(insert(_work), [{"host": host, "finished": count}])
    finished.clear()


def forget(connection: Connection, item: Recorded, task: int | None = None) -> None:
    """Subtract the tasks (or one task) of a batch that finished before the event `item`.

    `item` submits the batch again or reopens the task. Such events are rare, so reading the log for them costs little.
    """
    if not connection.execute(select(func.count()).select_from(_work)).scalar_one():
        return
    submission_version = select(func.max(_E.version)).where(
        _E.stream == item.stream, _E.type == "BatchSubmitted", _E.version < item.version).scalar_subquery()
    runners_by_task: dict[int, str] = {}
    rows = connection.execute(
        select(_E.type, _E.data).where(
            _E.stream == item.stream, _E.type.in_(("TaskFinished", "TaskReopened")), _E.version > submission_version,
            _E.version < item.version,
        ).order_by(_E.version)
    )
    for name, data in rows:
        event = orjson.loads(data)
        if name == "TaskFinished":
            runners_by_task[event["task"]] = event["runner"]
        else:  # it was subtracted when it was reopened
            runners_by_task.pop(event["task"], None)
    runners = [runner for task_id, runner in runners_by_task.items() if task in (None, task_id)]
    counts = Counter(host for host in map(host_of, runners) if host)
    flush(connection, Counter({host: -count for host, count in counts.items()}))


def read_finished(connection: Connection) -> dict[str, int]:
    return {row.host: int(row.finished) for row in connection.execute(select(_work).order_by(_work.c.host))}

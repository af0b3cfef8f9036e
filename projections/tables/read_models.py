"""Read models: tables on batches, runners, weights, losses and more, folded from the whole log.

A Projector updates the tables in the transaction of each append. So they are always current, and recovery reads only
open batches. `EventLog.rebuild` makes the tables again from the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.prepared import Gathered, Prepared
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.projections.host_states import host_of
from trinity_es.projections.metric_aggregation import mean_reward
from trinity_es.projections.tables import experience_usage, host_work, open_leases, runner_history, serve_answers

__all__ = [
    "ReadModels", "Totals", "delivered_batches", "open_batches", "projectors", "read_losses", "untrained_since",
]

_metadata = sa.MetaData()

batches = sa.Table(
    "rm_batch", _metadata,
    sa.Column("stream", sa.String(255), primary_key=True),
    sa.Column("batch_id", sa.Text, nullable=False),  # as JSON: 12 and "12" are different batches
    sa.Column("batch_type", sa.String(8), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("tasks", sa.Integer, nullable=False),
    sa.Column("finished", sa.Integer, nullable=False),
    sa.Column("failed_attempts", sa.Integer, nullable=False),
    sa.Column("experiences", sa.Integer, nullable=False),
    sa.Column("response_tokens", sa.BigInteger, nullable=False),
    sa.Column("reward", sa.Float),  # the batch's mean reward once it is finalized
    sa.Column("model_version", sa.Integer),
    sa.Column("submitted_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("first_position", sa.BigInteger, nullable=False),
    sa.Column("last_position", sa.BigInteger, nullable=False),
    sa.Column("trained_step", sa.Integer),
    sa.Column("trained_at", sa.Float),
    sa.Column("failed", sa.Integer, nullable=False),  # tasks with a run that failed for good
    sa.Column("dropped", sa.Integer, nullable=False),  # tasks given up unfinished
    sa.Column("sent", sa.Integer, nullable=False),  # tasks with a unit that a runner got
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("staleness", sa.Float),  # weights versions behind the current one when it was finalized, on average
    sa.Index("rm_batch_state", "state"),
)

failed_tasks = sa.Table(
    "rm_failed_task", _metadata,
    sa.Column("stream", sa.String(255), primary_key=True),
    sa.Column("task", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(32), nullable=False),  # kind of the first final failure
    sqlite_with_rowid=False,
)

losses = sa.Table(
    "rm_loss", _metadata,
    sa.Column("stream", sa.String(255), primary_key=True),
    sa.Column("what", sa.String(16), primary_key=True),  # attempt, task or experience
    sa.Column("why", sa.String(200), primary_key=True),  # kind of failure, reason, or operator of the pipeline
    sa.Column("count", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)

_METADATA = (_metadata, *(part.metadata for part in (
    runner_history, experience_usage, open_leases, host_work, serve_answers)))
_TABLES = [table for metadata in _METADATA for table in metadata.sorted_tables]


class ReadModels:
    """Projector of all read models. They hold a row for each

    - batch (its latest submission), failed task, and reason of a loss
    - delivery of a batch, weights version in a delivery, and use of experiences
    - incarnation of a runner, publication and load of weights, and host that finished tasks
    - open lease, and answer of the proxy
    """

    name, version = "read_models", 6

    def create(self, connection: sa.Connection) -> None:
        """Create missing tables, and replace tables with other columns by empty ones."""
        inspector = sa.inspect(connection)
        names = set(inspector.get_table_names())
        for table in _TABLES:
            if table.name in names and {c["name"] for c in inspector.get_columns(table.name)} != set(table.c.keys()):
                table.drop(connection)  # of another version; the caller folds its rows from the log again
        if "rm_runner" in names:  # in older logs; rm_life replaces it
            connection.execute(sa.text("DROP TABLE rm_runner"))
        for metadata in _METADATA:
            metadata.create_all(connection, checkfirst=True)

    def reset(self, connection: sa.Connection) -> None:
        for table in _TABLES:
            connection.execute(sa.delete(table))

    def apply(self, connection: sa.Connection, recorded: Sequence[Recorded]) -> None:
        group = _Group(connection)
        for item in recorded:
            if item.stream.startswith("batch/"):
                group.batch_event(item, item.event)
            elif item.stream in experience_usage.STREAMS:
                experience_usage.apply(group.new, item)
            elif item.stream == "weights" or item.stream.startswith("runner/"):
                runner_history.apply(group.new, item)
            elif item.stream == serve_answers.STREAM:
                serve_answers.apply(connection, item.event)
            elif item.stream == ev.LeaseTaken.stream:
                open_leases.apply(connection, item)
        group.flush()


class _Group:
    """Changes that a group of events makes to the read models, gathered until `flush` writes them."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection, self.new = connection, Gathered(connection)
        self._changes: dict[str, dict[str, Any]] = {}  # change of each batch's row, by stream
        self._losses = Counter[tuple[str, str, str]]()  # by (stream, what, why)
        self._finished_elsewhere = Counter[str]()  # tasks by host
        self._dispatches: dict[tuple[str, str, int], runner_history.Dispatched] = {}  # see add_lost_attempt
        self._system_ends: dict[str, float | None] = {}

    def flush(self) -> None:
        connection = self.new.write()
        _CHANGE.change_all(connection, [
            {"key": stream} | {f"new_{name}": value for name, value in change.items()}
            for stream, change in self._changes.items()
        ])
        _ADD_LOSS.change_all(connection, [
            {"stream": stream, "what": what, "why": why, "count": count}
            for (stream, what, why), count in self._losses.items() if count
        ])
        if any(count < 0 for count in self._losses.values()):
            connection.execute(sa.delete(losses).where(losses.c.count <= 0))
        host_work.flush(connection, self._finished_elsewhere)
        self._changes, self._losses = {}, Counter()

    def batch_event(self, item: Recorded, event: ev.Event) -> None:
        """Gather the changes that one event of a batch makes. Rare events, such as a resubmission, write at once."""
        connection = self._connection
        if isinstance(event, ev.TaskFinished):
            if "@" in event.runner:
                self._finished_elsewhere[host_of(event.runner)] += 1
        elif isinstance(event, ev.BatchSubmitted):
            if item.version > 1:  # the batch id is reused
                self.flush()
                host_work.forget(connection, item)
                for table in (batches, failed_tasks, losses):
                    connection.execute(sa.delete(table).where(table.c.stream == item.stream))
            self.new.add(_NEW, _new_row(item, event))
        elif isinstance(event, ev.TaskReopened) and event.finished:
            host_work.flush(connection, self._finished_elsewhere)
            host_work.forget(connection, item, event.task)
        if (change := self._changes.get(item.stream)) is None:
            change = self._changes[item.stream] = dict(_UNCHANGED)
        _apply_to_row(change, item, event)
        if isinstance(event, ev.FinalizeFailed):  # a batch without tasks is pending, as in `projections.batch`
            self.flush()
            connection.execute(sa.update(batches).where(batches.c.stream == item.stream, batches.c.tasks == 0)
                               .values(state=BatchLifecycleState.PENDING.value))
        elif isinstance(event, _LOSING):
            self._add_losses(change, item, event)
            if isinstance(event, ev.AttemptFailed) and event.kind == "runner_lost":
                runner_history.add_lost_attempt(connection, item, event, self._dispatches, self._system_ends)
        if isinstance(event, experience_usage.USED):
            experience_usage.apply(self.new, item)

    def _add_losses(self, change: dict[str, Any], item: Recorded, event: ev.Event) -> None:
        """Add the attempts, tasks and experiences that an event reports as lost to the counts of the batch's losses.

        `change`: changes of the batch's row. Mark the rows of tasks that failed, or that failed no more.
        """
        loss_counts: dict[tuple[str, str], int] = {}
        connection = self._connection
        match event:
            case ev.AttemptFailed():
                loss_counts["attempt", event.kind] = 1
                if not event.retry:
                    row = {"stream": item.stream, "task": event.task, "kind": event.kind}
                    change["failed"] += _FAILED.change(connection, row)
            case ev.TaskDropped():
                loss_counts["task", event.reason] = len(event.tasks)
                failed = {task for (task,) in _FAILED_TASKS.rows(connection, {"stream": item.stream})}
                for task in failed.intersection(event.tasks):  # they now count as dropped
                    change["failed"] -= _NOT_FAILED.change(connection, {"stream": item.stream, "task": task})
            case ev.TaskReopened():
                change["failed"] -= _NOT_FAILED.change(connection, {"stream": item.stream, "task": event.task})
                if event.dropped:
                    loss_counts["task", event.dropped] = -1
            case ev.BatchFinalized():
                loss_counts = {("experience", name): len(uids) for name, uids in event.dropped_by.items()}
                unnamed_count = event.dropped - sum(loss_counts.values())
                if unnamed_count > 0:  # dropped by operators that report no ids
                    loss_counts["experience", ""] = loss_counts.get(("experience", ""), 0) + unnamed_count
                counts = [count for count, _ in event.model_versions]
                if sum(counts):
                    delivered = sum(count * version for count, version in event.model_versions) / sum(counts)
                    change["staleness"] = runner_history.current_version_in(self.new) - delivered
                    runner_history.add_deliveries(self.new, item, event)
        for (what, why), count in loss_counts.items():
            self._losses[item.stream, what, runner_history.storable(why, 200)] += count


def stored_version(log: EventLog) -> int:
    """Return the version of the read models in this log; 0 if it has none."""
    c = schema.checkpoints.c
    query = sa.select(c.version).where(c.name == ReadModels.name)
    return int(log.query(lambda connection: connection.execute(query).scalar_one_or_none()) or 0)


def _new_row(item: Recorded, event: ev.BatchSubmitted) -> dict[str, Any]:
    return {
        "stream": item.stream, "batch_id": orjson.dumps(event.batch_id).decode(), "batch_type": event.batch_type,
        "tasks": len(event.repeat_times), "finished": 0, "failed_attempts": 0, "failed": 0, "dropped": 0, "sent": 0,
        "experiences": 0, "prompt_tokens": 0, "response_tokens": 0, **dict.fromkeys(_REPLACED),
        "state": (BatchLifecycleState.RUNNING if event.repeat_times else BatchLifecycleState.PENDING).value,
        "submitted_at": item.recorded_at, "first_position": item.position, "last_position": item.position,
    }


_ADDED = (
    "tasks", "finished", "failed_attempts", "failed", "dropped", "sent", "experiences", "prompt_tokens",
    "response_tokens",
)
_REPLACED = ("state", "reward", "model_version", "ended_at", "trained_step", "trained_at", "staleness", "last_position")
_UNCHANGED: dict[str, Any] = {**dict.fromkeys(_ADDED, 0), **dict.fromkeys(_REPLACED)}


def _new_value(name: str) -> sa.BindParameter[Any]:
    """Return the parameter of `_CHANGE` for this column."""
    return sa.bindparam(f"new_{name}", type_=batches.c[name].type)


# One statement for all changes. It adds counts, and replaces other values unless the new value is null.
_CHANGE = Prepared(
    sa.update(batches)
    .where(batches.c.stream == sa.bindparam("key"))
    .values(
        {name: batches.c[name] + _new_value(name) for name in _ADDED}
        | {name: sa.func.coalesce(_new_value(name), batches.c[name]) for name in _REPLACED}
        | {"model_version": sa.case(  # keep the newest, since tasks end in any order
            (batches.c.model_version > _new_value("model_version"), batches.c.model_version),
            else_=sa.func.coalesce(_new_value("model_version"), batches.c.model_version))}
    )
)
_NEW = Prepared(sa.insert(batches))
# SQL text that both databases accept: see `events.store.database.statements`.
_ADD_LOSS = Prepared(sa.text(
    "INSERT INTO rm_loss (stream, what, why, count) VALUES (:stream, :what, :why, :count) "
    "ON CONFLICT (stream, what, why) DO UPDATE SET count = rm_loss.count + excluded.count"
))
_FAILED = Prepared(sa.text(
    "INSERT INTO rm_failed_task (stream, task, kind) VALUES (:stream, :task, :kind) "
    "ON CONFLICT (stream, task) DO NOTHING"
))
_OF_TASK = failed_tasks.c.stream == sa.bindparam("stream"), failed_tasks.c.task == sa.bindparam("task")
_NOT_FAILED = Prepared(sa.delete(failed_tasks).where(*_OF_TASK))
_FAILED_TASKS = Prepared(sa.select(failed_tasks.c.task).where(_OF_TASK[0]))


def _apply_to_row(change: dict[str, Any], item: Recorded, event: ev.Event) -> None:
    """Apply an event to `change`, the gathered change of its batch's row: add to counts, replace other values."""
    change["last_position"] = item.position
    match event:
        case ev.RunsFinished():
            change["response_tokens"] += event.response_tokens
            change["prompt_tokens"] += event.prompt_tokens
            change["experiences"] += sum(r.experiences for r in event.runs)
            version, newest = event.model_version_end, change["model_version"]
            change["model_version"] = version if newest is None else max(newest, version)
            change["finished"] += isinstance(event, ev.TaskFinished)
        case ev.TasksDispatched():  # each task's first unit has a first attempt exactly once
            change["state"] = BatchLifecycleState.RUNNING.value
            change["sent"] += sum(unit.run_id_base == 0 and unit.attempt == 1 for unit in event.units)
        case ev.TasksAdded():
            change["tasks"] += len(event.repeat_times)
        case ev.AttemptFailed():
            change["failed_attempts"] += 1
        case ev.TaskDropped():
            change["dropped"] += len(event.tasks)
        case ev.TaskReopened():  # its tokens stay counted
            change["finished"] -= event.finished
            change["dropped"] -= bool(event.dropped)
            change["experiences"] -= event.experiences
        case ev.BatchFinalizing():
            change["state"] = BatchLifecycleState.FINALIZING.value
        case ev.FinalizeFailed() | ev.GroupsMissing():
            change["state"] = BatchLifecycleState.RUNNING.value
        case ev.BatchFinalized():
            change["state"], change["ended_at"] = BatchLifecycleState.FINALIZED.value, item.recorded_at
            if (reward := mean_reward(event.result)) is not None:  # _CHANGE never replaces a value with null
                change["reward"] = reward
        case ev.BatchAborted():
            change["state"], change["ended_at"] = BatchLifecycleState.ABORTED.value, item.recorded_at
        case ev.BatchTrained():
            change["trained_step"], change["trained_at"] = event.step, item.recorded_at


_LOSING = (ev.AttemptFailed, ev.TaskDropped, ev.TaskReopened, ev.BatchFinalized)


def projectors() -> list[ReadModels]:
    return [ReadModels()]


def open_batches(connection: sa.Connection) -> list[tuple[str, BatchId]]:
    """Return (stream, batch id) of every open batch, in the order of submission."""
    ended_states = [BatchLifecycleState.FINALIZED.value, BatchLifecycleState.ABORTED.value]
    query = sa.select(batches.c.stream, batches.c.batch_id).where(batches.c.state.not_in(ended_states))
    rows = connection.execute(query.order_by(batches.c.first_position))
    return [(stream, orjson.loads(batch_id)) for stream, batch_id in rows]


def delivered_batches(connection: sa.Connection, limit: int) -> list[tuple[str, int]]:
    """Return (stream, first position) of at most `limit` finalized train batches, newest first."""
    rows = connection.execute(
        sa.select(batches.c.stream, batches.c.first_position)
        .where(batches.c.batch_type == "train", batches.c.state == BatchLifecycleState.FINALIZED.value)
        .order_by(batches.c.ended_at.desc(), batches.c.first_position.desc())
        .limit(limit)
    )
    return [(stream, first) for stream, first in rows]


def untrained_since(connection: sa.Connection, step: int, position: int) -> list[tuple[BatchId, int, int]]:
    """Return the train batches that a trainer still has to use after going back to `step`.

    Each is (batch id, first position, last position). First come the batches trained after `step`, in the order of
    their steps. Then come the untrained batches that were finalized up to `position`, in the order of their ends.
    """
    c = batches.c
    rows = connection.execute(
        sa.select(c.batch_id, c.first_position, c.last_position)
        .where(c.batch_type == "train", c.state == BatchLifecycleState.FINALIZED.value)
        .where(sa.or_(c.trained_step > step, sa.and_(c.trained_step.is_(None), c.last_position <= position)))
        .order_by(c.trained_step.is_(None), c.trained_step, c.ended_at, c.first_position)
    )
    return [(orjson.loads(batch_id), first, last) for batch_id, first, last in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all batches of one type and state."""

    batch_type: str
    state: str
    batches: int
    tasks: int
    finished: int
    failed: int
    dropped: int
    experiences: int
    prompt_tokens: int
    response_tokens: int


def read_totals(connection: sa.Connection) -> list[Totals]:
    key = batches.c.batch_type, batches.c.state
    summed = ("tasks", "finished", "failed", "dropped", "experiences", "prompt_tokens", "response_tokens")
    sums = (sa.cast(sa.func.sum(batches.c[name]), sa.BigInteger).label(name) for name in summed)
    query = sa.select(*key, sa.func.count().label("batches"), *sums).group_by(*key).order_by(*key)
    return [Totals(**row) for row in connection.execute(query).mappings()]


def read_losses(connection: sa.Connection, stream: str | None = None) -> dict[tuple[str, str], int]:
    c = losses.c
    query = sa.select(c.what, c.why, sa.func.sum(c.count)).group_by(c.what, c.why).order_by(c.what, c.why)
    if stream is not None:
        query = query.where(c.stream == stream)
    return {(what, why): int(count) for what, why, count in connection.execute(query)}

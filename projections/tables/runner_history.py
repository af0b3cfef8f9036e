"""Read models of runners' lives and of weights versions, folded from streams `runner/...` and `weights`.

A life is one incarnation of a runner, from the start of its process to the end. The tables have a row for each life,
each publication and load of weights, and each weights version in a batch's delivery. Batch events change the lives only
if an attempt was lost with its runner.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import orjson
import sqlalchemy as sa

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.prepared import Gathered, Prepared
from trinity_es.events.store.log import Recorded
from trinity_es.projections.host_states import went_with_host

__all__ = [
    "Dispatched", "RunnerIncarnation", "RunnerLives", "WeightsLoad", "WeightsVersion", "add_deliveries",
    "add_lost_attempt", "apply", "batches_made_by", "before_start", "by_runner", "count_weights", "current_version",
    "current_version_in", "last_incarnation", "metadata", "natural_key", "read_deliveries_by_version", "read_lives",
    "read_weights", "runner_states", "storable", "visible_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIncarnation:
    runner: str
    model: str
    """Model that its engine serves: `rollout` or the name of an auxiliary model."""
    incarnation: int
    pid: int
    host: str
    engine: str
    places: int
    started_at: float | None
    """Unix seconds, or None if it ended before it reported its start. Fields that end in `_at` are unix seconds."""
    ready_at: float | None
    load_seconds: float | None
    ended_at: float | None
    how: str
    """State: `running`, `lost`, `retired`, `failed`, `quarantined` or `replaced`. `replaced`: the log has no end of
    this life, for example because the whole system died, and a later life began. `ended_at` is then the time of the
    last event before that start."""
    reason: str
    model_version: int
    attempts_lost: int
    seconds_lost: float
    """Total time of the lost attempts, from their dispatch to `ended_at`."""

    @property
    def state(self) -> str:
        return self.how if self.how != "running" else "started" if self.ready_at is None else "ready"

    @property
    def died(self) -> bool:
        """True if it ended unintentionally."""
        return self.how in ("lost", "failed", "quarantined")

    @property
    def went_with_host(self) -> bool:
        """True if it ended because its host was lost or left."""
        return self.died and went_with_host(self.runner, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLives:
    """A runner's last life, and totals over all its lives."""

    name: str
    last: RunnerIncarnation
    how: str
    """State of the last life, from `visible_state`."""
    lives: int
    deaths: int
    """Number of lives that ended unintentionally, including `with_host`."""
    with_host: int
    """Number of lives that ended because the host was lost or left."""
    attempts_lost: int
    seconds_lost: float
    all: list[RunnerIncarnation]


def by_runner(lives: Iterable[RunnerIncarnation], up: bool | None = None) -> list[RunnerLives]:
    """Group lives by runner, in natural order of names. `up`: as in `visible_state`."""
    runners: dict[str, list[RunnerIncarnation]] = {}
    for life in lives:
        runners.setdefault(life.runner, []).append(life)
    return [
        RunnerLives(
            name=name, last=own_lives[-1], how=visible_state(own_lives[-1], up), lives=len(own_lives),
            deaths=sum(life.died for life in own_lives),
            with_host=sum(life.went_with_host for life in own_lives),
            attempts_lost=sum(life.attempts_lost for life in own_lives),
            seconds_lost=sum(life.seconds_lost for life in own_lives), all=own_lives,
        )
        for name, own_lives in sorted(runners.items(), key=lambda item: natural_key(item[0]))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoad:
    """Successful or failed load of a weights version by one runner."""

    runner: str
    incarnation: int
    at: float
    """End of the load, in unix seconds."""
    seconds: float
    """Duration of the load; 0 if it failed."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsVersion:
    """Published version of the weights and its loads. Version 0, the original model, is never published."""

    version: int
    published_at: float
    """Unix seconds of its first publication."""
    position: int
    method: str
    """Method of its last publication. A version in memory may be published again as a checkpoint."""
    path: str
    loads: list[WeightsLoad] = field(default_factory=list)
    """Successful loads in order. Engines that started with this version have none."""
    failures: list[WeightsLoad] = field(default_factory=list)


metadata = sa.MetaData()

_lives = sa.Table(
    "rm_life", metadata,
    sa.Column("runner", sa.String(255), primary_key=True),
    sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("engine", sa.Text, nullable=False),
    sa.Column("places", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Float),
    sa.Column("ready_at", sa.Float),
    sa.Column("load_seconds", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("how", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("model_version", sa.Integer, nullable=False),
    sa.Column("attempts_lost", sa.Integer, nullable=False),
    sa.Column("seconds_lost", sa.Float, nullable=False),
    sa.Column("first_position", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

_published = sa.Table(
    "rm_weights", metadata,
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
)

_loads = sa.Table(
    "rm_load", metadata,
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("runner", sa.String(255), nullable=False),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("error", sa.Text),
    sa.Index("rm_load_version", "version"),
)

_made = sa.Table(
    "rm_made", metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),  # position of the BatchFinalized
    sa.Column("stream", sa.String(255), nullable=False),
    sa.Column("experiences", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)


_OF_LIFE = _lives.c.runner == sa.bindparam("of_runner"), _lives.c.incarnation == sa.bindparam("of_incarnation")
_NEW_LIFE = Prepared(sa.insert(_lives))
_BEGIN_AND_END = Prepared(sa.select(_lives.c.first_position, _lives.c.ended_at).where(*_OF_LIFE))
_END_OF_LIFE = Prepared(sa.select(_lives.c.ended_at, _lives.c.reason).where(*_OF_LIFE))
_ADD_LOST_ATTEMPT = Prepared(sa.update(_lives).where(*_OF_LIFE).values(
    attempts_lost=_lives.c.attempts_lost + 1,
    seconds_lost=_lives.c.seconds_lost + sa.bindparam("seconds", type_=sa.Float),
))
_UNKNOWN_LIFE: dict[str, Any] = {
    "model": "rollout", "pid": 0, "host": "", "engine": "", "places": 0, "started_at": None, "ready_at": None,
    "load_seconds": None, "ended_at": None, "how": "running", "reason": "", "model_version": 0, "attempts_lost": 0,
    "seconds_lost": 0.0,
}
_NEW_PUBLISHED, _NEW_LOAD, _NEW_MADE = (Prepared(sa.insert(table)) for table in (_published, _loads, _made))
_LAST_PUBLISHED = Prepared(sa.select(_published.c.version).order_by(_published.c.position.desc()).limit(1))


def storable(value: str, limit: int = 2000) -> str:
    """Return a text without NUL, which PostgreSQL can't store, cut to `limit` characters."""
    return value[:limit].replace("\0", "\ufffd")


def apply(group: Gathered, item: Recorded) -> None:
    """Apply one event of stream `weights` or of a runner's stream."""
    connection, event, at = group.connection, item.event, item.recorded_at
    match event:
        case ev.WeightsPublished():
            group.add(_NEW_PUBLISHED, {
                "position": item.position, "version": event.version, "at": at, "method": storable(event.method),
                "path": storable(event.path)})
        case ev.RunnerStarted():
            _write_life(connection, item, event, model=storable(event.model), pid=event.pid, host=storable(event.host),
                        engine=storable(event.engine), started_at=at)
        case ev.RunnerReady():
            _write_life(connection, item, event, ready_at=at, load_seconds=event.load_seconds, places=event.places,
                        model_version=event.model_version, how="running", ended_at=None, reason="")
        case ev.ConcurrencyChanged():
            _write_life(connection, item, event, places=event.places)
        case ev.RunnerFailed() | ev.RunnerLost() | ev.RunnerQuarantined() | ev.RunnerRetired():
            _end_life(connection, item, event)
        case ev.WeightsLoaded() | ev.WeightsFailed():
            if isinstance(event, ev.WeightsLoaded):
                _write_life(connection, item, event, model_version=event.version)
            error: str | None = getattr(event, "error", None)
            group.add(_NEW_LOAD, {
                "position": item.position, "version": event.version, "runner": storable(event.runner, 255),
                "incarnation": event.incarnation, "at": at, "seconds": getattr(event, "seconds", 0.0),
                "error": error and storable(error)})


def _write_life(connection: sa.Connection, item: Recorded, event: Any, **values: Any) -> None:
    """Set these columns in the row of the life that the event names. Insert the row if it is missing."""
    parameters = _life_key(event) | {f"new_{name}": value for name, value in values.items()}
    if not _life_update(tuple(values)).change(connection, parameters):
        key = {"runner": storable(event.runner, 255), "incarnation": event.incarnation}
        _NEW_LIFE.change(connection, _UNKNOWN_LIFE | {"first_position": item.position} | key | values)


def _life_key(event: Any) -> dict[str, Any]:
    """Return the parameters of `_OF_LIFE` for the life that an event names."""
    return {"of_runner": storable(event.runner, 255), "of_incarnation": event.incarnation}


@cache
def _life_update(names: tuple[str, ...]) -> Prepared:
    new = {name: sa.bindparam(f"new_{name}", type_=_lives.c[name].type) for name in names}
    return Prepared(sa.update(_lives).where(*_OF_LIFE).values(new))


def _end_life(connection: sa.Connection, item: Recorded, event: Any) -> None:
    """Record the end of a life. The first end sets the time. A second one (lost, then quarantined) sets the state."""
    how, reason = item.type.removeprefix("Runner").lower(), getattr(event, "reason", "")
    life = _END_OF_LIFE.first(connection, _life_key(event))
    ended_at, earlier_reason = (None, "") if life is None else life
    if ended_at is None:
        _write_life(connection, item, event, how=how, reason=storable(reason), ended_at=item.recorded_at)
    elif how != "retired":
        _write_life(connection, item, event, how=how, reason=storable(reason) or earlier_reason)


def add_deliveries(group: Gathered, item: Recorded, event: ev.BatchFinalized) -> None:
    """Add rows with the number of a batch's delivered experiences from each weights version."""
    counts = Counter[int]()
    for count, version in event.model_versions:
        counts[version] += count
    group.add(_NEW_MADE, *(
        {"version": version, "position": item.position, "stream": item.stream, "experiences": count}
        for version, count in counts.items() if count))


Dispatched = dict[tuple[Any, ...], list[tuple[int, float]]]
"""(runner, incarnation, task, first run, attempt) -> (stream version, unix seconds) of its dispatches in a batch."""


def add_lost_attempt(
    connection: sa.Connection, item: Recorded, event: ev.AttemptFailed,
    dispatches: dict[tuple[str, str, int], Dispatched], system_ends: dict[str, float | None],
) -> None:
    """Add an attempt that was lost with its runner's process to the row of that process, an incarnation of the runner.

    The two dicts are caches of what this function reads in the log: `dispatches` has dispatch times by stream, runner
    and incarnation, `system_ends` the end of the previous system by commit id.
    """
    life_key = _life_key(event)
    life = _BEGIN_AND_END.first(connection, life_key)
    if life is None:
        return
    first_position, ended_at = life
    batch_life = item.stream, event.runner, event.incarnation
    if batch_life not in dispatches:  # read from the life's begin on, because the stream may be long
        dispatches[batch_life] = _dispatch_times(connection, item.stream, first_position)
    key = event.runner, event.incarnation, event.task, event.run_id_base, event.attempt
    dispatch_times = [at for version, at in dispatches[batch_life].get(key, []) if version < item.version]
    if item.commit_id not in system_ends:
        system_ends[item.commit_id] = _system_end(connection, 0, item.position, item.commit_id)
    lost_at = item.recorded_at  # perhaps long after the end of the life or of the whole system
    if ended_at is not None:
        lost_at = min(ended_at, lost_at)
    elif (system_end := system_ends[item.commit_id]) is not None:
        lost_at = system_end
    seconds = max(0.0, lost_at - dispatch_times[-1]) if dispatch_times else 0.0
    _ADD_LOST_ATTEMPT.change(connection, life_key | {"seconds": seconds})


def before_start(position: int, commit_id: str) -> sa.Select[Any]:
    """Return a query for the last event that the coordinator before this start recorded.

    It skips events that are recorded without a coordinator (ClockStepped, RewindAccepted).
    """
    e = schema.events.c
    return sa.select(schema.events).where(
        e.position < position, e.commit_id != commit_id, e.type.not_in(["ClockStepped", "RewindAccepted"])
    ).order_by(e.position.desc()).limit(1)


def _dispatch_times(connection: sa.Connection, stream: str, after: int) -> Dispatched:
    e = schema.events.c
    query = sa.select(e.version, e.recorded_at, e.data).where(
        e.stream == stream, e.type == "TasksDispatched", after < schema.POSITION_IN_STREAM
    )
    times: Dispatched = {}
    for version, at, data in connection.execute(query.order_by(e.version)):
        event = orjson.loads(data)
        for unit in event["units"]:
            key = event["runner"], event["incarnation"], unit["task"], unit["run_id_base"], unit["attempt"]
            times.setdefault(key, []).append((version, at))
    return times


def current_version(connection: sa.Connection) -> int:
    """Return the current weights version; 0 if none was published."""
    row = _LAST_PUBLISHED.first(connection, {})
    return 0 if row is None else int(row[0])


def current_version_in(group: Gathered) -> int:
    """Return the current weights version, from buffered rows of this group or else from the table."""
    unwritten = group.waiting(_NEW_PUBLISHED)
    return int(unwritten[-1]["version"]) if unwritten else current_version(group.connection)


def natural_key(name: str) -> list[str | int]:
    """Return the natural sort key of a name, which puts runner-2 before runner-10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def visible_state(life: RunnerIncarnation, up: bool | None) -> str:
    """Return the state of a life: its `how`, or `gone` if it is `running` by the log but its system is down.

    `up`: False if the system is down, None if unknown.
    """
    return "gone" if life.how == "running" and up is False else life.how


def read_lives(connection: sa.Connection) -> list[RunnerIncarnation]:
    """Return all lives, ordered by runner and incarnation. A life without an end before a later one is `replaced`."""
    query = sa.select(_lives).order_by(_lives.c.runner, _lives.c.incarnation)
    rows = [dict(row) for row in connection.execute(query).mappings()]
    positions = [row.pop("first_position") for row in rows]
    lives = [RunnerIncarnation(**row) for row in rows]
    for i, (life, successor) in enumerate(pairwise(lives)):
        if successor.runner == life.runner and life.ended_at is None:
            ended_at = _system_end(connection, positions[i], positions[i + 1]) or successor.started_at
            lives[i] = replace(life, how="replaced", ended_at=ended_at or successor.ended_at)
    return lives


def _system_end(connection: sa.Connection, after: int, before: int, commit_id: str | None = None) -> float | None:
    """Return when the previous system ended, by the last start of a coordinator between two positions.

    This is the time of the last event before that start; None if no coordinator started there. With `commit_id`, also
    None if the start is in another commit. A coordinator records lost attempts in the commit of its start.
    """
    e = schema.events.c
    started = connection.execute(sa.select(e.position, e.commit_id).where(
        schema.IS_RARE, e.type == "CoordinatorStarted", e.position > after, e.position < before
    ).order_by(e.position.desc()).limit(1)).one_or_none()
    if started is None or commit_id not in (None, started.commit_id):
        return None
    last_event = connection.execute(before_start(started.position, started.commit_id)).one_or_none()
    return None if last_event is None else float(last_event.recorded_at)


def runner_states(connection: sa.Connection) -> dict[str, tuple[int, str]]:
    """Return {runner: (last incarnation, state)}."""
    return {life.runner: (life.incarnation, life.state) for life in read_lives(connection)}


def last_incarnation(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.max(_lives.c.incarnation))).scalar() or 0)


def read_weights(
    connection: sa.Connection, *, version: int | None = None, limit: int | None = None, offset: int = 0
) -> list[WeightsVersion]:
    """Return published versions in order: all, one `version`, or the newest `limit` after skipping `offset`."""
    first_position = sa.func.min(_published.c.position)
    version_query = sa.select(_published.c.version).group_by(_published.c.version).order_by(first_position.desc())
    if version is not None:
        version_query = version_query.where(_published.c.version == version)
    if limit is not None:
        version_query = version_query.limit(limit).offset(offset)
    versions: dict[int, dict[str, Any]] = {}
    publications = sa.select(_published).where(_published.c.version.in_(version_query)).order_by(_published.c.position)
    for row in connection.execute(publications):
        first_values = {"version": row.version, "published_at": row.at, "position": row.position, "loads": [],
                        "failures": []}
        versions.setdefault(row.version, first_values).update(method=row.method, path=row.path)
    c = _loads.c
    loads = sa.select(c.version, c.runner, c.incarnation, c.at, c.seconds, c.error).where(c.version.in_(version_query))
    for loaded_version, runner, incarnation, at, seconds, error in connection.execute(loads.order_by(c.position)).all():
        load = WeightsLoad(runner=runner, incarnation=incarnation, at=at, seconds=seconds, error=error)
        versions[loaded_version]["loads" if error is None else "failures"].append(load)
    return [WeightsVersion(**values) for values in versions.values()]


def count_weights(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.count(_published.c.version.distinct()))).scalar_one())


def read_deliveries_by_version(connection: sa.Connection) -> dict[int, int]:
    query = sa.select(_made.c.version, sa.func.sum(_made.c.experiences)).group_by(_made.c.version)
    return {version: int(count) for version, count in connection.execute(query)}


def batches_made_by(connection: sa.Connection, version: int, limit: int) -> list[tuple[str, int]]:
    query = sa.select(_made.c.stream, _made.c.experiences).where(_made.c.version == version)
    rows = connection.execute(query.order_by(_made.c.position.desc()).limit(limit))
    return [(stream, count) for stream, count in rows]

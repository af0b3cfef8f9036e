"""Runners' lives, and versions of the weights: what the streams `runner/...` and `weights` say, in tables.

Part of the read models (`projections.tables.read_models`): changed in the transaction of each append, a row a life, a
publication, a load, and a version that made some of what a batch delivered. Nothing here happens once a task, but for
the units that a dead runner takes along.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any

import orjson
import sqlalchemy as sa

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.prepared import Gathered, Prepared
from trinity_es.events.store.log import Recorded
from trinity_es.projections.host_states import went_with_host

__all__ = [
    "Dispatched", "RunnerIncarnation", "RunnerLives", "WeightsLoad", "WeightsVersion", "apply", "attempt_lost",
    "batches_made_by", "before_start", "by_runner", "count_weights", "last_incarnation", "made", "metadata", "natural",
    "published", "published_so_far", "read_lives", "read_made", "read_weights", "runner_states", "seen", "stored",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerIncarnation:
    """One process of a runner, from its start to its end."""

    runner: str
    model: str
    """Which model it serves: `rollout`, or an auxiliary one by its name."""
    incarnation: int
    pid: int
    host: str
    engine: str
    places: int
    started_at: float | None
    """Unix seconds, as all that end in `_at`; None where it ended before it could say so."""
    ready_at: float | None
    load_seconds: float | None
    """What its engine took to load."""
    ended_at: float | None
    how: str
    """`running`, `lost`, `retired`, `failed`, `quarantined`, or `replaced`: a later life began, and this one's end is
    not known, as where its whole system ended; `ended_at` is then when the later one began."""
    reason: str
    model_version: int
    attempts_lost: int
    """Units that it had when it ended."""
    seconds_lost: float
    """From their dispatch to its end, of all of them together; not while its whole system was away."""

    @property
    def state(self) -> str:
        return self.how if self.how != "running" else "started" if self.ready_at is None else "ready"

    @property
    def died(self) -> bool:
        """It ended as nobody wanted."""
        return self.how in ("lost", "failed", "quarantined")

    @property
    def went_with_host(self) -> bool:
        """It ended because its host was lost, or left: no fault of its own."""
        return self.died and went_with_host(self.runner, self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLives:
    """A runner: its last life, and what all of them came to."""

    name: str
    last: RunnerIncarnation
    how: str
    """Of the last, as it can be seen."""
    lives: int
    deaths: int
    """Those that went with their host too."""
    with_host: int
    """Of its deaths, those that came because its host was lost, or left before it had ended."""
    attempts_lost: int
    seconds_lost: float
    all: list[RunnerIncarnation]


def by_runner(lives: Iterable[RunnerIncarnation], up: bool | None = None) -> list[RunnerLives]:
    """Return lives by runner, in the order of their names. `up`: whether their system has processes."""
    found: dict[str, list[RunnerIncarnation]] = {}
    for life in lives:
        found.setdefault(life.runner, []).append(life)
    return [
        RunnerLives(
            name=name, last=of[-1], how=seen(of[-1], up), lives=len(of), deaths=sum(life.died for life in of),
            with_host=sum(life.went_with_host for life in of), attempts_lost=sum(life.attempts_lost for life in of),
            seconds_lost=sum(life.seconds_lost for life in of), all=of,
        )
        for name, of in sorted(found.items(), key=lambda item: natural(item[0]))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoad:
    """One runner took a version in, or failed to."""

    runner: str
    incarnation: int
    at: float
    """Unix seconds, when it had it."""
    seconds: float
    """What that took; 0 where it failed."""
    error: str | None
    """Why it failed; None: it serves the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsVersion:
    """One version of the weights, and who took it in when. Version 0, the model as it was given, is never published."""

    version: int
    published_at: float
    """Unix seconds, of its first publication."""
    position: int
    method: str
    """Of its last publication: a version in memory may be published again as a checkpoint."""
    path: str
    loads: list[WeightsLoad] = field(default_factory=list)
    """In order; engines that came up with this version did not load it separately."""
    failures: list[WeightsLoad] = field(default_factory=list)


metadata = sa.MetaData()

_lives = sa.Table(
    "rm_life",
    metadata,
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
    "rm_weights",
    metadata,
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("method", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
)

_loads = sa.Table(
    "rm_load",
    metadata,
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
    "rm_made",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),  # of the BatchFinalized
    sa.Column("stream", sa.String(255), nullable=False),
    sa.Column("experiences", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)


_NEW_LIFE = Prepared(sa.insert(_lives))
_UNKNOWN_LIFE: dict[str, Any] = {
    "model": "rollout", "pid": 0, "host": "", "engine": "", "places": 0, "started_at": None, "ready_at": None,
    "load_seconds": None, "ended_at": None, "how": "running", "reason": "", "model_version": 0, "attempts_lost": 0,
    "seconds_lost": 0.0,
}
_NEW_PUBLISHED, _NEW_LOAD, _NEW_MADE = (Prepared(sa.insert(table)) for table in (_published, _loads, _made))
_LAST_PUBLISHED = Prepared(sa.select(_published.c.version).order_by(_published.c.position.desc()).limit(1))


def stored(value: str, limit: int = 2000) -> str:
    """Return a text as every database can hold it: PostgreSQL has no NUL in a text."""
    return value[:limit].replace("\0", "\ufffd")


def apply(group: Gathered, item: Recorded) -> None:
    """Apply one more event of `weights` or of a runner."""
    connection, event, at = group.connection, item.event, item.recorded_at
    match event:
        case ev.WeightsPublished():
            row = {"position": item.position, "version": event.version, "at": at, "method": stored(event.method),
                   "path": stored(event.path)}
            group.add(_NEW_PUBLISHED, row)
        case ev.RunnerStarted():
            _put(connection, item, event, model=stored(event.model), pid=event.pid, host=stored(event.host),
                 engine=stored(event.engine), started_at=at)
        case ev.RunnerReady():
            _put(connection, item, event, ready_at=at, load_seconds=event.load_seconds, places=event.places,
                 model_version=event.model_version, how="running", ended_at=None, reason="")
        case ev.ConcurrencyChanged():
            _put(connection, item, event, places=event.places)
        case ev.RunnerFailed() | ev.RunnerLost() | ev.RunnerQuarantined() | ev.RunnerRetired():
            _end(connection, item, event)
        case ev.WeightsLoaded() | ev.WeightsFailed():
            if isinstance(event, ev.WeightsLoaded):
                _put(connection, item, event, model_version=event.version)
            error: str | None = getattr(event, "error", None)
            group.add(_NEW_LOAD, {
                "position": item.position, "version": event.version, "runner": stored(event.runner, 255),
                "incarnation": event.incarnation, "at": at, "seconds": getattr(event, "seconds", 0.0),
                "error": error and stored(error)})


def _put(connection: sa.Connection, item: Recorded, event: Any, **values: Any) -> None:
    """Change the row of the life that the event names, or make it."""
    key = {"runner": stored(event.runner, 255), "incarnation": event.incarnation}
    new = {f"of_{name}": value for name, value in key.items()} | {f"new_{name}": v for name, v in values.items()}
    if not _change_life(tuple(values)).change(connection, new):
        _NEW_LIFE.change(connection, _UNKNOWN_LIFE | {"first_position": item.position} | key | values)


@cache
def _change_life(names: tuple[str, ...]) -> Prepared:
    of_life = [_lives.c[name] == sa.bindparam(f"of_{name}") for name in ("runner", "incarnation")]
    new = {name: sa.bindparam(f"new_{name}", type_=_lives.c[name].type) for name in names}
    return Prepared(sa.update(_lives).where(*of_life).values(new))


def _end(connection: sa.Connection, item: Recorded, event: Any) -> None:
    """End a life. The first end counts; one that comes later (lost, then quarantined) may say more of it."""
    c, how, reason = _lives.c, item.type.removeprefix("Runner").lower(), getattr(event, "reason", "")
    query = sa.select(c.how, c.ended_at, c.reason).where(
        c.runner == stored(event.runner, 255), c.incarnation == event.incarnation
    )
    known = connection.execute(query).one_or_none()
    if known is None or known.ended_at is None:
        _put(connection, item, event, how=how, reason=stored(reason), ended_at=item.recorded_at)
    elif how != "retired":
        _put(connection, item, event, how=how, reason=stored(reason) or known.reason)


def made(group: Gathered, item: Recorded, event: ev.BatchFinalized) -> None:
    """Count the experiences that a batch delivered by the versions that made them."""
    counts = Counter[int]()
    for count, version in event.model_versions:
        counts[version] += count
    rows = [{"version": version, "position": item.position, "stream": item.stream, "experiences": count}
            for version, count in counts.items() if count]
    group.add(_NEW_MADE, *rows)


Dispatched = dict[tuple[Any, ...], list[tuple[int, float]]]
"""Runner, incarnation, task, first run, attempt -> versions and times at which a batch's stream says it was sent."""


def attempt_lost(
    connection: sa.Connection, item: Recorded, event: ev.AttemptFailed, known: dict[tuple[str, str, int], Dispatched],
    system_ends: dict[str, float | None],
) -> None:
    """Count what an attempt cost that ended with its runner to the runner's life.

    When it was dispatched is asked of the log, in the same transaction; `known` keeps the answers, by stream and life,
    and `system_ends` when the system ended under it, by append.
    """
    c = _lives.c
    life = sa.and_(c.runner == stored(event.runner, 255), c.incarnation == event.incarnation)
    row = connection.execute(sa.select(c.first_position, c.ended_at).where(life)).one_or_none()
    if row is None:  # nothing is known of that life, and it has no row to count this to
        return
    of = item.stream, event.runner, event.incarnation
    if of not in known:  # only since that life began: the stream may be long
        known[of] = _dispatched(connection, item.stream, row.first_position)
    key = event.runner, event.incarnation, event.task, event.run_id_base, event.attempt
    before = [at for version, at in known[of].get(key, []) if version < item.version]
    if item.commit_id not in system_ends:
        system_ends[item.commit_id] = _system_ended(connection, item)
    until = item.recorded_at  # it may be told long after the end of its life, or of the whole system
    if row.ended_at is not None:
        until = min(row.ended_at, until)
    elif (ended := system_ends[item.commit_id]) is not None:
        until = ended
    seconds = max(0.0, until - before[-1]) if before else 0.0
    connection.execute(
        sa.update(_lives).where(life)
        .values(attempts_lost=c.attempts_lost + 1, seconds_lost=c.seconds_lost + seconds)
    )


def _system_ended(connection: sa.Connection, item: Recorded) -> float | None:
    """Return when a system was last heard that ended as a whole, in unix seconds.

    That is where an event is of the append with which the next coordinator started, and said what it found; None
    where it is not.
    """
    e = schema.events.c
    start = sa.select(e.position, e.commit_id).where(
        schema.IS_RARE, e.type == "CoordinatorStarted", e.position < item.position
    ).order_by(e.position.desc()).limit(1)
    started = connection.execute(start).one_or_none()
    if started is None or started.commit_id != item.commit_id:
        return None
    last = connection.execute(before_start(started.position, started.commit_id)).one_or_none()
    return None if last is None else float(last.recorded_at)


def before_start(position: int, commit_id: str) -> sa.Select[Any]:
    """Select the last event before a coordinator's start, which has this position and is of this append.

    It is not of that append, nor what was noted while nobody led: of the clock, or of what a person gave up.
    """
    e = schema.events.c
    return sa.select(schema.events).where(
        e.position < position, e.commit_id != commit_id, e.type.not_in(["ClockStepped", "RewindAccepted"])
    ).order_by(e.position.desc()).limit(1)


def _dispatched(connection: sa.Connection, stream: str, after: int) -> Dispatched:
    e = schema.events.c
    query = sa.select(e.version, e.recorded_at, e.data).where(
        e.stream == stream, e.type == "TasksDispatched", after < schema.POSITION_IN_STREAM
    )
    found: Dispatched = {}
    for version, at, data in connection.execute(query.order_by(e.version)):
        sent = orjson.loads(data)
        for unit in sent["units"]:
            key = sent["runner"], sent["incarnation"], unit["task"], unit["run_id_base"], unit["attempt"]
            found.setdefault(key, []).append((version, at))
    return found


def published(connection: sa.Connection) -> int:
    """Return the current version of the weights; 0 where none was published."""
    row = _LAST_PUBLISHED.first(connection, {})
    return 0 if row is None else int(row[0])


def published_so_far(group: Gathered) -> int:
    """Return the same within a group of events."""
    waiting = group.waiting(_NEW_PUBLISHED)
    return int(waiting[-1]["version"]) if waiting else published(group.connection)


def natural(name: str) -> list[str | int]:
    """Return a key by which runner-2 comes before runner-10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]


def seen(life: RunnerIncarnation, up: bool | None) -> str:
    """`how` it is for who looks now: `gone` where its log holds no end of it, and its system has no process (`up` is
    False) that could write one."""
    return "gone" if life.how == "running" and up is False else life.how


def read_lives(connection: sa.Connection) -> list[RunnerIncarnation]:
    rows = connection.execute(sa.select(_lives).order_by(_lives.c.runner, _lives.c.incarnation)).mappings().all()
    out: list[RunnerIncarnation] = []
    for row, after in zip_longest(rows, rows[1:]):
        values = {k: v for k, v in row.items() if k != "first_position"}
        replaced = after is not None and after["runner"] == row["runner"] and row["ended_at"] is None
        if replaced and after is not None:
            values |= {"how": "replaced", "ended_at": after["started_at"] or after["ended_at"]}
        out.append(RunnerIncarnation(**values))
    return out


def runner_states(connection: sa.Connection) -> dict[str, tuple[int, str]]:
    """Last incarnation and state of every runner."""
    return {life.runner: (life.incarnation, life.state) for life in read_lives(connection)}


def last_incarnation(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.max(_lives.c.incarnation))).scalar() or 0)


def read_weights(
    connection: sa.Connection, *, version: int | None = None, limit: int | None = None, offset: int = 0
) -> list[WeightsVersion]:
    """Return every version that was published, in the order of its first publication; or one, or the newest.

    With `limit`, so many of them, without the `offset` newest ones.
    """
    first = sa.func.min(_published.c.position)
    chosen = sa.select(_published.c.version).group_by(_published.c.version).order_by(first.desc())
    if version is not None:
        chosen = chosen.where(_published.c.version == version)
    if limit is not None:
        chosen = chosen.limit(limit).offset(offset)
    found: dict[int, dict[str, Any]] = {}
    published = sa.select(_published).where(_published.c.version.in_(chosen)).order_by(_published.c.position)
    for row in connection.execute(published):
        new = {"version": row.version, "published_at": row.at, "position": row.position, "loads": [], "failures": []}
        found.setdefault(row.version, new).update(method=row.method, path=row.path)
    c = _loads.c
    loads = sa.select(c.version, c.runner, c.incarnation, c.at, c.seconds, c.error).where(c.version.in_(chosen))
    for of_version, runner, incarnation, at, seconds, error in connection.execute(loads.order_by(c.position)).all():
        load = WeightsLoad(runner=runner, incarnation=incarnation, at=at, seconds=seconds, error=error)
        found[of_version]["loads" if error is None else "failures"].append(load)
    return [WeightsVersion(**values) for values in found.values()]


def count_weights(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.count(_published.c.version.distinct()))).scalar_one())


def read_made(connection: sa.Connection) -> dict[int, int]:
    """Version (0, the model as it was given, too) -> how many of the experiences that batches delivered it made."""
    query = sa.select(_made.c.version, sa.func.sum(_made.c.experiences)).group_by(_made.c.version)
    return {version: int(count) for version, count in connection.execute(query)}


def batches_made_by(connection: sa.Connection, version: int, limit: int) -> list[tuple[str, int]]:
    """(stream of a batch, how many of what it delivered this version made), the newest first, at most `limit`."""
    query = sa.select(_made.c.stream, _made.c.experiences).where(_made.c.version == version)
    return [(stream, count) for stream, count in connection.execute(
        query.order_by(_made.c.position.desc()).limit(limit))]

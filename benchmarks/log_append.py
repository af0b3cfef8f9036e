"""How fast is the log written? Groups of 1, 64 and 1,024 events, against the driver's own inserts of the same bytes.

trinity_es: `EventLog.append` with every guarantee on, which are the lease, versions, repeated commits, the hash chain,
the read models, and `durability: power`. The events are those of a run (`benchmarks.sample_log`), in its order. Driver:
sqlite3 or psycopg insert the finished rows (`executemany`) into the same table without its triggers, and compute and
fold nothing. Each group is one transaction, as durable: WAL with `synchronous=FULL`,
`synchronous_commit=on`.

Each repeat writes a new log, reads it back, compares all events and verifies the chain; `verify` checks the last log
completely, with read models and payloads. A digest of all rows checks the driver's table.

`python -m benchmarks.log_append [--json FILE] [--quick]`
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import create_engine, text

from benchmarks.compared import Databases, Row, Watch, alternate, databases, options_of, pairs, report
from benchmarks.sample_log import make
from benchmarks.sample_run import writes_of
from trinity_es.events.store.database import schema
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.payloads.payloads import open_payloads
from trinity_es.events.vocabulary import CoordinatorStarted, Event
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify.log import verify_log

GROUPS = {1: 512, 64: 8_192, 1024: 16_384}
"""{size of a group: events of one repeat}."""
REPEATS = 7
AIMS, FROM = {"sqlite": 0.35, "postgresql": 0.4}, 64
"""{kind of database: minimum ratio to the driver}, and the size of a group from which this aim holds."""

Appended = tuple[str, Event]
"""(stream, event)."""


def make_run(folder: Path, events: int) -> list[Appended]:
    """Make a run under one coordinator, and return its first `events` events in order.

    Its log is `run.sqlite` in `folder`, with the payloads beside it.
    """
    url = f"sqlite:///{folder}/run.sqlite"
    make(url, batches=10**9, tasks=64, events=events + 100, seed=16)
    with EventLog.open(url, read_only=True) as log:
        run = [(r.stream, r.event) for r in log.read() if r.type not in ("SystemConfigured", "CoordinatorStarted")]
        first = [(r.stream, r.event) for r in log.read(until=2)]
    return (first + run)[:events]


def groups_of(run: Sequence[Appended], size: int) -> list[list[Write]]:
    """Return the run as appends of `size` events."""
    versions: dict[str, int] = {}
    return [writes_of(run[first : first + size], versions) for first in range(0, len(run), size)]


def append_all(url: str, groups: Sequence[Sequence[Write]]) -> float:
    """Write these groups into a new log, and return the seconds of the appends alone."""
    with EventLog.open(url, create=True, durability="power", projectors=projectors()) as log:
        lease = log.acquire_lease("coordinator", _owner(groups))
        started = time.perf_counter()
        for number, writes in enumerate(groups):
            log.append(writes, commit_id=f"group-{number}", lease=lease)
        return time.perf_counter() - started


def _owner(groups: Sequence[Sequence[Write]]) -> dict[str, Any]:
    """Return the owner for the lease, which the first CoordinatorStarted names."""
    started = next(e for writes in groups for w in writes for e in w.events if isinstance(e, CoordinatorStarted))
    return {"pid": started.pid, "host": started.host}


def check_log(url: str, run: Sequence[Appended], payloads: str | None = None) -> None:
    """Check that the log holds exactly these events, in order, with a valid hash chain.

    `payloads`: URL of the log whose payloads these events name, for a full `verify`.
    """
    with EventLog.open(url, read_only=True) as log:
        events = [(r.stream, r.event) for r in log.read()]
        if events != list(run):
            raise SystemExit(f"{url}: {len(events)} events are there, or other ones, where {len(run)} were appended")
        problems = log.verify()
    if payloads is not None and not problems:
        with closing(open_payloads(payloads)) as source, closing(open_payloads(url, durability="process")) as target:
            for digest in source.digests():
                target.put(source.get(digest))
        problems = verify_log(url).problems
    if problems:
        raise SystemExit(f"{url} is not sound: {problems[0]}")


class Driver:
    """Driver-level access to a table with the log's columns and indexes."""

    connection: Any

    def __init__(self, url: str) -> None:
        engine = create_engine(parse_url(url))
        schema.events.create(engine)
        engine.dispose()

    def rows(self) -> Iterable[tuple[Any, ...]]:
        return self.connection.execute("SELECT * FROM es_event ORDER BY position")

    def close(self) -> None:
        self.connection.close()


class Sqlite(Driver):
    statement = f"INSERT INTO es_event VALUES ({', '.join('?' * len(schema.events.columns))})"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.connection = sqlite3.connect(str(parse_url(url).database), isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")

    def insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert the rows in one transaction, and return when they are durable."""
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(self.statement, rows)
        self.connection.execute("COMMIT")


class Psycopg(Driver):
    statement = f"INSERT INTO es_event VALUES ({', '.join(['%s'] * len(schema.events.columns))})".encode()

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute("SET synchronous_commit = on")

    def insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(self.statement, rows)


DRIVERS: dict[str, type[Sqlite] | type[Psycopg]] = {"sqlite": Sqlite, "postgresql": Psycopg}


def stored_rows(url: str) -> list[tuple[Any, ...]]:
    with EventLog.open(url, read_only=True) as log:
        rows = log.query(lambda c: c.execute(text("SELECT * FROM es_event ORDER BY position")).all())
    return [tuple(bytes(v) if isinstance(v, memoryview) else v for v in row) for row in rows]


def digest(rows: Iterable[tuple[Any, ...]]) -> str:
    sha = hashlib.sha256()
    for row in rows:
        sha.update(repr(tuple(row)).encode())
    return sha.hexdigest()


def insert_all(driver: Sqlite | Psycopg, rows: Sequence[tuple[Any, ...]], size: int) -> float:
    """Insert all rows in transactions of `size` rows, check them, and return the seconds of the inserts."""
    started = time.perf_counter()
    for first in range(0, len(rows), size):
        driver.insert(rows[first : first + size])
    seconds = time.perf_counter() - started
    if digest(driver.rows()) != digest(rows):
        raise SystemExit(f"{type(driver).__name__}: other rows are there than were inserted")
    return seconds


def measure(places: Databases, kind: str, run: list[Appended], size: int, repeats: int) -> Row:
    groups = groups_of(run, size)
    append_all(url := places.new(kind), groups)  # also warms up
    rows = stored_rows(url)
    last = [url]

    def ours() -> float:
        last[0] = places.new(kind)
        seconds = append_all(last[0], groups)
        check_log(last[0], run)
        return len(run) / seconds

    def theirs() -> float:
        with closing(DRIVERS[kind](places.new(kind))) as driver:
            return len(rows) / insert_all(driver, rows, size)

    rates = alternate({"ours": ours, "theirs": theirs}, repeats)
    check_log(last[0], run, payloads=f"sqlite:///{places.folder}/run.sqlite")
    return pairs(f"append, groups of {size:,}, {kind}", "events/s", rates["ours"], DRIVERS[kind].__name__.lower(),
                 rates["theirs"], aim=AIMS[kind] if size >= FROM else None)


def main() -> int:
    options = options_of(__doc__)
    watch, rows = Watch(), []
    part, repeats = (8, 5) if options.quick else (1, REPEATS)
    with databases() as places:
        run = make_run(places.folder, max(GROUPS.values()) // part)
        for kind in places.kinds:
            for size, events in GROUPS.items():
                rows.append(measure(places, kind, run[: events // part], size, repeats))
        left_out = places.missing
    return report("Appending to the log, every guarantee on, against the driver's own inserts", rows, watch, left_out,
                  options.json)


if __name__ == "__main__":
    sys.exit(main())

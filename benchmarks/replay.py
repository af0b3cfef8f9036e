"""How fast are replay, `rebuild` and `verify`, compared with reading a log's rows and decoding their JSON?

The log of a run (`benchmarks.sample_log`), with the same events on SQLite and on PostgreSQL. Measured in turn:

- replay: `Log.replay` of every batch, from its events alone;
- `rebuild` of every read model;
- `verify`: order, hash chain, results, read models, payloads;
- floor: the driver alone (sqlite3, psycopg) reads all columns of all rows in order, and orjson decodes their JSON.

Figures are events per second. It checks that every row was read, that every batch was folded to the state of its read
model and to the result in its last event, that `rebuild` changed no table, and that `verify` found no problem.

`python -m benchmarks.replay [--json FILE] [--quick] [--events N] [--repeats N] [--folder KEPT]`
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psycopg

from benchmarks.compared import Databases, Row, Spread, Watch, alternate, databases, options_of, pairs, report, sound
from benchmarks.sample_log import make
from tests.helpers.logs import tables
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.log import EventLog
from trinity_es.projections.reading.log_reader import open_log
from trinity_es.projections.tables.read_models import projectors
from trinity_es.projections.verify.log import canonical

EVENTS, QUICK, REPEATS = 200_000, 50_000, 5
PAGE = 1000
AIM = 0.5

_ALL = "SELECT * FROM es_event ORDER BY position"
_DATA, _METADATA = 5, 6


def read_rows(kind: str, url: str) -> int:
    """Read and decode all rows of a log through the database driver alone, and return their number."""
    if kind == "sqlite":
        with closing(sqlite3.connect(str(parse_url(url).database))) as lite:
            return _decode_all(lite.execute(_ALL))
    with psycopg.connect(url) as connection, connection.cursor("all", binary=True) as cursor:
        cursor.itersize = PAGE
        return _decode_all(cursor.execute(_ALL.encode()))


def _decode_all(cursor: Any) -> int:
    rows, loads = 0, orjson.loads
    while page := cursor.fetchmany(PAGE):
        for row in page:
            loads(row[_DATA])
            loads(row[_METADATA])
        rows += len(page)
    return rows


def replay_all(url: str) -> int:
    """Replay every batch, check its state, and return the number of folded events."""
    folded = 0
    with open_log(url) as log:
        for row in log.batches():
            state = log.replay(row.batch_id)
            folded += state.version
            if state.state.value != row.state or len(state.statuses) < row.finished:
                raise SystemExit(f"{log.url}: batch {row.batch_id!r} is replayed to {state.state.value}, its row says "
                                 f"{row.state}")
    return folded


def check_results(url: str) -> None:
    """Check that every final result follows from the events before it."""
    with open_log(url) as log:
        for batch_id in [row.batch_id for row in log.batches() if row.state in ("finalized", "aborted")]:
            stored, again = log.check_result(batch_id)
            if stored is None or canonical(stored) != canonical(again):
                raise SystemExit(f"{log.url}: batch {batch_id!r} has another result than its events give")


def read_model_rows(url: str) -> dict[str, list[tuple[Any, ...]]]:
    with EventLog.open(url, read_only=True) as log:
        return tables(log)


def rebuild(url: str) -> int:
    with EventLog.open(url, projectors=projectors()) as log:
        return log.rebuild()


def measured_rate(work: Callable[[], int], most: int | None = None) -> Callable[[], float]:
    """Return a function that measures the counts per second of `work`. `most`: the number that `work` must return."""
    def measured() -> float:
        started = time.perf_counter()
        count = work()
        seconds = time.perf_counter() - started
        if most is not None and count != most:
            raise SystemExit(f"{count} were read where {most} are")
        return count / seconds

    return measured


def measure(urls: dict[str, str], events: dict[str, int], repeats: int) -> list[Row]:
    before = {kind: read_model_rows(url) for kind, url in urls.items()}
    ways: dict[str, Callable[[], float]] = {}
    for kind, url in urls.items():
        ways[f"floor {kind}"] = measured_rate(partial(read_rows, kind, url), events[kind])
        ways[f"replay {kind}"] = measured_rate(partial(replay_all, url))
        ways[f"verify {kind}"] = measured_rate(partial(sound, url), events[kind])
        ways[f"rebuild {kind}"] = measured_rate(partial(rebuild, url), events[kind])
    rates = alternate(ways, repeats)
    for kind, url in urls.items():
        if read_model_rows(url) != before[kind]:
            raise SystemExit(f"{kind}: rebuild left other tables than the appends made")
    rows = []
    for kind in urls:
        floor = rates[f"floor {kind}"]
        rows += [
            pairs(f"replay of all batches, {kind}", "events/s", rates[f"replay {kind}"], "reading and decoding", floor,
                  aim=AIM),
            pairs(f"verify, {kind}", "events/s", rates[f"verify {kind}"], "reading and decoding", floor),
        ]
        if kind == "sqlite":
            rows.append(Row("rebuild, sqlite", "events/s", Spread.of(rates["rebuild sqlite"])))
        else:
            rows.append(pairs(f"rebuild, {kind}", "events/s", rates[f"rebuild {kind}"], "rebuild, sqlite",
                              rates["rebuild sqlite"], aim=AIM))
    return rows


def make_logs(places: Databases, folder: str | None, events: int) -> dict[str, str]:
    """Make the log on each kind of database, and return {kind: URL}. `folder`: keeps the SQLite log for later calls."""
    urls = {kind: places.new(kind) for kind in places.kinds}
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        urls["sqlite"] = f"sqlite:///{Path(folder).absolute()}/replay-{events}.sqlite"
    for url in urls.values():
        path = parse_url(url).database if url.startswith("sqlite") else None
        if path is None or not Path(path).exists():
            make(url, batches=10**9, tasks=64, events=events, keep=50)
    return urls


def main() -> int:
    options = options_of(__doc__, [
        ("--events", {"type": int, "help": f"of the log (default: {EVENTS:,}, with --quick {QUICK:,})"}),
        ("--folder", {"help": "folder that keeps the SQLite log for the next time (default: none)"}),
    ], repeats=REPEATS)
    events = options.events or (QUICK if options.quick else EVENTS)
    with databases() as places:
        urls = make_logs(places, options.folder, events)
        watch = Watch()
        count = {}
        for kind, url in urls.items():
            with EventLog.open(url, read_only=True) as log:
                count[kind] = log.head().position
            check_results(url)
        rows = measure(urls, count, options.repeats)
        left_out = places.missing
    title = f"Replaying a log of {count['sqlite']:,} events, against reading its rows and decoding their JSON"
    return report(title, rows, watch, left_out, options.json)


if __name__ == "__main__":
    sys.exit(main())

"""The same events appended and replayed by the `eventsourcing` library, and by trinity_es, in turn.

The library (from PyPI, pinned, with psycopg) is installed once, in its own environment in the user's cache folder. If
that fails, the rows are left out, with the reason. It is used as its documentation shows: an aggregate for each stream,
`Application.save` of a group in one transaction, `repository.get`. It has no lease, hash chain or read models, and its
aggregates keep only a count and the last event. The log of trinity_es has every guarantee on, and folds batches
completely. Both are durable against the loss of power.

After each repeat the log of trinity_es is verified, and each stream's events in the library are compared.

`python -m benchmarks.eventsourcing_library [--json FILE] [--quick]`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy.engine import make_url

from benchmarks.child_processes import LineProcess
from benchmarks.compared import Databases, Row, Watch, alternate, databases, options_of, pairs, report
from benchmarks.log_append import GROUPS, Appended, append_all, check_log, groups_of, make_run
from benchmarks.replay import replay_all
from trinity_es.events.codec import check

PINS = ["eventsourcing==9.5.6", "psycopg[binary]==3.3.9", "psycopg-pool==3.3.3"]
REPEATS, AHEAD = 7, 1.0
PATIENCE = 120


def library_python() -> Path:
    """Install the library in its own environment unless it is there. Return its Python. Raises CalledProcessError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trinity_es" / f"{PINS[0].replace('==', '-')}-python{sys.version_info[0]}.{sys.version_info[1]}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        venv.create(folder, clear=True, with_pip=True)
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINS]
        subprocess.run(words, check=True, capture_output=True, text=True)
        ready.touch()
    return python


class Library(LineProcess):
    """Process that runs `eventsourcing_child.py` with the library."""

    def __init__(self, python: Path, run: Sequence[Appended], file: Path) -> None:
        lines = [orjson.dumps([stream, type(e).__name__, orjson.loads(check(e)[0])]) for stream, e in run]
        file.write_bytes(b"\n".join(lines))
        super().__init__([str(python), str(Path(__file__).with_name("eventsourcing_child.py"))], PATIENCE)
        if self.order(file=str(file))["ready"] != len(run):
            raise SystemExit("the library's process has not read the whole run")

    def order(self, **order: Any) -> dict[str, Any]:
        """Send a command, and return the answer."""
        return dict(json.loads(self.ask(json.dumps(order))))


def library_settings(url: str) -> dict[str, str]:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(parsed.database)}
    return {
        "PERSISTENCE_MODULE": "eventsourcing.postgres", "POSTGRES_DBNAME": str(parsed.database),
        "POSTGRES_HOST": str(parsed.host or parsed.query["host"]), "POSTGRES_PORT": str(parsed.port or 5432),
        "POSTGRES_USER": str(parsed.username), "POSTGRES_PASSWORD": parsed.password or "none",
        # Faster, and necessary: without it a `save` of 1,024 events hangs in the driver.
        "POSTGRES_ENABLE_DB_FUNCTIONS": "y",
    }


def measure(
    places: Databases, kind: str, library: Library, run: list[Appended], size: int, repeats: int
) -> tuple[Row, Row]:
    """Return the rows of appends in groups of this size on one kind of database, and of the replay of these events."""
    groups, events = groups_of(run, size), len(run)
    replayed: dict[str, list[float]] = {"ours": [], "theirs": []}

    def ours() -> float:
        seconds = append_all(url := places.new(kind), groups)
        started = time.perf_counter()
        replayed["ours"].append(replay_all(url) / (time.perf_counter() - started))
        check_log(url, run)
        return events / seconds

    def theirs() -> float:
        settings = library_settings(places.new(kind))
        seconds = library.order(do="append", environment=settings, size=size, events=events)["seconds"]
        folded = library.order(do="replay", events=events)
        replayed["theirs"].append(folded["events"] / folded["seconds"])
        if (right := library.order(do="check", events=events)["right"]) != events:
            raise SystemExit(f"the library has {right} of {events} events")
        return float(events / seconds)

    rates = alternate({"ours": ours, "theirs": theirs}, repeats)
    name, unit = "eventsourcing 9.5.6", "events/s"
    return (
        pairs(f"append, groups of {size:,}, {kind}", unit, rates["ours"], name, rates["theirs"], aim=AHEAD),
        pairs(f"replay of all batches, {kind}", unit, replayed["ours"], name, replayed["theirs"], aim=AHEAD),
    )


def main() -> int:
    options = options_of(__doc__)
    watch, rows, left_out = Watch(), list[Row](), list[str]()
    part, repeats = (8, 5) if options.quick else (1, REPEATS)
    with databases() as places:
        try:
            python = library_python()
        except subprocess.CalledProcessError as e:
            left_out.append(f"all of it: {PINS[0]} can't be had: {str(e.stderr or e).strip()[-300:]}")
            return report("The eventsourcing library", rows, watch, left_out, options.json)
        run = make_run(places.folder, max(GROUPS.values()) // part)
        with closing(Library(python, run, places.folder / "run.jsonl")) as library:
            for kind in places.kinds:
                for size, events in GROUPS.items():
                    appended, replayed = measure(places, kind, library, run[: events // part], size, repeats)
                    rows.append(appended)
                rows.append(replayed)  # of the last size, which has the most events
        left_out += places.missing
    return report("The same events in the eventsourcing library", rows, watch, left_out, options.json)


if __name__ == "__main__":
    sys.exit(main())

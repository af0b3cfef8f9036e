"""Where the time of the tests goes: seconds of each test and fixture, each worker's idle time, CPU of all processes.

With DURATIONS=FILE in its environment each session of pytest adds its figures to that file. This command sums them up
by folder, names the dearest tests, and says which became dearer than the committed figures have them:

    python -m tests.durations FILE [STEP=SECONDS ...]
    python -m tests.durations FILE --commit     # write them to tests/durations.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMITTED = Path(__file__).with_name("durations.json")
POLL_SECONDS = 1.0
DEAR_SECONDS = 1.0
"""Fixtures and committed tests that take less are not listed."""
MORE, AND_SECONDS = 1.5, 4.0
"""A test became dearer when its CPU seconds are more than `MORE` times the committed ones and `AND_SECONDS`."""
_RUNNING = "[pytest-xdist running] "
"""Beginning of the title of a worker of pytest-xdist, before the test that it runs."""
_TICKS = os.sysconf("SC_CLK_TCK")


class CpuByTest(threading.Thread):
    """CPU seconds of all processes of this machine by test, found by the test's name in their environment."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[str, float] = defaultdict(float)
        """By test; of processes that no test started: ''."""
        self.kinds: dict[str, float] = defaultdict(float)
        """By the name of the process, and what a Python runs: Coordinator, VLLM::Worker, python -m trinity_es up."""
        self._ended = threading.Event()
        self._before: dict[tuple[int, int], float] = {}
        self._tests: dict[tuple[int, int], str] = {}
        self._kinds: dict[tuple[int, int], str] = {}

    def run(self) -> None:
        self._look()
        self.seconds.clear()  # what was spent before
        self.kinds.clear()
        while not self._ended.wait(POLL_SECONDS):
            self._look()

    def end(self) -> dict[str, float]:
        self._ended.set()
        self.join()
        self._look()
        return self.seconds

    def _look(self) -> None:
        parents: dict[int, int] = {}
        tests: dict[int, str] = {}
        spent: dict[int, float] = {}
        processes: dict[int, tuple[int, int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            try:
                command, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                fields = rest.split()
                process = pid, int(fields[19])
                if not self._tests.get(process):  # its environment is gone once it gives itself a title
                    self._tests[process] = _test_in((folder / "environ").read_bytes())
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                test = self._tests[process] or _test_of_worker(line)
            except (OSError, IndexError):  # it ended meanwhile
                continue
            seconds = (int(fields[11]) + int(fields[12])) / _TICKS
            parents[pid], spent[pid] = int(fields[1]), seconds - self._before.get(process, 0.0)
            self._before[process], processes[pid] = seconds, process
            kind = _kind(command, line) if line else self._kinds.get(process, command)  # who has ended has no line
            self._kinds[process] = kind
            self.kinds[kind] += spent[pid]
            if test:
                tests[pid] = test
        for pid, seconds in spent.items():
            ancestor = pid
            while ancestor not in tests and ancestor in parents:
                ancestor = parents[ancestor]
            test = tests.get(ancestor, "")
            if pid not in tests:
                self._tests[processes[pid]] = test  # it may outlive the parent by which this is known
            self.seconds[test] += seconds


def _test_in(environment: bytes) -> str:
    entries = (entry for entry in environment.split(b"\0") if entry.startswith(b"PYTEST_CURRENT_TEST="))
    return next(entries, b"").partition(b"=")[2].decode(errors="replace").rpartition(" (")[0]


def _kind(command: str, line: str) -> str:
    """Return the kind of a process."""
    if not command.startswith("python"):
        return command.partition(" ")[0]
    words = re.sub(r"\0-[^mc\0][^\0]*", "", line).split("\0")[1:4]
    return " ".join(["python", *(re.sub(r"(?s).*/|import sys; sys.path[^;]*;|\n.*", "", word)[:60] for word in words)])


def _test_of_worker(command_line: str) -> str:
    title = command_line.strip("\0 ")
    return title.removeprefix(_RUNNING) if title.startswith(_RUNNING) else ""


class Session:
    """Figures of one pytest session, from its reports and `CpuByTest`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = defaultdict(float)
        self.workers: dict[str, float] = defaultdict(float)
        self.fixtures: dict[str, list[float]] = defaultdict(list)
        self.began = time.monotonic()
        self.cpu = CpuByTest()
        self.cpu.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        worker = getattr(report, "node", None)
        self.workers[worker.gateway.id if worker else "the only one"] += report.duration
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == "fixture":
                    self.fixtures[value[0]].append(round(value[1], 1))

    def pytest_sessionfinish(self) -> None:
        cpu, wall = self.cpu.end(), time.monotonic() - self.began
        session = {
            "seconds": round(wall, 1), "cpu": round(sum(cpu.values()), 1), "cpu_of_no_test": round(cpu[""], 1),
            "kinds": {kind: round(s, 1) for kind, s in self.cpu.kinds.items() if s > DEAR_SECONDS},
            "idle": {worker: round(wall - busy, 1) for worker, busy in self.workers.items()},
            "fixtures": self.fixtures,
            "tests": {test: [round(s, 2), round(cpu.get(test, 0.0), 2)] for test, s in self.seconds.items()},
        }
        sessions = json.loads(self.path.read_text()) if self.path.exists() else []
        self.path.write_text(json.dumps([*sessions, session]))


class Fixtures:
    """Plugin for a worker: reports slow fixtures, with the first test that needed them."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        began = time.monotonic()
        try:
            return (yield)
        finally:
            if (seconds := time.monotonic() - began) > DEAR_SECONDS:
                name = f"{fixturedef.baseid}::{fixturedef.argname}"
                request._pyfuncitem.user_properties.append(("fixture", (name, seconds)))


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get("DURATIONS"):
        config.pluginmanager.register(Fixtures())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Session(Path(path)))


# --- the command ------------------------------------------------------------------------------------------------------
def _all_tests(sessions: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {test: figures for session in sessions for test, figures in session["tests"].items()}


def _folder(test: str) -> str:
    parts = test.partition("::")[0].split("/")
    return "/".join(parts[:3] if len(parts) > 3 else parts[:2])


def _sums(tests: dict[str, list[float]], key: Any) -> dict[str, list[float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for test, (seconds, cpu) in tests.items():
        sums[key(test)][0] += seconds
        sums[key(test)][1] += cpu
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def dearer(tests: dict[str, list[float]], committed: dict[str, float]) -> list[str]:
    """Return a line for each test well above its committed CPU seconds (new: 0), scaled by the sum of all tests."""
    both = tests.keys() & committed.keys()
    if not both:
        return []
    scale = sum(tests[test][1] for test in both) / sum(committed[test] for test in both)
    return [
        f"{test}: {cpu:.1f} CPU s, {before:.1f} committed" for test, (_, cpu) in tests.items()
        if cpu > MORE * scale * (before := committed.get(test, 0.0)) + AND_SECONDS * scale
    ]


def report(sessions: list[dict[str, Any]], steps: dict[str, float], committed: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    tests = _all_tests(sessions)
    yield "Where the time went (seconds of workers, CPU seconds of all processes):"
    for step, taken in steps.items():
        yield f"  {taken:7.0f} s          {step}"
    for session in sessions:
        idle = ", ".join(f"{worker} {seconds:.0f}" for worker, seconds in sorted(session["idle"].items()))
        yield (f"  {session['seconds']:7.0f} s {session['cpu']:7.0f} CPU  {len(session['tests'])} tests; "
               f"of no test {session['cpu_of_no_test']:.0f} CPU; idle: {idle}")
    kinds: dict[str, float] = defaultdict(float)
    for session in sessions:
        for kind, cpu in session["kinds"].items():
            kinds[kind] += cpu
    yield "By kind of process:"
    for kind, cpu in sorted(kinds.items(), key=lambda item: -item[1])[:20]:
        yield f"           {cpu:7.0f} CPU  {kind}"
    yield "By folder:"
    for folder, (seconds, cpu) in _sums(tests, _folder).items():
        yield f"  {seconds:7.0f} s {cpu:7.0f} CPU  {folder}"
    yield "The twenty dearest tests:"
    for test, (seconds, cpu) in sorted(tests.items(), key=lambda item: -item[1][1])[:20]:
        yield f"  {seconds:7.1f} s {cpu:7.1f} CPU  {test}"
    yield "The ten dearest fixtures:"
    fixtures: dict[str, list[float]] = defaultdict(list)
    for session in sessions:
        for name, times in session["fixtures"].items():
            fixtures[name] += times
    for name, times in sorted(fixtures.items(), key=lambda item: -sum(item[1]))[:10]:
        yield f"  {sum(times):7.1f} s  {len(times)} times  {name}"
    now, before = sum(cpu for _, cpu in tests.values()), committed.get("cpu", 0.0)
    yield f"All tests: {now:.0f} CPU s; {before:.0f} when tests/durations.json was committed"
    lines = dearer(tests, committed.get("tests", {}))
    yield f"Dearer than committed: {len(lines) or 'none'}"
    yield from (f"  {line}" for line in lines)


def committable(sessions: list[dict[str, Any]]) -> str:
    """Return the CPU seconds to commit, a line a test: those of tests that took one or more, and the sum of all."""
    tests = _all_tests(sessions)
    rows = [f"    {json.dumps(test)}: {cpu:.1f}" for test, (_, cpu) in sorted(tests.items()) if cpu >= DEAR_SECONDS]
    total = round(sum(cpu for _, cpu in tests.values()))
    return f'{{\n  "cpu": {total},\n  "tests": {{\n' + ",\n".join(rows) + "\n  }\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what the sessions wrote")
    parser.add_argument("steps", nargs="*", metavar="STEP=SECONDS", help="other steps of the run, to be told with them")
    parser.add_argument("--commit", action="store_true", help=f"write tests/{COMMITTED.name} instead of printing")
    asked = parser.parse_args()
    sessions = json.loads(asked.file.read_text())
    if asked.commit:
        COMMITTED.write_text(committable(sessions))
        return 0
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    steps = {name: float(value) for name, _, value in (step.partition("=") for step in asked.steps)}
    print(*report(sessions, steps, committed), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

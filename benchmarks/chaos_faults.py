"""Faults that `benchmarks.chaos` injects."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

import psutil

from benchmarks.chaos_machine import Disk, SteppedClock
from tests.helpers.faults import Server
from trinity_es import Config
from trinity_es.actors.rollout.workers import fork_server_main as worker_template_main
from trinity_es.system import running_system
from trinity_es.system.leftovers import leftovers

KILLED = {"runner": 8, "coordinator": 6, "worker": 4, "guardian": 1, "admin": 1}
"""{kind of process: its share of 20 kills}."""

NOTICED_SECONDS = 60.0
"""Time limit until a hanging process is replaced; after that it counts as needing a person."""
FULL_SECONDS = 10.0
FROZEN_SECONDS = 30.0
CALM_SECONDS = 6.0
"""Seconds after a freeze in which no process may be ended."""
CLOCK_STEPS = 1.0, -1.0, 3600.0, -600.0, 0.0
STEP_SECONDS = 3.0
"""Seconds for which the clock keeps each offset."""


def by_kind(config: Config) -> dict[str, list[psutil.Process]]:
    """Return {kind: processes} of a system, such as runner, worker or admin."""
    found: dict[str, list[psutil.Process]] = {}
    for process in leftovers(config):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if not title:  # a zombie
                continue
            kind = next(
                (k for k in ("Runner", "Coordinator", "Guardian") if title.startswith(k)),
                "admin" if "MultiProcAdmin" in title else
                "worker" if worker_template_main.__name__ in title else "other",
            )
            found.setdefault(kind.lower(), []).append(process)
    return found


def kill(processes: list[psutil.Process]) -> int:
    """Kill these processes with SIGKILL, and return how many were alive."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
            killed += 1
    return killed


class Faults:
    """Faults for one system. `trouble` collects hangs that it did not notice, `ended` needlessly ended processes."""

    def __init__(
        self, config: Config, chance: random.Random, database: Server | None, disk: Disk | None,
        clock: SteppedClock | None,
    ) -> None:
        self.config, self.random, self.database, self.disk, self.clock = config, chance, database, disk, clock
        self.kills = 0
        self.trouble: list[str] = []
        self.ended: list[str] = []

    # --- at random --------------------------------------------------------------------------------------------------
    def inject_random(self) -> str:
        """Inject a random fault, and return its name; "" if there was no process to hit."""
        kinds = [kind for kind, times in KILLED.items() for _ in range(times)]
        kinds += ["everything", "all and keeper"] + ["stop coordinator"] * 2
        kinds += ["database"] * (3 if self.database is not None else 0)
        kind = self.random.choice(kinds)
        if kind == "database" and self.database is not None:
            self.database.stop()
            time.sleep(self.random.uniform(0.2, 2.0))
            self.database.start()
            return "database stopped (immediate) and started"
        found = by_kind(self.config)
        everybody = [p for group in found.values() for p in group]
        if kind == "everything":
            count = kill(everybody)
        elif kind == "all and keeper":
            pid = running_system.keeper(self.config)
            if pid is None:
                return ""
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            count = 1 + kill(everybody)
        elif kind == "stop coordinator":
            return self.stop_coordinator(found.get("coordinator", []))
        else:
            victims = found.get(kind, [])
            count = kill([self.random.choice(victims)]) if victims else 0
        self.kills += count
        return f"kill -9 of {'every process' if kind == 'everything' else kind}" if count else ""

    def stop_coordinator(self, found: list[psutil.Process]) -> str:
        """Suspend the coordinator for less or more time than the guardian waits, and resume it. Return the name."""
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.suspend()
                time.sleep(self.random.choice([0.5, 2.0, 12.0]))
                process.resume()
                return "coordinator stopped and continued"
        return ""

    # --- once each --------------------------------------------------------------------------------------------------
    def single_faults(self) -> dict[str, Callable[[], bool]]:
        """Return {name: function} of the faults that come once each. A function returns False if it hit no process.

        Faults that this machine does not permit are left out.
        """
        found: dict[str, Callable[[], bool]] = {
            "guardian stopped for good": lambda: self.hang("guardian"),
            "admin stopped for good": lambda: self.hang("admin"),
            "everything frozen": self.freeze,
        }
        if self.clock is not None:
            found["clock stepped" if self.clock.namespace else "clock stepped, but for the boot time"] = self.step_clock
        if self.disk is not None:
            found["disk full"] = self.fill_disk
        return found

    def hang(self, kind: str) -> bool:
        """Suspend a process for good. The system must replace it within `NOTICED_SECONDS`."""
        found = by_kind(self.config).get(kind, [])
        if not found or running_system.keeper(self.config) is None:
            return False
        found[0].suspend()
        _, alive = psutil.wait_procs(found[:1], timeout=NOTICED_SECONDS)
        for process in alive:
            self.trouble.append(f"a stopped {kind} (pid {process.pid}) was not noticed in {NOTICED_SECONDS:.0f} s")
            process.resume()
        return True

    def freeze(self) -> bool:
        """Suspend all processes and the keeper, as a sleeping laptop does, and resume them. None may be ended."""
        pid, found = running_system.keeper(self.config), by_kind(self.config)
        if pid is None or not found:
            return False
        workers = {p.pid for p in found.get("worker", [])}  # these end normally, with their work
        frozen = [psutil.Process(pid), *(p for group in found.values() for p in group)]
        names = {p.pid: _title(p) for p in frozen}
        for process in frozen:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        time.sleep(FROZEN_SECONDS)
        for process in reversed(frozen):
            with contextlib.suppress(psutil.Error):
                process.resume()
        gone, _ = psutil.wait_procs([p for p in frozen if p.pid not in workers], timeout=CALM_SECONDS)
        self.ended.extend(f"{names[p.pid]} (pid {p.pid}) ended after all were frozen" for p in gone)
        return True

    def step_clock(self) -> bool:
        """Step the wall clock by each of `CLOCK_STEPS`. No process may be ended."""
        assert self.clock is not None
        everybody = [p for kind, group in by_kind(self.config).items() if kind != "worker" for p in group]
        if not everybody:
            return False
        names = {p.pid: _title(p) for p in everybody}
        gone: list[psutil.Process] = []
        for seconds in CLOCK_STEPS:
            self.clock.step(seconds)
            # not psutil, which mistakes a process for another one after the boot time has moved
            until = time.monotonic() + STEP_SECONDS
            while time.monotonic() < until:
                if running_system.find(self.config) is None and all(_alive(p.pid) for p in everybody):
                    self.ended.append(f"the system was not found with the clock {seconds:+.0f} s off")
                    break
                time.sleep(0.1)
            gone += [p for p in everybody if p not in gone and not _alive(p.pid)]
        self.ended.extend(f"{names[p.pid]} (pid {p.pid}) ended after the clock was stepped" for p in gone)
        return True

    def fill_disk(self) -> bool:
        assert self.disk is not None
        self.disk.fill()
        time.sleep(FULL_SECONDS)
        self.disk.free()
        return True


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:40]
    except psutil.Error:
        return "a process"


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""The machines of `benchmarks.chaos_hosts`, which are network namespaces with their own processes, and its trainer."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_faults import kill
from benchmarks.chaos_hosts_trainer import HOST_VARIABLE
from tests.helpers.namespaces import Network

ROOT = Path(__file__).parents[1]
KEY = "the key of this benchmark, of 40 characters"
LEAVE_SECONDS = 60.0


class Machine:
    def __init__(self, name: str, network: Network, folder: Path) -> None:
        self.name, self.folder, self.inside = name, folder / name, network.add(name)
        self.command: list[str] = []
        """Command that the machine runs from its start."""
        self.folder.mkdir()
        temporary = self.folder / "tmp"  # clients find the host's system here, so each host has its own
        temporary.mkdir()
        self.env = {
            **os.environ, "TRINITY_ES_KEY": KEY, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), HOST_VARIABLE: name
        }
        self.process: Any = None
        self.is_wanted = False
        """True from `start` until the machine is killed or leaves."""

    def start(self) -> None:
        self.is_wanted = True
        with (self.folder / "said").open("a") as out:
            self.process = subprocess.Popen(
                [*self.inside, *self.command], stdout=out, stderr=out, env=self.env, cwd=ROOT)

    def is_on(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def first_process(self) -> list[psutil.Process]:
        """Return the machine's first process, with which all its other processes end; [] if it is off."""
        with contextlib.suppress(psutil.Error):
            if self.is_on():
                return psutil.Process(self.process.pid).children()[:1]
        return []

    def processes(self, kind: str = "") -> list[psutil.Process]:
        """Return the machine's processes whose title begins with `kind`, without the first process."""
        found = []
        with contextlib.suppress(psutil.Error):
            for process in [p for first in self.first_process() for p in first.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    if " ".join(process.cmdline()).startswith(kind):
                        found.append(process)
        return found

    def kill(self) -> None:
        self.is_wanted = False
        kill(self.first_process())
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait()

    def kill_one(self, kind: str) -> bool:
        """Kill a process of this kind with SIGKILL. Return False if there is none."""
        return any(kill([process]) for process in self.processes(kind))

    def command_prefix(self) -> list[str]:
        pid = next((first.pid for first in self.first_process()), 0)
        return ["nsenter", "-t", str(pid), "-p", "-m", "-n"]


class HostMachine(Machine):
    def __init__(self, name: str, network: Network, folder: Path, url: str) -> None:
        super().__init__(name, network, folder)
        self.command = [sys.executable, "-m", "trinity_es", "join", url, "--name", name, "--log-dir",
                        str(self.folder / "logs")]

    def sigterm(self) -> None:
        """Send SIGTERM to the machine's first process, as a launcher does, so that the host leaves."""
        for first in self.first_process():
            first.send_signal(signal.SIGTERM)

    def wait_left(self) -> str:
        """Wait until the host has left the run. Return what went wrong, else ""."""
        self.is_wanted = False
        try:
            status = self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"host {self.name} was told to leave, and had not after {LEAVE_SECONDS:.0f} s"
        return f"host {self.name} left with exit status {status}" if status else ""


class HeadMachine(Machine):
    """A machine that leads the run or stands by: it repeats `trinity-es up --standby`."""

    def __init__(
        self, name: str, network: Network, folder: Path, config: dict[str, Any], port: int, timeout: float
    ) -> None:
        super().__init__(name, network, folder)
        self.address = f"{network.address(name)}:{port}"
        given = {**config, "hosts": {"address": self.address, "timeout": timeout},
                 "system": {**config.get("system", {}), "log_dir": str(self.folder / "logs")}}
        self.config = self.folder / "config.yaml"
        self.config.write_text(json.dumps(given))
        up = f"{sys.executable} -m trinity_es up --standby --no-wait {self.config}"
        self.command = ["bash", "-c", f"while :; do {up}; sleep 1; done"]


class Trainer:
    """The trainer's processes, one after the other: when its host dies, it is started on another host."""

    def __init__(self, url: str, folder: Path, notes: Path, *, lanes: int, tasks: int, seconds: float) -> None:
        self.url, self.folder, self.notes, self.tasks, self.seconds = url, folder, notes, tasks, seconds
        self.lanes = {lane: (lane, False) for lane in range(1, lanes + 1)}
        self.finalized: dict[int, dict[str, Any]] = {}
        self.submitted: set[int] = set()
        self.trouble: list[str] = []
        self.starts = 0
        self._process: Any = None
        self._ending = False
        self._thread: threading.Thread | None = None

    def run_on(self, machines: Sequence[Machine]) -> None:
        """Keep a trainer process running on one of these machines, until `end`."""
        def keep() -> None:
            for machine in itertools.cycle(machines):
                if self._ending and not self.open_lanes():
                    return
                if machine.is_on() and machine.processes("Host"):
                    self._run_process(machine)
                time.sleep(0.5)

        self._thread = threading.Thread(target=keep, daemon=True)
        self._thread.start()

    def open_lanes(self) -> list[tuple[int, bool]]:
        """Return (batch, is submitted) of each lane; after `end` only of those whose batch was submitted."""
        return [lane for lane in self.lanes.values() if lane[1] or not self._ending]

    def _run_process(self, machine: Machine) -> None:
        command = [
            *machine.command_prefix(), sys.executable, "-m", "benchmarks.chaos_hosts_trainer", "--url", self.url,
            "--folder", str(machine.folder), "--notes", str(self.notes), "--lanes", json.dumps(self.open_lanes()),
            "--tasks", str(self.tasks), "--every", str(len(self.lanes)), "--seconds", str(self.seconds),
        ]
        with (machine.folder / "trainer.said").open("a") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, env=machine.env, cwd=ROOT, text=True
            )
        self.starts += 1
        if self._ending:
            self._send_end()
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # half a line of a killed process
                self._note_answer(json.loads(line))
        self._process.wait()

    def _note_answer(self, said: dict[str, Any]) -> None:
        if "submitted" in said:
            batch = said["submitted"]
            self.submitted.add(batch)
            self.lanes[self._lane(batch)] = batch, True
        elif "finalized" in said:
            batch = said["finalized"]
            self.finalized[batch] = said["result"]
            self.lanes[self._lane(batch)] = batch + len(self.lanes), False
        else:
            self.trouble.append(said["trouble"])

    def _lane(self, batch: int) -> int:
        return (batch - 1) % len(self.lanes) + 1

    def end(self, seconds: float) -> None:
        """Submit no more batches, and wait up to `seconds` until the open ones are finalized."""
        self._ending = True
        self._send_end()
        if self._thread is not None:
            self._thread.join(seconds)
        if self.open_lanes():
            self.trouble.append(f"not finalized {seconds:.0f} s after the last fault: {self.open_lanes()}")

    def _send_end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write("end\n")
                self._process.stdin.flush()

    def kill(self) -> None:
        self._ending = True
        self.lanes = {}
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

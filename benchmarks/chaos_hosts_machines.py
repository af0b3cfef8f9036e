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
        self.name, self.network, self.folder = name, network, folder / name
        self.inside = network.add(name)
        self.folder.mkdir()
        temporary = self.folder / "tmp"  # clients find the host's system here, so each host has its own
        temporary.mkdir()
        self.env = {
            **os.environ, "TRINITY_ES_KEY": KEY, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), HOST_VARIABLE: name
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.is_wanted = False
        """True from `start` until the machine is killed or leaves."""

    def command(self) -> list[str]:
        """Return the command that the machine runs from its start."""
        raise NotImplementedError

    def start(self) -> None:
        self.is_wanted = True
        with (self.folder / "said").open("a") as out:
            self.process = subprocess.Popen(
                [*self.inside, *self.command()], stdout=out, stderr=out, env=self.env, cwd=ROOT
            )

    def is_on(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def first_process(self) -> psutil.Process | None:
        """Return the machine's first process, with which all its other processes end; None if it is off."""
        with contextlib.suppress(psutil.Error):
            if self.is_on() and self.process is not None:
                return next(iter(psutil.Process(self.process.pid).children()), None)
        return None

    def processes(self, kind: str = "") -> list[psutil.Process]:
        """Return the machine's processes whose title begins with `kind`, without the first process."""
        first, found = self.first_process(), []
        with contextlib.suppress(psutil.Error):
            for process in first.children(recursive=True) if first is not None else ():
                with contextlib.suppress(psutil.Error):
                    if " ".join(process.cmdline()).startswith(kind):
                        found.append(process)
        return found

    def kill(self) -> None:
        self.is_wanted = False
        first = self.first_process()
        if first is not None:
            with contextlib.suppress(psutil.Error):
                first.kill()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait()

    def kill_one(self, kind: str) -> bool:
        """Kill a process of this kind with SIGKILL. Return False if there is none."""
        return any(kill([process]) for process in self.processes(kind))

    def command_prefix(self) -> list[str]:
        first = self.first_process()
        return ["nsenter", "-t", str(first.pid if first else 0), "-p", "-m", "-n"]


class HostMachine(Machine):
    def __init__(self, name: str, network: Network, folder: Path, url: str) -> None:
        super().__init__(name, network, folder)
        self.url = url

    def command(self) -> list[str]:
        return [sys.executable, "-m", "trinity_es", "join", self.url, "--name", self.name, "--log-dir",
                str(self.folder / "logs")]

    def sigterm(self) -> None:
        """Send SIGTERM to the machine's first process, as a launcher does, so that the host leaves."""
        first = self.first_process()
        if first is not None:
            first.send_signal(signal.SIGTERM)

    def wait_left(self) -> str:
        """Wait until the host has left the run. Return what went wrong, else ""."""
        self.is_wanted = False
        assert self.process is not None
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

    def command(self) -> list[str]:
        up = f"{sys.executable} -m trinity_es up --standby --no-wait {self.config}"
        return ["bash", "-c", f"while :; do {up}; sleep 1; done"]


class Trainer:
    """The trainer's processes, one after the other: when its host dies, it is started on another host."""

    def __init__(self, url: str, folder: Path, notes: Path, *, lanes: int, tasks: int, seconds: float) -> None:
        self.url, self.folder, self.notes, self.tasks, self.seconds = url, folder, notes, tasks, seconds
        self.lanes = {lane: (lane, False) for lane in range(1, lanes + 1)}
        self.finalized: dict[int, dict[str, Any]] = {}
        self.submitted: set[int] = set()
        self.trouble: list[str] = []
        self.starts = 0
        self.host: Machine | None = None
        self._process: subprocess.Popen[str] | None = None
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
        self.host, self.starts = machine, self.starts + 1
        if self._ending:
            self._send_end()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # half a line of a killed process
                self._note_answer(json.loads(line))
        self._process.wait()
        self.host = None

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

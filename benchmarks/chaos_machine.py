"""Parts of a machine that `benchmarks.chaos` breaks: a small disk, and the wall clock.

A disk that fills up and a boot time that moves need mounts, so a program that breaks them runs itself again in its own
mount namespace (`in_namespace`), which only root can make. Without root these faults are left out, and the result says
so.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

_INSIDE = "CHAOS_NAMESPACE"
DISK_BYTES = 1 << 30


def in_namespace(module: str) -> bool:
    """Run this program again in its own mount namespace. Return True inside it, False if there can't be one."""
    if os.environ.get(_INSIDE):
        return True
    unshare = shutil.which("unshare")
    command = [str(unshare), "--mount", "--propagation", "private"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        return False
    return os.execve(unshare, [*command, sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, _INSIDE: "1"})


class Disk:
    """A folder that is a separate disk, and can be filled to the last byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0755", "tmpfs", folder], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with open(self.folder / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
            while True:
                f.write(b"\0" * (1 << 16))
        with open(self.folder / "filler.last", "wb", buffering=0) as f, contextlib.suppress(OSError):
            while True:
                f.write(b"\0" * 512)

    def free(self) -> None:
        for name in ("filler", "filler.last"):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the disk, even if a process still has a file open on it."""
        subprocess.run(["umount", "-l", self.folder], check=False)


class SteppedClock:
    """Wall clock (in a namespace also boot time) with an offset, for processes started with `environment`."""

    def __init__(self, folder: Path, *, namespace: bool) -> None:
        self.file, self.stat = folder / "clock", folder / "stat"
        self.file.write_bytes(struct.pack("d", 0.0))
        here = str(Path(__file__).with_name("stepped_clock"))
        self.environment = {
            "STEPPED_CLOCK": str(self.file),
            "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self._real = Path("/proc/stat").read_text()
        self._boot = int(re.findall(r"^btime (\d+)$", self._real, re.MULTILINE)[0])
        self.namespace = namespace
        if namespace:
            self.stat.write_text(self._real)
            subprocess.run(["mount", "--bind", self.stat, "/proc/stat"], check=True)

    def step(self, seconds: float) -> None:
        """Set the clock's offset from the true time."""
        with open(self.file, "r+b") as f:
            f.write(struct.pack("d", seconds))
        if self.namespace:  # the kernel moves the boot time with the clock
            self.stat.write_text(re.sub(r"(?m)^btime \d+$", f"btime {self._boot + round(seconds)}", self._real))

    def close(self) -> None:
        """Restore the true boot time."""
        if self.namespace:
            subprocess.run(["umount", "-l", "/proc/stat"], check=False)

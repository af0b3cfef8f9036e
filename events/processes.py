"""Identity of processes, which holds although pids are reused and clocks are set.

A pid and a start identify a process. The start is a text of the clock ticks since the machine's boot (field 22 of
/proc/PID/stat), the boot's id and the pid namespace. psutil's `create_time()` changes when the clock is set.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

__all__ = [
    "LEAST_FILES", "end_with_parent", "is_visible_here", "process_lives", "process_start_time", "raise_file_limit",
]

WANTED_FILES = 65536
"""Limit of open files that each process of the system gets, if this user's hard limit allows it."""
LEAST_FILES = 128
"""Limit of open files that suffices for a small system. A runner that plays 16 units has 70 files open."""

_PR_SET_PDEATHSIG = 1

_ENDED = "ZX"
"""States in /proc of a process that ended and was not yet reaped."""


def process_start_time(pid: int) -> str | None:
    """Return the start of a process, which identifies it together with its pid, or None if it has ended.

    A zombie counts as ended, because in some containers nothing reaps orphans.
    """
    try:
        text = Path(f"/proc/{int(pid)}/stat").read_text(errors="replace")
    except (OSError, ValueError):
        return None
    fields = text[text.rfind(")") + 1 :].split()  # the process name before it may hold anything
    if len(fields) < 20 or fields[0] in _ENDED:
        return None
    return f"{fields[19]}@{_boot_and_namespace()}"


def raise_file_limit() -> int:
    """Raise this process's limit of open files to WANTED_FILES or the hard limit, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY:
        return WANTED_FILES
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return max(soft, target)


def process_lives(pid: int, started: object) -> bool:
    """Return True if the process with this pid and this `process_start_time` still runs."""
    return started is not None and process_start_time(pid) == started


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the call of prctl


def is_visible_here(started: object) -> bool | None:
    """Return True if /proc would show a process with this start: it has our boot and pid namespace.

    Return None if it has our boot and another pid namespace. Return False for another boot, of this machine or another.
    """
    boot_and_namespace, own = str(started).partition("@")[2], _boot_and_namespace()
    if boot_and_namespace == own:
        return True
    is_same_boot = boot_and_namespace.partition("/")[0] == own.partition("/")[0]
    return None if is_same_boot else False


def _boot_and_namespace() -> str:
    """Return the ids of the machine's boot and of this pid namespace as `boot/namespace`, with "-" if unreadable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "-"
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        namespace = "-"
    return f"{boot}/{namespace}"

"""Identity of processes, although pids are reused and clocks are set.

A pid and a start identify a process. The start is made of the clock ticks from the machine's boot (field 22 of
/proc/PID/stat), the boot's id, and the pid namespace. psutil's `create_time()` changes when the clock is set.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

__all__ = [
    "LEAST_FILES", "end_with_parent", "process_lives", "process_start_time", "raise_file_limit", "seen_from_here",
]

WANTED_FILES = 65536
"""Number of files that each process of ours may open, if this user may open that many."""
LEAST_FILES = 128
"""Number of files that a process of a small system may need: a runner that plays 16 units has 70 open."""

_PR_SET_PDEATHSIG = 1

_ENDED = "ZX"
"""States of a process that ended, until its parent reaps it."""


def process_start_time(pid: int) -> str | None:
    """Return the start of a process, which identifies it together with its pid; None if it has ended.

    A zombie counts as ended. Without an init that reaps orphans, as in some containers, it stays for ever.
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
    """Raise this process's limit of open files, since each client needs some, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY:
        return WANTED_FILES
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return max(soft, target)


def process_lives(pid: int, started: object) -> bool:
    """Return True if the process with this pid and `process_start_time` still runs, as seen from here."""
    return started is not None and process_start_time(pid) == started


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the call of prctl


def seen_from_here(started: object) -> bool | None:
    """Return True if a process with this start is visible from here, None if it is in another pid namespace.

    False: its boot is over, or it runs on another machine. Only its host name shows which.
    """
    boot_and_namespace, own = str(started).partition("@")[2], _boot_and_namespace()
    if boot_and_namespace == own:
        return True
    is_same_boot = boot_and_namespace.partition("/")[0] == own.partition("/")[0]
    return None if is_same_boot else False


def _boot_and_namespace() -> str:
    """Return the id of the machine's boot and of this pid namespace, as `boot/namespace`; "-" for an unreadable one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "-"
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        namespace = "-"
    return f"{boot}/{namespace}"

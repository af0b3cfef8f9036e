"""State of a local system that does not answer, read from its processes. Linux only."""

from __future__ import annotations

import contextlib

import psutil

__all__ = ["state_of_runner", "stopped_processes"]


def state_of_runner(pid: int, *, is_system_up: bool) -> str:
    """Return "stopped" if SIGSTOP suspended the runner, "silent" if it is alive otherwise, and "down" if it is gone.

    If its system is not up, a process with this pid belongs to another program, and the runner is "down".
    """
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        if is_system_up and process.cmdline()[:1] and process.cmdline()[0].startswith("Runner"):
            return "stopped" if process.status() == psutil.STATUS_STOPPED else "silent"
    return "down"


def stopped_processes(admin_pid: int) -> list[int]:
    """Return the pids of those processes, among the admin and its descendants, that SIGSTOP suspended."""
    pids = list[int]()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(admin_pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    pids.append(process.pid)
    return pids

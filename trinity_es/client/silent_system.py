"""State of a local system that does not answer, read from its processes. Linux only."""

from __future__ import annotations

import contextlib

import psutil

__all__ = ["state_of_runner", "stopped_processes"]


def state_of_runner(pid: int, *, is_system_up: bool) -> str:
    """Return `stopped` if the runner got SIGSTOP, `silent` if it lives otherwise, else `down`.

    `is_system_up`: whether its system exists; otherwise a process with this pid is another program's.
    """
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        if is_system_up and process.cmdline()[:1] and process.cmdline()[0].startswith("Runner"):
            return "stopped" if process.status() == psutil.STATUS_STOPPED else "silent"
    return "down"


def stopped_processes(admin_pid: int) -> list[int]:
    """Return the pids of the admin and its descendants that are stopped by SIGSTOP."""
    pids = list[int]()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(admin_pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    pids.append(process.pid)
    return pids

"""What can be known, by its processes, of a system on this machine that answers nothing. Linux only."""

from __future__ import annotations

import contextlib

import psutil

__all__ = ["state_of_runner", "stopped_processes"]


def state_of_runner(pid: int, *, up: bool) -> str:
    """Return `stopped` for one that was sent SIGSTOP, `silent` for another that lives, and `down`.

    `up`: its system is there; else a process of this pid is another one.
    """
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        if up and process.cmdline()[:1] and process.cmdline()[0].startswith("Runner"):
            return "stopped" if process.status() == psutil.STATUS_STOPPED else "silent"
    return "down"


def stopped_processes(admin: int) -> list[int]:
    """Return the pids of a system's processes that were sent SIGSTOP, from its admin on."""
    found = list[int]()
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(admin)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    found.append(process.pid)
    return found

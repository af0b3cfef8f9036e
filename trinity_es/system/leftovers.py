"""Ending all processes of a store's system, whatever its state.

Unlike `lifecycle.stop` this needs no guardian. It also finds processes of earlier starts, by their output file.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from trinity_es.actors.system_end_checks import processes_printing_to
from trinity_es.config.config import Config
from trinity_es.system import running_system

__all__ = ["end_all_leftovers", "end_leftovers", "leftovers"]

SETTLE_SECONDS = 0.3
"""Seconds until a child that was being started when its parent was killed can be found."""


def leftovers(config: Config) -> list[psutil.Process]:
    """Return the processes that any start of this store's system left, without this one and its parents. Linux only."""
    own_pids = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    processes = []
    for pid in processes_printing_to(str(running_system.output_file(config).resolve())):
        if pid not in own_pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
    return processes


def end_leftovers(config: Config) -> int:
    """Kill the processes that `leftovers` finds, wait up to 10 s for their end, and return their number.

    The wait matters because an engine holds its GPU, and may outlive its killed runner by a moment.
    """
    return running_system.end(leftovers(config), 10.0)


def end_all_leftovers(config: Config) -> int:
    """Repeat `end_leftovers` until two rounds find no process, at most for 15 s. Return how many were killed."""
    killed_count = empty_rounds = 0
    deadline = time.monotonic() + 15.0
    while empty_rounds < 2 and time.monotonic() < deadline:
        if empty_rounds:
            time.sleep(SETTLE_SECONDS)
        count = end_leftovers(config)
        killed_count += count
        empty_rounds = 0 if count else empty_rounds + 1
    return killed_count

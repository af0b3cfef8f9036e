"""End of a system down to its last process, whatever its state.

Unlike `lifecycle.stop` it needs no guardian, and also finds processes of earlier lives, by the file that they print to.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from trinity_es.actors.system_end_checks import printing_to
from trinity_es.config.config import Config
from trinity_es.system import running_system

__all__ = ["end_all_leftovers", "end_leftovers", "leftovers"]

SETTLE_SECONDS = 0.3
"""Seconds until a child shows up that was being started when its parent was killed."""


def leftovers(config: Config) -> list[psutil.Process]:
    """Return every process of this user that belongs to a system of this store, in any life of it. Linux only."""
    own = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    processes = []
    for pid in printing_to(str(running_system.output_file(config).resolve())):
        if pid not in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
    return processes


def end_leftovers(config: Config) -> int:
    """Kill every process of every life of this store's system, wait for their ends, and return their number.

    An engine may outlive its killed runner and admin by a moment, and holds its GPU.
    """
    return running_system.end(leftovers(config), 10.0)


def end_all_leftovers(config: Config) -> int:
    """Repeat `end_leftovers` until no process shows up any more. Return the number of killed processes."""
    killed, rounds_without_any, deadline = 0, 0, time.monotonic() + 15.0
    while rounds_without_any < 2 and time.monotonic() < deadline:
        if rounds_without_any:
            time.sleep(SETTLE_SECONDS)
        count = end_leftovers(config)
        killed += count
        rounds_without_any = 0 if count else rounds_without_any + 1
    return killed

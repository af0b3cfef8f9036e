"""The end of a system, down to its last process, whatever state it is in.

`lifecycle.stop` is the orderly way and needs a guardian that answers. This one also finds what an earlier life left
behind, by the file that every process of a store's system prints to.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

from trinity_es.actors.orphaned import printing_to
from trinity_es.config.config import Config
from trinity_es.system import running_system

__all__ = ["end_all_leftovers", "end_leftovers", "leftovers"]

SETTLE_SECONDS = 0.3
"""How long a process that was being started when its parent was killed may take to show up."""


def leftovers(config: Config) -> list[psutil.Process]:
    """Return every process of this user's that belongs to a system of this store, in whatever life of it.

    Linux only.
    """
    mine = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = []
    for pid in printing_to(str(running_system.output_file(config).resolve())):
        if pid not in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def end_leftovers(config: Config) -> int:
    """Kill every process of every life of this store's system and wait for its end; how many were killed.

    An engine whose runner and admin were killed may have outlived them by a moment, and holds its GPU.
    """
    return running_system.end(leftovers(config), 10.0)


def end_all_leftovers(config: Config) -> int:
    """`end_leftovers`, until none shows up any more; how many were killed."""
    killed, quiet, deadline = 0, 0, time.monotonic() + 15.0
    while quiet < 2 and time.monotonic() < deadline:
        if quiet:
            time.sleep(SETTLE_SECONDS)
        found = end_leftovers(config)
        killed += found
        quiet = 0 if found else quiet + 1
    return killed

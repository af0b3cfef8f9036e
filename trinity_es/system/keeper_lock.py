"""The lock by which a keeper is known to run: who holds it, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal

from trinity_es.config.config import Config
from trinity_es.events.processes import process_lives
from trinity_es.system import running_system

__all__ = ["LOCK_SECONDS", "running", "stop"]


LOCK_SECONDS = 0.3
"""How long a lock is tried for that only those who look whether it is held hold for a moment."""


def running(config: Config) -> int | None:
    """Return its pid; None where none runs."""
    try:
        with running_system.lock_file(config, "keeper").open() as lock:
            pid, _, started = lock.read().partition(" ")
        return int(pid) if process_lives(int(pid), started) else None
    except (OSError, ValueError):
        return None


def stop(config: Config) -> None:
    """End the keeper, so that the system may end. Nothing happens where none runs."""
    pid = running(config)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    running_system.came_true(lambda: running(config) is None, 5.0)

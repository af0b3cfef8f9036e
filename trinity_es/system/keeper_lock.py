"""The keeper as others see it: how it is started, by which lock it is known to run, how it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from trinity_es.actors.orphaned import owner_gone
from trinity_es.config.config import Config
from trinity_es.events.errors import StartupError
from trinity_es.events.private_files import open_private
from trinity_es.events.processes import process_lives
from trinity_es.system import running_system

__all__ = ["LOCK_SECONDS", "ended", "is_up", "running", "start", "stop", "stopped"]


START_SECONDS = 60.0
"""Maximum time that a keeper takes to come up."""
LOCK_SECONDS = 0.3
"""How long a lock is tried for that only those who look whether it is held hold for a moment."""


def start(config: Config, admin: dict[str, Any]) -> None:
    """Start a keeper for the running system of this config, whose admin this is. One that runs already stays.

    Raises StartupError where none comes up.
    """
    words = Path(config.system.log_dir) / "keeper.log"
    with os.fdopen(open_private(words, os.O_WRONLY | os.O_APPEND), "ab") as out:
        before = out.seek(0, os.SEEK_END)  # what earlier ones said is not about this one
        process = subprocess.Popen(
            [sys.executable, "-m", "trinity_es.system.keeper"],
            stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps({"config": config.to_dict(), "admin": admin}).encode())
    # One that is still starting could not be stopped, and would start again what was ended meanwhile.
    running_system.came_true(lambda: running(config) is not None or process.poll() is not None, START_SECONDS)
    if running(config) is None:
        process.kill()  # later it would start again what was ended meanwhile
        process.wait()
        told = words.read_bytes()[before:].decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise StartupError(f"the keeper did not come up, which would start the system again: {told[0]} ({words})")


def running(config: Config) -> int | None:
    """Return its pid; None where none runs."""
    pid, lives = _noted(config)
    return pid if lives else None


def ended(config: Config) -> int | None:
    """Return the pid of the last keeper, which runs no more; None where one runs, or there was never one."""
    pid, lives = _noted(config)
    return None if lives else pid


def _noted(config: Config) -> tuple[int | None, bool]:
    """Return who took the lock last, and whether it lives."""
    try:
        with running_system.lock_file(config, "keeper").open() as lock:
            pid, _, started = lock.read().partition(" ")
        return int(pid), process_lives(int(pid), started)
    except (OSError, ValueError):
        return None, False


def is_up(config: Config) -> bool:
    """Return True if a system runs on the store, or its keeper starts it again just now: there is one to connect to."""
    return running_system.find(config) is not None or stopped(config)["kept"] is not None


def stopped(config: Config) -> dict[str, Any]:
    """Return what becomes of a system that `running_system.find` does not find.

    `kept`: pid of the keeper that starts it again, or None; `ends`: why what is left of it ends instead, or "".
    """
    kept, ends = running(config), ""
    admin = running_system.last_started(config)
    if admin is not None and (kept is not None or process_lives(admin["pid"], admin["started"])):
        ends = owner_gone(admin.get("owner"))
    return {"kept": None if ends else kept, "ends": ends}


def stop(config: Config) -> None:
    """End the keeper, so that the system may end. Nothing happens where none runs."""
    pid = running(config)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    running_system.came_true(lambda: running(config) is None, 5.0)

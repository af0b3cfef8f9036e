"""Reasons for a system to end by itself: its owner process has ended, or its store is gone.

Such a system is of no use, and its engines hold GPUs. The guardian watches the owner, the coordinator watches the
store, and the keeper checks both before it restarts anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trinity_es.events.errors import LogNotFound, TrinityError
from trinity_es.events.processes import process_lives

__all__ = ["end_processes", "owner_end_reason", "processes_printing_to", "store_loss_reason", "watch_store"]

LOOK_SECONDS = 5.0
"""Interval between two checks of the store."""

MISSES = 3
"""Number of checks in a row that must find no store. Restoring a copy removes the store for a moment."""


def owner_end_reason(owner: Mapping[str, Any] | None) -> str:
    """Return a sentence if a system's owner process (`pid`, `started`) has ended; "" if it lives, or there is none."""
    if not owner or process_lives(owner["pid"], owner["started"]):
        return ""
    return f"process {owner['pid']}, which had started it, has ended"


def store_loss_reason(url: str) -> str:
    """Return a sentence if the store at this URL, a file or a database, was removed; "" if it may still exist. A
    database that does not answer counts as one that still exists."""
    # Here, since it imports SQLAlchemy, which would take most of the keeper's memory.
    from trinity_es.events.store.database.database import Database
    from trinity_es.events.store.database.urls import parse_url

    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        path = Path(parsed.database or "").absolute()
        with contextlib.suppress(PermissionError):
            return "" if path.exists() else f"its store {path} was deleted"
        return ""
    try:
        database = Database(url, read_only=True, patience=0.0)
        try:
            database.read(lambda connection: connection.exec_driver_sql("SELECT 1").first())
        finally:
            database.close()
    except LogNotFound as e:
        return f"its store was dropped ({e.message})"
    except TrinityError:
        pass
    return ""


def watch_store(url: str, on_gone: Callable[[str], None]) -> None:
    """Check the store of a running system in a thread, and call `on_gone(reason)` there once if the store is gone."""

    def watch() -> None:
        miss_count = 0
        while miss_count < MISSES:
            time.sleep(LOOK_SECONDS)
            reason = store_loss_reason(url)
            miss_count = miss_count + 1 if reason else 0
        on_gone(reason)

    threading.Thread(target=watch, name="store-watch", daemon=True).start()


def end_processes(admin: int, runners: list[int]) -> None:
    """Kill the actor system: the runners' process groups, processes that write to the launch log, admin, this one."""
    for pid in runners:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    output = os.readlink("/proc/self/fd/1")
    for pid in processes_printing_to(output) if Path(output).name.startswith("launch-") else ():
        if pid not in (os.getpid(), admin):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(admin, signal.SIGKILL)
    os._exit(0)


def processes_printing_to(output: str) -> list[int]:
    """Return the ids of this user's processes whose standard output or error is the file `output` (Linux)."""
    pids = set()
    # `fd/[12]` would list the folder, which raises if its process ends meanwhile; a plain name is only looked up.
    for link in (link for fd in (1, 2) for link in Path("/proc").glob(f"[0-9]*/fd/{fd}")):
        with contextlib.suppress(OSError):  # the process is gone, a zombie, or another user's
            if os.readlink(link) == output:
                pids.add(int(link.parts[2]))
    return sorted(pids)

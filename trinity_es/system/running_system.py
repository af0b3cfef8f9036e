"""The running system of a store: finding it, its files, its keeper, and the end of its processes.

The coordinator's lease in the log says where it runs. Pids are reused, so processes have pid and start time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from trinity_es.actors.system_end_checks import owner_end_reason
from trinity_es.config.config import Config
from trinity_es.events.errors import LogNotFound, LogUnavailable, NotRunning
from trinity_es.events.processes import process_lives
from trinity_es.events.store.database.leader_lock import is_led
from trinity_es.events.store.database.retry import within
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.log import EventLog

__all__ = [
    "end", "ended_keeper", "find", "find_head", "is_up", "joined_file", "keeper", "key_file", "last_known",
    "leader", "led_elsewhere", "lock_file", "none_runs", "output_file", "processes", "stop_keeper", "stopped",
    "system_file", "wait_for", "wait_gone",
]

CHECK_SECONDS = 0.02
"""Interval between two checks of an awaited condition."""
_FIND_SECONDS = 5.0
"""Maximum seconds to read from the log where a system is, since the database server may be frozen."""


def output_file(config: Config) -> Path:
    """Return the file that the processes of this store's system print to: their standard output.

    Children inherit it, so leftovers are found by it even if they overwrote their titles and environments.
    """
    return _file(config, "launch", ".log")


def _file(config: Config, name: str, suffix: str) -> Path:
    """Return a file for this store alone, even if others share the log folder."""
    return Path(config.system.log_dir) / f"{name}-{_digest(config.store.url)}{suffix}"


def _digest(url: str) -> str:
    """Return the part of file names that stands for a store: the same for every path to its file or server socket."""
    parsed = parse_url(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    database = os.path.realpath(parsed.database or "") if sqlite else f"{parsed.database}{parsed.query.get('host', '')}"
    return hashlib.sha256(f"{parsed.host}:{parsed.port}/{database}".encode()).hexdigest()[:12]


def lock_file(config: Config, role: str) -> Path:
    """Return the file that the explorer or the trainer of this store's run locks."""
    return _file(config, role, ".lock")


def key_file(config: Config) -> str:
    return config.system.key_file or str(Path(config.system.log_dir) / "key")


def last_known(config: Config) -> dict[str, Any] | None:
    """Return the admin of the last system of this store; None if there was none, or if it ended in order."""
    try:
        return within(_FIND_SECONDS, lambda: leader(config)).get("admin") or None
    except LogUnavailable:
        admin = _read_admin(system_file(config))  # the database does not answer, but the system may
        if admin is None:
            raise
        return admin


def leader(config: Config) -> dict[str, Any]:
    """Return the owner of the store's coordinator lease, as that coordinator wrote it; {} if it has none."""
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            lease = log.read_lease("coordinator")
    except LogNotFound:
        return {}
    return lease.owner if lease is not None else {}


def system_file(config: Config) -> Path:
    """Return the file that names the admin of this store's last system and its keeper."""
    return _file(config, "system", ".json")


def _read_admin(path: Path) -> dict[str, Any] | None:
    """Return the admin process in a `system_file` or `joined_file`; None if it is missing or another user wrote it."""
    try:
        admin = json.loads(path.read_bytes())
        is_valid = path.stat().st_uid == os.geteuid() and {"pid", "started", "port"} <= admin.keys()
        return admin if is_valid else None
    except (OSError, ValueError, AttributeError):
        return None


def find(config: Config) -> dict[str, Any] | None:
    """Return the admin of this store's running system on this host, as `find_head` does.

    If another host leads the run, return the admin of the system that joined it from here, which passes requests on.
    """
    joined = joined_file(config.store.url, "*")
    admins = (_read_admin(path) for path in sorted(joined.parent.glob(joined.name)))
    return find_head(config) or next((admin for admin in admins if admin and _is_running(admin)), None)


def find_head(config: Config) -> dict[str, Any] | None:
    """Return the system that leads the run of this store on this host; None if it, or its owner, has ended.

    It has `port`, `pid` and `started` of its admin process, `guardian` (a pid), and `key_file`, the place of its key.
    """
    admin = last_known(config)
    if admin is None or not _is_running(admin):
        return None
    return {**admin, "key_file": key_file(config)}


def _is_running(admin: dict[str, Any]) -> bool:
    """Return whether this admin lives and so does its owner, with which it would end."""
    return process_lives(admin["pid"], admin["started"]) and not owner_end_reason(admin.get("owner"))


def joined_file(url: str, name: str) -> Path:
    """Return this user's file with the admin of the system that joined this store's run under this host name."""
    folder = Path(tempfile.gettempdir()) / f"trinity-es-{os.geteuid()}"
    return folder / f"joined-{_digest(url)}-{name}.json"


def led_elsewhere(config: Config) -> str:
    """Return the leader of this store's run on another host, as "pid 12 on gpu-1". Raises LogUnavailable.

    Empty if there is no leader. Also empty if the head takes no hosts: then it holds no leader lock.
    """
    if parse_url(config.store.url).get_backend_name() == "sqlite":
        return ""
    owner = leader(config)
    return f"pid {owner.get('pid')} on {owner.get('host')}" if owner.get("hosts") and is_led(config.store.url) else ""


def none_runs(config: Config) -> NotRunning:
    """Return the error for a store without a running system on this machine, with the way out."""
    url, other_leader = config.masked()["store"]["url"], ""
    with contextlib.suppress(LogUnavailable):  # even then it is certain that no system runs here
        other_leader = within(_FIND_SECONDS, lambda: led_elsewhere(config))
    if other_leader:
        return NotRunning(f"the run of {url} is led by {other_leader}, and this machine takes no part in it: ask "
                          "there, or on a host that does (`trinity-es join`)")
    return NotRunning(f"no actor system runs on {url}: start one with `trinity-es up`")


# --- the keeper -------------------------------------------------------------------------------------------------------
def keeper(config: Config) -> int | None:
    """Return the pid of the process that keeps this store's system running; None without one."""
    pid, is_alive = _keeper(config)
    return pid if is_alive else None


def ended_keeper(config: Config) -> int | None:
    """Return the pid of the last keeper if it has ended; None if it still runs, or if the last system had none."""
    pid, is_alive = _keeper(config)
    return None if is_alive else pid


def _keeper(config: Config) -> tuple[int | None, bool]:
    """Return the pid of the last system's keeper, None if it had none, and whether that process lives."""
    admin = _read_admin(system_file(config))
    process = admin.get("keeper") if admin is not None else None
    if process is None:
        return None, False
    return process["pid"], process_lives(process["pid"], process["started"])


def is_up(config: Config) -> bool:
    """Return True if there is a system to connect to: it runs, or its keeper is starting it again."""
    return find(config) is not None or stopped(config)["kept"] is not None


def stopped(config: Config) -> dict[str, Any]:
    """Return what will happen to a system that `find` does not return.

    `kept`: pid of the keeper that is starting it again, or None. `ends`: reason why its processes end instead, or "".
    """
    keeper_pid, end_reason = keeper(config), ""
    admin = last_known(config) or _read_admin(system_file(config))  # a system that ends gives the lease back
    if admin is not None and (keeper_pid is not None or process_lives(admin["pid"], admin["started"])):
        end_reason = owner_end_reason(admin.get("owner"))
    return {"kept": None if end_reason else keeper_pid, "ends": end_reason}


def stop_keeper(config: Config) -> None:
    """End the keeper, unless this process starts the system for it, so that it does not start the system again."""
    pid = keeper(config)
    if pid is not None and pid != os.getppid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: keeper(config) is None, 5.0)


# --- its processes ----------------------------------------------------------------------------------------------------
def processes(admin: dict[str, Any]) -> list[psutil.Process]:
    """Return the admin's process and all its descendants; [] if it has ended."""
    try:
        root = psutil.Process(admin["pid"])
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_gone(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait up to `timeout` seconds for processes to end, and return those that did not. A zombie has ended."""
    wait_for(lambda: not any(map(_runs, processes)), timeout)
    return [p for p in processes if _runs(p)]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait up to these seconds for a condition, and return whether it holds."""
    deadline = time.monotonic() + seconds
    while True:
        holds = condition()
        if holds or time.monotonic() >= deadline:
            return holds
        time.sleep(CHECK_SECONDS)


def end(processes: list[psutil.Process], seconds: float = 5.0) -> int:
    """Kill these processes and wait for their end. Return how many it killed."""
    killed_count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed_count += 1
    wait_gone(processes, seconds)
    return killed_count


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

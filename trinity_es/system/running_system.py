"""Finding a store's running system, its files and its keeper, and ending its processes.

The coordinator's lease in the log says where the system runs. Pids are reused, so a process has pid and start time.
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
    "leader", "led_elsewhere", "lock_file", "not_running_error", "output_file", "processes", "stop_keeper", "stopped",
    "system_file", "wait_for", "wait_gone",
]

CHECK_SECONDS = 0.02
"""Interval between two checks of an awaited condition."""
_FIND_SECONDS = 5.0
"""Maximum seconds for reading the coordinator's lease, since the database server may be frozen."""


def output_file(config: Config) -> Path:
    """Return the file that is standard output for all processes of this store's system.

    Children inherit it, so it identifies them even if they overwrote their titles and environments.
    """
    return _store_file(config, "launch", ".log")


def _store_file(config: Config, name: str, suffix: str) -> Path:
    """Return the path of a file in the log folder that belongs to this store, since stores may share the folder."""
    return Path(config.system.log_dir) / f"{name}-{_digest(config.store.url)}{suffix}"


def _digest(url: str) -> str:
    """Return a digest of a store for file names. Every path to the same SQLite file has the same digest."""
    parsed = parse_url(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    database = os.path.realpath(parsed.database or "") if sqlite else f"{parsed.database}{parsed.query.get('host', '')}"
    return hashlib.sha256(f"{parsed.host}:{parsed.port}/{database}".encode()).hexdigest()[:12]


def lock_file(config: Config, role: str) -> Path:
    return _store_file(config, role, ".lock")


def key_file(config: Config) -> str:
    return config.system.key_file or str(Path(config.system.log_dir) / "key")


def last_known(config: Config) -> dict[str, Any] | None:
    """Return the admin of this store's last system; None if there was none or it ended in order."""
    try:
        return within(_FIND_SECONDS, lambda: leader(config)).get("admin") or None
    except LogUnavailable:
        admin = _read_admin(system_file(config))  # the database does not answer, but the system may
        if admin is None:
            raise
        return admin


def leader(config: Config) -> dict[str, Any]:
    """Return the record that the coordinator wrote into the store's lease (host, pid, admin); {} if there is none."""
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            lease = log.read_lease("coordinator")
    except LogNotFound:
        return {}
    return lease.owner if lease is not None else {}


def system_file(config: Config) -> Path:
    """Return the file that names the admin and the keeper of this store's last system."""
    return _store_file(config, "system", ".json")


def _read_admin(path: Path) -> dict[str, Any] | None:
    """Return the admin in a `system_file` or `joined_file`; None if the file is missing or another user wrote it."""
    try:
        admin = json.loads(path.read_bytes())
        is_valid = path.stat().st_uid == os.geteuid() and {"pid", "started", "port"} <= admin.keys()
        return admin if is_valid else None
    except (OSError, ValueError, AttributeError):
        return None


def find(config: Config) -> dict[str, Any] | None:
    """Return the admin of this store's running system on this host, as `find_head` does; None without one.

    If another host leads the run, this is the admin of this host's joined system, which forwards requests.
    """
    joined = joined_file(config.store.url, "*")
    admins = (_read_admin(path) for path in sorted(joined.parent.glob(joined.name)))
    return find_head(config) or next((admin for admin in admins if admin and _is_admin_running(admin)), None)


def find_head(config: Config) -> dict[str, Any] | None:
    """Return how to reach the system that leads this store's run from this host; None if none runs here.

    The dict has `port`, `pid` and `started` (start time) of its admin process, the `guardian`'s pid, and `key_file`,
    the path of its key.
    """
    admin = last_known(config)
    if admin is None or not _is_admin_running(admin):
        return None
    return {**admin, "key_file": key_file(config)}


def _is_admin_running(admin: dict[str, Any]) -> bool:
    """Return whether this admin lives and its owner, with which it would end, lives too."""
    return process_lives(admin["pid"], admin["started"]) and not owner_end_reason(admin.get("owner"))


def joined_file(url: str, name: str) -> Path:
    """Return the path of the file with the admin of the system that joined the run under this host name."""
    folder = Path(tempfile.gettempdir()) / f"trinity-es-{os.geteuid()}"
    return folder / f"joined-{_digest(url)}-{name}.json"


def led_elsewhere(config: Config) -> str:
    """Return the leader of this store's run on another host, as "pid 12 on gpu-1"; "" if there is none.

    A head without `hosts.address` holds no leader lock, so it counts as none. Raises LogUnavailable.
    """
    if parse_url(config.store.url).get_backend_name() == "sqlite":
        return ""
    owner = leader(config)
    return f"pid {owner.get('pid')} on {owner.get('host')}" if owner.get("hosts") and is_led(config.store.url) else ""


def not_running_error(config: Config) -> NotRunning:
    """Return the error for a store without a running system on this machine; it says how to start or join one."""
    url, other_leader = config.masked()["store"]["url"], ""
    with contextlib.suppress(LogUnavailable):  # even then it is certain that no system runs here
        other_leader = within(_FIND_SECONDS, lambda: led_elsewhere(config))
    if other_leader:
        return NotRunning(f"the run of {url} is led by {other_leader}, and this machine takes no part in it: ask "
                          "there, or on a host that does (`trinity-es join`)")
    return NotRunning(f"no actor system runs on {url}: start one with `trinity-es up`")


# --- the keeper -------------------------------------------------------------------------------------------------------
def keeper(config: Config) -> int | None:
    """Return the pid of this store's keeper, the process that restarts its system; None if none runs."""
    pid, is_alive = _last_keeper(config)
    return pid if is_alive else None


def ended_keeper(config: Config) -> int | None:
    """Return the pid of the last keeper if it has ended; None if it still runs, or if the last system had none."""
    pid, is_alive = _last_keeper(config)
    return None if is_alive else pid


def _last_keeper(config: Config) -> tuple[int | None, bool]:
    """Return the pid of the last system's keeper, if it had one, and whether that process lives."""
    admin = _read_admin(system_file(config))
    process = admin.get("keeper") if admin is not None else None
    if process is None:
        return None, False
    return process["pid"], process_lives(process["pid"], process["started"])


def is_up(config: Config) -> bool:
    """Return True if there is a system to connect to: it runs, or its keeper is starting it again."""
    return find(config) is not None or stopped(config)["kept"] is not None


def stopped(config: Config) -> dict[str, Any]:
    """Return whether a system that `find` does not return will be restarted, or ends.

    `kept`: pid of the keeper that restarts it, or None. `ends`: reason why its remaining processes end, or "".
    """
    keeper_pid, end_reason = keeper(config), ""
    admin = last_known(config) or _read_admin(system_file(config))  # a system that ends gives the lease back
    if admin is not None and (keeper_pid is not None or process_lives(admin["pid"], admin["started"])):
        end_reason = owner_end_reason(admin.get("owner"))
    return {"kept": None if end_reason else keeper_pid, "ends": end_reason}


def stop_keeper(config: Config) -> None:
    """Kill the keeper, so that it does not restart the system, unless it is the parent of this process."""
    pid = keeper(config)
    if pid is not None and pid != os.getppid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: keeper(config) is None, 5.0)


# --- its processes ----------------------------------------------------------------------------------------------------
def processes(admin: dict[str, Any]) -> list[psutil.Process]:
    """Return the admin process and all its descendants; [] if the admin has ended."""
    try:
        root = psutil.Process(admin["pid"])
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_gone(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait up to `timeout` seconds for these processes to end, and return those that still run. Zombies have ended."""
    wait_for(lambda: not any(map(_is_process_running, processes)), timeout)
    return [p for p in processes if _is_process_running(p)]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait up to `seconds` for a condition, and return whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(CHECK_SECONDS)
    return holds


def end(processes: list[psutil.Process], seconds: float = 5.0) -> int:
    """Kill these processes and wait up to `seconds` for their end. Return how many were killed."""
    killed_count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed_count += 1
    wait_gone(processes, seconds)
    return killed_count


def _is_process_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

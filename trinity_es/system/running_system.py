"""The running system of a store: start it, find it, end it.

Where it runs stands in the log's database (the coordinator's lease), so a store is all that one needs to find it; a
process is named by pid and start time, so a pid that was given to somebody else is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from trinity_es.actors.orphaned import owner_gone
from trinity_es.config.config import Config
from trinity_es.events.errors import LogNotFound, LogUnavailable, NotRunning
from trinity_es.events.processes import process_lives
from trinity_es.events.store.database.leader_lock import is_led
from trinity_es.events.store.database.retry import within
from trinity_es.events.store.database.urls import parse_url
from trinity_es.events.store.log import EventLog

__all__ = [
    "came_true", "end", "ended_keeper", "find", "find_head", "is_up", "joined_file", "keeper", "key_file", "last_known",
    "leader", "led_elsewhere", "lock_file", "none_runs", "output_file", "processes", "stop_keeper", "stopped",
    "system_file", "wait_gone",
]


_log = logging.getLogger(__name__)
LOOK_SECONDS = 0.02
"""Interval between two looks at what is waited for."""
_FIND_SECONDS = 5.0
"""Maximum of the time that the log may take to say where a system is: its server may be frozen."""


def output_file(config: Config) -> Path:
    """Return where the processes of this store's system write what they print.

    It is their standard output, which children inherit: what is left of a system is found by it, even where titles
    and environments were overwritten.
    """
    return _file(config, "launch", ".log")


def _file(config: Config, what: str, suffix: str) -> Path:
    """Return a file of this store's alone, also in a log folder that others share."""
    return Path(config.system.log_dir) / f"{what}-{_digest(config.store.url)}{suffix}"


def _digest(url: str) -> str:
    """Return what names a store in the names of files, however its path or its server's socket is reached."""
    parsed = parse_url(url)
    sqlite = parsed.get_backend_name() == "sqlite"
    database = os.path.realpath(parsed.database or "") if sqlite else f"{parsed.database}{parsed.query.get('host', '')}"
    return hashlib.sha256(f"{parsed.host}:{parsed.port}/{database}".encode()).hexdigest()[:12]


def lock_file(config: Config, role: str) -> Path:
    """Return the lock of this store's explorer or trainer."""
    return _file(config, role, ".lock")


def key_file(config: Config) -> str:
    return config.system.key_file or str(Path(config.system.log_dir) / "key")


def last_known(config: Config) -> dict[str, Any] | None:
    """Return the admin of the system that last had this store; None where there was none, or it ended in order."""
    try:
        return within(_FIND_SECONDS, lambda: leader(config)).get("admin") or None
    except LogUnavailable:
        admin = _noted(system_file(config))  # the database does not answer, but the system may
        if admin is None:
            raise
        return admin


def leader(config: Config) -> dict[str, Any]:
    """Return what the coordinator that has the store's lease says of itself; {} where none has it."""
    try:
        with EventLog.open(config.store.url, read_only=True) as log:
            lease = log.read_lease("coordinator")
    except LogNotFound:
        return {}
    return lease.owner if lease is not None else {}


def system_file(config: Config) -> Path:
    """Return where the system that this machine started last for this store is written down."""
    return _file(config, "system", ".json")


def _noted(path: Path) -> dict[str, Any] | None:
    """Return the admin of the system that is written down there; None where there is none, or another user's word."""
    try:
        noted = json.loads(path.read_bytes())
        mine = path.stat().st_uid == os.geteuid() and {"pid", "started", "port"} <= noted.keys()
        return noted if mine else None
    except (OSError, ValueError, AttributeError):
        return None


def find(config: Config) -> dict[str, Any] | None:
    """Return the running system of this store, as `find_head` does.

    Where the run is led on another host: the system that joined it on this one, which passes on what is asked.
    """
    joined = joined_file(config.store.url, "*")
    found = (_noted(path) for path in sorted(joined.parent.glob(joined.name)))
    return find_head(config) or next((admin for admin in found if admin and _goes_on(admin)), None)


def find_head(config: Config) -> dict[str, Any] | None:
    """Return the system that leads the run of this store on this host.

    None when there is none, or the process that it was started for has ended. `{port, pid, started, guardian}`: of its
    admin process, and the guardian's pid; `key_file`: where its key should be.
    """
    admin = last_known(config)
    return {**admin, "key_file": key_file(config)} if admin and _goes_on(admin) else None


def _goes_on(admin: dict[str, Any]) -> bool:
    return process_lives(admin["pid"], admin["started"]) and not owner_gone(admin.get("owner"))


def joined_file(url: str, name: str) -> Path:
    """Return where the system of this store that joined as this host, for this user, is written down."""
    folder = Path(tempfile.gettempdir()) / f"trinity-es-{os.geteuid()}"
    return folder / f"joined-{_digest(url)}-{name}.json"


def led_elsewhere(config: Config) -> str:
    """Return who leads the run of this store now, as "pid 12 on gpu-1"; for who found nothing here (`find`) to ask.

    Empty where nobody does, or where it is not known: a head that takes no hosts holds no lock that says so. Raises
    LogUnavailable.
    """
    if parse_url(config.store.url).get_backend_name() == "sqlite":
        return ""
    owner = leader(config)
    return f"pid {owner.get('pid')} on {owner.get('host')}" if owner.get("hosts") and is_led(config.store.url) else ""


def none_runs(config: Config) -> NotRunning:
    """Return the error for a store of which no system runs on this machine, with the way out."""
    where, other = config.masked()["store"]["url"], ""
    with contextlib.suppress(LogUnavailable):  # what is known is that nothing runs here
        other = within(_FIND_SECONDS, lambda: led_elsewhere(config))
    if other:
        return NotRunning(f"the run of {where} is led by {other}, and this machine takes no part in it: ask there, "
                          "or on a host that does (`trinity-es join`)")
    return NotRunning(f"no actor system runs on {where}: start one with `trinity-es up`")


# --- the keeper -------------------------------------------------------------------------------------------------------
def keeper(config: Config) -> int | None:
    """Return the pid of the process that starts the system of this store again; None where none lives."""
    pid, lives = _keeper(config)
    return pid if lives else None


def ended_keeper(config: Config) -> int | None:
    """Return the pid of the last keeper, which runs no more; None where one runs, or the last system had none."""
    pid, lives = _keeper(config)
    return None if lives else pid


def _keeper(config: Config) -> tuple[int | None, bool]:
    told = (_noted(system_file(config)) or {}).get("keeper")
    return (told["pid"], process_lives(told["pid"], told["started"])) if told else (None, False)


def is_up(config: Config) -> bool:
    """Return True if a system runs on the store, or its keeper starts it again just now: there is one to connect to."""
    return find(config) is not None or stopped(config)["kept"] is not None


def stopped(config: Config) -> dict[str, Any]:
    """Return what becomes of a system that `find` does not find.

    `kept`: pid of the keeper that starts it again, or None; `ends`: why what is left of it ends instead, or "".
    """
    kept, ends = keeper(config), ""
    admin = last_known(config) or _noted(system_file(config))  # it gives the lease back when it ends
    if admin is not None and (kept is not None or process_lives(admin["pid"], admin["started"])):
        ends = owner_gone(admin.get("owner"))
    return {"kept": None if ends else kept, "ends": ends}


def stop_keeper(config: Config) -> None:
    """End the keeper, so that the system may end, unless it is this process. Nothing happens where none runs."""
    pid = keeper(config)
    if pid is not None and pid != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        came_true(lambda: keeper(config) is None, 5.0)


# --- its processes ----------------------------------------------------------------------------------------------------
def processes(admin: dict[str, Any]) -> list[psutil.Process]:
    try:
        root = psutil.Process(admin["pid"])
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_gone(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Wait up to `timeout` seconds for processes to end; returns those that have not. A zombie has ended."""
    came_true(lambda: not any(map(_runs, processes)), timeout)
    return [p for p in processes if _runs(p)]


def came_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait up to these seconds for a condition; returns whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return holds


def end(processes: list[psutil.Process], seconds: float = 5.0) -> int:
    """Kill these processes and wait for their end; returns how many were still there."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    wait_gone(processes, seconds)
    return killed


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Locks of a run's explorer and trainer on this machine, so that only one process continues the run."""

from __future__ import annotations

import atexit
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, get_args

from trinity_es.config.config import Config
from trinity_es.events.errors import AlreadyRunning
from trinity_es.events.private_files import make_private_folder, open_private, take_lock
from trinity_es.system import running_system

__all__ = ["Role", "RunLock", "hold", "holders", "killed"]

Role = Literal["explorer", "trainer"]
LOCK_SECONDS = 0.3
"""Seconds to try for a lock, since processes that only check it hold it for a moment."""


class RunLock:
    """Lock of a run's explorer or trainer, since two of them would train each step twice.

    The lock ends with its process, even if the process has forked. The lock's file names its holder and the actor
    system that the holder started (the pids of admin and keeper), for as long as that system may run.
    """

    def __init__(self, config: Config, role: Role) -> None:
        """Take the lock. Raises AlreadyRunning."""
        self._file = self._open(config, role)
        holder = take_lock(self._file.fileno(), seconds=LOCK_SECONDS)
        self._file.seek(0)
        system_pids = self._file.read().split()[1:]  # of the admin and the keeper
        if holder is None:
            os.register_at_fork(after_in_child=self._file.close)  # or a child that outlives its parent would hold it
        else:
            self._file.close()
            url, article = config.masked()["store"]["url"], "a" if role == "trainer" else "an"
            raise AlreadyRunning(f"{article} {role} runs on {url} already ({holder}): wait for it, or end it")
        running = running_system.find(config)
        keeper = str(running_system.keeper(config) or "no keeper")
        self.owns_system = (
            running is None or system_pids[:1] == [str(running["pid"])] or system_pids[1:] == [keeper])
        """True if no system runs, or an earlier holder of this lock or its keeper started the system."""
        # Stays in the file until there is another system, since this holder may end before the system does.
        self._system_pids = system_pids if running is not None and self.owns_system else []
        self._write(str(os.getpid()))

    @staticmethod
    def _open(config: Config, role: Role) -> IO[str]:
        path = running_system.lock_file(config, role)
        make_private_folder(path.parent)
        return os.fdopen(open_private(path, os.O_RDWR | os.O_APPEND), "r+")

    @classmethod
    def is_held(cls, config: Config, role: Role) -> bool:
        with cls._open(config, role) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def write_system(self, config: Config, admin: dict[str, Any]) -> None:
        """Record the actor system that this lock's holder started."""
        self._system_pids = [str(admin["pid"]), str(running_system.keeper(config) or "")]
        self._write(str(os.getpid()))

    def _write(self, holder: str) -> None:
        self._file.truncate(0)
        self._file.write(" ".join([holder, *self._system_pids]))
        self._file.flush()

    def release(self) -> None:
        """Release the lock; its file still names the actor system that the holder started. Idempotent."""
        if self._file.closed:  # in a forked child of the holder
            return
        self._write("-" if self._system_pids else "")
        self._file.close()


def hold(config: Config, role: Role) -> None:
    """Take the lock of this store and role, and keep it until this process exits. Raises AlreadyRunning."""
    file = running_system.lock_file(config, role)
    if file not in _held:
        _held[file] = RunLock(config, role)
        atexit.register(_held[file].release)


def killed(config: Config) -> dict[Role, int]:
    """Return {role: pid} of this store's lock holders on this machine that ended without releasing their lock."""
    return _pids(config, held=False)


def holders(config: Config) -> dict[Role, int]:
    """Return {role: pid} of living processes on this machine that hold a lock of this store."""
    return _pids(config, held=True)


def _pids(config: Config, *, held: bool) -> dict[Role, int]:
    """Return {role: pid} from the files of this store's locks that are held, or of those that are not."""
    pids: dict[Role, int] = {}
    role: Role
    for role in get_args(Role):
        with suppress(OSError, ValueError, IndexError):  # no holder yet, or it released the lock
            pid = int(running_system.lock_file(config, role).read_text().split()[0])
            if RunLock.is_held(config, role) == held:
                pids[role] = pid
    return pids


_held: dict[Path, RunLock] = {}

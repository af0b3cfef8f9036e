"""Files and folders that only this user may open, and locks on them.

flock and SQLite's locks need only the right to read, so any user who can read a file can hold its lock. That is why the
files of a run have mode 0600, in folders of mode 0700.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

from trinity_es.events.atomic_file import sync

__all__ = ["create_private", "holder", "make_private_folder", "open_private", "require_regular", "take_lock"]

RETRY_SECONDS = 0.02
"""Interval between two tries for a lock."""

TELL_SECONDS = 2.0
"""Seconds of waiting for a lock after which `tell` is called."""


def make_private_folder(path: str | Path) -> None:
    """Make a folder and its missing parents with mode 0700, and sync their names to the disk. Raises OSError."""
    path = Path(path)
    if not path.is_dir():
        if path.parent != path:
            make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder that may be written and not read
            sync(path.parent)


def require_regular(path: str | Path) -> None:
    """Raise OSError unless this is a regular file. A read of a pipe or of /dev/zero may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def open_private(path: str | Path, flags: int = os.O_RDWR) -> int:
    """Open a file, creating it with mode 0600 if it is missing, and return its descriptor. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)


def create_private(path: str | Path) -> None:
    os.close(open_private(path, os.O_WRONLY))


def take_lock(handle: int, *, seconds: float, tell: Callable[[str], None] | None = None) -> str | None:
    """Take the lock of an open file and return None, or return a description of its holder after `seconds`.

    If the wait takes TELL_SECONDS, call `tell` once with that description. The lock ends with its process.
    """
    started_at = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            waited_seconds = time.monotonic() - started_at
            if waited_seconds >= seconds:
                return holder(handle)
            if tell is not None and waited_seconds >= TELL_SECONDS:
                tell(holder(handle))
                tell = None
        time.sleep(RETRY_SECONDS)


def holder(handle: int) -> str:
    """Describe the process that locks this open file, as "process 12 (python x.py) of user root" if /proc shows it."""
    status = os.fstat(handle)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return "another process"
    # "1: FLOCK  ADVISORY  WRITE 3012 fd:01:131189 0 EOF"; waiting processes have "->" before it. On layered file
    # systems the device there differs from stat's.
    holder_line = re.compile(rf"\d+: FLOCK +\S+ +\S+ +(\d+) +(\S+):{status.st_ino} ")
    matches = [match for line in lines if (match := holder_line.match(line))]
    if not matches:
        return "another process, which can't be seen from here"
    best = max(matches, key=lambda match: (match[2] == device, int(match[1])))  # preferably with stat's device
    return _process_description(int(best[1]))


def _process_description(pid: int) -> str:
    """Describe a process by its pid and user, and by the beginning of its command if this user started it."""
    try:
        command_line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        user_id = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"process {pid}"
    try:
        user = pwd.getpwuid(user_id).pw_name
    except KeyError:
        user = str(user_id)
    command = f" ({command_line[:60]})" if command_line and user_id == os.geteuid() else ""
    return f"process {pid}{command} of user {user}"

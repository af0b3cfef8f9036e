"""Files and folders that are this user's alone, and the locks on them.

flock needs no more than the right to read a file, and so do SQLite's own locks: whoever could read a log or a lock file
could hold it. So what a run makes is of mode 0600, in folders of mode 0700.
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

LOOK_SECONDS = 0.02
"""Interval between two tries for a lock."""

TELL_SECONDS = 2.0
"""How long a lock is waited for before a word is said."""


def make_private_folder(path: str | Path) -> None:
    """Make this folder and those above it that are missing, mode 0700, with their names on the disk. Raises OSError.

    One that is there stays as it is: it may be meant for others too.
    """
    path = Path(path)
    if not path.is_dir():
        if path.parent != path:
            make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder that may be written and not read
            sync(path.parent)


def require_regular(path: str | Path) -> None:
    """Require a file that ends: a pipe is waited for without end, and /dev/zero has none. Raises OSError."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def open_private(path: str | Path, flags: int = os.O_RDWR) -> int:
    """Open a file for this user alone; it is made where there is none. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)


def create_private(path: str | Path) -> None:
    os.close(open_private(path, os.O_WRONLY))


def take_lock(handle: int, *, seconds: float, tell: Callable[[str], None] | None = None) -> str | None:
    """Take the lock of an open file. Return None, or after `seconds` who holds it, in words.

    `tell` is told who holds it, once, when it takes longer. The lock ends with its process.
    """
    began, told = time.monotonic(), tell is None
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited >= seconds:
                return holder(handle)
            if not told and tell is not None and waited >= TELL_SECONDS:
                told = True
                tell(holder(handle))
        time.sleep(LOOK_SECONDS)


def holder(handle: int) -> str:
    """Say who holds a lock on this open file: "process 12 (python x.py) of user root", as far as it can be seen."""
    found = os.fstat(handle)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return "another process"
    # "1: FLOCK  ADVISORY  WRITE 3012 fd:01:131189 0 EOF"; who waits has "->" before it. Layered file systems tell
    # another device there than stat does.
    held = re.compile(rf"\d+: FLOCK +\S+ +\S+ +(\d+) +(\S+):{found.st_ino} ")
    pids = [(m[2] == device, int(m[1])) for line in lines if (m := held.match(line))]
    return _described(max(pids)[1]) if pids else "another process, which can't be seen from here"


def _described(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"process {pid}"
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = str(owner)
    command = f" ({words[:60]})" if words and owner == os.geteuid() else ""
    return f"process {pid}{command} of user {name}"

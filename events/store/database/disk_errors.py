"""Texts of errors about a disk that can't be written: which disk, how much room it has, what to do."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

__all__ = ["NO_FILE", "full_disk_text", "is_out_of_files", "write_error_text"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FILE = (errno.EMFILE, errno.ENFILE)
NO_FILE = "this process or machine can open no more files: raise the limit of open files (ulimit -n, LimitNOFILE=)"


def is_out_of_files() -> bool:
    """Return True if this process can't open any file now. SQLite then reports only that its file can't be opened."""
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError as e:
        return e.errno in _NO_FILE
    return False


def write_error_text(path: Path, needed_bytes: int, e: OSError) -> str:
    """Explain why a write of about `needed_bytes` to `path` failed with this error, and what to do."""
    if e.errno in _FULL:
        return full_disk_text(path, needed_bytes)
    if e.errno == errno.EROFS:
        return f"the disk of {path} is mounted read-only: mount it for writing, and the run continues by itself"
    if e.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not write to {path}: change its rights, and the run continues by itself"
    if e.errno in _NO_FILE:
        return f"{NO_FILE}, and the run continues by itself"
    if e.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"{path} is gone: it was renamed or deleted; put it back, and the run continues by itself"
    return f"the disk of {path} fails: the machine's log (dmesg) says more"


def full_disk_text(path: Path, needed_bytes: int) -> str:
    """Describe the free space on the disk of `path` after a write of `needed_bytes` failed, and what to do."""
    for folder in (path, *path.parents):
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            continue
        break
    else:
        return f"no free space can be read for the disk of {path}: free some there, and the run continues by itself"
    free, total, needed = map(_size_text, (usage.free, usage.total, needed_bytes))
    sizes = f"{free} of {total} are free, about {needed} are needed"
    if usage.free < needed_bytes:
        return f"the disk of {folder} is full ({sizes}): free space there, and the run continues by itself"
    return (f"the disk of {folder} takes no more ({sizes}, so a quota, a limit of file sizes or the disk itself stops "
            "it): free space or lift the limit, and the run continues by itself")


def _size_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"

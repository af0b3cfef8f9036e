"""Limit on the size of log files.

Many processes write to them: by loggers, by `print`, and directly to descriptor 1. No logging handler sees all of it,
so a file that grew too long is copied and truncated in place. All writers have it open for appending, so they go on at
its new end.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable

__all__ = ["MAX_BYTES", "cut_long_files", "standard_output_file"]

MAX_BYTES = 10 * 1024 * 1024
"""Maximum size in bytes of a log file, and of the copy beside it. Until the next check the file may grow beyond it."""

_log = logging.getLogger("trinity_es.log_files")


def standard_output_file() -> str | None:
    """Return the path of the file that this process's standard output goes to; None if it does not go to a file."""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/1")
        if os.path.isfile(path):
            return path
    return None


def cut_long_files(paths: Iterable[str], max_bytes: int = MAX_BYTES) -> list[str]:
    """Truncate each file above `max_bytes`, and return these files. Their last `max_bytes` replace `FILE.1`. Never
    raises. If the disk is full, the copy is left out."""
    cut_files = []
    for path in paths:
        try:
            if os.stat(path).st_size > max_bytes:
                _cut_file(path, max_bytes)
                cut_files.append(path)
        except OSError as e:
            _log.debug("%s can't be cut: %s", path, e)
    return cut_files


def _cut_file(path: str, max_bytes: int) -> None:
    """Copy the last `max_bytes` of a file to `FILE.1`, then replace its content by a line that says so."""
    with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_APPEND)) as file:
        size = file.seek(0, os.SEEK_END)
        copy_note = f"the last {max_bytes >> 20} MiB of that are in {path}.1"
        try:
            file.seek(size - max_bytes)
            with open(f"{path}.1", "wb") as copy:
                copy.write(file.read(max_bytes))
        except OSError as e:
            copy_note = f"it is gone ({e.strerror})"
        file.truncate(0)
        limit = f"{max_bytes >> 20} MiB"
        file.write(f"(this file was cut: more than {limit} had been written, {size} bytes; {copy_note})\n".encode())

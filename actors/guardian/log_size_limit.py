"""Limit on the size of log files, whichever process writes to them.

A system's processes, their workflows and the programs that these start write by loggers, by `print`, and directly to
descriptor 1. No logging handler sees all of it, so a file that grew too long is copied and truncated in place. All
writers have it open for appending and go on at its new end without waiting.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable

__all__ = ["MOST_BYTES", "cut", "printed_to"]

MOST_BYTES = 10 * 1024 * 1024
"""Maximum size in bytes of a log file, and of the copy beside it. Until the next check the file may grow beyond it."""

_log = logging.getLogger("trinity_es.log_files")


def printed_to() -> str | None:
    """Return the file that is this process's standard output; None if that is no file."""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/1")
        if os.path.isfile(path):
            return path
    return None


def cut(paths: Iterable[str], most: int = MOST_BYTES) -> list[str]:
    """Truncate each file that grew beyond `most` bytes, and return these files.

    The last `most` bytes replace `FILE.1`. Never raises: if the disk is full, there is no copy.
    """
    cut_files = []
    for path in paths:
        try:
            if os.stat(path).st_size > most:
                _cut(path, most)
                cut_files.append(path)
        except OSError as e:
            _log.debug("%s can't be cut: %s", path, e)
    return cut_files


def _cut(path: str, most: int) -> None:
    with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_APPEND)) as file:
        size = file.seek(0, os.SEEK_END)
        copy_note = f"the last {most >> 20} MiB of that are in {path}.1"
        try:
            file.seek(size - most)
            with open(f"{path}.1", "wb") as copy:
                copy.write(file.read(most))
        except OSError as e:
            copy_note = f"it is gone ({e.strerror})"
        file.truncate(0)
        file.write(
            f"(this file was cut: more than {most >> 20} MiB had been written, {size} bytes; {copy_note})\n".encode())

"""Log files that stay small, whoever writes to them.

A system's processes, their workflows and what these start all print to files that they have open: by loggers, by
`print`, and straight to descriptor 1. No handler sees all of that, so a file that grew too long is copied and cut to
nothing in place: everybody has it open for appending, and goes on at its new end. Nobody waits for anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable

__all__ = ["MOST_BYTES", "cut", "printed_to"]

MOST_BYTES = 10 * 1024 * 1024
"""Maximum size of a log file in bytes, give or take what is written between two looks; the one before it is as big."""

_log = logging.getLogger("trinity_es.log_files")


def printed_to() -> str | None:
    """Return the file that this process, and whoever it started, prints to; None where that is no file."""
    with contextlib.suppress(OSError):
        path = os.readlink("/proc/self/fd/1")
        if os.path.isfile(path):
            return path
    return None


def cut(paths: Iterable[str], most: int = MOST_BYTES) -> list[str]:
    """Cut those of these files that grew beyond `most` bytes, and return them; the end of each is kept beside it.

    `FILE.1` has the last `most` bytes, in place of those of the time before. Never raises: where a disk is full there
    is no copy.
    """
    found = []
    for path in paths:
        try:
            if os.stat(path).st_size > most:
                _cut(path, most)
                found.append(path)
        except OSError as e:
            _log.debug("%s can't be cut: %s", path, e)
    return found


def _cut(path: str, most: int) -> None:
    with open(path, "r+b", opener=_appending) as file:
        size = file.seek(0, os.SEEK_END)
        kept = f"the last {most >> 20} MiB of that are in {path}.1"
        try:
            file.seek(size - most)
            with open(f"{path}.1", "wb") as copy:
                copy.write(file.read(most))
        except OSError as e:
            kept = f"it is gone ({e.strerror})"
        file.truncate(0)
        file.write(f"(this file was cut: more than {most >> 20} MiB had been written, {size} bytes; {kept})\n".encode())


def _appending(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_APPEND)

"""Files that appear whole or not at all: written under another name, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["sync", "whole_file"]


@contextlib.contextmanager
def whole_file(
    path: Path, *, durable: bool = False, mode: int | None = None, prefix: str = ".unfinished-"
) -> Iterator[IO[bytes]]:
    """Yield a temporary file to write, and rename it to `path` when the block ends. On any error delete it.

    With `durable`, sync file and name to the disk. `mode` is 0600 by default; the temporary name begins with `prefix`.
    """
    handle, temporary_path = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(handle)
        if mode is not None:
            os.chmod(temporary_path, mode)
        os.replace(temporary_path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary_path)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

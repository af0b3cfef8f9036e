"""Where a SQLite log lies: whether its path still names the file that this process has open.

SQLite writes on into a file that was renamed, replaced or deleted, and says nothing: what is committed there has no
name, and is gone with the last process that has it open. Only the file's device and inode tell. The same holds for the
two files beside it, the write-ahead log and its index, which every connection opens anew by name.

A log is the file that was opened first. While its path names another one, or none, nothing is written and nothing is
acknowledged (`LogReplaced`); when the path names it again all goes on. A whole copy is not the file: a process that
was started on it takes it, one that runs does not, since its pages would be read together with a write-ahead log of
another state.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path
from typing import Any

from trinity_es.events.errors import LogCorrupt, LogReplaced

__all__ = ["BesideGone", "Place"]

_CONNECTION: dict[str, Any] = {"check_same_thread": False, "isolation_level": None, "timeout": 5.0, "uri": True}
"""isolation_level None: the driver begins no transaction of its own."""

_PAGES = slice(28, 32)
"""Where the header of a database says how many pages it has."""

Named = tuple[int, int]
"""Device and inode."""


class BesideGone(Exception):
    """The write-ahead log or its index lost its name, and the file itself did not: what they hold can be saved."""


class Place:
    """The files of one log as one process opened them. The caller keeps threads apart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reading = False
        self._file: Named | None = None
        self._size = 0
        self._real = str(path)
        self._beside: dict[str, tuple[Named, int]] = {}

    def connect(self, *, read_only: bool) -> sqlite3.Connection:
        """Open the file, or make it where none was opened yet. Raises LogReplaced, sqlite3.Error."""
        try:
            self._reading = read_only
            if self._file is not None:
                self._opened()
            if read_only:
                connection = _connect_to_read(self.path)
            else:  # what was there is not made again, empty, where somebody deleted it
                mode = "rwc" if self._file is None else "rw"
                connection = sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", **_CONNECTION)
            try:
                self._opened()
            except BaseException:
                connection.close()
                raise
        except BesideGone as e:
            raise self.gone(e) from None
        return connection

    def _opened(self) -> None:
        """Take note of the file that a connection is about to open, or just opened. Raises LogReplaced."""
        found = self._stat()
        if self._file is None:
            self._file, self._size, self._real = _named(found), found.st_size, os.path.realpath(self.path)
        elif _named(found) != self._file:
            raise self._replaced()
        for name in self._beside:
            self._look_beside(name)

    @property
    def named(self) -> Named | None:
        """Device and inode of the file; None before it was opened."""
        return self._file

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log, as it was when it was looked at last."""
        return self._beside.get(f"{self._real}-wal", ((0, 0), 0))[1]

    def require(self) -> None:
        """See that what is committed now has a name. Raises LogReplaced, LogCorrupt, BesideGone.

        To be called inside a writing transaction, before its commit and after it: a few calls of `stat`.
        """
        found = self._stat()
        if _named(found) != self._file:
            raise self._replaced()
        if found.st_size < self._size and self._is_cut(found.st_size):
            raise LogCorrupt(
                f"{self.path} was cut from {self._size} to {found.st_size} bytes while it was in use; nothing was "
                "acknowledged: stop all writers and restore the last good copy"
            )
        self._size = found.st_size
        for suffix in ("-wal", "-shm"):
            name = self._real + suffix
            if name in self._beside:
                self._look_beside(name)
            else:
                try:
                    there = os.stat(name)
                except OSError:
                    raise BesideGone(f"{name} is gone") from None
                self._beside[name] = _named(there), there.st_size

    def is_replaced(self) -> bool:
        """Return True if another file lies there now; not where none does."""
        try:
            return self._file is not None and _named(os.stat(self.path)) != self._file
        except OSError:
            return False

    def forget_beside(self) -> None:
        """Take whatever lies beside the file next: every connection was closed."""
        self._beside.clear()

    def beside_is_empty(self) -> bool:
        """Return True if nobody wrote into a write-ahead log that took the place of ours."""
        try:
            found = os.stat(f"{self._real}-wal")
        except FileNotFoundError:
            return True
        known = self._beside.get(f"{self._real}-wal")
        return found.st_size == 0 or (known is not None and known[0] == _named(found))

    def gone(self, why: BesideGone) -> LogReplaced:
        """Return the error for what could not be saved yet."""
        return LogReplaced(
            f"{why} while the log was in use; nothing was acknowledged. What it held is still in this process, and is "
            "moved into the log as soon as nobody reads there; leave the process alone until then", path=str(self.path)
        )

    def _look_beside(self, name: str) -> None:
        known, size = self._beside[name]
        try:
            found = os.stat(name)
        except OSError:
            raise BesideGone(f"{name} was renamed or deleted") from None
        if _named(found) != known:
            raise BesideGone(f"{name} was replaced by another file")
        if found.st_size < size and name.endswith("-wal") and self._is_wal_cut(found.st_size):
            raise LogCorrupt(
                f"{name} was cut from {size} to {found.st_size} bytes while it was in use: events that were "
                "acknowledged are gone; stop all writers and restore the last good copy"
            )
        self._beside[name] = known, found.st_size

    def _stat(self) -> os.stat_result:
        try:
            return os.stat(self.path)
        except OSError as e:
            if self._reading:
                raise LogReplaced(
                    f"{self.path} is gone ({e.strerror}): it or its folder was renamed or deleted while it was read; "
                    "put that file back under this name, and reading goes on", path=str(self.path), missing=True
                ) from None
            raise LogReplaced(
                f"{self.path} is gone ({e.strerror}): it or its folder was renamed or deleted while the log was in "
                "use. Nothing was acknowledged since: put that file back under this name and all goes on, or end the "
                "system with `trinity-es down` and restore a copy", path=str(self.path), missing=True
            ) from None

    def _replaced(self) -> LogReplaced:
        if self._reading:
            return LogReplaced(
                f"{self.path} is another file than the one that was read until now: it was renamed over, replaced, or "
                "a link was switched; open it again to read what is there, from its start", path=str(self.path),
                missing=False,
            )
        return LogReplaced(
            f"{self.path} is another file than the one that is in use: it was renamed over, replaced, or a link was "
            "switched. Nothing was acknowledged since: put the file that was there back under this name and all goes "
            "on, or end the system with `trinity-es down` and start it on the file that is there now",
            path=str(self.path), missing=False,
        )

    def _is_cut(self, size: int) -> bool:
        """Return True if the file is shorter than its header says, and was not only made smaller (VACUUM)."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(100)
        except OSError:
            return True
        page = int.from_bytes(head[16:18], "big")
        return len(head) < 100 or int.from_bytes(head[_PAGES], "big") * (65536 if page == 1 else page) > size

    def _is_wal_cut(self, size: int) -> bool:
        """Return True if it is shorter than its index says, and was not only begun anew."""
        with open(self.path, "rb") as file:
            page = int.from_bytes(file.read(18)[16:18], "big")
        used = max(frames_in_use(Path(self._real)).values(), default=0)
        return size < used * (24 + (65536 if page == 1 else page))


def _named(found: os.stat_result) -> Named:
    return found.st_dev, found.st_ino


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a connection that can't write the log, also where it can't write beside it.

    SQLite reads a database with a write-ahead log through a shared-memory file, which it makes where there is none. In
    a folder that this user can't write to, with no writer at work, it can only be read as one that does not change
    ("immutable"); that holds for a moment and not for the life of a pooled connection.
    """
    connection: sqlite3.Connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", **_CONNECTION)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as e:
        connection.close()
        if e.sqlite_errorname not in ("SQLITE_CANTOPEN", "SQLITE_READONLY_DIRECTORY") or _has_content(f"{path}-wal"):
            raise
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", **_CONNECTION)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _has_content(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False


def frames_in_use(path: Path) -> dict[bytes, int]:
    """Return how many frames SQLite's index of the write-ahead log counts, by the log's salts; {} where it can't tell.

    What lies behind them was never committed, though its commit may be there: a writer was killed before it could count
    it, and a smaller one was written over its beginning. To be asked before the log is opened: who opens it first, only
    to read, makes the index anew from what it can read. Such an index has seen no commit, and is not believed.
    """
    try:
        with Path(f"{path}-shm").open("rb") as file:
            index = file.read(96)
    except OSError:
        return {}
    if len(index) < 96 or index[:48] != index[48:] or not index[12] or not any(index[8:12]):
        return {}
    return {index[32:40]: struct.unpack_from("=I", index, 16)[0]}

"""Checks that the open files of a SQLite log are still at their paths, by device and inode.

SQLite keeps writing into a file that was renamed, replaced or deleted. Such commits are lost when the last process
closes it. The same holds for the write-ahead log and its index (the sidecars), which each connection opens by name.

While another file or none is at the path, nothing is written or acknowledged (`LogReplaced`). A new process accepts a
copy there. A running process does not, because it would combine the copy with a write-ahead log of another state.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path
from typing import Any

from trinity_es.events.errors import LogCorrupt, LogReplaced

__all__ = ["OpenedFiles", "SidecarGone"]

_CONNECTION: dict[str, Any] = {"check_same_thread": False, "isolation_level": None, "timeout": 5.0, "uri": True}
"""With isolation_level None the driver begins no transaction by itself."""

_PAGE_COUNT = slice(28, 32)
"""Bytes of the database file's header that hold the number of pages."""
FileId = tuple[int, int]
"""Device and inode."""


class SidecarGone(Exception):
    """The write-ahead log or its index is no longer at its path. The log itself is, so the content can be saved."""


class OpenedFiles:
    """Files of one SQLite log that a process has open. Not safe for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: FileId | None = None
        """Identity of the log's file; None before it is opened."""
        self._read_only = False
        self._size = 0  # of the file at the last check
        self._real = str(path)  # resolved when the file is opened
        self._sidecars: dict[str, tuple[FileId, int]] = {}
        """Identity and last known size of the write-ahead log and its index, by name."""

    def connect(self, *, read_only: bool) -> sqlite3.Connection:
        """Open a connection. The first call creates a missing file. Raises LogReplaced, sqlite3.Error."""
        try:
            self._read_only = read_only
            if self.file is not None:
                self._note_file()
            if read_only:
                connection = _connect_to_read(self.path)
            else:  # later calls don't recreate a deleted file
                mode = "rwc" if self.file is None else "rw"
                connection = sqlite3.connect(f"{self.path.as_uri()}?mode={mode}", **_CONNECTION)
            try:
                self._note_file()
            except BaseException:
                connection.close()
                raise
        except SidecarGone as e:
            raise self.gone_error(e) from None
        return connection

    def _note_file(self) -> None:
        """Remember which file the log is, at the first call; later raise LogReplaced if another one is at its path."""
        status = self._file_status()
        if self.file is None:
            self.file, self._size, self._real = _file_id(status), status.st_size, os.path.realpath(self.path)
        elif _file_id(status) != self.file:
            raise self._replaced_error()
        for name in self._sidecars:
            self._check_sidecar(name)

    @property
    def wal_bytes(self) -> int:
        """Size of the write-ahead log at the last check."""
        return self._sidecars.get(f"{self._real}-wal", ((0, 0), 0))[1]

    def require_names(self) -> None:
        """Check that the log's files are still at their paths. Raises LogReplaced, LogCorrupt, SidecarGone.

        Call this in a writing transaction before the commit, and again after the commit. It costs some calls of `stat`.
        """
        status = self._file_status()
        if _file_id(status) != self.file:
            raise self._replaced_error()
        if status.st_size < self._size and self._is_cut(status.st_size):
            raise LogCorrupt(
                f"{self.path} was cut from {self._size} to {status.st_size} bytes while it was in use, so nothing was "
                "acknowledged: stop all writers and restore the last good copy"
            )
        self._size = status.st_size
        for suffix in ("-wal", "-shm"):
            self._check_sidecar(self._real + suffix)

    def is_replaced(self) -> bool:
        """Return True if another file is now at the log's path, False if it is the same file or none."""
        try:
            return self.file is not None and _file_id(os.stat(self.path)) != self.file
        except OSError:
            return False

    def forget_sidecars(self) -> None:
        """Forget the sidecars' identities, when all connections are closed. New ones are then accepted."""
        self._sidecars.clear()

    def new_wal_is_empty(self) -> bool:
        """Return True unless another write-ahead log is at ours' path and a process wrote into it."""
        try:
            status = os.stat(f"{self._real}-wal")
        except FileNotFoundError:
            return True
        own_wal = self._sidecars.get(f"{self._real}-wal")
        return status.st_size == 0 or (own_wal is not None and own_wal[0] == _file_id(status))

    def gone_error(self, cause: SidecarGone) -> LogReplaced:
        """Return the error to raise until the content of a write-ahead log that lost its name is saved."""
        return LogReplaced(
            f"{cause} while the log was in use; nothing was acknowledged. This process still has its content, and "
            "moves it into the log as soon as no other process reads the log: do not end this process before",
            path=str(self.path)
        )

    def _check_sidecar(self, name: str) -> None:
        """Check that a sidecar is the same file and not cut, and note its size. Raises SidecarGone, LogCorrupt."""
        try:
            status = os.stat(name)
        except OSError:
            raise SidecarGone(f"{name} was renamed or deleted") from None
        file, size = self._sidecars.get(name, (_file_id(status), 0))
        if _file_id(status) != file:
            raise SidecarGone(f"{name} was replaced by another file")
        if status.st_size < size and name.endswith("-wal") and self._is_wal_cut(status.st_size):
            raise LogCorrupt(
                f"{name} was cut from {size} to {status.st_size} bytes while it was in use: events that were "
                "acknowledged are gone; stop all writers and restore the last good copy"
            )
        self._sidecars[name] = file, status.st_size

    def _file_status(self) -> os.stat_result:
        """Return the status of the file at the log's path. Raises LogReplaced if there is none."""
        try:
            return os.stat(self.path)
        except OSError as e:
            problem = f"{self.path} is gone ({e.strerror}): it or its folder was renamed or deleted while "
            if self._read_only:
                problem += "it was read; put that file back under this name, and reading goes on"
            else:
                problem += ("the log was in use. Nothing was acknowledged since: put that file back under this name to "
                            "continue, or end the system with `trinity-es down` and restore a copy")
            raise LogReplaced(problem, path=str(self.path), missing=True) from None

    def _replaced_error(self) -> LogReplaced:
        use = "was read until now" if self._read_only else "is in use"
        advice = "; open it again to read what is there, from its start" if self._read_only else (
            ". Nothing was acknowledged since: put the earlier file back under this name to continue, or end the "
            "system with `trinity-es down` and start it on the file that is there now")
        return LogReplaced(
            f"{self.path} is another file than the one that {use}: it was renamed over, replaced, or a link was "
            f"switched{advice}", path=str(self.path), missing=False,
        )

    def _is_cut(self, size: int) -> bool:
        """Return True if a file of this size is shorter than its header says. After VACUUM it is not."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(100)
        except OSError:
            return True
        return len(head) < 100 or int.from_bytes(head[_PAGE_COUNT], "big") * _page_bytes(head) > size

    def _is_wal_cut(self, size: int) -> bool:
        """Return True if a write-ahead log of this size is shorter than its index says. After a restart it is not."""
        with open(self.path, "rb") as file:
            page_bytes = _page_bytes(file.read(18))
        used_frames = max(frames_in_use(Path(self._real)).values(), default=0)
        return size < used_frames * (24 + page_bytes)  # a frame is a header and a page


def _page_bytes(head: bytes) -> int:
    """Return the page size from a database file's header, in which 1 stands for 65,536."""
    stored = int.from_bytes(head[16:18], "big")
    return 65536 if stored == 1 else stored


def _file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Open a read-only connection, even if this user can't write to the log's folder.

    SQLite reads a write-ahead log through a shared-memory file, and creates a missing one. If this user can't write to
    the folder and no writer is active, it can only open the log as "immutable". The log may change at any time, so
    don't keep such a connection.
    """
    connection: sqlite3.Connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", **_CONNECTION)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error as e:
        connection.close()
        wal = Path(f"{path}-wal")
        try:
            has_content = wal.stat().st_size > 0
        except OSError:
            has_content = False
        name = getattr(e, "sqlite_errorname", "")
        if name not in ("SQLITE_CANTOPEN", "SQLITE_READONLY_DIRECTORY") or has_content:
            raise
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", **_CONNECTION)
    return connection


def frames_in_use(path: Path) -> dict[bytes, int]:
    """Return {salts of the write-ahead log: number of committed frames}, read from SQLite's index of that log.

    Return {} if the index is unusable, as before the first commit. Frames beyond this number were never committed, even
    if a commit record follows: a killed writer did not count them, or they are left from an earlier, longer log.
    """
    # The index begins with two copies of a header of 48 bytes: 8 to 11 count its changes, 12 is 1 once it is valid,
    # 16 to 19 count the frames, 32 to 39 are the salts.
    try:
        with Path(f"{path}-shm").open("rb") as file:
            index = file.read(96)
    except OSError:
        return {}
    if len(index) < 96 or index[:48] != index[48:] or not index[12] or not any(index[8:12]):
        return {}
    return {index[32:40]: struct.unpack_from("=I", index, 16)[0]}

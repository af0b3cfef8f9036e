"""Identity of a SQLite log's files: whether its path still leads to the file that this process has open.

SQLite silently writes on into a file that was renamed, replaced or deleted; such commits are lost with the last process
that has it open. Only device and inode reveal it. The same holds for the write-ahead log and its index, which every
connection opens by name.

While the path leads to another file or none, nothing is written or acknowledged (`LogReplaced`). A new process accepts
a copy in its place. A running one does not: it would combine the copy with a write-ahead log of another state.
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
"""isolation_level None: the driver begins no transaction of its own."""

_PAGE_COUNT = slice(28, 32)
"""Bytes of a database's header that hold its number of pages."""
FileId = tuple[int, int]
"""Device and inode."""


class SidecarGone(Exception):
    """A sidecar (the write-ahead log or its index) lost its name. The log kept its own, so the content can be saved."""


class OpenedFiles:
    """Files of one SQLite log as one process opened them. The caller keeps threads apart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: FileId | None = None
        """Identity of the log's file; None before it was opened."""
        self._read_only = False
        self._size = 0  # of the file at the last check
        self._real = str(path)  # without links, once it was opened
        self._sidecars: dict[str, tuple[FileId, int]] = {}
        """Identity and last known size of the write-ahead log and its index, by name."""

    def connect(self, *, read_only: bool) -> sqlite3.Connection:
        """Open the file; the first call creates it if it is missing. Raises LogReplaced, sqlite3.Error."""
        try:
            self._read_only = read_only
            if self.file is not None:
                self._note_file()
            if read_only:
                connection = _connect_to_read(self.path)
            else:  # a file that was deleted meanwhile is not recreated, empty
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
        """Remember the file that a connection is about to open, or just opened. Raises LogReplaced."""
        status = self._stat()
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
        """Require that the files of the log still have their names. Raises LogReplaced, LogCorrupt, SidecarGone.

        Call this in a writing transaction before the commit, and again after the commit. Costs only some calls of
        `stat`.
        """
        status = self._stat()
        if _file_id(status) != self.file:
            raise self._replaced_error()
        if status.st_size < self._size and self._is_cut(status.st_size):
            raise LogCorrupt(
                f"{self.path} was cut from {self._size} to {status.st_size} bytes while it was in use, so nothing was "
                "acknowledged: stop all writers and restore the last good copy"
            )
        self._size = status.st_size
        for suffix in ("-wal", "-shm"):
            name = self._real + suffix
            if name in self._sidecars:
                self._check_sidecar(name)
            else:
                try:
                    sidecar = os.stat(name)
                except OSError:
                    raise SidecarGone(f"{name} was deleted") from None
                self._sidecars[name] = _file_id(sidecar), sidecar.st_size

    def is_replaced(self) -> bool:
        """Return True if the path now leads to another file; False also if it leads to none."""
        try:
            return self.file is not None and _file_id(os.stat(self.path)) != self.file
        except OSError:
            return False

    def forget_sidecars(self) -> None:
        """Accept any sidecars from now on, since every connection was closed."""
        self._sidecars.clear()

    def new_wal_is_empty(self) -> bool:
        """Return True if no process wrote into a write-ahead log that replaced ours."""
        try:
            status = os.stat(f"{self._real}-wal")
        except FileNotFoundError:
            return True
        own_wal = self._sidecars.get(f"{self._real}-wal")
        return status.st_size == 0 or (own_wal is not None and own_wal[0] == _file_id(status))

    def gone_error(self, cause: SidecarGone) -> LogReplaced:
        """Return the error to raise while the content of a write-ahead log that lost its name is not saved yet."""
        return LogReplaced(
            f"{cause} while the log was in use; nothing was acknowledged. This process still has its content, and "
            "moves it into the log as soon as no other process reads the log: do not end this process before",
            path=str(self.path)
        )

    def _check_sidecar(self, name: str) -> None:
        """Require that a sidecar is the same file, uncut, and note its size. Raises SidecarGone, LogCorrupt."""
        file, size = self._sidecars[name]
        try:
            status = os.stat(name)
        except OSError:
            raise SidecarGone(f"{name} was renamed or deleted") from None
        if _file_id(status) != file:
            raise SidecarGone(f"{name} was replaced by another file")
        if status.st_size < size and name.endswith("-wal") and self._is_wal_cut(status.st_size):
            raise LogCorrupt(
                f"{name} was cut from {size} to {status.st_size} bytes while it was in use: events that were "
                "acknowledged are gone; stop all writers and restore the last good copy"
            )
        self._sidecars[name] = file, status.st_size

    def _stat(self) -> os.stat_result:
        """Return the status of the log's file. Raises LogReplaced if no file has its name."""
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
        """Return True if the file is shorter than its header says, and did not only shrink by VACUUM."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(100)
        except OSError:
            return True
        page_bytes = _page_bytes(head)
        return len(head) < 100 or int.from_bytes(head[_PAGE_COUNT], "big") * page_bytes > size

    def _is_wal_cut(self, size: int) -> bool:
        """Return True if the write-ahead log is shorter than its index says, and was not only restarted."""
        with open(self.path, "rb") as file:
            page_bytes = _page_bytes(file.read(18))
        used_frames = max(frames_in_use(Path(self._real)).values(), default=0)
        return size < used_frames * (24 + page_bytes)  # a frame is a header and a page


def _page_bytes(head: bytes) -> int:
    """Return the page size in a database's header, in which 1 stands for 65,536."""
    stored = int.from_bytes(head[16:18], "big")
    return 65536 if stored == 1 else stored


def _file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Return a read-only connection, also if this user can't write to the log's folder.

    SQLite reads a write-ahead log through a shared-memory file, and makes a missing one. In a folder that this user
    can't write to, without an active writer, it can only open the log as one that never changes ("immutable"). The
    log is unchanged for a moment only, so don't keep such a connection.
    """
    connection: sqlite3.Connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", **_CONNECTION)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as e:
        connection.close()
        wal = Path(f"{path}-wal")
        try:
            has_content = wal.stat().st_size > 0
        except OSError:
            has_content = False
        if e.sqlite_errorname not in ("SQLITE_CANTOPEN", "SQLITE_READONLY_DIRECTORY") or has_content:
            raise
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", **_CONNECTION)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def frames_in_use(path: Path) -> dict[bytes, int]:
    """Return the number of frames in SQLite's index of the write-ahead log, by the log's salts.

    {} if the index is unusable, as before the first commit. Frames beyond this number were never committed, even if a
    commit record is there: a killed writer did not count them, and a shorter log was written over their beginning.
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

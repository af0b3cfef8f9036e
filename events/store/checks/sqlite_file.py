"""A SQLite log as a file: what SQLite itself does not say of a file that was changed. Reads only.

SQLite takes many bytes of its header as they are, and from a write-ahead log whatever comes before the first frame
that is not whole: changed there, it goes on without what was committed later, and says nothing. So both are looked at
here, byte by byte, and `PRAGMA integrity_check` is asked for the rest: pages, trees, indexes against their tables.
A writer may be at work: what looks wrong is looked at again a moment later.
"""

from __future__ import annotations

import math
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from trinity_es.events.store.checks.verify import raw_text
from trinity_es.events.store.database.file_identity import frames_in_use

__all__ = ["check_file", "check_pages"]

MAGIC = b"SQLite format 3\0"
TRIES, PAUSE = 4, 0.15
"""Number of looks at what seems wrong, and seconds between two."""

MOST = 100
"""Maximum number of problems that SQLite is asked for."""

_FIXED = (
    (21, 1, 64, "largest share of a key on a page"), (22, 1, 32, "smallest share"), (23, 1, 32, "share of a leaf"),
    (44, 4, 4, "schema format"), (48, 4, 0, "cache size"), (56, 4, 1, "text encoding"), (60, 4, 0, "user version"),
    (64, 4, 0, "incremental vacuum"), (68, 4, 0, "application id"), (72, 20, 0, "reserved"),
)
"""Offset, length and value of what is the same in every log's header."""

_WAL_MAGIC = (0x377F0682, 0x377F0683)
_WAL_VERSION = 3007000
_WAL_HEADER, _FRAME_HEADER = 32, 24


def check_file(path: Path, in_use: dict[bytes, int] | None = None) -> tuple[list[str], list[str]]:
    """(problems, notes) of the file's header and of its write-ahead log. Raises OSError where they can't be read.

    `in_use`: what `frames_in_use` said before the log was opened.
    """
    problems = _steadily(lambda: _header(path))
    found = _steadily(lambda: _wal(path, frames_in_use(path) or in_use or {}))
    cut = [p for p in found if p.startswith(_CUT)]
    return [*problems, *(p for p in found if p not in cut)], cut


def _steadily(look: Callable[[], list[str]]) -> list[str]:
    """Return the problems that stay when a writer that was in the middle of something is done."""
    seen = look()
    for _ in range(TRIES - 1):
        if not seen:
            break
        time.sleep(PAUSE)
        again = look()
        seen = [problem for problem in seen if problem in again]
    return seen


def _header(path: Path) -> list[str]:
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) < 100:
        return [f"{path}: it has {len(head)} bytes, the header of a database alone has 100"]
    if head[:16] != MAGIC:
        return [f"{path}: bytes 0 to 15 of its header are {head[:16]!r}, not {MAGIC!r}: it is no SQLite database, or "
                "they were changed"]
    problems = []

    def wrong(offset: int, length: int, what: str, found: object, expected: object) -> None:
        problems.append(f"{path}: its header, bytes {offset} to {offset + length - 1} ({what}): {found}, where "
                        f"{expected} belongs")

    if head[18] != head[19] or head[18] not in (1, 2):
        wrong(18, 2, "format for writers and readers", f"{head[18]} and {head[19]}", "2 and 2")
    no_table_yet = head[40:44] == bytes(4)  # all of it is still in the write-ahead log
    for offset, length, expected, what in _FIXED:
        if no_table_yet and offset in (44, 56):
            continue
        found = int.from_bytes(head[offset : offset + length], "big")
        if found != expected:
            wrong(offset, length, what, found, expected)
    changes, valid_for = head[24:28].hex(), head[92:96].hex()
    if changes != valid_for:
        problems.append(f"{path}: its header, bytes 24 to 27 (change counter) and 92 to 95 (the change of the "
                        f"size): {changes} and {valid_for}, where they must be the same")
    size = int.from_bytes(head[16:18], "big")
    size = 65536 if size == 1 else size
    pages = int.from_bytes(head[28:32], "big")
    if not _has_frames(path) and pages * size != path.stat().st_size:
        wrong(28, 4, "pages", f"{pages} of {size} bytes", f"{path.stat().st_size} bytes in all")
    return problems


def _has_frames(path: Path) -> bool:
    wal = Path(f"{path}-wal")
    return wal.exists() and wal.stat().st_size > _WAL_HEADER


_CUT = "the write-ahead log ends"


def _wal(path: Path, in_use: dict[bytes, int]) -> list[str]:
    """Return what is wrong with the write-ahead log: a commit of its present round after a frame that SQLite stops at.

    Frames without a commit after them are what a writer left that was killed in the middle of one.
    """
    wal = Path(f"{path}-wal")
    try:
        file = wal.open("rb")
    except FileNotFoundError:
        return []
    with file:
        head = file.read(_WAL_HEADER)
        if len(head) < _WAL_HEADER:
            return [] if not head else [f"{wal}: it has {len(head)} bytes, its header alone has {_WAL_HEADER}"]
        magic, version, size, _, salt1, salt2, sum1, sum2 = struct.unpack(">8I", head)
        order = ">" if magic & 1 else "<"
        if magic not in _WAL_MAGIC or version != _WAL_VERSION or _sum(order, head[:24]) != (sum1, sum2) or not size:
            return [f"{wal}: its header (bytes 0 to {_WAL_HEADER - 1}) was changed: SQLite takes nothing of it"]
        last, broken, number, end = (sum1, sum2), 0, 0, in_use.get(head[16:24], math.inf)
        while number < end and len(frame := file.read(_FRAME_HEADER + size)) == _FRAME_HEADER + size:
            number += 1
            _, commits, frame_salt1, frame_salt2, sum1, sum2 = struct.unpack(">6I", frame[:_FRAME_HEADER])
            present = (frame_salt1, frame_salt2) == (salt1, salt2)
            if broken:
                if present and commits:
                    return [f"{wal}: frame {broken} (bytes {_place(broken, size)} to {_place(broken + 1, size) - 1}) "
                            "was changed: SQLite takes nothing from it on, and a commit follows it"]
                if not present and number > broken + 1:
                    break
                continue
            last = _sum(order, frame[:8] + frame[_FRAME_HEADER:], last)
            if not present or last != (sum1, sum2):
                broken = number
                cut = present
    if broken and cut:
        return [f"{_CUT} in a frame that is not whole (frame {broken} of {wal}): a commit that a crash cut off and "
                "nobody was told of, or it was changed"]
    return []


def _place(frame: int, size: int) -> int:
    return _WAL_HEADER + (frame - 1) * (_FRAME_HEADER + size)


def _sum(order: str, data: bytes, start: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return SQLite's checksum of a write-ahead log."""
    a, b = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for i in range(0, len(words), 2):
        a = (a + words[i] + b) & 0xFFFFFFFF
        b = (b + words[i + 1] + a) & 0xFFFFFFFF
    return a, b


def check_pages(connection: Connection) -> list[str]:
    """Return what SQLite finds wrong with the pages, trees and indexes of this log."""
    try:
        with raw_text(connection):
            lines = [str(row[0]) for row in connection.execute(text(f"PRAGMA integrity_check({MOST})"))]
    except (DBAPIError, UnicodeDecodeError) as e:
        return [f"the database file: its pages can't be checked: {getattr(e, 'orig', e)}"]
    if lines == ["ok"]:
        return []
    try:
        roots = {str(row[1]): row[0] for row in connection.execute(text("SELECT name, rootpage FROM sqlite_master"))}
    except (DBAPIError, UnicodeDecodeError):
        roots = {}
    parts = [part for line in lines for part in line.splitlines() if part.strip() and not part.startswith("***")]
    return [f"the database file: {_named(part, roots)}" for part in parts]


def _named(line: str, roots: dict[str, str]) -> str:
    """ "Tree 7 page 9: ..." with the name of the table or index that the tree is."""
    return re.sub(r"^(On tree|Tree) (\d+)", lambda m: f"{roots.get(m[2], 'tree')} ({m[1].lower()} {m[2]})", line)

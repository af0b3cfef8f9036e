"""What each byte of a SQLite database file is for: for tests that change one and have to say where it was.

Follows the file format as sqlite.org/fileformat2.html tells it: the header, the trees from their roots, overflow pages,
the list of free pages. A checkpointed file without auto-vacuum is expected.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

NOTHING = frozenset({"gap", "freeblock", "fragment", "free page", "overflow slack"})
"""Kinds of bytes that hold nothing."""

_HEADER = [
    (0, 40, "header"), (40, 44, "schema cookie"), (44, 96, "header"), (96, 100, "version of SQLite"),
]


@dataclass(frozen=True)
class Place:
    """Bytes `start` to `end` (exclusive) of the file."""

    start: int
    end: int
    kind: str
    tree: str = ""
    """The table or index that it belongs to."""


def places(path: Path) -> list[Place]:
    """Every byte of the file, in order."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    roots = [(1, "sqlite_master"), *connection.execute("SELECT rootpage, name FROM sqlite_master WHERE rootpage > 0")]
    connection.close()
    file = _File(path.read_bytes())
    for root, name in roots:
        file.tree(root, name)
    file.free()
    found = sorted(file.found, key=lambda p: p.start)
    for one, other in pairwise(found):
        assert one.end == other.start, (one, other)
    assert found[0].start == 0
    assert found[-1].end == len(file.data)
    return found


@dataclass
class _File:
    data: bytes
    found: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = int.from_bytes(self.data[16:18], "big")
        self.size = 65536 if size == 1 else size

    def u16(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 2], "big")

    def u32(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 4], "big")

    def varint(self, at: int) -> tuple[int, int]:
        """(value, length)."""
        value = 0
        for i in range(8):
            value = value << 7 | self.data[at + i] & 0x7F
            if self.data[at + i] < 0x80:
                return value, i + 1
        return value << 8 | self.data[at + 8], 9

    def tree(self, page: int, name: str) -> None:
        start, end = (page - 1) * self.size, page * self.size
        head = start
        if page == 1:
            self.found += [Place(*place) for place in _HEADER]
            head = 100
        kind = self.data[head]
        interior = kind in (2, 5)
        cells = self.u16(head + 3)
        pointers = head + (12 if interior else 8)
        content = start + (self.u16(head + 5) or 65536)
        self.found.append(Place(head, pointers, "page header", name))
        if cells:
            self.found.append(Place(pointers, pointers + 2 * cells, "pointers", name))
        gap = pointers + 2 * cells
        used: list[Place] = []
        for i in range(cells):
            at = start + self.u16(pointers + 2 * i)
            length = self._cell(at, kind, name)
            used.append(Place(at, at + length, "cell", name))
            if interior:
                self.tree(self.u32(at), name)
        if interior:
            self.tree(self.u32(head + 8), name)
        block = self.u16(head + 1)
        while block:
            at = start + block
            used += [Place(at, at + 4, "freeblock header", name)]
            if (length := self.u16(at + 2)) > 4:
                used.append(Place(at + 4, at + length, "freeblock", name))
            block = self.u16(at)
        self._fill(sorted(used, key=lambda p: p.start), gap, content, end, name)

    def _fill(self, used: list[Place], gap: int, content: int, end: int, name: str) -> None:
        if gap < content:
            self.found.append(Place(gap, content, "gap", name))
        at = content
        for place in [*used, Place(end, end, "")]:
            if at < place.start:
                self.found.append(Place(at, place.start, "fragment", name))
            if place.kind:
                self.found.append(place)
            at = place.end

    def _cell(self, at: int, kind: int, name: str) -> int:
        """Its length on the page; its overflow pages are followed."""
        begin = at
        if kind in (2, 5):
            at += 4
        if kind == 5:
            return at + self.varint(at)[1] - begin
        payload, length = self.varint(at)
        at += length
        if kind == 13:
            at += self.varint(at)[1]
        largest = self.size - 35 if kind == 13 else (self.size - 12) * 64 // 255 - 23
        smallest = (self.size - 12) * 32 // 255 - 23
        if payload <= largest:
            return max(at + payload - begin, 4)
        local = smallest + (payload - smallest) % (self.size - 4)
        local = local if local <= largest else smallest
        self._overflow(self.u32(at + local), payload - local, name)
        return at + local + 4 - begin

    def _overflow(self, page: int, left: int, name: str) -> None:
        while left > 0:
            start, end = (page - 1) * self.size, page * self.size
            here = min(left, self.size - 4)
            self.found.append(Place(start, start + 4 + here, "overflow", name))
            if start + 4 + here < end:
                self.found.append(Place(start + 4 + here, end, "overflow slack", name))
            page, left = self.u32(start), left - here

    def free(self) -> None:
        for page in self._free_pages():
            self.found.append(page)

    def _free_pages(self) -> Iterator[Place]:
        trunk = self.u32(32)
        while trunk:
            start = (trunk - 1) * self.size
            count = self.u32(start + 4)
            yield Place(start, start + 8 + 4 * count, "list of free pages")
            yield Place(start + 8 + 4 * count, start + self.size, "free page")
            for i in range(count):
                leaf = (self.u32(start + 8 + 4 * i) - 1) * self.size
                yield Place(leaf, leaf + self.size, "free page")
            trunk = self.u32(start)

"""Marks and claims about the end of a log, and the file in which a host keeps them. `log_end.py` checks claims.

The keeper process uses this module, so it does not import SQLAlchemy, which would take most of the keeper's memory.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from trinity_es.events.private_files import make_private_folder, open_private

__all__ = ["HERE", "Claim", "Mark", "MemoryFile", "claim_to_dict", "claims_of", "lost_between"]

SIZE = 2048
"""Size of a memory file in bytes. It fits in one page, so that it is written at once."""
MOST_CLAIMS = 6
"""Maximum number of claims in a memory file."""
TRIES = 3
"""Maximum number of reads of a memory file, since another process may be writing it."""
HERE = "this host's memory"
"""`Claim.by` of the marks in a memory file."""


class Mark(NamedTuple):
    """Position of a log and the hash of the event there. The hash covers all events up to that position."""

    generation: str
    position: int
    hash: bytes
    teller: str = ""
    """Id of the coordinator process that sent the mark. A coordinator need not check its own marks."""


class Claim(NamedTuple):
    """Statement of a process or file that the log has the event of a mark."""

    mark: Mark
    by: str
    """Process or file that holds the mark, in words: `a client (pid 12 on host)`."""


def claim_to_dict(claim: Claim) -> dict[str, Any]:
    mark = claim.mark
    return {"generation": mark.generation, "position": mark.position, "hash": mark.hash.hex(), "by": claim.by}


def claims_of(data: Iterable[Mapping[str, Any]]) -> tuple[Claim, ...]:
    """Return the claims that `claim_to_dict` wrote. Raises KeyError, ValueError, TypeError for other data."""
    claims = tuple(Claim(Mark(str(c["generation"]), c["position"], bytes.fromhex(c["hash"])), str(c["by"]))
                   for c in data)
    if any(not isinstance(mark.position, int) or mark.position < 0 for mark, _ in claims):
        raise ValueError(f"the positions of a log must be whole numbers from 0: {claims}")
    return claims


def lost_between(seen: Mark | None, answer: Mark | None) -> str | None:
    """Compare the mark of this process with the mark in an answer. Describe the loss if the answer's log lost events.

    Return None if it lost none, or if the generations differ: only the log shows whether one follows from the other.
    """
    if seen is None or answer is None or seen.generation != answer.generation or answer.position > seen.position:
        return None
    if answer.position < seen.position:
        return f"it has seen position {seen.position}, and the answer says that the log ends at {answer.position}"
    return None if answer.hash == seen.hash else f"it has seen another event at position {seen.position}"


class MemoryFile:
    """File of this host with claims about the log of one store, beside the system's key.

    The coordinator writes the file after each commit, before it answers: in place, with a checksum for concurrent
    readers, and without an fsync. After a loss of power the file may be older than the log, which does no harm.
    """

    def __init__(self, path: Path, url: str) -> None:
        """`path`: the file, which may be missing. `url`: the store's URL or address without a password."""
        self.path, self._url = path, url
        self._fd = -1
        self._lock = threading.Lock()
        self.key: tuple[Any, ...] = ()
        """`StoreIdentity.key` of the store, set when its log is read (`EventLog.remembered_claims`)."""
        self._others: list[Claim] = []
        self.trouble = ""
        """Error of the last write; "" if it succeeded."""

    @classmethod
    def of(cls, url: str, folder: str | Path) -> MemoryFile:
        """Return the memory file of the store at this URL, in this folder of memory files."""
        from trinity_es.events.store.database.urls import place_of  # imports SQLAlchemy

        place = place_of(url)
        digest = hashlib.sha256(place.encode()).hexdigest()[:12]
        return cls(Path(folder) / f"acknowledged-{digest}", place)

    def claims(self, generation: str = "") -> list[Claim]:
        """Return this host's claims about the store's log.

        If this file has no claim of this `generation`, add those from the files of other addresses, because a log may
        have moved or have several addresses. Skip a file if our store is a copy of that file's store.
        """
        claims, _, _ = _read_file(self.path)
        if not generation or any(claim.mark.generation == generation for claim in claims):
            return claims
        for path in sorted(self.path.parent.glob("acknowledged-*")):
            foreign_claims, place, key = _read_file(path)
            if foreign_claims and path != self.path and not self._is_copy(place, key):
                claims += [c for c in foreign_claims if c.mark.generation == generation and c not in claims]
        return claims

    def _is_copy(self, place: str, key: Sequence[Any]) -> bool:
        """Return True if this store was copied from the one at `place`, and not moved: the original still exists."""
        if place.startswith("/"):
            return os.path.exists(place)
        # Without the port: a server that took over from another one has the same data, perhaps without its end.
        return any(a != b for a, b in zip(self.key[:2], key, strict=False) if None not in (a, b))

    def note(self, mark: Mark) -> None:
        """Store this mark as the end of the log. Never raises: `trouble` has the error."""
        with self._lock:
            self._write([Claim(mark, HERE), *self._others])

    def add_claims(self, claims: Iterable[Claim]) -> None:
        """Store false claims of other processes, whose events the log lost, until a person accepts the loss."""
        with self._lock:
            stored_claims, _, _ = _read_file(self.path)
            candidates = dict.fromkeys([*self._others, *stored_claims[1:], *claims])
            self._others = [claim for claim in candidates if claim not in stored_claims[:1]]
            self._write([*stored_claims[:1], *self._others])

    def keep_only(self, mark: Mark) -> None:
        self._others = []
        self.note(mark)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, claims: Sequence[Claim]) -> None:
        """Replace the file's content with these claims. On an error, set `trouble`."""
        try:
            if self._fd < 0:
                make_private_folder(self.path.parent)
                self._fd = open_private(self.path, os.O_RDWR | os.O_NOFOLLOW)
            os.pwrite(self._fd, _file_content(claims[:MOST_CLAIMS], self._url, self.key), 0)
            self.trouble = ""
        except OSError as e:
            self.close()
            self.trouble = f"{self.path}: {e.strerror}"


def _file_content(claims: Sequence[Claim], place: str, key: Sequence[Any]) -> bytes:
    """Return the content of a memory file. Leave out the last claims if they don't fit in SIZE."""
    data = orjson.dumps({"log": place[-512:], "key": list(key), "known": [claim_to_dict(c) for c in claims]})
    if len(data) > SIZE - 10:
        return _file_content(claims[:-1], place, key)
    return (b"%08x %b" % (zlib.crc32(data), data)).ljust(SIZE - 1) + b"\n"


def _read_file(path: Path) -> tuple[list[Claim], str, list[Any]]:
    """Return a memory file's claims, and the address and key of its store. Return ([], "", []) if it is unreadable."""
    for _ in range(TRIES):
        try:
            with path.open("rb") as file:
                check, text = file.read(SIZE).rstrip(b"\0 \n").split(b" ", 1)
            if int(check, 16) == zlib.crc32(text):
                data = orjson.loads(text)
                return list(claims_of(data["known"])), str(data["log"]), list(data.get("key", ()))
        except OSError:
            break
        except (ValueError, KeyError, TypeError):
            pass
    return [], "", []

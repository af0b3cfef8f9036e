"""Marks, claims, and the file that holds a host's claims about a log; `log_end.py` compares them with the log.

The keeper reads this file, so this module imports no SQLAlchemy, which would take most of the keeper's memory.
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

__all__ = ["HERE", "Claim", "Mark", "Memory", "claim_to_dict", "claims_of", "lost_between"]

SIZE = 2048
"""Bytes of a memory file, which fit in one page and are written at once."""
MOST_CLAIMS = 6
"""Maximum number of claims that a memory file keeps."""
TRIES = 3
"""Number of times that a memory file is read if another process may be writing it."""
HERE = "this host's memory"
"""`Claim.by` of the marks in a memory file."""


class Mark(NamedTuple):
    """A position of a log and the hash of the event there, which stand for all events up to it."""

    generation: str
    position: int
    hash: bytes
    teller: str = ""
    """Life of the coordinator that sent it, which need not look up its own marks."""


class Claim(NamedTuple):
    """A statement that the log reaches a mark, and the process or file that makes it."""

    mark: Mark
    by: str
    """Holder of the mark, in words: `a client (pid 12 on host)`."""


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


def lost_between(own: Mark | None, answer: Mark | None) -> str | None:
    """Describe the loss if an answer's log lacks events that this process has seen; None if it lacks none.

    `own`: mark of this process; `answer`: mark in the answer. Marks of two generations can't be compared, because only
    the log shows whether one generation follows from the other.
    """
    if own is None or answer is None or own.generation != answer.generation or answer.position > own.position:
        return None
    if answer.position < own.position:
        return f"it has seen position {own.position}, and the answer says that the log ends at {answer.position}"
    return None if answer.hash == own.hash else f"it has seen another event at position {own.position}"


class Memory:
    """File with this host's claims about the log of one store, of mode 0600, beside the key.

    The coordinator writes the file after every commit, before any answer: in place, with a checksum for concurrent
    readers, and without a flush to the disk. After a loss of power the file may know less than the log, which does no
    harm.
    """

    def __init__(self, path: Path, url: str) -> None:
        """`path`: of the file, which need not exist; `url`: of the store, without a password."""
        self.path, self._url = path, url
        self._fd = -1
        self._lock = threading.Lock()
        self.key: tuple[Any, ...] = ()
        """Key of the store's identity, set when its log is read (`EventLog.remembered_claims`)."""
        self._others: list[Claim] = []
        self.trouble = ""
        """Error of the last write; empty if it succeeded."""

    @classmethod
    def of(cls, url: str, folder: str | Path) -> Memory:
        """Return the memory of a store's log in this folder of memory files."""
        from trinity_es.events.store.database.urls import place_of  # imports SQLAlchemy

        place = place_of(url)
        digest = hashlib.sha256(place.encode()).hexdigest()[:12]
        return cls(Path(folder) / f"acknowledged-{digest}", place)

    def claims(self, generation: str = "") -> list[Claim]:
        """Return this host's claims about the store.

        If no claim under the store's address has this `generation`, claims under other addresses count too, since a log
        may move or have several addresses. Claims about the original of a copy don't count. A store is a copy if the
        original's file still exists, or the original's database has another key.
        """
        claims, _, _ = _read(self.path)
        if not generation or any(claim.mark.generation == generation for claim in claims):
            return claims
        for path in sorted(self.path.parent.glob("acknowledged-*")):
            foreign_claims, place, key = _read(path)
            if foreign_claims and path != self.path and not self._is_copy(place, key):
                claims += [c for c in foreign_claims if c.mark.generation == generation and c not in claims]
        return claims

    def _is_copy(self, place: str, key: Sequence[Any]) -> bool:
        """Return True if this log is a copy of the one at `place`, which still exists."""
        if place.startswith("/"):
            return os.path.exists(place)
        # Without the port: a server that takes over from another has the same data, and may lack its end.
        return any(a != b for a, b in zip(self.key[:2], key, strict=False) if None not in (a, b))

    def note(self, mark: Mark) -> None:
        """Keep this mark as the end of the log. Never raises: `trouble` has the error."""
        with self._lock:
            self._write([Claim(mark, HERE), *self._others])

    def add_claims(self, claims: Iterable[Claim]) -> None:
        """Keep claims of other processes that the log does not hold, until a person accepts the loss."""
        with self._lock:
            stored_claims, _, _ = _read(self.path)
            candidates = dict.fromkeys([*self._others, *stored_claims[1:], *claims])
            self._others = [claim for claim in candidates if claim not in stored_claims[:1]]
            self._write([*stored_claims[:1], *self._others])

    def keep_only(self, mark: Mark) -> None:
        """Keep this mark and forget all others."""
        self._others = []
        self.note(mark)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, claims: Sequence[Claim]) -> None:
        """Write these claims over the file's content. On an error, note it in `trouble`."""
        try:
            if self._fd < 0:
                make_private_folder(self.path.parent)
                self._fd = open_private(self.path, os.O_RDWR | os.O_NOFOLLOW)
            os.pwrite(self._fd, _encode(claims[:MOST_CLAIMS], self._url, self.key), 0)
            self.trouble = ""
        except OSError as e:
            self.close()
            self.trouble = f"{self.path}: {e.strerror}"


def _encode(claims: Sequence[Claim], place: str, key: Sequence[Any]) -> bytes:
    """Return the content of a memory file, without the last claims if they do not fit in SIZE."""
    data = orjson.dumps({"log": place[-512:], "key": list(key), "known": [claim_to_dict(c) for c in claims]})
    if len(data) > SIZE - 10:
        return _encode(claims[:-1], place, key)
    return (b"%08x %b" % (zlib.crc32(data), data)).ljust(SIZE - 1) + b"\n"


def _read(path: Path) -> tuple[list[Claim], str, list[Any]]:
    """Return the claims in a memory file, the log's place and its store's key; no claims if the file is incomplete."""
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

"""Interface of payload stores, digests and their check, and inline payloads."""

from __future__ import annotations

import base64
import binascii
import hashlib
import mmap
import re
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from trinity_es.events.errors import CorruptPayload, PayloadNotFound

__all__ = [
    "DIGEST", "Buffer", "PayloadStore", "Unusable", "digest_of", "inline", "inlined", "is_inline", "not_found",
    "require_digest",
]

Bytes = TypeVar("Bytes", bytes, mmap.mmap)
Buffer = bytes | mmap.mmap
Unusable = CorruptPayload | PayloadNotFound

DIGEST = re.compile(r"[0-9a-f]{64}")
_INLINE = "data:"


class PayloadStore(Protocol):
    """Store of immutable bytes by their digest."""

    def put(self, data: bytes) -> str:
        """Store these bytes durably, and return their digest. Raises LogUnavailable.

        If the digest exists already, compare the stored bytes, and replace them if they are damaged.
        """

    def get(self, digest: str) -> bytes:
        """Return the bytes of a payload, after a check of their digest. Raises PayloadNotFound, CorruptPayload."""

    def view(self, digest: str) -> Buffer:
        """Return the same bytes as `get`, but map a large file into memory (copy-on-write) instead of reading it.

        If the disk fails while mapped bytes are in use, SIGBUS ends the process.
        """
        return self.get(digest)

    def get_all(self, digests: Sequence[str], *, mapped: bool = False) -> Iterator[Buffer]:
        """Yield the bytes of these payloads in order, by `get` or, if `mapped`, by `view`."""
        return map(self.view if mapped else self.get, digests)

    def size(self, digest: str) -> int | None:
        """Return the size of a payload in bytes, without reading it; None if the store lacks it."""

    def delete(self, digest: str) -> None:
        """Delete a payload, if the store has it."""

    def digests(self) -> Iterator[str]:
        """Yield every digest in the store, in order."""

    def strays(self) -> list[str]:
        """Return the names of entries that are no payloads, left by other software or by a process that died."""
        return []

    def check_all(self) -> Iterator[tuple[str, Unusable | None]]:
        """Read every payload. Yield each digest in order, with the error if the payload is unusable, else None."""
        for digest in self.digests():
            yield digest, self.reading_error(digest)

    def reading_error(self, digest: str) -> Unusable | None:
        """Read a payload, and return the error if it is corrupt or missing, else None."""
        try:
            self.get(digest)
        except (CorruptPayload, PayloadNotFound) as e:
            return e
        return None

    def close(self) -> None:
        """Close connections, if the store keeps any."""
        return


def digest_of(data: Buffer) -> str:
    """Return the digest of these bytes: SHA-256, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def inline(data: bytes) -> str:
    """Return a name for a small payload that holds its bytes itself, to use in place of a digest."""
    return _INLINE + base64.b64encode(data).decode()


def is_inline(name: str) -> bool:
    """Return True for a name from `inline`, False for a digest."""
    return name.startswith(_INLINE)


def inlined(name: str) -> bytes:
    """Return the bytes in a name from `inline`. Raises CorruptPayload."""
    try:
        return base64.b64decode(name[len(_INLINE) :], validate=True)
    except binascii.Error as e:
        raise CorruptPayload(f"payload {name[:80]} in an event is no base64: {e}", digest=name) from e


def not_found(digest: str, place: object) -> PayloadNotFound:
    return PayloadNotFound(f"no payload {str(digest)[:80]} in {place}", digest=digest)


def require_digest(digest: str, data: Bytes, place: object) -> Bytes:
    if digest_of(data) != digest:
        raise CorruptPayload(
            f"payload {digest} in {place} was changed: its {len(data)} bytes have another digest", digest=digest
        )
    return data

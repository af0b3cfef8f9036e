"""Interface of a payload store, and what all of its kinds share: the digest and its check."""

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
    """Immutable bytes by their digest."""

    def put(self, data: bytes) -> str:
        """Store the bytes durably, and return their digest.

        If the digest is there already, its bytes are compared, and are replaced if they differ. Raises LogUnavailable.
        """

    def get(self, digest: str) -> bytes:
        """Return the bytes after a check of their digest. Raises PayloadNotFound, CorruptPayload."""

    def view(self, digest: str) -> Buffer:
        """Return the same as `get`; a large file is mapped into memory, private to this process, instead of read.

        If the disk fails while mapped bytes are used, the process ends by SIGBUS.
        """
        return self.get(digest)

    def get_all(self, digests: Sequence[str], *, mapped: bool = False) -> Iterator[Buffer]:
        """Yield the bytes of these payloads in order, as `get` or, if `mapped`, as `view` returns them."""
        return map(self.view if mapped else self.get, digests)

    def exists(self, digest: str) -> bool:
        """Return True if a payload has this digest; only `get` checks its bytes."""

    def size(self, digest: str) -> int | None:
        """Return the number of bytes of a payload; None if the store lacks it."""

    def delete(self, digest: str) -> None:
        """Delete a payload; nothing happens if the store lacks it."""

    def digests(self) -> Iterator[str]:
        """Yield every digest in the store, in order."""

    def strays(self) -> list[str]:
        """Return entries of the store that are no payloads, left by a put that died or by other software."""
        return []

    def checked(self) -> Iterator[tuple[str, Unusable | None]]:
        """Read everything; yield each digest, in order, with the error of reading it, or None."""
        for digest in self.digests():
            yield digest, self.reading_error(digest)

    def reading_error(self, digest: str) -> Unusable | None:
        """Read a payload, and return the error; None if it is sound."""
        try:
            self.get(digest)
        except (CorruptPayload, PayloadNotFound) as e:
            return e
        return None

    def verify(self) -> list[str]:
        """Read everything, and return all problems, each naming its digest; [] if the store is sound."""
        # one that is not found was deleted meanwhile
        return [error.message for _, error in self.checked() if isinstance(error, CorruptPayload)]

    def close(self) -> None:
        """Close connections."""


def digest_of(data: Buffer) -> str:
    """Return the digest under which these bytes are stored: SHA-256, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def inline(data: bytes) -> str:
    """Return a name that holds these few bytes itself, in place of a digest, so that no store has to keep them."""
    return _INLINE + base64.b64encode(data).decode()


def is_inline(name: str) -> bool:
    """Return True for a name of `inline`, False for a digest."""
    return name.startswith(_INLINE)


def inlined(name: str) -> bytes:
    """Return the bytes that a name of `inline` holds. Raises CorruptPayload."""
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

"""Opens connections to the head: HTTPS, to where the log's lease says that it is.

The lease names the SHA-256 of the head's certificate, too: nothing is said to whoever answers there with another one.
The host shows by a token that it has the key.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

__all__ = ["HELLO_SECONDS", "NAME_HEADER", "HeadDialer", "HeadPlace", "NotOurs", "Refused", "bearer", "require_taken"]

HELLO_SECONDS = 5.0
"""How long TCP and TLS, or a first word, may take."""
NAME_HEADER = "Trinity-ES-Host"
"""Header with the name of the host that asks."""
READ_BYTES = 2**20
"""How much of an answer is read ahead, in bytes."""


class NotOurs(ConnectionError):
    """The other side has not the key, or is not the head: why, in words."""


class Refused(ConnectionError):
    """The head, which has the key, does not take this host: why, in words, and whether it is for good."""


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Where the head takes hosts in, and by what it is known there."""

    address: str
    """As in 10.0.0.1:7700."""
    digest: bytes
    """SHA-256 of its certificate."""

    @classmethod
    def of(cls, owner: Mapping[str, Any] | None) -> HeadPlace | None:
        """Return what the owner of the coordinator's lease says; None where it takes no hosts."""
        told = owner or {}
        return cls(told["hosts"], bytes.fromhex(told["certificate"])) if told.get("certificate") else None

    def __str__(self) -> str:
        return self.address


def bearer(key: bytes, digest: bytes) -> str:
    """Return the header by which a host shows this key to the head with the certificate of this digest.

    It tells nothing of the key, and is of no use for another certificate.
    """
    return "Bearer " + hmac.digest(key, b"trinity-es host token " + digest, "sha256").hex()


def require_taken(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the head answers. Raises Refused where it refuses."""
    if said.get("refused"):
        raise Refused(said["refused"], bool(said.get("for_good")))
    return said


class HeadDialer:
    """See the module. May be used by several event loops."""

    def __init__(
        self, name: str, key: Callable[[], bytes], find: Callable[[], HeadPlace | None], timeout: float
    ) -> None:
        """`name`: of this host. `find` returns where the head is, None while nobody leads; like `key` it may block.
        `timeout`: seconds that the head may take to answer."""
        self.timeout = timeout
        self._name, self._key, self._find = name, key, find

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Give a session with the head. Its errors, also in what is done with it, are ConnectionError and OSError,
        NotOurs among them.

        Raises ConnectionError while nobody leads, what `find` does, WrongKey.
        """
        place = await asyncio.to_thread(self._find)
        if place is None:
            raise ConnectionError("nobody leads")
        headers = {
            "Authorization": bearer(await asyncio.to_thread(self._key), place.digest), NAME_HEADER: self._name,
            "Accept-Encoding": "identity",
        }
        timeout = aiohttp.ClientTimeout(sock_connect=HELLO_SECONDS, sock_read=HELLO_SECONDS + self.timeout, total=None)
        connector = aiohttp.TCPConnector(ssl=aiohttp.Fingerprint(place.digest))
        try:
            async with aiohttp.ClientSession(
                f"https://{place}", connector=connector, timeout=timeout, headers=headers, raise_for_status=True,
                read_bufsize=READ_BYTES,
            ) as session:
                yield session
        except aiohttp.ServerFingerprintMismatch as e:
            raise NotOurs(
                f"who answers at {place} has not the certificate that the log names for the head: a head that was, or "
                "a stranger"
            ) from e
        except aiohttp.ClientResponseError as e:
            if e.status == 401:
                raise NotOurs("the head has another key: give this host the head's (hosts.key_file, --key-file or "
                              "TRINITY_ES_KEY)") from e
            raise ConnectionError(f"the head answers with {e.status} ({e.message})") from e
        except aiohttp.ClientConnectorError as e:
            raise e.os_error from e
        except aiohttp.ClientError as e:
            raise ConnectionError(str(e) or type(e).__name__) from e

"""Connections to the head by HTTPS, at the address in the log's lease.

The lease also has the SHA-256 of the head's certificate. The host sends nothing to a server with another certificate,
and proves by a token that it has the key.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

__all__ = ["HELLO_SECONDS", "NAME_HEADER", "HeadDialer", "HeadPlace", "NotOurs", "Refused", "bearer", "raise_refusal"]

HELLO_SECONDS = 5.0
"""Time limit for the TCP and TLS handshakes, and for a first message."""
NAME_HEADER = "Trinity-ES-Host"
"""Header with the name of the requesting host."""
READ_BYTES = 2**20
"""Bytes of an answer that are read ahead."""


class NotOurs(ConnectionError):
    """The server is not the head, has another key, or sent wrong files."""


class Refused(ConnectionError):
    """The head refuses this host. Its arguments are the reason, and True if the head always will."""


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Address of the head for hosts, and its certificate."""

    address: str
    """Host and port, as in 10.0.0.1:7700."""
    digest: bytes

    @classmethod
    def of(cls, owner: Mapping[str, Any] | None) -> HeadPlace | None:
        """Return the address and certificate in a lease's owner; None if that coordinator admits no hosts."""
        if not owner or not owner.get("certificate"):
            return None
        return cls(owner["hosts"], bytes.fromhex(owner["certificate"]))

    def __str__(self) -> str:
        return self.address


def bearer(key: bytes, digest: bytes) -> str:
    """Return the Authorization header that proves the key to the head whose certificate has this digest. Its token is a
    hash of both, so it does not reveal the key, and another server can't use it."""
    return "Bearer " + hmac.digest(key, b"trinity-es host token " + digest, "sha256").hex()


def raise_refusal(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the head's answer. Raises Refused if it is a refusal."""
    if answer.get("refused"):
        raise Refused(answer["refused"], bool(answer.get("for_good")))
    return answer


class HeadDialer:
    """Factory of HTTPS sessions with the head. Several event loops may use it."""

    def __init__(
        self, name: str, key: Callable[[], bytes], find: Callable[[], HeadPlace | None], timeout: float
    ) -> None:
        """`find` returns the head's address, or None while there is no coordinator. `find` and `key` may block.
        `timeout` is the time limit for the head's answers, in seconds.
        """
        self.timeout = timeout
        self._name, self._key, self._find = name, key, find

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Open a session with the head. Errors of aiohttp in the `with` block are raised as ConnectionError or OSError.

        Raises ConnectionError while there is no coordinator, NotOurs, WrongKey, and the errors of `find`.
        """
        place = await asyncio.to_thread(self._find)
        if place is None:
            raise ConnectionError("the run has no coordinator now, so there is no head to connect to")
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
                f"the server at {place} does not have the head's certificate that the log names: it is an earlier head "
                "or another program"
            ) from e
        except aiohttp.ClientResponseError as e:
            if e.status == 401:
                raise NotOurs("the head has another key: give this host the same key (hosts.key_file, --key-file or "
                              "TRINITY_ES_KEY)") from e
            raise ConnectionError(f"the head answered with HTTP status {e.status} ({e.message})") from e
        except aiohttp.ClientConnectorError as e:
            raise e.os_error from e
        except aiohttp.ClientError as e:
            raise ConnectionError(str(e) or type(e).__name__) from e

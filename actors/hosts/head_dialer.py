"""Opens connections to the head: where the log says that it is, in TLS or not, with each of the keys in its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_es.actors.config.hosts import HostsTlsConfig
from trinity_es.actors.hosts.sealed_stream import SealedStream, open_to_head
from trinity_es.actors.hosts.tls import begin_at_host

__all__ = ["HELLO_SECONDS", "NO_TLS", "HeadDialer", "Keys"]

HELLO_SECONDS = 5.0
"""How long the other side may take to say who it is, or to take this one in."""
NO_TLS = HostsTlsConfig()

Keys = Callable[[], Sequence[bytes]]
"""Gives the keys that hosts and head share now, the newest first; may read a file. Raises WrongKey."""


class HeadDialer:
    """See the module. May be used by several event loops."""

    def __init__(
        self, keys: Keys, find: Callable[[], tuple[str, int] | None], timeout: float, tls: HostsTlsConfig = NO_TLS
    ) -> None:
        """`find` returns where the head takes hosts in, None while nobody leads; like `keys` it may block."""
        self.keys, self.timeout = keys, timeout
        self._find, self._tls = find, tls
        self._tried = 0
        """How many keys the head has not taken since it last took one: each is tried in its turn."""

    async def connect(self, hello: Mapping[str, Any]) -> tuple[Mapping[str, Any], SealedStream, bytes]:
        """Return what the head says to this hello, the connection, and its key.

        Raises ConnectionError while nobody leads, what `open_to_head` and `find` do, TimeoutError, WrongKey.
        """
        where = await asyncio.to_thread(self._find)
        if where is None:
            raise ConnectionError("nobody leads")
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*where, limit=1 << 20), HELLO_SECONDS)
        try:
            await asyncio.wait_for(begin_at_host(reader, writer, self._tls, where[0]), HELLO_SECONDS)
            keys = await asyncio.to_thread(self.keys)
            key = keys[self._tried % len(keys)]
            self._tried += 1
            said, stream = await asyncio.wait_for(
                open_to_head(reader, writer, key, hello), HELLO_SECONDS + self.timeout)
        except BaseException:
            writer.transport.abort()
            raise
        self._tried = 0
        return said, stream, key

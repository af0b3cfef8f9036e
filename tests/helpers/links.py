"""Two ends of a connection between a host and the head, and a network between them that a test breaks."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

__all__ = ["Network", "network"]


class Network:
    """Stands between a host and the head: passes on what comes, loses it, or ends all connections.

    `lost`: which way nothing gets through: "to head", "to host", both or none.
    """

    def __init__(self, to: int) -> None:
        self.lost: frozenset[str] = frozenset()
        self.passed = {"to head": bytearray(), "to host": bytearray()}
        """What went which way, of all connections."""
        self.stalled = ""
        """Which way nothing is even taken any more, so that who sends has to wait."""
        self.spoils = ""
        """Which way a bit of the next large piece is changed."""
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def to(self, port: int) -> None:
        """Lead to this port from now on."""
        self._to = port

    def away(self) -> None:
        """Let nothing through any more, either way; connections stay open, as where a cable is pulled."""
        self.lost = frozenset({"to head", "to host"})

    def one_way(self, lost: str) -> None:
        """Let nothing through this way, and all the other way."""
        self.lost = frozenset({lost})

    def heal(self) -> None:
        """Let everything through again; what was lost stays lost."""
        self.lost = frozenset()

    def cut(self) -> None:
        """End all connections."""
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End."""
        self._over.set()
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                host, _ = self._listening.accept()
            except OSError:
                return
            try:
                head = socket.create_connection(("127.0.0.1", self._to), 5.0)
            except OSError:
                host.close()
                continue
            self._pairs.append((host, head))
            threading.Thread(target=self._pass_on, args=(host, head), daemon=True).start()

    def _pass_on(self, host: socket.socket, head: socket.socket) -> None:
        ways = {host: ("to head", head), head: ("to host", host)}
        broken: set[socket.socket] = set()
        with host, head, contextlib.suppress(OSError, ValueError):
            while not self._over.is_set():
                for end in select.select([e for e in ways if ways[e][0] != self.stalled], [], [], 0.2)[0]:
                    way, other = ways[end]
                    data = end.recv(65536)
                    if not data:
                        return
                    if way in self.lost or end in broken:
                        broken.add(end)  # what is lost in the middle of a stream is not made good
                        continue
                    if way == self.spoils and len(data) > 4096:
                        self.spoils, data = "", data[:-1] + bytes([data[-1] ^ 1])
                    self.passed[way] += data
                    other.sendall(data)


@contextlib.contextmanager
def network(to: int) -> Iterator[Network]:
    """Give a network to this port of the head."""
    between = Network(to)
    try:
        yield between
    finally:
        between.close()

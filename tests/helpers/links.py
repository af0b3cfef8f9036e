"""A host and a head, connected over a network that a test can break."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trinity_es.actors.hosts.admission_answer import Admission
from trinity_es.actors.hosts.certificate import Certificate
from trinity_es.actors.hosts.head_client import HeadDialer, HeadPlace
from trinity_es.actors.hosts.link import HeadEnd, HostEnd
from trinity_es.testing import wait_until

__all__ = ["HELLO", "KEY", "OTHER", "Heard", "Network", "Told", "dialer", "joined", "network", "taken_in"]

KEY, OTHER = b"k" * 40, b"o" * 40
HELLO = {"name": "b", "life": "1", "pid": 7, "build": "0", "places": {}}


class Network:
    """Relay between a host and the head that can lose messages "to head", "to host" or both (`lost`), or end
    connections.
    """

    def __init__(self, to: int) -> None:
        self.lost: frozenset[str] = frozenset()
        self.passed = {"to head": bytearray(), "to host": bytearray()}
        """Direction -> data of all connections."""
        self.stalled = ""
        """Direction in which nothing is read, so that the sender blocks; "" for none."""
        self.spoils = ""
        """Direction in which a bit of the next large chunk is flipped; "" for none."""
        self.rate = float("inf")
        """Maximum bytes per second of a connection."""
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def to(self, port: int) -> None:
        """Forward to this port from now on."""
        self._to = port

    def away(self) -> None:
        """Drop everything in both directions; connections stay open, as when a cable is pulled."""
        self.lost = frozenset({"to head", "to host"})

    def one_way(self, lost: str) -> None:
        """Drop everything in this direction only."""
        self.lost = frozenset({lost})

    def heal(self) -> None:
        """Forward everything again. Dropped data stay lost."""
        self.lost = frozenset()

    def cut(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
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
                        broken.add(end)  # lost data of a stream can't be repaired
                        continue
                    if way == self.spoils and len(data) > 4096:
                        self.spoils, data = "", data[:-1] + bytes([data[-1] ^ 1])
                    self.passed[way] += data
                    other.sendall(data)
                    time.sleep(len(data) / self.rate)


@contextlib.contextmanager
def network(to: int) -> Iterator[Network]:
    """Yield a network that forwards to this port of the head."""
    between = Network(to)
    try:
        yield between
    finally:
        between.close()


class Heard:
    """Head that accepts or refuses hosts, and records their messages."""

    def __init__(self, key: bytes = KEY, timeout: float = 5.0, **more: Any) -> None:
        self.hellos: list[Mapping[str, Any]] = []
        self.items: list[tuple[str, Any]] = []
        self.gone: list[tuple[str, float]] = []
        """(reason of the end, time of the host's last message) of each ended connection."""
        self.key, self.refuses, self.certificate = key, Admission(1, 1), Certificate.create()
        self.end = HeadEnd(
            ("127.0.0.1", 0), lambda: self.key, self.certificate, timeout, hello=self._hello,
            take=lambda host, epoch, items: self.items.extend(items),
            gone=lambda host, epoch, why, heard: self.gone.append((why, heard)), **more,
        )
        self.port = self.end.start().result(10)

    def _hello(self, said: Mapping[str, Any], where: str, answer: Callable[[Admission], None]) -> None:
        self.hellos.append(said)
        answer(self.refuses)


def dialer(head: Heard, port: int | None = None, key: Callable[[], bytes] = lambda: KEY, timeout: float = 5.0,
           name: str = "b") -> HeadDialer:
    """Return a dialer that connects to a head over the network that listens at `port`."""
    return HeadDialer(name, key, lambda: HeadPlace(f"127.0.0.1:{port or head.port}", head.certificate.digest), timeout)


class Told:
    """Host that records its messages."""

    def __init__(self, way: HeadDialer) -> None:
        self.ups: list[tuple[int, int]] = []
        self.items: list[tuple[str, Any]] = []
        self.downs: list[str] = []
        self.refused: list[str] = []
        self.end = HostEnd(
            HELLO, way, up=lambda *epochs: self.ups.append(epochs),
            take=self.items.extend, down=self.downs.append, refused=self.refused.append,
        )
        self.end.start()


@contextlib.contextmanager
def joined(head: Heard, port: int | None = None, **args: Any) -> Iterator[Told]:
    host = Told(dialer(head, port, **args))
    try:
        yield host
    finally:
        host.end.stop()
        head.end.stop()


@contextlib.contextmanager
def taken_in(timeout: float = 5.0, **args: Any) -> Iterator[tuple[Heard, Network, Told]]:
    """Yield a head, the network, and a host that the head has accepted."""
    head = Heard(timeout=timeout)
    with network(head.port) as between, joined(head, between.port, timeout=timeout, **args) as host:
        wait_until(lambda: host.ups == [(1, 1)], "the host is taken in", 20)
        yield head, between, host

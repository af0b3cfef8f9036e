"""OpenEnv servers in separate processes, which can be killed and started again at the same address."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Server:
    """Server process. Its command gets the port and `more` as further arguments."""

    def __init__(self, command: Sequence[str], *more: object) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.command = [*command, str(port), *map(str, more)]

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except (OSError, urllib.error.URLError):
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < until, "waited for the server"
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def listening(command: Sequence[str], *more: object) -> Iterator[Server]:
    server = Server(command, *more)
    with ended(server):
        yield server


@contextmanager
def ended(server: Server) -> Iterator[None]:
    """Start a server, and end it after the block, even if it did not start."""
    try:
        server.start()
        yield
    finally:
        server.kill()

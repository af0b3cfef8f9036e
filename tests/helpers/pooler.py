"""Pooler in front of PostgreSQL, like PgBouncer with pool_mode=transaction and one server process."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator

from sqlalchemy import make_url

ENCRYPTION = 80877103, 80877104
"""Codes of a client's requests for TLS and for GSSAPI."""


def exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


def _message(end: socket.socket) -> bytes:
    head = exactly(end, 5)
    return head + exactly(end, struct.unpack("!I", head[1:])[0] - 4)


def _until_ready(server: socket.socket) -> list[bytes]:
    found = [_message(server)]
    while found[-1][:1] != b"Z":
        found.append(_message(server))
    return found


class _Client(socketserver.BaseRequestHandler):
    server: _Pooler

    def handle(self) -> None:
        client, pool = self.request, self.server
        code = 0
        while code == 0 or code in ENCRYPTION:
            size, code = struct.unpack("!II", exactly(client, 8))
            exactly(client, size - 8)
            if code in ENCRYPTION:
                client.sendall(b"N")
        client.sendall(pool.greeting)
        asked, held = b"", False
        try:
            while (message := _message(client))[:1] != b"X":
                asked += message
                if message[:1] not in (b"Q", b"S"):
                    continue  # the rest is still to come
                if not held:
                    held = pool.turn.acquire(timeout=20)
                pool.process.sendall(asked)
                answer = _until_ready(pool.process)
                if answer[-1][5:] == b"I":  # the transaction is over
                    pool.turn.release()
                    held = False
                asked = b""
                client.sendall(b"".join(answer))
        except ConnectionError:
            pass
        finally:
            if held:
                pool.process.sendall(b"Q" + struct.pack("!I", 13) + b"ROLLBACK\0")
                _until_ready(pool.process)
                pool.turn.release()


class _Pooler(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, database: str, path: str) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.turn = threading.Lock()
        self.process = socket.socket(socket.AF_UNIX)
        self.process.connect(path)
        start = struct.pack("!I", 196608) + b"user\0postgres\0database\0" + database.encode() + b"\0\0"
        self.process.sendall(struct.pack("!I", len(start) + 4) + start)
        self.greeting = b"".join(_until_ready(self.process))


@contextlib.contextmanager
def pooled(url: str) -> Iterator[str]:
    """Run a pooler during the block, and yield the database's URL through it."""
    parsed = make_url(url)
    with _Pooler(str(parsed.database), f"{parsed.query['host']}/.s.PGSQL.5432") as pooler:
        threading.Thread(target=pooler.serve_forever, args=(0.05,), daemon=True).start()
        yield f"postgresql://postgres@127.0.0.1:{pooler.server_address[1]}/{parsed.database}"
        pooler.shutdown()
        pooler.process.close()

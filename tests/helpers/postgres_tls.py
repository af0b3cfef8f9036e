"""TLS proxy in front of the tests' PostgreSQL, which has no TLS. It acts like a server with only `hostssl` rules."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator

from tests.helpers.certificates import Files
from tests.helpers.pooler import exactly

_SSL_REQUEST = bytes.fromhex("0000000804d2162f")
_GSS_REQUEST = bytes.fromhex("0000000804d21630")
_REFUSED = b"SFATAL\0C28000\0Mno pg_hba.conf entry: no encryption\0\0"


def _serve(client: socket.socket, to: tuple[str, int], context: ssl.SSLContext) -> None:
    with contextlib.suppress(OSError), client:
        asked = exactly(client, 8)
        if asked == _GSS_REQUEST:
            client.sendall(b"N")
            asked = exactly(client, 8)
        if asked != _SSL_REQUEST:
            client.sendall(b"E" + (len(_REFUSED) + 4).to_bytes(4, "big") + _REFUSED)
            return
        client.sendall(b"S")
        with context.wrap_socket(client, server_side=True) as inside, socket.create_connection(to, 10) as server:
            other = {inside: server, server: inside}
            while True:
                for end in [inside] if inside.pending() else select.select(other, [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    other[end].sendall(data)


@contextlib.contextmanager
def in_tls(files: Files, address: str, to: tuple[str, int]) -> Iterator[int]:
    """Yield a port at which the server at `to` is reached by TLS with this certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    listening = socket.create_server((address, 0), backlog=128)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                threading.Thread(target=_serve, args=(client, to, context), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()

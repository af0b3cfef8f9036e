"""Packet capture of a network of this machine, like `tcpdump -i any net ...`. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator

_ALL_PROTOCOLS, _IPV4, _TCP = 0x0003, 0x0800, 6
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
_Flow = tuple[bytes, bytes, int, int]


class Capture:
    """Recorder of the TCP streams between addresses of a network, in both directions."""

    def __init__(self, network: str) -> None:
        self._network = ipaddress.ip_network(network)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 * 2**20)
        self._let_only_in(int(self._network.network_address), int(self._network.netmask))
        self._dropped()  # reset the count of packets from before the filter
        self._socket.settimeout(0.2)
        self._parts: defaultdict[_Flow, dict[int, bytes]] = defaultdict(dict)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _let_only_in(self, network: int, mask: int) -> None:
        load, both, is_equal, give = 0x20, 0x54, 0x15, 0x06
        program = [
            (load, 0, 0, 12), (both, 0, 0, mask), (is_equal, 0, 4, network),  # from an address of the network
            (load, 0, 0, 16), (both, 0, 0, mask), (is_equal, 0, 1, network),  # to an address of the network
            (give, 0, 0, 2**18), (give, 0, 0, 0),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
        filters = struct.pack("HP", len(program), ctypes.addressof(code))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)

    def _dropped(self) -> int:
        """Return the number of packets missed since the last call."""
        return int(struct.unpack("II", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1])

    def _listen(self) -> None:
        low, high = (int(self._network[n]).to_bytes(4, "big") for n in (0, -1))
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                packet, (_, protocol, *_) = self._socket.recvfrom(65536)
                if protocol == _IPV4 and packet[9] == _TCP and low <= packet[12:16] <= high and \
                        low <= packet[16:20] <= high:
                    self._keep(packet)

    def _keep(self, packet: bytes) -> None:
        start = (packet[0] & 15) * 4
        source, target, number = struct.unpack_from(">HHI", packet, start)
        size = struct.unpack_from(">H", packet, 2)[0] or len(packet)
        payload = packet[start + (packet[start + 12] >> 4) * 4 : size]
        if payload:
            self._parts[packet[12:16], packet[16:20], source, target][number] = payload

    def stop(self) -> None:
        self._over.set()
        self._thread.join(10)
        dropped = self._dropped()
        self._socket.close()
        assert dropped == 0, f"{dropped} packets were missed"

    def streams(self, port: int) -> bytes:
        """Return the data of all connections to this port (0: any), each direction in order."""
        return b"\n".join(
            b"".join(part for _, part in sorted(parts.items()))
            for (_, _, source, target), parts in self._parts.items() if port in (0, source, target)
        )


@contextlib.contextmanager
def captured(network: str) -> Iterator[Capture]:
    """Capture a network's traffic during this block. The capture is complete after the block."""
    capture = Capture(network)
    try:
        yield capture
    finally:
        capture.stop()

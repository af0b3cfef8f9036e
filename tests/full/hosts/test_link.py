"""The connection between a host and the head: sealed, in order, never replayed, and made again when it breaks."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.links import HELLO, KEY, OTHER, Heard, Told, joined, network
from trinity_es.actors.hosts import link, sealed_stream
from trinity_es.actors.hosts.head_dialer import HeadDialer
from trinity_es.actors.hosts.link import Admission, HostEnd
from trinity_es.testing import wait_until


def test_messages_come_both_ways_once_and_in_their_order() -> None:
    head = Heard([KEY])
    with joined(head) as host:
        wait_until(lambda: host.ups == [(1, 1)], "the host is taken in", 10)
        for n in range(500):
            host.end.send("runner-0@b", n)
            head.end.send("b", "runner-0@b", n)
        wait_until(lambda: len(host.items) == len(head.items) == 500, "all messages", 20)
        assert head.items == host.items == [("runner-0@b", n) for n in range(500)]
        assert head.hellos[0]["name"] == "b"


def test_who_has_another_key_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    head = Heard([KEY])
    with joined(head, keys=[OTHER]) as host:
        wait_until(lambda: len(host.downs) >= 2, "two tries", 20)
        assert host.ups == []
        assert head.hellos == []
        assert "another key" in host.downs[0]
    assert "refused who wanted to join from 127.0.0.1: it has another key" in caplog.text


def test_a_key_is_replaced_without_a_stop(caplog: pytest.LogCaptureFixture) -> None:
    """Both have the new one beside the old for a while; then the connections of the old one end and are made again."""
    head, keys = Heard([KEY]), [OTHER, KEY]
    with joined(head, keys=keys) as host:
        wait_until(lambda: len(host.ups) == 1, "taken in with the old key, though the new one is tried first", 10)
        head.keys = [OTHER, KEY]
        host.end.send("runner-0@b", "before")
        head.keys = [OTHER]
        wait_until(lambda: len(host.ups) == 2, "taken in with the new key", 20)
        host.end.send("runner-0@b", "after")
        wait_until(lambda: head.items == [("runner-0@b", "before"), ("runner-0@b", "after")], "what it says", 10)
        assert "its key was taken away" in [*(why for why, _ in head.gone), *host.downs]
    assert "refused who wanted to join" in caplog.text  # with the new key, before the head had it


def test_a_host_that_was_not_given_the_new_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    head = Heard([KEY])
    with joined(head) as host:
        wait_until(lambda: len(host.ups) == 1, "taken in with the old key", 10)
        head.keys = [OTHER]
        wait_until(lambda: any("another key" in why for why in host.downs), "refused with the old key", 20)
        assert head.gone[0][0] == "its key was taken away"
        assert len(host.ups) == 1
    assert "one that was taken away, and calls itself 'b': give that host the head's" in caplog.text


def test_a_host_whose_own_file_lost_the_key_ends_the_connection() -> None:
    head, keys = Heard([KEY, OTHER]), [KEY]
    with joined(head, keys=keys) as host:
        wait_until(lambda: len(host.ups) == 1, "taken in", 10)
        keys[:] = [OTHER]
        wait_until(lambda: len(host.ups) == 2, "taken in with the other key", 20)


def test_a_head_without_the_key_is_told_nothing() -> None:
    """Who answers at the head's address has to show the key too, before a host believes a word."""
    impostor = Heard([OTHER])
    impostor.end.stop()
    listening = socket.create_server(("127.0.0.1", 0))
    said: list[bytes] = []

    def pretend() -> None:
        with listening.accept()[0] as connection:
            connection.sendall(sealed_stream.MAGIC + bytes(sealed_stream.NONCE))
            said.append(connection.recv(65536))
            body = b'{"taken": true, "epoch": 1, "coordinator_epoch": 1}'
            connection.sendall(len(body).to_bytes(4, "big") + bytes(32) + body)
            connection.recv(1)

    threading.Thread(target=pretend, daemon=True).start()
    host = Told(listening.getsockname()[1])
    try:
        wait_until(lambda: bool(host.downs), "the answer is seen through", 10)
        assert host.ups == []
        assert "another key" in host.downs[0]
        assert KEY not in said[0]
    finally:
        host.end.stop()
        listening.close()


class Runs:
    """A payload that tells that it was unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def test_a_recorded_connection_is_refused_whole_and_in_part(caplog: pytest.LogCaptureFixture) -> None:
    head = Heard([KEY])
    with network(head.port) as between, joined(head, between.port) as host:
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
        host.end.send("runner-0@b", "once")
        wait_until(lambda: bool(head.items), "a message", 10)
        recorded = bytes(between.passed["to head"])
        hellos = len(head.hellos)
        with socket.create_connection(("127.0.0.1", head.port), 5) as again:
            again.sendall(recorded)
            again.settimeout(10)
            greeting = again.recv(65536)
            assert greeting.startswith(sealed_stream.MAGIC)
            while again.recv(65536):
                pass  # until the head hangs up
        assert len(head.hellos) == hellos
        assert head.items == [("runner-0@b", "once")]
        assert host.ups == [(1, 1)]  # the true host is still there
    assert "its seal does not fit" in caplog.text


def twice(frame: bytes) -> bytes:
    return frame + frame


def changed(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


def made_up(frame: bytes) -> bytes:
    payload = pickle.dumps([("x", Runs())])
    return frame + len(payload).to_bytes(4, "big") + bytes(32) + payload


@pytest.mark.parametrize("change", [twice, changed, made_up])
def test_what_somebody_in_the_middle_sends_ends_the_connection_before_it_is_unpickled(
    change: Callable[[bytes], bytes]
) -> None:
    head = Heard([KEY])
    with in_the_middle(head.port, change) as port, joined(head, port) as host:
        wait_until(lambda: bool(host.ups), "the host is taken in", 10)
        host.end.send("runner-0@b", "once")
        wait_until(lambda: bool(head.gone), "the head hangs up", 10)
        assert head.items in ([], [("runner-0@b", "once")])
        assert "seal" in head.gone[0][0]


@contextmanager
def in_the_middle(port: int, change: Callable[[bytes], bytes]) -> Iterator[int]:
    """Pass on all that goes between a host and the head, but the first frame after the hello, which is changed."""
    listening = socket.create_server(("127.0.0.1", 0))

    def exactly(connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = connection.recv(size - len(data))
            if not more:
                raise ConnectionError
            data += more
        return data

    def frame(connection: socket.socket) -> bytes:
        front = exactly(connection, 36)
        return front + exactly(connection, int.from_bytes(front[:4], "big"))

    def back(head: socket.socket, host: socket.socket) -> None:
        try:
            while data := head.recv(65536):
                host.sendall(data)
        except OSError:
            pass

    def meet() -> None:
        while True:
            try:
                host, _ = listening.accept()
                head = socket.create_connection(("127.0.0.1", port), 5)
                threading.Thread(target=back, args=(head, host), daemon=True).start()
                head.sendall(frame(host))
                head.sendall(change(frame(host)))
                while True:
                    head.sendall(frame(host))
            except OSError:
                if listening.fileno() < 0:
                    return

    threading.Thread(target=meet, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()


DEEP = b"[" * 60_000


@pytest.mark.parametrize("stranger", [
    b"GET / HTTP/1.1\r\n\r\n", b"", bytes(36), b"\xff" * 4096, len(DEEP).to_bytes(4, "big") + bytes(32) + DEEP,
], ids=["http", "nothing", "zeros", "ones", "deep"])
def test_a_stranger_is_hung_up_on_and_harms_nobody(stranger: bytes) -> None:
    head = Heard([KEY])
    with joined(head) as host:
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
        with socket.create_connection(("127.0.0.1", head.port), 5) as connection:
            connection.settimeout(20)
            connection.sendall(stranger)
            while True:
                try:
                    if not connection.recv(65536):
                        break
                except ConnectionResetError:
                    break
        assert not head.gone
        host.end.send("runner-0@b", "still there")
        wait_until(lambda: bool(head.items), "the host is heard", 10)
        assert len(host.ups) == 1


def test_many_strangers_take_no_room_from_a_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who opens connections and says nothing: of more than there may be, the oldest is dropped."""
    monkeypatch.setattr(link, "most_strangers", lambda: 8)
    head = Heard([KEY])
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", head.port), 5)) for _ in range(40)]
        wait_until(lambda: sum(map(ended, silent)) == 32, "all but 8 to be dropped", 4)  # before they are late
        host = stack.enter_context(joined(head))
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
    assert "too many connections that don't show the key" in caplog.text


def ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_who_hangs_up_on_an_earlier_epoch_leaves_the_new_one_its_connection() -> None:
    head = Heard([KEY])
    with joined(head) as host:
        wait_until(lambda: host.ups == [(1, 1)], "the host is taken in", 10)
        head.end.hang_up("b", 0)
        host.end.send("runner-0@b", "still there")
        wait_until(lambda: bool(head.items), "the host is heard", 10)
        assert not head.gone
        head.end.hang_up("b", 1)
        wait_until(lambda: bool(head.gone), "the end of the connection to be told", 10)


@pytest.mark.parametrize("lost", ["to head", "to host", "both"])
def test_a_silent_network_is_noticed_by_both_and_the_connection_made_again(lost: str) -> None:
    head = Heard([KEY], timeout=2.0)
    with network(head.port) as between, joined(head, between.port, timeout=2.0) as host:
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
        if lost == "both":
            between.away()
        else:
            between.one_way(lost)
        wait_until(lambda: bool(host.downs and head.gone), "both notice", 20)
        between.heal()
        wait_until(lambda: len(host.ups) == 2, "it is taken in again", 30)
        host.end.send("runner-0@b", "again")
        wait_until(lambda: head.items[-1:] == [("runner-0@b", "again")], "the host is heard", 10)


def test_a_host_that_is_gone_was_last_heard_before_its_silence() -> None:
    """By which its loss is known in `hosts.timeout`, and not twice that."""
    head = Heard([KEY], timeout=3.0)
    with network(head.port) as between, joined(head, between.port, timeout=3.0) as host:
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
        between.away()
        away = time.monotonic()
        wait_until(lambda: bool(head.gone), "the head notices", 20)
        assert head.gone[0][1] <= away + 1.0  # what was under way


def test_a_connection_is_made_anew_long_before_its_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a link that comes back is of use at once."""
    monkeypatch.setattr(link, "SILENCE", (0.02, 2.0))
    head = Heard([KEY], timeout=100.0)
    with network(head.port) as between, joined(head, between.port, timeout=100.0) as host:
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
        between.away()
        wait_until(lambda: bool(host.downs and head.gone), "both make it anew", 20)
        between.heal()
        wait_until(lambda: len(host.ups) == 2, "it is taken in again", 30)


def test_a_frame_that_comes_slowly_is_no_silence() -> None:
    async def slowly() -> tuple[int, Any]:
        sent = bytearray()
        writer: Any = SimpleNamespace(write=sent.extend, drain=lambda: asyncio.sleep(0))
        reader = asyncio.StreamReader()
        await sealed_stream.SealedStream(reader, writer, KEY, OTHER).send([("b", "x" * 100_000)])
        heard: list[None] = []
        stream = sealed_stream.SealedStream(reader, writer, OTHER, KEY)
        received = asyncio.ensure_future(stream.receive(lambda: heard.append(None)))
        for n in range(0, len(sent), 10_000):
            reader.feed_data(bytes(sent[n : n + 10_000]))
            await asyncio.sleep(0)
        return len(heard), await received

    often, items = asyncio.run(slowly())
    assert items == [("b", "x" * 100_000)]
    assert often >= 10


def test_one_host_that_takes_nothing_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's queue to it grows to its limit, then it is hung up on; sends never wait."""
    monkeypatch.setattr(link, "MAX_WAITING", 2000)
    head = Heard([KEY], timeout=60.0)
    with network(head.port) as between, joined(head, between.port, timeout=60.0) as host:
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
        between.stalled = "to host"
        items: list[tuple[str, Any]] = []
        ups: list[tuple[int, int]] = []
        other = HostEnd(
            {**HELLO, "name": "c"}, HeadDialer(lambda: [KEY], lambda: ("127.0.0.1", head.port), 30.0),
            up=lambda *epochs: ups.append(epochs), take=items.extend, down=print, refused=print,
        )
        other.start()
        try:
            wait_until(lambda: bool(ups), "the other host", 10)
            for n in range(25_000):
                head.end.send("b", "runner-0@b", f"{n} " * 500)  # another each time: a pickle holds one object once
                if n % 100 == 0:
                    head.end.send("c", "runner-0@c", n)
            wait_until(lambda: len(items) == 250, "all that the other is sent", 20)
            wait_until(lambda: bool(head.gone), "the one is hung up on", 20)
            assert "takes nothing" in head.gone[0][0]
        finally:
            other.stop()


def test_a_host_that_is_refused_for_good_asks_no_more() -> None:
    head = Heard([KEY])
    head.refuses = Admission(refused="another build", for_good=True)
    with joined(head) as host:
        wait_until(lambda: host.refused == ["another build"], "the refusal", 10)
        assert len(head.hellos) == 1
        assert host.ups == []

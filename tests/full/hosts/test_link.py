"""The connection between a host and the head: in TLS, in order, never replayed, and made again when it breaks."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.helpers.links import HELLO, KEY, OTHER, Heard, dialer, joined, network, taken_in
from trinity_es.actors.hosts import head_client, link
from trinity_es.actors.hosts.admission_answer import Admission
from trinity_es.actors.hosts.link import HostEnd
from trinity_es.testing import wait_until

PROMPT = "what is asked is nobody else's affair"


def test_messages_come_both_ways_once_and_in_their_order() -> None:
    with taken_in() as (head, _, host):
        for n in range(500):
            host.end.send("runner-0@b", n)
            head.end.send("b", "runner-0@b", n)
        wait_until(lambda: len(host.items) == len(head.items) == 500, "all messages", 20)
        assert head.items == host.items == [("runner-0@b", n) for n in range(500)]
        assert head.hellos[0]["name"] == "b"


def test_what_is_said_can_t_be_read_on_the_wire() -> None:
    with taken_in() as (head, between, host):
        for n in range(300):
            host.end.send("runner-0@b", (n, PROMPT))
            head.end.send("b", "runner-0@b", (n, PROMPT * 1000))
        wait_until(lambda: len(host.items) == len(head.items) == 300, "all messages", 30)
        passed = bytes(between.passed["to head"] + between.passed["to host"])
    assert len(passed) > 300 * 1000 * len(PROMPT)
    for said in (PROMPT.encode(), b"runner-0", KEY, b"Bearer"):
        assert said not in passed


def test_who_has_another_key_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    head = Heard()
    with joined(head, key=lambda: OTHER) as host:
        wait_until(lambda: len(host.downs) >= 2, "two tries", 20)
        assert host.ups == []
        assert head.hellos == []
        assert "another key" in host.downs[0]
    assert "refused a request from 127.0.0.1: it has another key, and calls itself 'b'" in caplog.text
    assert "give that host the head's" in caplog.text


def test_a_key_that_is_replaced_is_that_of_the_next_connection() -> None:
    head, keys = Heard(), [KEY]
    with network(head.port) as between, joined(head, between.port, key=lambda: keys[0]) as host:
        wait_until(lambda: len(host.ups) == 1, "taken in with the old key", 10)
        head.key = OTHER
        host.end.send("runner-0@b", "before")
        wait_until(lambda: bool(head.items), "the connection that stands is as before", 10)
        between.cut()
        wait_until(lambda: any("another key" in why for why in host.downs), "refused with the old key", 20)
        assert len(host.ups) == 1
        keys[0] = OTHER
        wait_until(lambda: len(host.ups) == 2, "taken in with the new key", 20)
        host.end.send("runner-0@b", "after")
        wait_until(lambda: head.items == [("runner-0@b", "before"), ("runner-0@b", "after")], "what it says", 10)


def test_who_answers_without_the_head_s_certificate_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Not even with the key: a head that led before, say."""
    head, impostor = Heard(), Heard()
    with joined(head, impostor.port) as host:
        wait_until(lambda: len(host.downs) >= 2, "two tries", 20)
        assert "does not have the head's certificate" in host.downs[0]
        assert (host.ups, impostor.hellos) == ([], [])
    impostor.end.stop()
    assert "refused a request" not in caplog.text


def test_a_token_is_of_no_use_to_who_got_it_by_another_certificate() -> None:
    one, other = Heard().certificate, Heard().certificate
    assert head_client.bearer(KEY, one.digest) != head_client.bearer(KEY, other.digest)
    assert KEY.hex() not in head_client.bearer(KEY, one.digest)


def test_a_recorded_connection_is_refused() -> None:
    with taken_in() as (head, between, host):
        host.end.send("runner-0@b", "once")
        wait_until(lambda: bool(head.items), "a message", 10)
        with socket.create_connection(("127.0.0.1", head.port), 5) as again:
            again.sendall(bytes(between.passed["to head"]))
            until_it_ends(again)
        assert len(head.hellos) == 1
        assert head.items == [("runner-0@b", "once")]
        assert host.ups == [(1, 1)]  # the true host is still there


@pytest.mark.parametrize("way", ["to head", "to host"])
def test_a_bit_that_changes_on_the_way_ends_the_connection_before_it_is_unpickled(way: str) -> None:
    with taken_in() as (head, between, host):
        between.spoils = way
        for send in (host.end.send, lambda name, what: head.end.send("b", name, what)):
            send("runner-0@b", "x" * 100_000)
        wait_until(lambda: bool(head.gone and host.downs), "both end it", 10)
        assert (head.items if way == "to head" else host.items) == []
        wait_until(lambda: len(host.ups) == 2, "it is made again", 20)


def until_it_ends(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    heard = b""
    while True:
        try:
            more = connection.recv(65536)
        except ConnectionResetError:
            return heard
        if not more:
            return heard
        heard += more


REQUESTS = ("GET /join", "POST /folders", "GET /folders/0/0", "POST /check", "GET /nowhere")


@pytest.mark.parametrize("said", [
    [b"GET / HTTP/1.1\r\n\r\n", b"", bytes(36), b"\xff" * 4096],
    [b"", b"GET /join HTTP/1.1\r\nhost: head\r\n", b"\xff" * 4096, *(
        f"{request} HTTP/1.1\r\nhost: head\r\nauthorization: Bearer \xff{KEY.decode()}\r\n\r\n".encode()
        for request in REQUESTS)],
], ids=["plain", "in TLS"])
def test_strangers_are_hung_up_on_get_nothing_and_harm_nobody(
    said: list[bytes], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HELLO_SECONDS", 2.0)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    head = Heard()
    with joined(head) as host, ExitStack() as stack:
        wait_until(lambda: len(host.ups) == 1, "the host is taken in", 10)
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", head.port), 20)) for _ in said]
        if request.node.callspec.id == "in TLS":
            connections = [stack.enter_context(context.wrap_socket(connection)) for connection in connections]
        for connection, what in zip(connections, said, strict=True):
            connection.sendall(what)
        for connection in connections:
            assert until_it_ends(connection)[9:12] in (b"", b"400", b"401")
        assert (head.gone, len(head.hellos), len(host.ups)) == ([], 1, 1)
        host.end.send("runner-0@b", "still there")
        wait_until(lambda: bool(head.items), "the host is heard", 10)


def test_who_hangs_up_on_an_earlier_epoch_leaves_the_new_one_its_connection() -> None:
    with taken_in() as (head, _, host):
        head.end.hang_up("b", 0)
        host.end.send("runner-0@b", "still there")
        wait_until(lambda: bool(head.items), "the host is heard", 10)
        assert not head.gone
        head.end.hang_up("b", 1)
        wait_until(lambda: bool(head.gone), "the end of the connection to be told", 10)


@pytest.mark.parametrize("lost", ["to head", "to host", "both"])
def test_a_silent_network_is_noticed_by_both_and_the_connection_made_again(lost: str) -> None:
    with taken_in(timeout=2.0) as (head, between, host):
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
    with taken_in(timeout=3.0) as (head, between, _):
        between.away()
        away = time.monotonic()
        wait_until(lambda: bool(head.gone), "the head notices", 20)
        assert head.gone[0][1] <= away + 1.0  # what was under way


def test_a_connection_is_made_anew_long_before_its_host_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a link that comes back is of use at once."""
    monkeypatch.setattr(link, "SILENCE", (0.02, 2.0))
    with taken_in(timeout=100.0) as (head, between, host):
        between.away()
        wait_until(lambda: bool(host.downs and head.gone), "both make it anew", 20)
        between.heal()
        wait_until(lambda: len(host.ups) == 2, "it is taken in again", 30)


def test_messages_that_come_slowly_are_no_silence() -> None:
    with taken_in(timeout=1.5) as (head, between, host):
        between.rate = 300_000.0
        for n in range(32):
            head.end.send("b", "runner-0@b", f"{n} " * 10_000)
        wait_until(lambda: len(host.items) == 32, "all messages", 20)
        assert len(host.ups) == 1


def test_one_host_that_takes_nothing_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's queue to it grows to its limit, then it is hung up on; sends never wait."""
    monkeypatch.setattr(link, "MAX_WAITING", 2000)
    with taken_in(timeout=60.0) as (head, between, _):
        between.stalled = "to host"
        items: list[tuple[str, Any]] = []
        ups: list[tuple[int, int]] = []
        other = HostEnd(
            {**HELLO, "name": "c"}, dialer(head, timeout=30.0, name="c"),
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
            assert "reads nothing" in head.gone[0][0]
        finally:
            other.stop()


def test_a_host_that_is_refused_for_good_asks_no_more() -> None:
    head = Heard()
    head.refuses = Admission(refused="another build", for_good=True)
    with joined(head) as host:
        wait_until(lambda: host.refused == ["another build"], "the refusal", 10)
        assert len(head.hellos) == 1
        assert host.ups == []

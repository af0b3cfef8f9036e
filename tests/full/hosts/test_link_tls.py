"""The connection between a host and the head in TLS: nothing is read on the way, and nobody else is believed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.certificates import Authority, Files
from tests.helpers.links import KEY, OTHER, Heard, joined, network
from trinity_es.actors.config.hosts import HostsTlsConfig
from trinity_es.actors.hosts import sealed_stream
from trinity_es.actors.hosts.head_dialer import NO_TLS
from trinity_es.testing import wait_until

PROMPT = "what is asked is nobody else's affair"


def of_head(files: Files) -> HostsTlsConfig:
    return HostsTlsConfig(cert=str(files.cert), key=str(files.key))


def of_host(ca: Path) -> HostsTlsConfig:
    """The config is the run's, whose certificate lies on the head alone."""
    return HostsTlsConfig(cert="/nowhere/cert.pem", key="/nowhere/key.pem", ca=str(ca))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_is_said_can_t_be_read_on_the_wire(authority: Authority, encrypted: bool) -> None:
    """And without TLS it can, which shows that this test would see it."""
    head = Heard([KEY], tls=of_head(authority.issue("127.0.0.1")) if encrypted else NO_TLS)
    with (
        network(head.port) as between,
        joined(head, between.port, tls=of_host(authority.ca) if encrypted else NO_TLS) as host,
    ):
        wait_until(lambda: host.ups == [(1, 1)], "the host is taken in", 20)
        for n in range(300):
            host.end.send("runner-0@b", (n, PROMPT))
            head.end.send("b", "runner-0@b", (n, PROMPT * 1000))
        wait_until(lambda: len(host.items) == len(head.items) == 300, "all messages", 30)
        passed = bytes(between.passed["to head"] + between.passed["to host"])
    assert [n for _, (n, _) in head.items] == [n for _, (n, _) in host.items] == list(range(300))
    assert (PROMPT.encode() in passed) is (b"runner-0" in passed) is not encrypted


def test_who_has_no_key_is_not_heard_in_tls_either(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    head = Heard([KEY], tls=of_head(authority.issue("127.0.0.1")))
    with joined(head, keys=[OTHER], tls=of_host(authority.ca)) as host:
        wait_until(lambda: bool(host.downs), "a try", 20)
        assert "another key" in host.downs[0]
        assert head.hellos == []
    assert "it has another key" in caplog.text


@pytest.mark.parametrize(("names", "own"), [(["127.0.0.1"], False), (["elsewhere.example"], True)],
                         ids=["of another CA", "for another name"])
def test_a_certificate_that_is_not_believed_is_named_with_the_way_out(
    tmp_path: Path, authority: Authority, names: list[str], own: bool
) -> None:
    other = authority if own else Authority(tmp_path, "other")
    head = Heard([KEY], tls=of_head(other.issue(*names)))
    with joined(head, tls=of_host(authority.ca)) as host:
        wait_until(lambda: bool(host.downs), "a try", 20)
        assert "the head's certificate is not believed" in host.downs[0]
        assert "hosts.tls.ca has to name the CA that signed it, and it has to be one for 127.0.0.1" in host.downs[0]
        assert (head.hellos, host.ups) == ([], [])


def test_one_side_alone_that_speaks_tls_is_told_so(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    head = Heard([KEY], tls=of_head(authority.issue("127.0.0.1")))
    with joined(head) as host:
        wait_until(lambda: bool(host.downs), "a try", 20)
        assert "the head speaks TLS, and this host does not: set hosts.tls" in host.downs[0]
    plain = Heard([KEY])
    with joined(plain, tls=of_host(authority.ca)) as host:
        wait_until(lambda: bool(host.downs), "a try", 20)
        assert "the head speaks no TLS" in host.downs[0]
        wait_until(lambda: "refused who wanted to join from 127.0.0.1" in caplog.text, "a warning of the head", 20)
    assert head.hellos == plain.hellos == []


def test_a_certificate_that_is_renewed_is_that_of_the_next_connection(authority: Authority) -> None:
    head = Heard([KEY], tls=of_head(authority.issue("elsewhere.example")))
    with joined(head, tls=of_host(authority.ca)) as host:
        wait_until(lambda: bool(host.downs), "a try that fails", 20)
        authority.issue("127.0.0.1")
        wait_until(lambda: bool(host.ups), "taken in", 30)


def broken(files: Files) -> None:
    files.key.write_text("no key")


def missing(files: Files) -> None:
    files.key.unlink()


@pytest.mark.parametrize("damage", [broken, missing])
def test_a_certificate_that_can_t_be_used_is_named(
    authority: Authority, damage: Callable[[Files], None], caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue("127.0.0.1")
    head = Heard([KEY], tls=of_head(files))
    damage(files)
    with joined(head, tls=of_host(authority.ca)) as host:
        wait_until(lambda: bool(host.downs), "a try", 20)
    assert f"hosts.tls.key {files.key} can't be used" in caplog.text


def heard_of(connection: socket.socket) -> bytes:
    """Everything until the other side ends it."""
    heard = b""
    while True:
        try:
            more = connection.recv(65536)
        except ConnectionResetError:
            return heard
        if not more:
            return heard
        heard += more


def test_a_stranger_that_does_not_go_on_in_tls_is_hung_up_on(authority: Authority) -> None:
    head = Heard([KEY], tls=of_head(authority.issue("127.0.0.1")))
    with joined(head, tls=of_host(authority.ca)) as host:
        wait_until(lambda: bool(host.ups), "the host is taken in", 20)
        strangers = [socket.create_connection(("127.0.0.1", head.port), 5) for _ in range(3)]
        for stranger, said in zip(strangers, (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b""), strict=True):
            stranger.settimeout(20)
            stranger.sendall(said)
        for stranger in strangers:
            with stranger:
                assert heard_of(stranger).startswith(sealed_stream.MAGIC_TLS)
        host.end.send("runner-0@b", "still there")
        wait_until(lambda: bool(head.items), "the host is heard", 10)
        assert len(host.ups) == 1

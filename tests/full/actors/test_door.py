"""The door alone: what it lets in, what it refuses, and that no frame, however wrong, harms it."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from thespian.system.transport import ExternalInterfaceTransportInit, SendStatus, TransmitIntent
from thespian.system.transport.streamBuffer import ackMsg, toSendBuffer

from tests.helpers.systems import Evil
from trinity_es.actors import sealed_transport, system_key
from trinity_es.actors.frames import HEADER, MAX_FRAME, frame, knock
from trinity_es.actors.sealed_transport import AuthenticatedTransport
from trinity_es.actors.system_key import KEY_VARIABLE, make_key, read_key
from trinity_es.events.errors import WrongKey

KEY = b"k" * 64
OTHER = b"o" * 64

MakeDoor = Callable[..., AuthenticatedTransport]


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def make_door() -> Iterator[MakeDoor]:
    made: list[AuthenticatedTransport] = []

    def make(key: bytes = KEY, address: str = "127.0.0.1") -> AuthenticatedTransport:
        capabilities = {sealed_transport._ADDRESS: address, "Admin Port": 1}
        made.append(AuthenticatedTransport(ExternalInterfaceTransportInit(), capabilities, None, None, key=key))
        return made[-1]

    yield make
    for each in made:
        listening = each.socket
        each.close()
        listening.close()


def listen(at: AuthenticatedTransport, seconds: float = 5.0) -> Any:
    """The next message, None when none came."""
    return getattr(at.run(None, timedelta(seconds=seconds)), "message", None)


def listen_until(at: AuthenticatedTransport, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < until, "it did not come to that in 10 s"
        listen(at, 0.05)


def send(out: AuthenticatedTransport, to: AuthenticatedTransport, message: Any) -> Any:
    """What arrives of it; both ends run in turn."""
    intent = TransmitIntent(to.myAddress, message)
    out.scheduleTransmit(None, intent)
    got = None
    for _ in range(500):
        listen(out, 0.002)
        got = got or listen(to, 0.002)
        if got is not None and intent.result is SendStatus.Sent:
            break
    return got


def transmit(out: AuthenticatedTransport, address: Any, message: str, ends: list[Any]) -> None:
    """Send a message; its status is added to `ends` once it is known."""
    intent = TransmitIntent(address, message)
    intent.addCallback(lambda status, _: ends.append(status), lambda status, _: ends.append(status))
    out.scheduleTransmit(None, intent)


def raw(to: AuthenticatedTransport, data: bytes) -> socket.socket:
    s = socket.create_connection(to.socket.getsockname(), 5)
    s.sendall(data)
    return s


def sealed(to: AuthenticatedTransport, message: Any, key: bytes = KEY, port: int | None = None) -> bytes:
    return frame(key, to._port if port is None else port, pickle.dumps((to.myAddress, message)))


# --- frames ---------------------------------------------------------------------------------------------------------
def test_frames_go_between_doors_of_one_key_and_are_answered(make_door: MakeDoor) -> None:
    a, b = make_door(), make_door()
    for message in ("small", "x" * 300_000, "again, on the same connection"):
        assert send(a, b, message) == message
        assert not a._transmitIntents, "it was not acknowledged"


def test_the_door_binds_to_its_address_alone(make_door: MakeDoor) -> None:
    def is_free_at(address: str, port: int) -> bool:
        with socket.socket() as other, contextlib.suppress(OSError):
            other.bind((address, port))
            return True
        return False

    doors = [make_door(address="127.0.0.2") for _ in range(5)]  # another process may have the port of one elsewhere
    assert any(is_free_at("127.0.0.1", door._port) for door in doors)
    there = doors[0]
    assert there.socket.getsockname()[0] == "127.0.0.2"
    clone = there.external_transport_clone()
    assert clone.socket.getsockname()[0] == "127.0.0.2"
    clone.close()


RUBBISH: dict[str, Callable[[AuthenticatedTransport, bytes], bytes]] = {
    "a pickle without a seal": lambda d, evil: b"%d>%b" % (len(evil), evil),
    "a seal of another key": lambda d, evil: frame(OTHER, d._port, evil),
    "a seal for another port": lambda d, evil: frame(KEY, d._port + 1, evil),
    "a seal for an answer": lambda d, evil: frame(KEY, 0, evil),
    "a seal of nulls": lambda d, evil: b"%d>%b%b" % (32 + len(evil), bytes(32), evil),
    "a changed byte": lambda d, evil: frame(KEY, d._port, evil)[:-1] + b"?",
    "a frame of another format": lambda d, evil: b"%d>%b%b" % (
        32 + len(evil), hmac.digest(KEY, b"trinity-es %d " % d._port + evil, "sha256"), evil),
    "another payload than was sealed": lambda d, evil: frame(KEY, d._port, bytes(len(evil)))[: -len(evil)] + evil,
    "a header and no end": lambda d, evil: frame(OTHER, d._port, bytes(100_000))[:-1],
    "a frame too short for a seal": lambda d, evil: b"3>abc",
    "an empty frame": lambda d, evil: b"0>",
    "a negative length": lambda d, evil: b"-5>" + evil,
    "a length that nobody has": lambda d, evil: b"99999999999>" + evil,
    "a length that is no number": lambda d, evil: b"ab>" + evil,
    "no length at all": lambda d, evil: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("what", RUBBISH)
def test_a_frame_without_the_seal_is_dropped_unread_and_harms_nothing(
    what: str, make_door: MakeDoor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = make_door(), make_door()
    written = tmp_path / "written"
    evil = pickle.dumps((b.myAddress, Evil(written)))
    with raw(b, RUBBISH[what](b, evil)) as s, caplog.at_level(logging.WARNING):
        assert listen(b, 0.3) is None
        s.settimeout(2)
        with contextlib.suppress(ConnectionResetError):
            assert s.recv(100) == b"", "it was answered"
        peer = "{}:{}".format(*s.getsockname())
    assert not written.exists()
    assert not b._incomingSockets
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert f"refused a frame from {peer}" in caplog.text
    assert send(a, b, "well") == "well"


def test_the_same_frame_with_the_seal_is_read(make_door: MakeDoor, tmp_path: Path) -> None:
    b = make_door()
    written = tmp_path / "written"
    with raw(b, sealed(b, Evil(written))):
        listen(b)
    assert written.exists()


def test_half_a_frame_and_a_closed_connection_leave_nothing(make_door: MakeDoor) -> None:
    a, b = make_door(), make_door()
    before = psutil.Process().num_fds()
    for data in (b"", b"10", sealed(b, "x")[:-1], b"nonsense" * 10):
        for _ in range(20):
            raw(b, data).close()
    listen_until(b, lambda: not b._incomingSockets and psutil.Process().num_fds() == before)
    assert send(a, b, "well") == "well"


def test_a_connection_without_a_seal_in_time_is_dropped(make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_transport, "STRANGER_SECONDS", 0.4)
    a, b = make_door(), make_door()
    silent, slow = raw(b, b""), raw(b, b"1")
    until = time.monotonic() + 1.0
    with silent, slow:
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                slow.send(b"0")
            assert send(a, b, "well") == "well", "others are not heard meanwhile"
        assert not b._incomingSockets
        for s in (silent, slow):
            s.settimeout(2)
            with contextlib.suppress(ConnectionError):
                assert s.recv(1) == b"", "it is open still"


def test_a_frame_of_ours_that_does_not_end_is_dropped_too(make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that was overheard may be sent by anybody, with a body that never ends."""
    monkeypatch.setattr(sealed_transport, "FRAME_SECONDS", 0.5)
    a, b = make_door(), make_door()
    with raw(b, sealed(b, "x" * 1000)[:-1]) as s:
        listen_until(b, lambda: bool(b._incomingSockets))
        listen_until(b, lambda: not b._incomingSockets)
        assert s.recv(1) == b""
    monkeypatch.setattr(sealed_transport, "FRAME_SECONDS", 30.0)
    monkeypatch.setattr(sealed_transport, "MAX_UNFINISHED", 500_000)
    half = sealed(b, "x" * 400_000)[:-100_000]
    with raw(b, half), raw(b, half), raw(b, half):
        listen(b, 0.3)
        assert sum(len(i._rData._buf) for i in b._incomingSockets.values()) <= 1_000_000
        assert send(a, b, "well") == "well"


def test_of_too_many_silent_connections_the_oldest_are_dropped_and_ours_are_heard(make_door: MakeDoor) -> None:
    a, b = make_door(), make_door()
    b._max_strangers = 10
    assert send(a, b, "before") == "before"
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(raw(b, b""))
            listen(b, 0.005)
        assert send(make_door(), b, "new") == "new"
        assert send(a, b, "old") == "old"
        assert len(b._incomingSockets) <= 10


def test_of_many_peers_few_connections_are_kept_and_all_are_heard_again(make_door: MakeDoor) -> None:
    b, peers = make_door(), [make_door() for _ in range(12)]
    b._max_idle = 4
    for word in ("once", "again"):
        for peer in peers:
            assert send(peer, b, word) == word
            assert send(b, peer, word) == word
            assert len(b._openSockets) <= 5


def test_nothing_of_a_stranger_s_frame_is_kept_before_its_seal_fits(make_door: MakeDoor) -> None:
    b = make_door()
    claimed = b"%d>" % MAX_FRAME + bytes(HEADER - 1)
    with raw(b, claimed) as s:
        listen_until(b, lambda: [len(i._rData._buf) for i in b._incomingSockets.values()] == [HEADER - 1])
        with contextlib.suppress(OSError):
            s.send(bytes(100_000))
        listen_until(b, lambda: not b._incomingSockets)


# --- peers that take nothing ----------------------------------------------------------------------------------------
def test_a_peer_that_takes_nothing_keeps_nothing_from_others_and_gets_little_more(
    make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, well = make_door(), make_door()
    ends: list[Any] = []

    def tell(port: int) -> None:
        transmit(a, sealed_transport._address("127.0.0.1", port), "a message", ends)

    with socket.create_server(("127.0.0.1", 0)) as frozen:  # its kernel takes what comes, and nobody reads it
        port = frozen.getsockname()[1]
        for _ in range(100):
            tell(port)
        assert send(a, well, "at once") == "at once"
        monkeypatch.setattr(sealed_transport, "SILENT_SECONDS", 0.0)
        for _ in range(100):
            tell(port)
        assert ends == [SendStatus.Failed] * 100, "what comes on top is dropped"
        assert send(a, well, "at once") == "at once"
        assert len(a._transmitIntents) <= 2, "one connection for all that waits for it"


def test_what_nobody_takes_is_given_up_and_tried_later(make_door: MakeDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_transport, "TRANSMIT_SECONDS", 0.3)
    monkeypatch.setattr(sealed_transport, "SILENT_SECONDS", 0.1)
    a, b = make_door(), make_door()
    ends: list[Any] = []
    for _ in range(sealed_transport.MAX_UNREAD + 5):
        transmit(a, b.myAddress, "lost", ends)
        listen(a, 0.01)
    listen_until(a, lambda: ends == [SendStatus.Failed] * (sealed_transport.MAX_UNREAD + 5) and not a._unread)
    while listen(b, 0.3) is not None:
        pass  # it lives again
    assert send(a, b, "well") == "well"


def test_many_refused_frames_make_few_warnings(make_door: MakeDoor, caplog: pytest.LogCaptureFixture) -> None:
    b = make_door()
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            raw(b, b"3>abc").close()
        listen(b, 0.5)
    assert len(caplog.records) == 1
    assert b._refused_count == 30


def test_a_frame_of_ours_that_cannot_be_unpickled_is_answered_and_harms_nothing(make_door: MakeDoor) -> None:
    a, b = make_door(), make_door()
    with raw(b, frame(KEY, b._port, b"no pickle")) as s:
        assert listen(b, 0.3) is None
        assert s.recv(100) == b._not_understood
    assert send(a, b, "well") == "well"


ANSWERS = {
    "Thespian's own": ackMsg,
    "a seal of another key": frame(OTHER, 0, pickle.dumps("ACK")),
    "a frame without a seal": toSendBuffer(("from", "me")),
    "a negative length": b"-5>xxxxxxxxxxxxxxxxxxxx",
    "a length that nobody has": b"99999999999>xxxxxxxx",
    "a length that is no number": b"ab>",
    "no length at all": b"no answer at all, and long",
    "too short for a seal": b"3>abc",
}


@pytest.mark.parametrize("what", ANSWERS)
def test_who_took_the_port_of_a_dead_actor_cannot_say_that_it_got_the_message(what: str, make_door: MakeDoor) -> None:
    a, b = make_door(), make_door()
    ends: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        squatter.settimeout(5)
        transmit(a, sealed_transport._address("127.0.0.1", squatter.getsockname()[1]), "a message", ends)
        listen(a, 0.1)
        first, _ = squatter.accept()
        first.settimeout(5)
        with first:
            frame = first.recv(10_000)
            first.sendall(ANSWERS[what])
            assert listen(a, 0.3) is None
            assert first.recv(10_000) == b"", "the connection is left open"
        again, _ = squatter.accept()
        with again:
            assert again.recv(10_000) == frame, "it is not sent again"
    assert ends == []
    assert send(a, b, "well") == "well"


def test_a_message_that_no_door_would_let_in_is_not_sent(make_door: MakeDoor) -> None:
    a, b = make_door(), make_door()
    with pytest.raises(ValueError, match=r"a bytes of \d+ bytes is too large"):
        a.scheduleTransmit(None, TransmitIntent(b.myAddress, bytes(MAX_FRAME)))


@pytest.mark.parametrize(("key", "fits"), [(KEY, True), (OTHER, False)])
def test_a_knock_tells_whether_the_key_fits(key: bytes, fits: bool, make_door: MakeDoor) -> None:
    b = make_door()
    thread = threading.Thread(target=b.run, args=(None, timedelta(seconds=1)))
    thread.start()
    assert knock("127.0.0.1", b._port, key) is fits
    thread.join()


def test_a_knock_where_nobody_answers_tells_nothing(make_door: MakeDoor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert knock("127.0.0.1", busy.getsockname()[1], KEY, 0.2) is None
        port = busy.getsockname()[1]
    assert knock("127.0.0.1", port, KEY) is None


# --- the key --------------------------------------------------------------------------------------------------------
def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    old = os.umask(0)
    try:
        make_key(str(path))
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text().strip()
    assert len(bytes.fromhex(text)) == 32
    make_key(str(path))
    assert read_key(str(path)) == text.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_key_that_others_can_read_is_refused_with_the_way_out(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key(str(path))
    path.chmod(mode)
    with pytest.raises(WrongKey, match=f"chmod 600 {path}"):
        read_key(str(path))


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    make_key(str(path))
    status = SimpleNamespace(st_mode=0o100600, st_uid=os.geteuid() + 4711)
    stranger = SimpleNamespace(
        environ={}, fstat=lambda _: status, geteuid=os.geteuid, open=os.open, O_NONBLOCK=os.O_NONBLOCK)
    monkeypatch.setattr(system_key, "os", stranger)
    with pytest.raises(WrongKey, match="belongs to another user"):
        read_key(str(path))


def test_a_key_that_is_missing_or_short_is_told_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    with pytest.raises(WrongKey, match=f"{path} can't be read .No such file.*{KEY_VARIABLE}"):
        read_key(str(path))
    path.touch(0o600)
    with pytest.raises(WrongKey, match=f"the file {path} has 0 characters"):
        read_key(str(path))
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(WrongKey, match="it is no text"):
        read_key(str(path))
    with pytest.raises(WrongKey, match=r"can't be made .*system.key_file"):
        make_key(str(tmp_path / "nowhere" / "key"))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(WrongKey, match=f"the environment variable {KEY_VARIABLE} has 5 characters"):
        read_key(str(path))


def test_the_key_in_the_environment_goes_before_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    monkeypatch.setenv(KEY_VARIABLE, "e" * 32)
    make_key(str(path))
    assert not path.exists()
    assert read_key(str(path)) == b"e" * 32

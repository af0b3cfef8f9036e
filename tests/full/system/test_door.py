"""Promise 11 on a running system: nobody gets in who has not the key, and nobody reaches it from another machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import trinity_es
from tests.helpers.parity_rows import NewId
from tests.helpers.systems import Evil, StartSystem, end, everything, play_batch, scripted, sleepers
from trinity_es.actors import system_key
from trinity_es.actors.frames import frame
from trinity_es.actors.system_key import KEY_VARIABLE
from trinity_es.client import health, teardown
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.errors import NotRunning, StartupError, VersionMismatch, WrongKey
from trinity_es.system import lifecycle, running_system
from trinity_es.testing import wait_until


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    found = process.net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def ports(client: RolloutClient) -> dict[int, int]:
    """Of the admin, its logger, the guardian, the coordinator and the runners: pid by port. Not the engines' HTTP."""
    return {port: p.pid for p in everything(client) for _, port in listening(p) if port not in endpoints(client)}


def endpoints(client: RolloutClient) -> set[int]:
    return {int(r["endpoint"].rpartition(":")[2]) for r in client.status()["runners"]}


def other_addresses() -> list[str]:
    """Of this machine, as seen from others where it has a network."""
    mine = [a.address for all_ in psutil.net_if_addrs().values() for a in all_ if a.family is socket.AF_INET]
    return ["127.0.0.2", *(a for a in mine if not a.startswith("127."))]


def throw(host: str, port: int, data: bytes) -> bytes:
    """Send it; what is answered before the connection is closed."""
    with socket.create_connection((host, port), 5) as s:
        s.settimeout(10)
        s.sendall(data)
        try:
            return s.recv(1000)
        except ConnectionResetError:
            return b""


# --- where it listens -----------------------------------------------------------------------------------------------
def test_every_process_listens_on_loopback_alone(shared: RolloutClient) -> None:
    everyone = {p.pid: listening(p) for p in everything(shared)}
    open_ports = [place for places in everyone.values() for place in places]
    assert len(open_ports) >= 5, "admin, logger, guardian, coordinator, runner"
    assert {host for host, _ in open_ports} == {"127.0.0.1"}
    clients = listening(psutil.Process())
    assert clients, "clients listen for their answers"
    assert all(host.startswith("127.") for host, _ in clients)
    for address in other_addresses():
        for _, port in [*open_ports, *clients]:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), 2)


def test_a_system_on_another_address_listens_there_and_is_found(start_system: StartSystem, tmp_path: Path) -> None:
    client = start_system(system={"address": "127.0.0.2"})
    assert {host for p in everything(client) for host, _ in listening(p)} == {"127.0.0.2"}
    play_batch(client, 1, sleepers(1))
    for port in ports(client):
        assert throw("127.0.0.2", port, b"3>abc") == b""
    config = scripted(tmp_path)  # which says 127.0.0.1: of a system that runs, its process knows better
    with trinity_es.connect(config) as other:
        assert other.status()["system"]
    (tmp_path / "other").write_text("0" * 64)
    (tmp_path / "other").chmod(0o600)
    with pytest.raises(WrongKey, match="is not the key of the actor system"):
        trinity_es.connect(scripted(tmp_path, system={"address": "127.0.0.2", "key_file": str(tmp_path / "other")}))
    play_batch(client, 2, sleepers(1))


def test_an_address_that_is_not_of_this_machine_is_told_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(StartupError, match=r"can't listen on 203\.0\.113\.7, port \(any\).*system\.address"):
        lifecycle.start(scripted(tmp_path, system={"address": "203.0.113.7"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"can't listen on 127.0.0.1, port {port} .*in use.*system.port"):
            lifecycle.start(scripted(tmp_path, system={"port": port}))
    assert time.monotonic() - began < 20


# --- who is heard ---------------------------------------------------------------------------------------------------
ATTACKS: dict[str, Callable[[bytes, int], bytes]] = {
    "as Thespian would send it": lambda evil, port: b"%d>%b" % (len(evil), evil),
    "with a seal of another key": lambda evil, port: frame(b"o" * 64, port, evil),
    "with a seal of nulls": lambda evil, port: b"%d>%b%b" % (32 + len(evil), bytes(32), evil),
    "too short": lambda evil, port: b"3>abc",
    "of negative length": lambda evil, port: b"-5>" + evil,
    "no frame": lambda evil, port: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_no_process_takes_a_frame_without_the_seal(system_for: StartSystem, new_id: NewId, tmp_path: Path) -> None:
    client = system_for()
    before = everything(client)
    output = running_system.output_file(client.config)
    skipped = len(output.read_text())
    written = tmp_path / "written"
    evil = pickle.dumps((None, Evil(written)))
    told: set[int] = set()
    for attack in ATTACKS.values():
        for port, pid in ports(client).items():
            assert throw("127.0.0.1", port, attack(evil, port)) == b""
            wait_until(lambda pid=pid: f"{pid} port" in output.read_text()[skipped:], f"a warning of process {pid}")
            told.add(pid)
    assert len(told) >= 5
    assert not written.exists()
    assert everything(client) == before
    play_batch(client, new_id(), sleepers(1))
    lines = [line for line in output.read_text()[skipped:].splitlines() if "refused a frame" in line]
    assert all(re.search(r"WARNING trinity_es\S+ \d+ port \d+ refused a frame from 127\.0\.0\.1:\d+", x) for x in lines)
    assert {int(re.findall(r"actors\.sealed_transport (\d+)", line)[0]) for line in lines} == told
    assert len(lines) <= len(told) * len(ATTACKS)


def test_another_version_is_told_apart_from_another_key(shared: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> None:
    found = running_system.find(shared.config)
    monkeypatch.setattr(running_system, "find", lambda _: {k: v for k, v in found.items() if k != "protocol"})
    with pytest.raises(VersionMismatch, match=r"another version of trinity_es.*trinity-es down"):
        trinity_es.connect(shared.config)


def test_an_engines_endpoint_reads_no_frame_and_asks_for_its_token(shared: RolloutClient, tmp_path: Path) -> None:
    key = system_key.read_key(running_system.key_file(shared.config))
    written = tmp_path / "written"
    evil = pickle.dumps((None, Evil(written)))
    (port,) = endpoints(shared)
    for thrown in [*(attack(evil, port) for attack in ATTACKS.values()), frame(key, port, evil)]:
        assert re.match(rb"HTTP/1.1 4\d\d |$", throw("127.0.0.1", port, thrown))
    for asked in (b"GET /v1/models", b"POST /v1/completions", b"POST /v1/chat/completions"):
        said = throw("127.0.0.1", port, asked + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert said.startswith(b"HTTP/1.1 401 ")
    assert not written.exists()


# --- the key --------------------------------------------------------------------------------------------------------
def test_the_key_lies_where_its_owner_alone_reads_it_and_on_no_command_line(shared: RolloutClient) -> None:
    path = Path(shared.config.system.log_dir) / "key"
    assert path.stat().st_mode & 0o777 == 0o600
    key = path.read_text().strip()
    assert len(key) == 64
    for process in everything(shared):
        assert key not in " ".join(process.cmdline())
        assert key not in " ".join(process.environ().values())
    for file in path.parent.iterdir():
        assert file == path or key not in file.read_text(errors="replace"), file


def test_a_client_without_the_right_key_is_told_where_it_was_looked_for(
    system_for: StartSystem, new_id: NewId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = system_for()
    folder = Path(client.config.code_path)
    missing, wrong = tmp_path / "missing", tmp_path / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    began = time.monotonic()
    with pytest.raises(WrongKey, match=f"{missing} can't be read .*{KEY_VARIABLE}"):
        trinity_es.connect(scripted(folder, system={"key_file": str(missing)}))
    with pytest.raises(WrongKey, match=f"the key from the file {wrong} is not the key of"):
        trinity_es.connect(scripted(folder, system={"key_file": str(wrong)}))
    monkeypatch.setenv(KEY_VARIABLE, "1" * 64)
    with pytest.raises(WrongKey, match=f"the key from the environment variable {KEY_VARIABLE}"):
        trinity_es.connect(scripted(folder))
    assert time.monotonic() - began < 5
    monkeypatch.setenv(KEY_VARIABLE, Path(running_system.key_file(client.config)).read_text().strip())
    with trinity_es.connect(scripted(folder, system={"key_file": str(wrong)})) as other:
        assert other.status()["system"]
    play_batch(client, new_id(), sleepers(1))


def test_a_key_in_the_environment_makes_no_file_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "e" * 40)
    config = scripted(tmp_path, system={"keeper": True})
    lifecycle.start(config)
    client = trinity_es.connect(config)
    try:
        client.wait_ready(60)
        assert not Path(running_system.key_file(config)).exists()
        wait_until(lambda: running_system.keeper(config), "the keeper")
        first = client._link.admin
        psutil.Process(first["pid"]).kill()
        play_batch(client, 1, sleepers(1))
        assert client._link.admin != first
        for process in everything(client):
            assert "e" * 40 not in " ".join(process.cmdline())
        monkeypatch.delenv(KEY_VARIABLE)
        with pytest.raises(WrongKey, match="can't be read"):
            trinity_es.connect(config)
    finally:
        end(client)


def test_one_process_uses_two_systems_with_keys(shared: RolloutClient, system_for: StartSystem, new_id: NewId) -> None:
    other = system_for()
    keys = [Path(running_system.key_file(system.config)).read_text() for system in (other, shared)]
    assert keys[0] != keys[1]
    play_batch(other, new_id(), sleepers(1))
    play_batch(shared, new_id(), sleepers(1))
    play_batch(other, new_id(), sleepers(1))


def test_no_process_holds_a_connection_of_another(start_system: StartSystem, tmp_path: Path) -> None:
    """A port that a forked process had from its parent would stay open when its owner is gone."""
    client = start_system(explorer={"rollout_model": {"engine_num": 2}})

    def owners() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for process in everything(client):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    found.setdefault(os.readlink(descriptor), set()).add(f"{process.pid} {process.name()}")
        kinds = ("socket:", "pipe:", str(tmp_path))
        return {what: who for what, who in found.items() if what.startswith(kinds) and "launch-" not in what}

    assert len(owners()) > 10
    shared_ones = {what: who for what, who in owners().items() if len(who) > 1}
    assert shared_ones == {}


def test_words_to_a_copy_of_a_run_do_not_reach_the_run(shared: RolloutClient, new_id: NewId, tmp_path: Path) -> None:
    """The copy has the key and the log, and so every word that leads to the run's processes."""
    before, batch = running_system.find(shared.config), new_id()
    shutil.copytree(shared.config.code_path, tmp_path / "copy")
    copy = scripted(tmp_path / "copy")
    assert health.read_health(copy)["up"] is False
    with pytest.raises(NotRunning, match=r"no actor system runs on .*: start one with `trinity-es up`"):
        trinity_es.connect(copy)
    assert teardown.end_system(copy) == (0, [])
    with trinity_es.running(copy) as client:
        play_batch(client, batch, sleepers(1))
    assert running_system.find(shared.config) == before
    play_batch(shared, batch, sleepers(2))

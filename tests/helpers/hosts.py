"""Hosts that join a run, as processes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import trinity_es
from tests.helpers.servers import free_port
from tests.helpers.systems import end, kill_all, scripted, sleepers
from trinity_es.actors.hosts.folder_puller import pulled_dir
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev
from trinity_es.projections.host_states import host_of
from trinity_es.system import leftovers, lifecycle
from trinity_es.testing import wait_until
from trinity_es.weights.shared_memory import memory_dir

KEY = "the key of these tests, of 40 characters"


class JoinedHost:
    """Host: the process of `trinity-es join` and its descendants."""

    def __init__(self, url: str, name: str, folder: Path, *options: str, inside: Sequence[str] = ()) -> None:
        """Start the host. `inside`: prefix of the command, to run it in a namespace."""
        self.url, self.name, self.log_dir = url, name, folder / f"host-{name}"
        self._config = scripted(folder, store={"url": url}, system={"log_dir": str(self.log_dir)})
        temporary = folder / f"tmp-{name}"  # clients find a host's system there
        temporary.mkdir(exist_ok=True)
        self.env = {**os.environ, "TRINITY_ES_KEY": KEY, "TMPDIR": str(temporary)}
        self.said = folder / f"{name}.said"
        command = [sys.executable, "-m", "trinity_es", "join", url, "--name", name, "--log-dir", str(self.log_dir)]
        with self.said.open("a") as out:
            self.process = subprocess.Popen([*inside, *command, *options], stdout=out, stderr=out, env=self.env)

    def kill(self) -> None:
        """Kill all processes of the host with SIGKILL, as when the machine fails."""
        self.process.kill()
        self.process.wait()
        kill_all(leftovers.leftovers(self._config))
        leftovers.end_all_leftovers(self._config)
        shutil.rmtree(pulled_dir("", self._config.store.url, str(self.log_dir)), ignore_errors=True)

    def inside(self) -> list[str]:
        """Return the prefix that runs a command in this host's namespace."""
        [first, *_] = [p.pid for p in psutil.Process(self.process.pid).children()]
        return ["nsenter", "-t", str(first), "-p", "-m", "-n"]

    def drain(self) -> int:
        """End the host with SIGTERM, as a launcher does, and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)

    def left(self) -> list[int]:
        return [p.pid for p in leftovers.leftovers(self._config)]


@dataclass
class Head:
    """Head of a run, with a client and a reader of its log."""

    client: RolloutClient
    url: str
    folder: Path
    port: int
    """Port on which the head listens for hosts."""

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        with trinity_es.open_log(self.url) as log:
            return [r.event for r in log.read(types=[kind.__name__ for kind in kinds])]

    def submit(self, batch_id: int, tasks: int, seconds: float) -> None:
        self.client.submit_batch(batch_id=batch_id, tasks=sleepers(tasks, seconds=seconds), batch_type="train")

    def settled(self) -> int:
        """Return the number of ended tasks of the open batch."""
        [batch] = self.client.status()["batches"]
        return int(batch["settled"])

    def finish(self, batch_id: int, tasks: int) -> None:
        """Wait for the batch. Check that each task ended once with its experience, and that the log is sound."""
        done = self.client.finalize_train_batch(batch_id, timeout=90)
        assert done["finished_task_count"] == tasks
        found = Counter(e.eid.task for e in self.client.experiences(batch_id))
        assert found == dict.fromkeys(range(tasks), 1)
        with trinity_es.open_log(self.url) as log:
            assert log.verify() == []
        assert Counter(e.task for e in self.ended(batch_id)) == dict.fromkeys(range(tasks), 1)

    def ended(self, batch_id: int) -> list[ev.TaskFinished]:
        with trinity_es.open_log(self.url) as log:
            read = [r.event for r in log.read(stream=f"batch/{batch_id}", types=["TaskFinished"])]
        return [e for e in read if isinstance(e, ev.TaskFinished)]

    def ran_on(self, batch_id: int) -> Counter[str]:
        """Return {host: number of tasks that ended on it}; "" is the head."""
        return Counter(host_of(e.runner) for e in self.ended(batch_id))


StartHead = Callable[..., Head]


def has_settled(head: Head, tasks: int) -> bool:
    return head.settled() >= tasks


@contextmanager
def host_joins(url: str, name: str, folder: Path, *options: str, inside: Sequence[str] = ()) -> Iterator[JoinedHost]:
    host = JoinedHost(url, name, folder, *options, inside=inside)
    try:
        yield host
    finally:
        host.kill()


def ready(client: RolloutClient, host: str, timeout: float = 90) -> None:
    """Wait until a runner of this host is ready."""
    def serves() -> bool:
        return any(r["runner"].endswith(f"@{host}") and r["state"] == "ready" for r in client.status()["runners"])

    wait_until(serves, f"a runner of host {host}", timeout)


class KeyFile:
    """File with the hosts' shared key, and its copies."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.holds(key)

    def holds(self, key: str) -> None:
        self.path.touch(0o600)
        self.path.write_text(f"{key}\n")


@contextmanager
def head_of(
    url: str, folder: Path, hosts: Mapping[str, Any] | None = None, *, port: int | None = None, **sections: Any
) -> Iterator[Head]:
    """Start the head of a run over several hosts. Keyword arguments are further sections of the config."""
    port = port or free_port()
    system = {"log_dir": str(folder / "head-logs"), **sections.pop("system", {})}
    reached = {"address": f"127.0.0.1:{port}", "timeout": 10.0, **(hosts or {})}
    store = {"url": url, **sections.pop("store", {})}
    config = scripted(folder / "head", store=store, hosts=reached, system=system, **sections)
    lifecycle.start(config)
    client = trinity_es.connect(config)
    try:
        client.wait_ready(60)
        yield Head(client, url, folder, port)
    finally:
        end(client)
        shutil.rmtree(memory_dir(config), ignore_errors=True)


def log_of(head: Head) -> str:
    return (head.folder / "head-logs" / "coordinator.log").read_text()


@contextmanager
def with_host(start_head: StartHead, *options: str) -> Iterator[tuple[Head, JoinedHost]]:
    """Yield a head, and a host `b` whose runner is ready."""
    head = start_head()
    with host_joins(head.url, "b", head.folder, *options) as host:
        ready(head.client, "b")
        yield head, host

"""A run that Ray places, over nodes of its multi-node test cluster on this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

import trinity_es
from tests.helpers.client_packages import installed
from tests.helpers.hosts import KEY, Head
from tests.helpers.of_the_day import LAUNCHERS, by_turns
from tests.helpers.ray_nodes import PACKAGES, RayNodes, ray_nodes
from tests.helpers.servers import free_port
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.config.config import Config, load_config
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import TrinityError
from trinity_es.system import leftovers, running_system
from trinity_es.testing import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(400)]
TIMEOUT = 4.0
"""Seconds after which a host that is not heard of is lost."""
CLI = [sys.executable, "-m", "trinity_es"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(installed(*PACKAGES, beside=True)) as made:
        yield made


@pytest.fixture
def config(postgres: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINITY_ES_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({
        "mode": "explore", "store": {"url": postgres()},
        "explorer": {"max_concurrency": 8, "rollout_model": {"engine_type": "scripted"}},
        "hosts": {"address": f"127.0.0.1:{free_port()}", "timeout": TIMEOUT},
    }))
    return path


def begin(nodes: RayNodes, *words: str) -> subprocess.Popen[str]:
    env = {**nodes.env, "TRINITY_ES_KEY": KEY, "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen([*CLI, *words], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def say(nodes: RayNodes, *words: str) -> subprocess.CompletedProcess[str]:
    with begin(nodes, *words) as process:
        try:
            told = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it says where it hangs
            raise AssertionError(f"no end after 120 s: {process.communicate(timeout=30)[1][-5000:]}") from None
    return subprocess.CompletedProcess(words, process.returncode, *told)


@contextmanager
def ended(nodes: RayNodes, config: Path) -> Iterator[None]:
    """Whatever happens, nothing of the run is left."""
    try:
        yield
    finally:
        say(nodes, "down", "--on", "ray", str(config))
        wait_until(lambda: not ours(config), "the end of all processes", 30)


def connected(config: Path) -> RolloutClient | None:
    try:
        return trinity_es.connect(load_config(config))
    except TrinityError:
        return None


def serving(client: RolloutClient) -> set[str]:
    return {r["host"] for r in client.status()["runners"] if r["state"] == "ready"}


def ours(config: Path) -> list[psutil.Process]:
    """Every process of this run, and every actor of Ray's."""
    settings = load_config(config)
    logs = Path(settings.system.log_dir)
    folders = [logs, *(p for p in logs.glob("*") if p.is_dir())]
    found = [p for folder in folders for p in leftovers.leftovers(
        Config.from_dict({"store": {"url": settings.store.url}, "system": {"log_dir": str(folder)}}))]
    return found + [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0] == "ray::Agent"]


def owner(client: RolloutClient) -> int:
    found = running_system.find_head(client.config)
    return 0 if found is None else int(found["owner"]["pid"])


@by_turns("ray", LAUNCHERS)
def test_f4_a_run_on_ray_survives_driver_node_and_head(nodes: RayNodes, config: Path, tmp_path: Path) -> None:
    driver = begin(nodes, "up", "--on", "ray", "--hosts", "2", str(config))
    with ended(nodes, config):
        client = wait_until(lambda: connected(config), "the head", 120)
        driver.kill()  # it still waits for a second node
        told = driver.communicate()[1]
        assert "waiting for 1 more" in told
        second = nodes.add()
        head = Head(client, load_config(config).store.url, tmp_path, 0)
        wait_until(lambda: len(serving(client)) == 2, "an engine of each node", 120)
        assert {r["host"] for r in client.status()["runners"]} == serving(client), "the head only leads"

        # Neither key nor store is told to who may look at processes and at Ray's text logs.
        lines = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
        assert not any(KEY in word or head.url in word for line in lines for word in line)
        looked = subprocess.run(["grep", "-rlaF", "--devices=skip", "-e", KEY, "-e", head.url, nodes.folder],
                                capture_output=True, text=True, check=False)
        assert looked.stdout == ""

        head.submit(1, 96, 0.5)
        wait_until(lambda: head.settled() >= 32, "32 tasks", 60)
        nodes.remove(second)
        wait_until(lambda: bool(head.events(ev.HostLost, ev.HostLeft)), "the end of its host", TIMEOUT + 30)
        head.finish(1, 96)
        assert len(head.ran_on(1)) == 2
        assert {(e.kind, e.blamed) for e in head.events(ev.AttemptFailed)} <= {("runner_lost", False)}

        nodes.add()  # takes the place of the one that is gone
        wait_until(lambda: len(serving(client)) == 2, "an engine of the new node", 120)
        head.submit(2, 96, 0.5)
        wait_until(lambda: head.settled() >= 16, "16 tasks", 60)
        before = owner(client)
        psutil.Process(before).kill()
        head.finish(2, 96)
        wait_until(lambda: owner(client) not in (0, before), "Ray's next head", 60)
        client.close()

        done = say(nodes, "down", str(config))  # where the head is; Ray's part follows
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not ours(config), "the end of Ray's actors", 60)
        assert "does not run on Ray" in say(nodes, "down", "--on", "ray", str(config)).stdout


@by_turns("ray", LAUNCHERS)
def test_up_waits_for_all_engines_and_is_refused_twice_and_down_ends_all(nodes: RayNodes, config: Path) -> None:
    with ended(nodes, config):
        done = say(nodes, "up", "--on", "ray", "--hosts", "1", str(config))
        assert done.returncode == 0, done.stderr
        assert "the head and 1 hosts" in done.stdout
        again = say(nodes, "up", "--on", "ray", str(config))
        assert again.returncode != 0
        assert "this run is already on Ray" in again.stderr
        done = say(nodes, "down", "--on", "ray", str(config))
        assert "ended the run on all nodes" in done.stdout, done.stderr
        assert ours(config) == []


def test_what_can_t_be_on_ray_is_refused(nodes: RayNodes, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str) -> str:
        done = say(nodes, "up", "--on", "ray", str(config), *words)
        assert done.returncode != 0
        return done.stderr

    assert "--hosts N" in refused("--set", "explorer.rollout_model.engine_num=64")
    assert "Set store.url to a PostgreSQL database" in refused("--set", "store.url=sqlite:///x.sqlite")
    with socket.socket() as silent:  # nobody else's: it is bound and does not listen
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setitem(nodes.env, "RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        assert "there is no Ray cluster at" in refused()

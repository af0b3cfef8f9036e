"""A running system on the ScriptedEngine: one for the tests that only use it, fresh ones for those that break it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import trinity_es
from trinity_es.actors.base import process_start_time
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.system import discovery, lifecycle
from trinity_es.testing import wait_until

StartSystem = Callable[..., RolloutClient]


def scripted(folder: Path, **sections: Any) -> trinity_es.Config:
    """A config for the ScriptedEngine in this folder; keyword arguments are sections that are laid over it."""
    data: dict[str, Any] = {
        "mode": "explore",
        "explorer": {"places": 8, "rollout_model": {"engine_type": "scripted"}},
        "system": {"keeper": False},
    }
    for name, section in sections.items():
        data[name] = merge(data.get(name, {}), section)
    return trinity_es.Config.from_dict(data, folder=folder)


def name_as_ours(folder: Path) -> None:
    """Put modules of a user's own into a folder that are called as our rooms are."""
    for file in ("events.py", "projections.py", "actors/__init__.py", "trinity_es_user.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("OWNER = 'the user'\n")


def merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {k: merge(base.get(k), v) for k, v in over.items()}
    return over


def kill_all(processes: list[psutil.Process]) -> None:
    """kill -9 of each, whichever of them the death of another has already ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_system(client: RolloutClient) -> None:
    """kill -9 of every process of a system at once, and wait until its admin is gone."""
    admin = client._link.admin
    kill_all(discovery.processes(admin))
    wait_until(lambda: process_start_time(admin["pid"]) != admin["started"], "the system to be gone")


def end(client: RolloutClient) -> None:
    """Stop a system, whatever a test did to it, and see that no process of it is left."""
    admin = client._link.admin
    family = discovery.processes(admin)
    try:
        client.shutdown()
    except Exception:
        kill_all(family)
    assert not discovery.wait_gone(family, 15), "a process of the system is left"


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutClient]:
    """A system that many tests use at once: batch ids must differ from test to test (`new_id`)."""
    config = scripted(tmp_path_factory.mktemp("shared"), explorer={"max_retry_times": 1, "max_timeout": 5.0})
    lifecycle.start(config)
    client = trinity_es.connect(config)
    try:
        client.wait_ready(60)
        yield client
    finally:
        end(client)


@pytest.fixture
def start_system(tmp_path: Path) -> Iterator[StartSystem]:
    """Start a system of one's own: `start_system(explorer={...})`."""
    clients: list[RolloutClient] = []

    def begin(*, folder: Path = tmp_path, wait: bool = True, **sections: Any) -> RolloutClient:
        config = scripted(folder, **sections)
        lifecycle.start(config)
        client = trinity_es.connect(config)
        clients.append(client)
        if wait:
            client.wait_ready(60)
        return client

    yield begin
    for client in clients:
        end(client)


_ids = iter(range(1000, 1_000_000))


@pytest.fixture
def new_id() -> Callable[[], int]:
    return lambda: next(_ids)

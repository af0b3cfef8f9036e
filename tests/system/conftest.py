"""A running system on the ScriptedEngine: one for the tests that only use it, fresh ones for those that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trinity_es
from tests.helpers.systems import StartSystem, end, scripted
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.system import lifecycle


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

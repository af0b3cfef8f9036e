"""What tests of the parity table's rows share: a batch trained and read, a system for a whole file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.helpers.systems import end, scripted
from trinity_es import Task, connect
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience
from trinity_es.system import lifecycle

__all__ = ["NewId", "one", "recorded", "running", "train"]

NewId = Callable[[], int]


def one(reward: float = 1.0, **fields: Any) -> Experience:
    return Experience(**{"tokens": [1, 2, 3], "prompt_length": 1, "reward": reward, **fields})


def train(client: RolloutClient, batch: int, tasks: list[Task]) -> list[Experience]:
    client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
    client.finalize_train_batch(batch, timeout=60)
    return list(client.experiences(batch))


def running(folder: Path, **sections: Any) -> Iterator[RolloutClient]:
    """A system for a fixture that several tests share."""
    config = scripted(folder, **sections)
    lifecycle.start(config)
    client = connect(config)
    try:
        client.wait_ready(60)
        yield client
    finally:
        end(client)


def recorded(client: RolloutClient, batch: int | str, kind: type[Any]) -> list[Any]:
    return [r.event for r in client.log.events(batch) if isinstance(r.event, kind)]

"""A batch that is trained and read, for tests of the parity table's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_es import Task
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.experience import Experience

NewId = Callable[[], int]


def one(reward: float = 1.0, **fields: Any) -> Experience:
    return Experience(**{"tokens": [1, 2, 3], "prompt_length": 1, "reward": reward, **fields})


def train(client: RolloutClient, batch: int, tasks: list[Task]) -> list[Experience]:
    client.submit_batch(batch_id=batch, tasks=tasks, batch_type="train")
    client.finalize_train_batch(batch, timeout=60)
    return list(client.experiences(batch))


def recorded(client: RolloutClient, batch: int | str, kind: type[Any]) -> list[Any]:
    return [r.event for r in client.log.events(batch) if isinstance(r.event, kind)]

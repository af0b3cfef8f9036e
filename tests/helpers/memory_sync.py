"""A batch for tests that send weights in memory."""

from __future__ import annotations

from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events.values import Task
from trinity_es.testing import SleepWorkflow


def served(client: RolloutClient) -> list[int]:
    return [r["model_version"] for r in client.status()["runners"]]


def play(client: RolloutClient, batch_id: int) -> None:
    """Check that a batch can be generated, whether or not a sync succeeded."""
    client.submit_batch(batch_id=batch_id, tasks=[Task(workflow=SleepWorkflow)], batch_type="train")
    assert client.finalize_train_batch(batch_id, timeout=30)["finished_task_count"] == 1

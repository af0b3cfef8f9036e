"""Checks of a system whose database fails for a while."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers.faults import lines
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev

TASKS = 48
"""Number of tasks of 0.2 s each, which take more than a second on 8 places."""


def on(url: str) -> dict[str, Any]:
    return {"store": {"url": url.replace("postgresql://", "postgresql+psycopg://"), "durability": "process"}}


def text_log(client: RolloutClient, name: str) -> Path:
    return Path(client.config.system.log_dir) / f"{name}.log"


def judge(client: RolloutClient, batch: int, result: dict[str, Any], tasks: int = TASKS) -> list[ev.Event]:
    """Check that each task finished once, at the first attempt, with its experiences, and that the log is sound."""
    assert result["finished_task_count"] == tasks
    events = [r.event for r in client.log.events(batch)]
    names = Counter(type(e).__name__ for e in events)
    assert names["BatchSubmitted"] == names["BatchFinalized"] == 1
    assert names["AttemptFailed"] == 0
    finished = Counter(e.task for e in events if isinstance(e, ev.TaskFinished))
    assert finished == Counter(range(tasks))
    assert sorted(e.eid.task for e in client.experiences(batch)) == list(range(tasks))
    assert client.log.verify() == []
    return events


def unnoticed(client: RolloutClient) -> bool:
    """Return True if a single coordinator did all writes, without giving up one and reloading its state."""
    return births(client) == 1 and lines(text_log(client, "coordinator"), "log not written") == 0


def births(client: RolloutClient) -> int:
    return sum(isinstance(r.event, ev.CoordinatorStarted) for r in client.log.events())

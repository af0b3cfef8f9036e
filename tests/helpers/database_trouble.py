"""A system whose database is in trouble."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers.faults import lines
from trinity_es.client.rollout_client import RolloutClient
from trinity_es.events import vocabulary as ev

TASKS = 48
"""Of 0.2 s each on 8 places: more than a second of work."""


def on(url: str) -> dict[str, Any]:
    return {"store": {"url": url.replace("postgresql://", "postgresql+psycopg://"), "durability": "process"}}


def text_log(client: RolloutClient, name: str) -> Path:
    return Path(client.config.system.log_dir) / f"{name}.log"


def judge(client: RolloutClient, batch: int, result: dict[str, Any], tasks: int = TASKS) -> list[ev.Event]:
    """Every task of the batch is finished, once, at the first attempt; its experiences are there; the log is sound."""
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
    """The one coordinator never had to give up a write, and to read its live state anew."""
    return births(client) == 1 and lines(text_log(client, "coordinator"), "log not written") == 0


def births(client: RolloutClient) -> int:
    return sum(isinstance(r.event, ev.CoordinatorStarted) for r in client.log.events())

"""Mean reward of each task of a finalized batch, by taskset and row, for data selectors."""

from __future__ import annotations

import math
from typing import Any

from trinity_es.events.values import BatchId, BatchLifecycleState
from trinity_es.projections.reading.log_reader import Log

__all__ = ["pass_rates", "submitted_tasks"]


def pass_rates(log: Log, batch_id: BatchId) -> dict[str, tuple[list[int], list[float]]]:
    """Return {taskset: (rows, mean reward of each row)} for a batch, without tasks that lack a reward.

    Return {} if the batch is not finalized.
    """
    state = log.current(batch_id)
    if state is None or state.state is not BatchLifecycleState.FINALIZED:
        return {}
    by_taskset: dict[str, tuple[list[int], list[float]]] = {}
    for number, task in enumerate(submitted_tasks(log, batch_id)):
        index = task.get("index") or {}
        rewards = [run.metrics["reward"] for run in state.tasks[number].done.values() if "reward" in run.metrics]
        if not rewards or type(index.get("index")) is not int or "taskset" not in index:
            continue
        rows, rates = by_taskset.setdefault(str(index["taskset"]), ([], []))
        rows.append(index["index"])
        rates.append(math.fsum(rewards) / len(rewards))
    return by_taskset


def submitted_tasks(log: Log, batch_id: BatchId) -> list[dict[str, Any]]:
    """Return the tasks of the batch's last submission, including added ones. Raises PayloadNotFound."""
    return [task for event in log.submission_events(batch_id) for task in log.tasks_of(event)]

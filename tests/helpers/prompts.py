"""How often a run used each prompt of a taskset."""

from __future__ import annotations

from collections import Counter

from trinity_es.events import vocabulary as ev
from trinity_es.projections.reading.log_reader import Log


def prompts_used(log: Log, taskset: str) -> dict[int, int]:
    """Return {row of the taskset: number of train batches with it}, without aborted and replaced submissions."""
    rows_by_stream: dict[str, list[int]] = {}
    for recorded in log.read(types=["BatchSubmitted", "TasksAdded", "BatchAborted"]):
        event = recorded.event
        if isinstance(event, ev.BatchSubmitted) and event.batch_type == "train":
            rows_by_stream[recorded.stream] = []
        if isinstance(event, ev.BatchSubmitted | ev.TasksAdded) and recorded.stream in rows_by_stream:
            # A task that continues a cut task counts in the batch that cut it.
            continued = {task.task for task in event.continues} if isinstance(event, ev.BatchSubmitted) else set[int]()
            tasks = enumerate(log.tasks_of(event))
            indices = [task.get("index", {}) for number, task in tasks if number not in continued]
            rows_by_stream[recorded.stream] += [i["index"] for i in indices if i.get("taskset") == taskset]
        elif isinstance(event, ev.BatchAborted):
            rows_by_stream.pop(recorded.stream, None)
    return dict(sorted(Counter(row for rows in rows_by_stream.values() for row in rows).items()))

"""Search for prompts that were submitted and never tried, because no runner got a unit of them.

A prompt is a row of a taskset. If one batch dropped it and another played it, it was tried. A task without an index
(a client's own) counts as a separate prompt. The report also says how far each taskset was read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import CorruptPayload, LogNotFound, PayloadNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.batch_queries import BatchRow

__all__ = ["PromptsTried", "Untried", "prompts_tried"]

_FEW = 50
"""Maximum number of prompts to search for as bytes in other batches. For more prompts every batch is decoded."""


@dataclass(frozen=True, slots=True)
class Untried:
    taskset: str | None
    row: Any
    """Row in its taskset; None for a task without an index."""
    batch_id: BatchId
    """Last batch that contains the prompt."""
    task: int
    reason: str
    """State of that batch."""


@dataclass(slots=True, kw_only=True)
class PromptsTried:
    tasks: int = 0
    """Number of tasks. A task that was cut and continued in a later batch counts once."""
    sent: int = 0
    """Number of these tasks that were sent to a runner."""
    never: list[Untried] = field(default_factory=list)
    read: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Taskset -> (number of the pass from 0, tasks read in that pass)."""


def prompts_tried(log: Log) -> PromptsTried:
    """Find the untried prompts of all batches. Decodes only batches that may matter."""
    rows = log.batches()
    report = PromptsTried(tasks=sum(r.tasks for r in rows), sent=sum(r.sent for r in rows), read=_taskset_cursors(log))
    rows_to_read = {batch_stream(r.batch_id): r for r in rows if r.sent < r.tasks}
    untried_by_key: dict[Any, Untried] = {}
    tried_keys: set[Any] = set()
    sent_by_stream: dict[str, set[int]] = {}
    for stream, row in rows_to_read.items():
        sent_tasks = {
            unit["task"] for item in log.read(stream=stream, types=["TasksDispatched"], after=row.first_position)
            for unit in orjson.loads(item.data)["units"]
        }
        sent_by_stream[stream] = sent_tasks
        submissions = log.read(stream=stream, types=["BatchSubmitted", "TasksAdded"], after=row.first_position - 1)
        indices = [index for item in submissions for index in _task_indices(log, item)]
        for number, index in enumerate(indices):
            key = _prompt_key(index) or (row.batch_id, number)
            if number in sent_tasks:
                tried_keys.add(key)
            else:
                taskset = index.get("taskset")
                untried_by_key[key] = Untried(
                    None if taskset is None else str(taskset), index.get("index"), row.batch_id, number, row.state
                )
    for key in tried_keys:
        untried_by_key.pop(key, None)
    row_by_stream = {batch_stream(r.batch_id): r for r in rows}
    _count_continued_once(log, row_by_stream, sent_by_stream, report)
    if any(prompt.row is not None for prompt in untried_by_key.values()):
        _remove_tried(log, row_by_stream, untried_by_key)
    report.never = list(untried_by_key.values())
    return report


def _count_continued_once(
    log: Log, row_by_stream: dict[str, BatchRow], sent_by_stream: dict[str, set[int]], report: PromptsTried
) -> None:
    """Correct the report's counts, so that a task continued in a later batch counts once.

    `sent_by_stream` has the sent tasks of each batch that did not send all its tasks.
    """
    for item in log.read_rare(["BatchSubmitted"]):
        row = row_by_stream.get(item.stream)
        if row is None or item.position < row.first_position or b'"continues":[{' not in item.data:
            continue
        assert isinstance(item.event, ev.BatchSubmitted)
        for continued in item.event.continues:
            both_tasks = (item.stream, continued.task), (batch_stream(continued.batch_id), continued.cut_task)
            report.tasks -= 1
            report.sent -= all(task in sent_by_stream.get(stream, (task,)) for stream, task in both_tasks)


def _remove_tried(log: Log, rows: dict[str, BatchRow], untried: dict[Any, Untried]) -> None:
    """Remove prompts from `untried` that another batch or an earlier submission of a batch tried.

    Submissions whose bytes contain none of the prompts are not decoded.
    """
    resubmitted: set[str] = set()
    byte_patterns = [b'"index":' + orjson.dumps(u.row) for u in untried.values() if u.row is not None]
    if len(byte_patterns) > _FEW:
        byte_patterns = [b""]
    for item in log.read_rare(["BatchSubmitted", "TasksAdded"]):
        row = rows.get(item.stream)
        if row is None:
            continue
        if item.position < row.first_position:
            resubmitted.add(item.stream)
        elif row.sent == row.tasks and (b'"tasks":null' in item.data or any(p in item.data for p in byte_patterns)):
            for index in _task_indices(log, item):
                untried.pop(_prompt_key(index), None)
    for stream in resubmitted:
        for key in _tried_before(log, stream, rows[stream].first_position):
            untried.pop(key, None)


def _tried_before(log: Log, stream: str, end: int) -> Iterator[Any]:
    """Yield the keys of the prompts that earlier submissions of a batch tried, before position `end`."""
    indices: list[dict[str, Any]] = []
    for item in log.read(stream=stream, types=["BatchSubmitted", "TasksAdded", "TasksDispatched"]):
        if item.position >= end:
            return
        if item.type == "TasksDispatched":
            yield from (_prompt_key(indices[unit["task"]]) for unit in orjson.loads(item.data)["units"])
        elif item.type == "TasksAdded":
            indices += _task_indices(log, item)
        else:
            indices = list(_task_indices(log, item))


def _prompt_key(index: dict[str, Any]) -> tuple[str, bytes] | None:
    """Return a key that identifies a prompt across batches; None for a task without an index."""
    return (str(index.get("taskset", "")), orjson.dumps(index["index"])) if "index" in index else None


def _task_indices(log: Log, submission: Recorded) -> Iterator[dict[str, Any]]:
    """Yield the `index` of each submitted task; {} if it has none or the payload is gone."""
    event = submission.event
    assert isinstance(event, ev.BatchSubmitted | ev.TasksAdded)
    tasks: list[Any] = []
    with contextlib.suppress(LogNotFound, PayloadNotFound, CorruptPayload):
        tasks = log.tasks_of(event)
    for number in range(len(event.repeat_times)):
        task = tasks[number] if number < len(tasks) else {}
        index = task.get("index") if isinstance(task, dict) else None
        yield index if isinstance(index, dict) else {}


def _taskset_cursors(log: Log) -> dict[str, tuple[int, int]]:
    """Return how far each taskset was read: {taskset: (number of the pass, tasks read in that pass)}."""
    last = [log.last(stream, "TasksetAdvanced") for stream in log.streams("taskset/")]
    events = [item.event for item in last if item is not None]
    return {e.taskset: (e.epoch, e.offset) for e in events if isinstance(e, ev.TasksetAdvanced)}

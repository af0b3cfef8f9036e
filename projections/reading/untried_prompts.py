"""Which prompts were never tried: handed in, and no runner ever got one of their runs; or never handed in at all.

A prompt is a row of a taskset, so one that was dropped in one batch and played in another was tried. A task without an
index (a client's own) is a prompt of its own. What no batch ever held is known from how far the taskset was read.
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
from trinity_es.projections.tables.batch_list import BatchRow

__all__ = ["PromptsTried", "Untried", "prompts_tried"]

_FEW = 50
"""Maximum number of prompts that are looked for in the other batches' bytes; for more, every batch is read."""


@dataclass(frozen=True, slots=True)
class Untried:
    taskset: str | None
    row: Any
    """In its taskset; None for a task without an index."""
    batch_id: BatchId
    """The batch in which it was handed in last."""
    task: int
    reason: str


@dataclass(slots=True, kw_only=True)
class PromptsTried:
    tasks: int = 0
    sent: int = 0
    """Of these, so many got to a runner."""
    never: list[Untried] = field(default_factory=list)
    read: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By taskset, how far it was read: (pass, tasks read in that pass), both from 0."""


def prompts_tried(log: Log) -> PromptsTried:
    """From all batches; only those of which not every task got to a runner are looked into."""
    rows = log.batches()
    out = PromptsTried(tasks=sum(r.tasks for r in rows), sent=sum(r.sent for r in rows), read=_read(log))
    partly = {batch_stream(r.batch_id): r for r in rows if r.sent < r.tasks}
    found: dict[Any, Untried] = {}
    tried: set[Any] = set()
    for stream, row in partly.items():
        sent = {
            unit["task"] for item in log.read(stream=stream, types=["TasksDispatched"], after=row.first_position)
            for unit in orjson.loads(item.data)["units"]
        }
        handed = log.read(stream=stream, types=["BatchSubmitted", "TasksAdded"], after=row.first_position - 1)
        for number, index in enumerate(i for item in handed for i in _indices(log, item)):
            key = _key(index) or (row.batch_id, number)
            if number in sent:
                tried.add(key)
            else:
                taskset = index.get("taskset")
                found[key] = Untried(
                    None if taskset is None else str(taskset), index.get("index"), row.batch_id, number, row.state
                )
    for key in tried:
        found.pop(key, None)
    if any(untried.row is not None for untried in found.values()):
        _forget_tried(log, {batch_stream(r.batch_id): r for r in rows}, found)
    out.never = list(found.values())
    return out


def _forget_tried(log: Log, rows: dict[str, BatchRow], found: dict[Any, Untried]) -> None:
    """Take out of `found` what another batch tried, or an earlier one of the same id.

    What can't hold any of it is not decoded.
    """
    again: set[str] = set()
    marks = [b'"index":' + orjson.dumps(u.row) for u in found.values() if u.row is not None]
    if len(marks) > _FEW:
        marks = [b""]
    for item in log.rare(["BatchSubmitted", "TasksAdded"]):
        row = rows.get(item.stream)
        if row is None:
            continue
        if item.position < row.first_position:
            again.add(item.stream)
        elif row.sent == row.tasks and (b'"tasks":null' in item.data or any(mark in item.data for mark in marks)):
            for index in _indices(log, item):
                found.pop(_key(index), None)
    for stream in again:
        for key in _tried_before(log, stream, rows[stream].first_position):
            found.pop(key, None)


def _tried_before(log: Log, stream: str, end: int) -> Iterator[Any]:
    """Yield the prompts that were tried under a batch's id before it was submitted at this position."""
    indices: list[dict[str, Any]] = []
    for item in log.read(stream=stream, types=["BatchSubmitted", "TasksAdded", "TasksDispatched"]):
        if item.position >= end:
            return
        if item.type == "TasksDispatched":
            yield from (_key(indices[unit["task"]]) for unit in orjson.loads(item.data)["units"])
        else:
            indices = [*(indices if item.type == "TasksAdded" else ()), *_indices(log, item)]


def _key(index: dict[str, Any]) -> tuple[str, bytes] | None:
    """Return what makes a prompt the same in two batches; None where it has no index."""
    return (str(index.get("taskset", "")), orjson.dumps(index["index"])) if "index" in index else None


def _indices(log: Log, handed: Recorded) -> Iterator[dict[str, Any]]:
    """Yield the index of each task that an event handed in; {} where it has none, or its payload is gone."""
    event = handed.event
    assert isinstance(event, ev.BatchSubmitted | ev.TasksAdded)
    tasks: list[Any] = []
    with contextlib.suppress(LogNotFound, PayloadNotFound, CorruptPayload):
        tasks = log.tasks_of(event)
    for place in range(len(event.repeat_times)):
        task = tasks[place] if place < len(tasks) else {}
        index = task.get("index") if isinstance(task, dict) else None
        yield index if isinstance(index, dict) else {}


def _read(log: Log) -> dict[str, tuple[int, int]]:
    missing = {name.removeprefix("taskset/") for name in log.streams("taskset/")}
    out: dict[str, tuple[int, int]] = {}
    for item in log.rare(["TasksetAdvanced"], descending=True):
        data = orjson.loads(item.data)
        out.setdefault(data["taskset"], (data["epoch"], data["offset"]))
        missing.discard(data["taskset"])
        if not missing:
            break
    return out

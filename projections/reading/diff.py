"""Differences between two moments of a batch, between two logs, and between two runs.

Two logs with a common beginning (one is a copy, or was restored and continued) are compared by the hash chain. Equal
hashes at a position mean equal events up to it, so a binary search finds the first difference. Two independent runs
share no hash. They are compared by content, batch by batch in the order of the first run: tasks, weights, outcomes of
tasks (runs, rewards, tokens), result, and training. Runners, times and durations are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState, evolve
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.batch_queries import BatchRow

__all__ = [
    "OWN", "BatchDifference", "Change", "Fork", "RunsCompared", "batch_content", "changes", "common_prefix",
    "compare_runs", "find_fork", "is_time_metric", "readable_state",
]

_TIME = re.compile(r"(^|[/_. ])(time|seconds|timestamp)([/_.]|$)")
OWN = {"name", "store.url", "run_dir", "system.log_dir", "system.key_file", "hosts.key_file"}
"""Settings that identify a run. They differ between any two runs, so they are not compared."""
MISSING = "(none)"
"""Value in a `Change` for a key that one side lacks."""
CONTEXT = 3
"""Number of events shown before and after the first difference of two logs."""


@dataclass(frozen=True, slots=True)
class Change:
    """A difference: the path of a value, such as `tasks.5.reward`, and the value on both sides."""

    path: str
    before: Any
    after: Any


def changes(before: Any, after: Any, path: str = "") -> Iterator[Change]:
    """Yield the differences between two JSON values. Dicts are compared key by key, numbers exactly."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(k for k in after if k not in before)]:
            key_path = f"{path}.{key}" if path else str(key)
            yield from changes(before.get(key, MISSING), after.get(key, MISSING), key_path)
    elif type(before) is not type(after) or before != after:
        yield Change(path, before, after)


# --- two moments of one batch ---------------------------------------------------------------------------------------
def readable_state(state: BatchState | None) -> dict[str, Any]:
    """Return a batch's state as {subject: text}, for people to compare: the batch, then each `task N`; {} for None."""
    if state is None:
        return {}
    facts: dict[str, Any] = {
        "state": state.state.value + (", paused" if state.paused else ""),
        "tasks settled": f"{state.completed_task_count} of {state.expected_task_count}",
        "units waiting": len(state.pending), "units running": len(state.flights),
        "failed attempts": state.failed_attempts, "tasks dropped": len(state.dropped),
        "experiences delivered": sum(ref.count for ref in state.experiences), "trained in step": state.trained_step,
    }
    open_units: dict[int, list[str]] = {}
    for (task_id, _), flight in sorted(state.flights.items(), key=lambda item: item[0]):
        text = f"attempt {flight.unit.attempt} on {flight.runner} #{flight.incarnation}, weights {flight.model_version}"
        open_units.setdefault(task_id, []).append(text)
    for (task_id, _), unit in sorted(state.pending.items(), key=lambda item: item[0]):
        open_units.setdefault(task_id, []).append(f"attempt {unit.attempt} waits for a runner")
    for task_id in range(len(state.tasks)):
        facts[f"task {task_id}"] = _task_text(state, task_id, open_units.get(task_id, []))
    metrics = (state.final_result or {}).get("metrics", {})
    return facts | {f"result {name}": value for name, value in sorted(metrics.items())}


def _task_text(state: BatchState, task_id: int, open_units: list[str]) -> str:
    """Describe a task by its outcome, number of finished runs and mean reward. `open_units`: texts on open units."""
    task = state.tasks[task_id]
    progress = f"{len(task.done)} of {task.total_runs} runs done" if task.done else "no run done"
    rewards = [result.metrics["reward"] for _, result in sorted(task.done.items()) if "reward" in result.metrics]
    if rewards:
        progress += f", reward {sum(rewards) / len(rewards):.4g}"
    if task_id in state.dropped:
        return f"dropped ({state.dropped[task_id]}), {progress}"
    if task_id in state.statuses:
        return ("finished, " if state.statuses[task_id].ok else f"failed ({task.first_error}), ") + progress
    return "; ".join([*open_units, progress])


# --- two logs with one beginning ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    common: int
    """Last position at which the logs are equal; 0 if their first events differ."""
    heads: tuple[int, int]
    before: list[Recorded]
    after: tuple[list[Recorded], list[Recorded]]
    """First differing events of each log."""


def common_prefix(first: Callable[[int], bytes | None], second: Callable[[int], bytes | None], end: int) -> int:
    """Return the last position up to `end` at which two logs have the same hash, or 0.

    `first` and `second` return the hash at a position of each log. The hashes are trusted: only `verify` checks them.
    """
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        first_hash = first(middle)
        low, high = (middle, high) if first_hash is not None and first_hash == second(middle) else (low, middle - 1)
    return low


def find_fork(first: Log, second: Log) -> Fork:
    """Find the first difference between two logs, with up to `CONTEXT` events before and after it."""

    def hash_at(log: Log, position: int) -> bytes | None:
        recorded = log.at(position)
        return None if recorded is None else recorded.hash

    def events_after(log: Log, position: int) -> list[Recorded]:
        return [*islice(log.events(after=max(0, position)), CONTEXT)]

    heads = first.head().position, second.head().position
    common = common_prefix(partial(hash_at, first), partial(hash_at, second), min(heads))
    return Fork(common=common, heads=heads, before=events_after(first, common - CONTEXT)[:common],
                after=(events_after(first, common), events_after(second, common)))


# --- two runs -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDifference:
    """Batch that differs between two runs; a row is None if that run lacks the batch."""

    batch_id: BatchId
    rows: tuple[BatchRow | None, BatchRow | None]
    changes: list[Change]


@dataclass(slots=True, kw_only=True)
class RunsCompared:
    settings: list[Change]
    same: list[BatchRow] = field(default_factory=list)
    """Equal batches before the first difference; rows of the first run."""
    first: BatchDifference | None = None
    """First batch that differs, compared task by task."""
    later: list[BatchDifference] = field(default_factory=list)
    """Later batches that differ, compared by their rows alone."""
    batches: tuple[int, int] = (0, 0)

    @property
    def equal(self) -> bool:
        return self.first is None and not self.settings


def compare_runs(first: Log, second: Log) -> RunsCompared:
    """Compare the configs of two runs, and their batches with equal ids: tasks, state, counts, reward and weights."""
    rows = first.batches()
    second_rows = {batch_stream(row.batch_id): row for row in second.batches()}
    report = RunsCompared(
        settings=[c for c in changes(first.config()[1], second.config()[1]) if c.path not in OWN],
        batches=(len(rows), len(second_rows)),
    )
    for row in rows:
        second_row = second_rows.pop(batch_stream(row.batch_id), None)
        differences = _row_changes(row, second_row)
        if report.first is None and second_row is not None and (
            differences or row.ended_at is None
            or _submission_fields(first, row) != _submission_fields(second, second_row)
        ):  # an open batch is always compared by its events, because its row says too little
            left, right = (batch_content(log.events(row.batch_id, r.first_position - 1))
                           for log, r in ((first, row), (second, second_row)))
            differences = list(changes(left, right)) or differences
        if differences:
            difference = BatchDifference(batch_id=row.batch_id, rows=(row, second_row), changes=differences)
            if report.first is None:
                report.first = difference
            else:
                report.later.append(difference)
        elif report.first is None:
            report.same.append(row)
    only_second = [BatchDifference(batch_id=row.batch_id, rows=(None, row), changes=_row_changes(None, row))
                   for row in second_rows.values()]
    if report.first is None and only_second:
        report.first = only_second.pop(0)
    report.later += only_second
    return report


_COMPARED = ("batch_type", "state", "tasks", "finished", "failed_attempts", "experiences", "response_tokens", "reward",
             "model_version", "trained_step")


def _row_changes(first: BatchRow | None, second: BatchRow | None) -> list[Change]:
    """Return the differences between a batch's rows in two logs. A row is None if that log lacks the batch."""
    if first is None or second is None:
        return [Change("batch", MISSING if first is None else "there", MISSING if second is None else "there")]
    left, right = ({name.replace("_", " "): getattr(row, name) for name in _COMPARED} for row in (first, second))
    return list(changes(left, right))


def _submission_fields(log: Log, row: BatchRow) -> tuple[Any, ...]:
    """Return the fields of a batch's submission that are compared, without the client's request id."""
    submitted = log.at(row.first_position)
    data = {} if submitted is None else orjson.loads(submitted.data)
    return tuple(data.get(name) for name in ("tasks", "tasks_digest", "repeat_times", "min_wait_num", "evals"))


def batch_content(recorded: Iterable[Recorded]) -> dict[str, Any]:
    """Fold a batch's events into its content to compare, without runners and times.

    Keys: `asked` (parameters of the submission), `task N` (submitted task, runs, weights, outcome, and metrics and
    tokens of each run), `state`, `result`, `trained`.
    """
    state: BatchState | None = None
    tasks: list[Any] = []
    weights: dict[int, set[int]] = {}
    trained: dict[str, Any] = {}
    for item in recorded:
        event = item.event
        state = evolve(state, event)
        match event:
            case ev.BatchSubmitted() | ev.TasksAdded():
                if isinstance(event, ev.BatchSubmitted):
                    tasks, weights, trained = [], {}, {}
                tasks += event.tasks or [{"payload": event.tasks_digest, "number": i}
                                         for i in range(len(event.repeat_times))]
            case ev.RunsFinished():
                weights.setdefault(event.task, set()).update((event.model_version, event.model_version_end))
            case ev.TaskReopened():
                weights.pop(event.task, None)
            case ev.BatchTrained():
                trained = {"step": event.step, **_without_times(event.metrics)}
    if state is None:
        return {}
    content: dict[str, Any] = {"asked": {
        "type": state.batch_type, "tasks": state.expected_task_count, "at least": state.min_wait_num,
        "attempts": state.max_attempts,
    }}
    for task_id, task in enumerate(state.tasks):
        outcome = f"dropped: {state.dropped[task_id]}" if task_id in state.dropped else "open"
        if status := state.statuses.get(task_id):
            outcome = "finished" if status.ok else f"failed: {status.message}"
        content[f"task {task_id}"] = {
            "asked": tasks[task_id] if task_id < len(tasks) else {}, "runs": task.total_runs,
            "weights": sorted(weights.get(task_id, ())), "outcome": outcome,
            **{f"run {run}": {"tokens": result.response_tokens, **_without_times(result.metrics)}
               for run, result in sorted(task.done.items())},
        }
    content["state"] = state.state.value
    content["result"] = _without_times((state.final_result or {}).get("metrics", {}))
    return content | {"trained": trained}


def _without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in sorted(metrics.items()) if not is_time_metric(name)}


def is_time_metric(name: str) -> bool:
    return _TIME.search(name) is not None

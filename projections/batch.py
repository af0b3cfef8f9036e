"""What a batch is: the fold of its stream.

`evolve(state, event)` is the only way a `BatchState` changes, in the coordinator as in a replay, so live and replayed
state are the same value. It touches no clock and no database. It takes the state over and gives it back changed: copy
first if you need the old one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogCorrupt
from trinity_es.events.values import BatchId, BatchLifecycleState, BatchType, Status
from trinity_es.projections.metrics import (
    aggregate_batch,
    aggregate_eval_batch,
    aggregate_task,
    missing_runs_by_metric,
)

__all__ = [
    "RESULT_FORMS", "BatchState", "Flight", "TaskState", "batch_result", "contiguous", "evolve", "fold", "mean_reward",
    "metric_prefix", "missing_runs",
]

_EVAL_REWARD = re.compile(r"/reward/mean@(\d+)(?:/mean)?\Z")  # the second form where monitor.detailed_stats is on

RESULT_FORMS = 4
"""Ways in which releases have computed `batch_result`, numbered from 1. 1: the tasks of an eval that lost runs have a
`mean@n` of their own. 2: an eval has one mean over all tasks, and counts its missing runs. 3: each mean that is not
over all completed runs has the count of those that lack its metric beside it, and the finished runs of tasks that are
delivered in part count, too. 4: a batch that is trained on counts the failed runs of its tasks, too."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """A unit that a runner has, and how many of its runs are still open."""

    unit: ev.Unit
    runner: str
    incarnation: int
    open_runs: int
    strikes: int = 0
    """Failed attempts before this one that the unit is blamed for."""
    model_version: int = 0
    """The weights that the runner had when it got the unit."""
    timeout: float = 0.0
    """Seconds that the attempt may take; 0: explorer.max_timeout."""


@dataclass(slots=True, kw_only=True)
class TaskState:
    """One task of a batch: which of its runs completed or failed for good, and where their experiences lie."""

    total_runs: int
    done: dict[int, ev.RunResult] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    payloads: list[ev.PayloadRef] = field(default_factory=list)
    seconds: float = 0.0
    """The longest of its successful attempts."""
    first_error: str | None = None
    is_eval: bool = False
    """Its experiences are not kept."""
    attempts: int = 0
    """The highest number of an attempt at any of its units."""
    reopened: str = ""
    """The last request that had it run again."""

    @property
    def settled(self) -> bool:
        return len(self.done) + len(self.failed) == self.total_runs

    def status(self) -> Status:
        message = None
        if len(self.done) < self.total_runs:
            message = f"{len(self.done)}/{self.total_runs} runs completed."
            if self.first_error:
                message += f" First error: {self.first_error}"
        return Status(
            completed_runs=len(self.done), total_runs=self.total_runs,
            metrics=[self.done[run].metrics for run in sorted(self.done)], message=message,
        )


@dataclass(slots=True, kw_only=True)
class BatchState:
    """One batch as the log tells it. A projection: nobody edits it."""

    batch_id: BatchId
    batch_type: BatchType
    expected_task_count: int
    min_wait_num: int | None = None
    state: BatchLifecycleState = BatchLifecycleState.PENDING
    statuses: dict[int, Status] = field(default_factory=dict)
    """By task id, for every settled task: finished, or failed after its last attempt."""
    final_result: dict[str, Any] | None = None
    tasks: list[TaskState] = field(default_factory=list)
    pending: OrderedDict[tuple[int, int], ev.Unit] = field(default_factory=OrderedDict)
    """Units to dispatch, in order, by (task, first run). A plain dict passes all that went before to find its first."""
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    """Units that runners have, by (task, first run)."""
    avoid: dict[tuple[int, int], str] = field(default_factory=dict)
    """Runner on which a unit failed last, by (task, first run)."""
    homes: dict[int, str] = field(default_factory=dict)
    """Runner that got a unit of a task last, where the task is run in several."""
    strikes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Failed attempts that the unit is blamed for, by (task, first run), while it waits for another."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Tasks given up unfinished, and why."""
    failed_attempts: int = 0
    oldest_version: int | None = None
    """The oldest weights that made any token of its completed runs."""
    experiences: list[ev.PayloadRef] = field(default_factory=list)
    trained_step: int | None = None
    max_attempts: int = 1
    detailed_stats: bool = False
    submission: str = ""
    additions: dict[str, int] = field(default_factory=dict)
    """Requests that added tasks, and the number of the first task of each."""
    partial: set[int] = field(default_factory=set)
    """Dropped tasks whose finished runs are delivered all the same."""
    taken: dict[int, str] = field(default_factory=dict)
    """Tasks whose results a scheduler took, and by which request."""
    paused: bool = False
    """What waits is not given to runners: its scheduler was stopped."""
    timed_attempts: int = 0
    """Attempts that tell how long an attempt takes: see PaceMeasured."""
    timed_seconds: float = 0.0
    version: int = 0
    """Version of the stream that this state folds."""

    @property
    def completed_task_count(self) -> int:
        """Tasks settled so far, finished or failed for good."""
        return len(self.statuses)

    @property
    def is_complete(self) -> bool:
        return len(self.statuses) == self.expected_task_count

    @property
    def open_task_count(self) -> int:
        """Tasks of which something is still to come: neither settled nor dropped."""
        return self.expected_task_count - len(self.statuses) - len(self.dropped)

    @property
    def ready_task_count(self) -> int:
        """Tasks whose results can be taken."""
        return len(self.statuses) + len(self.partial) - len(self.taken)

    @property
    def failed_whole(self) -> bool:
        """It is finalized, and no run succeeded of the tasks that it would have delivered."""
        settled = self.state is BatchLifecycleState.FINALIZED and bool(self.statuses)
        return settled and not any(self.tasks[number].done for number in self.statuses.keys() | self.partial)

    def task_status(self, task: int) -> Status:
        """Return what came of a task, as a Scheduler gives it: its metrics over all runs (one dict), and each run's."""
        found = self.tasks[task]
        status = found.status()
        if task in self.dropped and not status.ok:
            left = found.total_runs - len(found.done) - len(found.failed)
            status.message = f"{status.message} {left} given up: {self.dropped[task]}"
        status.per_run = status.metrics
        if status.metrics:
            is_eval = found.is_eval or self.batch_type == "eval"
            status.metrics = [
                {**aggregate_task(status.metrics, is_eval, found.total_runs), "time/task_execution": found.seconds}
            ]
        return status

    def ready_tasks(self) -> list[int]:
        """Return the tasks to be taken, in order: settled, or dropped with runs that are delivered all the same."""
        return sorted((self.statuses.keys() | self.partial) - self.taken.keys())


def contiguous(runs: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive stretches as (first, length): [0, 1, 3] gives (0, 2), (3, 1)."""
    ordered = sorted(runs)
    start = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            yield ordered[start], i - start
            start = i


def fold(events: Iterable[ev.Event], state: BatchState | None = None) -> BatchState | None:
    for event in events:
        state = evolve(state, event)
    return state


def evolve(state: BatchState | None, event: ev.Event) -> BatchState:
    """Return the state after one more event. Raises LogCorrupt for an event that can't follow this state."""
    if isinstance(event, ev.BatchSubmitted):
        return _submitted(event, state.version if state else 0)
    if state is None:
        raise LogCorrupt(f"{type(event).__name__} in a batch's stream before its BatchSubmitted")
    state.version += 1
    match event:
        case ev.TasksDispatched():
            state.state = BatchLifecycleState.RUNNING
            for unit in event.units:
                key = (unit.task, unit.run_id_base)
                state.pending.pop(key, None)
                task = state.tasks[unit.task]
                task.attempts = max(task.attempts, unit.attempt)
                state.flights[key] = Flight(
                    unit=unit, runner=event.runner, incarnation=event.incarnation, open_runs=unit.runs,
                    model_version=event.model_version, strikes=state.strikes.pop(key, 0), timeout=event.timeout,
                )
                if unit.runs < task.total_runs:
                    state.homes[unit.task] = event.runner
        case ev.TasksAdded():
            _added(state, event)
        case ev.RunsFinished():  # TaskFinished is one
            _runs_finished(state, event)
        case ev.AttemptFailed():
            _attempt_failed(state, event)
        case ev.TaskDropped():
            for number in event.tasks:
                state.dropped[number] = event.reason
            state.partial.update(event.kept)
            gone = set(event.tasks)
            state.pending = OrderedDict((k, u) for k, u in state.pending.items() if k[0] not in gone)
            state.flights = {k: f for k, f in state.flights.items() if k[0] not in gone}
        case ev.TaskReopened():
            _reopened(state, event)
        case ev.ResultsTaken():
            state.taken.update(dict.fromkeys(event.tasks, event.request))
        case ev.BatchPaused():
            state.paused = True
        case ev.BatchResumed():
            state.paused = False
        case ev.BatchFinalizing():
            state.state = BatchLifecycleState.FINALIZING
        case ev.FinalizeFailed():
            state.state = BatchLifecycleState.RUNNING if state.expected_task_count else BatchLifecycleState.PENDING
        case ev.BatchFinalized():
            state.state = BatchLifecycleState.FINALIZED
            state.final_result = event.result
            state.experiences = list(event.experiences)
        case ev.BatchAborted():
            state.state = BatchLifecycleState.ABORTED
            state.final_result = event.result
            state.pending, state.flights = OrderedDict(), {}
        case ev.BatchTrained():
            state.trained_step = event.step
        case ev.TasksetAdvanced() | ev.RecoveryDecided() | ev.StallDetected():
            pass
        case _:
            raise LogCorrupt(f"{type(event).__name__} does not belong in a batch's stream")
    return state


def _submitted(event: ev.BatchSubmitted, version: int) -> BatchState:
    evals = set(event.evals)
    return BatchState(
        batch_id=event.batch_id, batch_type=event.batch_type, expected_task_count=len(event.repeat_times),
        min_wait_num=event.min_wait_num,
        state=BatchLifecycleState.RUNNING if event.repeat_times else BatchLifecycleState.PENDING,
        tasks=[TaskState(total_runs=n, is_eval=i in evals) for i, n in enumerate(event.repeat_times)],
        pending=_units(0, event.repeat_times, event.runs_per_unit), max_attempts=event.max_attempts,
        detailed_stats=event.detailed_stats, submission=event.submission, version=version + 1,
    )


def _added(state: BatchState, event: ev.TasksAdded) -> None:
    first, evals = len(state.tasks), set(event.evals)
    state.tasks += [TaskState(total_runs=n, is_eval=i in evals) for i, n in enumerate(event.repeat_times, first)]
    state.pending |= _units(first, event.repeat_times, event.runs_per_unit)
    state.expected_task_count = len(state.tasks)
    state.additions[event.request] = first


def _units(first: int, repeat_times: list[int], runs_per_unit: int | None) -> OrderedDict[tuple[int, int], ev.Unit]:
    """Return the units of new tasks, numbered from `first`, in the order in which they are dispatched."""
    units: OrderedDict[tuple[int, int], ev.Unit] = OrderedDict()
    for task, runs in enumerate(repeat_times, first):
        step = min(runs_per_unit or runs, runs)
        for base in range(0, runs, step):
            units[task, base] = ev.Unit(task=task, run_id_base=base, runs=min(step, runs - base), attempt=1)
    return units


def _timed(state: BatchState, task: TaskState, seconds: float) -> None:
    if state.batch_type != "eval" and not task.is_eval:
        state.timed_attempts += 1
        state.timed_seconds += seconds


def _close_runs(state: BatchState, key: tuple[int, int], runs: int) -> None:
    flight = state.flights.get(key)
    if flight is not None:
        flight.open_runs -= runs
        if flight.open_runs <= 0:
            del state.flights[key]


def _runs_finished(state: BatchState, event: ev.RunsFinished) -> None:
    task = state.tasks[event.task]
    for run in event.runs:
        task.done[run.run] = run
    if event.payload is not None:
        task.payloads.append(event.payload)
    task.seconds = max(task.seconds, event.seconds)
    _timed(state, task, event.seconds)
    oldest = state.oldest_version
    state.oldest_version = event.model_version if oldest is None else min(oldest, event.model_version)
    _close_runs(state, (event.task, event.run_id_base), len(event.runs))
    if task.settled:
        state.statuses[event.task] = task.status()


def _attempt_failed(state: BatchState, event: ev.AttemptFailed) -> None:
    task = state.tasks[event.task]
    state.failed_attempts += 1
    if task.first_error is None:
        task.first_error = f"{event.kind}: {event.message}"
    if event.kind == "timeout":  # else steps that get longer would all time out, and never be counted
        _timed(state, task, event.seconds)
    flight = state.flights.get((event.task, event.run_id_base))
    strikes = (0 if flight is None else flight.strikes) + event.blamed  # an attempt may fail in several events
    _close_runs(state, (event.task, event.run_id_base), len(event.failed_runs))
    if event.retry:
        for base, runs in contiguous(event.failed_runs):
            state.pending[event.task, base] = ev.Unit(
                task=event.task, run_id_base=base, runs=runs, attempt=event.attempt + 1
            )
            state.avoid[event.task, base] = event.runner
            state.strikes[event.task, base] = strikes
    else:
        task.failed.update(dict.fromkeys(event.failed_runs, event.message))
        if task.settled:
            state.statuses[event.task] = task.status()


def _reopened(state: BatchState, event: ev.TaskReopened) -> None:
    """Reset a task to how it was handed in. Kept are its number of attempts, the batch's times and oldest weights."""
    before = state.tasks[event.task]
    state.tasks[event.task] = TaskState(
        total_runs=before.total_runs, is_eval=before.is_eval, attempts=before.attempts, reopened=event.request
    )
    state.statuses.pop(event.task, None)
    state.dropped.pop(event.task, None)
    state.partial.discard(event.task)
    state.homes.pop(event.task, None)
    for unit in event.units:
        state.pending[unit.task, unit.run_id_base] = unit


def batch_result(
    state: BatchState, pipeline_metrics: dict[str, float] | None = None, *, form: int = RESULT_FORMS
) -> dict[str, Any]:
    """Return what finalize returns, from the state alone: the same numbers, bit for bit, wherever it is computed.

    Keys `batch_id, batch_type, finished_task_count, metrics`. Metrics follow `projections.metrics` (run to task to
    batch, tasks in order of their id). A task that failed for good counts in `finished_task_count`, as settled, and in
    `failed_task_count`; its completed runs count in the means, its failed runs are no zero. Those are counted by
    `missing_run_count`, in an eval with those of dropped tasks. A metric that some completed runs lack has
    `<name>/missing_run_count` beside its mean, which is over the others. Finished runs of dropped tasks count in the
    means if they are delivered; these tasks do not count as finished. `form`: one of `RESULT_FORMS`.
    """
    is_eval, prefix = state.batch_type == "eval", metric_prefix(state.batch_id, state.batch_type)
    counted = {**state.statuses, **{task: state.tasks[task].status() for task in state.partial if form > 2}}
    per_task, runs = [], []
    for task_id in sorted(counted):
        status = counted[task_id]
        runs += status.metrics
        if status.metrics:
            metrics = aggregate_task(status.metrics, is_eval, status.total_runs if form > 1 else 0)
            metrics["time/task_execution"] = state.tasks[task_id].seconds
            per_task.append(metrics)
    metrics = dict(pipeline_metrics or {})
    if is_eval:
        metrics |= aggregate_eval_batch(per_task, prefix=prefix, detailed_stats=state.detailed_stats)
        asked = state.tasks if form > 2 else counted.values()
        missing = sum(one.total_runs for one in asked) - sum(s.completed_runs for s in counted.values())
    else:
        metrics |= aggregate_batch(per_task, prefix=prefix)
        missing = sum(s.total_runs - s.completed_runs for s in state.statuses.values()) if form > 3 else 0
    if missing and form > 1:
        metrics[f"{prefix}/missing_run_count"] = float(missing)
    for name, count in missing_runs_by_metric(runs).items() if form > 2 else ():
        metrics[f"{prefix}/{name}/missing_run_count"] = float(count)
    metrics[f"{prefix}/finished_task_count"] = float(state.completed_task_count)
    metrics[f"{prefix}/failed_task_count"] = float(sum(not s.ok for s in state.statuses.values()))
    return {
        "batch_id": state.batch_id, "batch_type": state.batch_type, "finished_task_count": state.completed_task_count,
        "metrics": metrics,
    }


def metric_prefix(batch_id: BatchId, batch_type: str) -> str:
    """Return what the names of a batch's metrics begin with, such as `rollout` or `eval/gsm8k`."""
    if batch_type != "eval":
        return "rollout"
    name = str(batch_id).split("/", 1)[-1]
    return name if name.startswith("bench/") else f"eval/{name}"


def missing_runs(batch_id: BatchId, batch_type: str, metrics: Mapping[str, float]) -> int:
    """Return how many runs a batch's mean reward is not over: those that failed, and those without a reward."""
    prefix = metric_prefix(batch_id, batch_type)
    return int(sum(metrics.get(f"{prefix}/{name}missing_run_count", 0) for name in ("", "reward/")))


def mean_reward(result: dict[str, Any]) -> float | None:
    """Return the mean reward in a final result: `rollout/reward/mean`, or for an eval the mean of its `reward/mean@n`.

    In a log of before 2026-11 an eval of which tasks lost runs has several n: that of the largest is taken.
    """
    metrics = result["metrics"]
    if "rollout/reward/mean" in metrics:
        return float(metrics["rollout/reward/mean"])
    found = {int(m.group(1)): float(v) for k, v in metrics.items() if (m := _EVAL_REWARD.search(k))}
    return found[max(found)] if found else None

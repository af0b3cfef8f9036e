"""Fold of a batch's stream into a `BatchState`.

Both the coordinator and a replay change a `BatchState` only by `evolve`, so live and replayed states are equal.
`evolve` reads no clock and no database. It changes the state in place, so copy the state first if you need the old one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogCorrupt
from trinity_es.events.values import BatchId, BatchLifecycleState, BatchType, Status
from trinity_es.projections import metric_aggregation as aggregation

__all__ = ["RESULT_FORMS", "BatchState", "Flight", "TaskState", "batch_result", "contiguous", "evolve", "fold"]

RESULT_FORMS = 4
"""Number of the newest form of `batch_result`. Each form computes results differently:

1: eval tasks that lost runs have a `mean@n` of their own.
2: an eval has one mean over all tasks and a count of its missing runs.
3: a metric that some completed runs lack comes with a count of these runs. Finished runs of partly delivered tasks
count too.
4: a train batch also has a count of the failed runs of its tasks."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """Unit that a runner has."""

    unit: ev.Unit
    runner: str
    incarnation: int
    open_runs: int
    """Number of its runs that have neither finished nor failed."""
    strikes: int = 0
    """Number of earlier failed attempts that count towards `max_attempts`."""
    model_version: int = 0
    """Weights version of the runner when it got the unit."""
    timeout: float = 0.0
    """Time limit of the attempt in seconds; 0 means explorer.max_timeout."""
    kept: ev.AttemptKept | None = None
    """Kept progress of lost attempts, from which this attempt continues."""


@dataclass(slots=True, kw_only=True)
class TaskState:
    total_runs: int
    done: dict[int, ev.RunResult] = field(default_factory=dict)
    """Run -> result of the completed run."""
    failed: dict[int, str] = field(default_factory=dict)
    """Run that failed for good -> message of its last failure."""
    payloads: list[ev.PayloadRef] = field(default_factory=list)
    seconds: float = 0.0
    """Duration of the longest successful attempt."""
    first_error: str | None = None
    ended_by: str | None = None
    """The first failure after which runs were not attempted again."""
    is_eval: bool = False
    """True for an eval task, whose experiences are not kept."""
    attempts: int = 0
    """Highest attempt number so far."""
    reopened: str = ""
    """Id of the client's request that reopened the task; empty if it was not reopened."""

    @property
    def settled(self) -> bool:
        return len(self.done) + len(self.failed) == self.total_runs

    def status(self) -> Status:
        """Return the outcome so far: metrics of completed runs, and a message if other runs failed or are open."""
        message = None
        if len(self.done) < self.total_runs:
            message = f"{len(self.done)}/{self.total_runs} runs completed."
            if self.ended_by != self.first_error and self.ended_by:
                message += f" Given up after: {self.ended_by}."
            if self.first_error:
                message += f" First error: {self.first_error}"
        return Status(
            completed_runs=len(self.done), total_runs=self.total_runs,
            metrics=[self.done[run].metrics for run in sorted(self.done)], message=message,
        )


@dataclass(slots=True, kw_only=True)
class BatchState:
    """State of one batch after its last event. Only `evolve` changes it."""

    batch_id: BatchId
    batch_type: BatchType
    expected_task_count: int
    min_wait_num: int | None = None
    state: BatchLifecycleState = BatchLifecycleState.PENDING
    statuses: dict[int, Status] = field(default_factory=dict)
    """Task -> status of the settled task (finished, or failed after its last attempt)."""
    final_result: dict[str, Any] | None = None
    tasks: list[TaskState] = field(default_factory=list)
    pending: OrderedDict[tuple[int, int], ev.Unit] = field(default_factory=OrderedDict)
    """(task, first run) -> unit to dispatch, in order. An OrderedDict, because a plain dict scans all deleted entries
    to find its first."""
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    """(task, first run) -> unit that a runner has."""
    avoid: dict[tuple[int, int], str] = field(default_factory=dict)
    """(task, first run) -> runner on which the unit failed last."""
    last_runners: dict[int, str] = field(default_factory=dict)
    """Task that is split into several units -> runner that last got one of them."""
    lost: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """(task, first run) of a pending unit -> runner and incarnation whose journal may have its beginning."""
    kept: dict[tuple[int, int], ev.AttemptKept] = field(default_factory=dict)
    """(task, first run) of a pending unit -> kept progress of lost attempts."""
    strikes: dict[tuple[int, int], int] = field(default_factory=dict)
    """(task, first run) of a pending unit -> number of failed attempts that count towards `max_attempts`."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Task that was dropped unfinished -> reason."""
    cut: set[int] = field(default_factory=set)
    """Dropped tasks that a later batch can continue from their progress in `kept`."""
    continues: dict[int, ev.ContinuedTask] = field(default_factory=dict)
    """Task -> the task of an earlier batch that it continues."""
    failed_attempts: int = 0
    oldest_version: int | None = None
    """Oldest weights version that made any tokens of completed runs."""
    experiences: list[ev.PayloadRef] = field(default_factory=list)
    trained_step: int | None = None
    max_attempts: int = 1
    detailed_stats: bool = False
    submission: str = ""
    additions: dict[str, int] = field(default_factory=dict)
    """Id of a request for more tasks -> first task that it added."""
    partial: set[int] = field(default_factory=set)
    """Dropped tasks whose finished runs are still delivered."""
    groups: int = 0
    """Minimum number of tasks with delivered experiences, set when the batch goes to the pipeline."""
    missing: ev.GroupsMissing | None = None
    """Set if the pipeline left experiences of too few tasks, until tasks are added or reopened."""
    taken: dict[int, str] = field(default_factory=dict)
    """Task -> id of the request by which a scheduler took its results."""
    paused: bool = False
    """True while pending units are not dispatched, because the scheduler was stopped."""
    timed_attempts: int = 0
    """Number of attempts that count in the mean attempt time (see PaceMeasured)."""
    timed_seconds: float = 0.0
    """Total duration of these attempts."""
    version: int = 0
    """Stream version of the last folded event."""

    @property
    def completed_task_count(self) -> int:
        """Number of tasks that finished or failed for good."""
        return len(self.statuses)

    @property
    def added_task_count(self) -> int:
        """Number of tasks that were added after the submission."""
        return self.expected_task_count - min(self.additions.values(), default=self.expected_task_count)

    @property
    def has_enough(self) -> bool:
        """True if enough tasks are settled to finalize the batch, and all added tasks are settled or dropped."""
        total = self.expected_task_count
        needed_count = total if self.min_wait_num is None else min(self.min_wait_num, total)
        added_tasks = range(total - self.added_task_count, total)
        has_added = all(task in self.statuses or task in self.dropped for task in added_tasks)
        return len(self.statuses) >= needed_count and has_added

    @property
    def is_complete(self) -> bool:
        return len(self.statuses) == self.expected_task_count

    @property
    def open_task_count(self) -> int:
        """Number of tasks that are neither settled nor dropped."""
        return self.expected_task_count - len(self.statuses) - len(self.dropped)

    @property
    def ready_task_count(self) -> int:
        return len(self.statuses) + len(self.partial) - len(self.taken)

    @property
    def failed_whole(self) -> bool:
        """True if the batch was finalized with tasks, and none of their runs succeeded."""
        if self.state is not BatchLifecycleState.FINALIZED or not self.statuses:
            return False
        return not any(self.tasks[task].done for task in self.statuses.keys() | self.partial)

    def task_status(self, task: int) -> Status:
        """Return a task's status as a Scheduler does, with metrics of the whole task and those of each run."""
        state = self.tasks[task]
        status = state.status()
        if task in self.dropped and not status.ok:
            unfinished = state.total_runs - len(state.done) - len(state.failed)
            status.message = f"{status.message} {unfinished} given up: {self.dropped[task]}"
        status.per_run = status.metrics
        if status.metrics:
            is_eval = state.is_eval or self.batch_type == "eval"
            metrics = aggregation.aggregate_task(status.metrics, is_eval, state.total_runs)
            status.metrics = [{**metrics, "time/task_execution": state.seconds}]
        return status

    def ready_tasks(self) -> list[int]:
        """Return the tasks whose results a scheduler can take, in order: settled, or dropped with finished runs."""
        return sorted((self.statuses.keys() | self.partial) - self.taken.keys())


def contiguous(runs: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, length) of each stretch of consecutive numbers: [0, 1, 3] gives (0, 2), (3, 1)."""
    for _, stretch in groupby(enumerate(sorted(runs)), lambda pair: pair[1] - pair[0]):
        numbers = [run for _, run in stretch]
        yield numbers[0], len(numbers)


def fold(events: Iterable[ev.Event], state: BatchState | None = None) -> BatchState | None:
    """Apply these events to `state`, or to a new state if it is None. Return None without state and events."""
    for event in events:
        state = evolve(state, event)
    return state


def evolve(state: BatchState | None, event: ev.Event) -> BatchState:
    """Apply one event to the state, in place, and return the state. Raises LogCorrupt if the event can't follow it."""
    if isinstance(event, ev.BatchSubmitted):
        return _initial_state(event, state.version if state else 0)
    if state is None:
        raise LogCorrupt(f"{type(event).__name__} comes before BatchSubmitted in a batch's stream")
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
                    kept=state.kept.pop(key, None),
                )
                state.lost.pop(key, None)
                if unit.runs < task.total_runs:
                    state.last_runners[unit.task] = event.runner
        case ev.TasksAdded():
            state.additions[event.request], state.missing = len(state.tasks), None
            if state.min_wait_num is not None:
                state.min_wait_num += len(event.repeat_times)
            _add_tasks(state, event)
        case ev.RunsFinished():  # or its subclass TaskFinished
            _apply_finished(state, event)
        case ev.AttemptFailed():
            _apply_failed(state, event)
        case ev.AttemptKept():
            _apply_kept(state, event)
        case ev.TaskDropped():
            state.dropped |= dict.fromkeys(event.tasks, event.reason)
            state.partial.update(event.kept)
            state.cut.update(event.cut)
            tasks = set(event.tasks)
            state.pending = OrderedDict((key, unit) for key, unit in state.pending.items() if key[0] not in tasks)
            state.flights = {key: flight for key, flight in state.flights.items() if key[0] not in tasks}
            state.lost = {key: life for key, life in state.lost.items() if key[0] not in tasks}
        case ev.TaskReopened():
            _reopen(state, event)
        case ev.ResultsTaken():
            state.taken.update(dict.fromkeys(event.tasks, event.request))
        case ev.BatchPaused() | ev.BatchResumed():
            state.paused = isinstance(event, ev.BatchPaused)
        case ev.BatchFinalizing():
            state.state, state.groups, state.missing = BatchLifecycleState.FINALIZING, event.groups, None
        case ev.FinalizeFailed():
            state.state = BatchLifecycleState.RUNNING if state.expected_task_count else BatchLifecycleState.PENDING
        case ev.GroupsMissing():
            state.state, state.missing = BatchLifecycleState.RUNNING, event
        case ev.BatchFinalized():
            state.state = BatchLifecycleState.FINALIZED
            state.final_result = event.result
            state.experiences = list(event.experiences)
        case ev.BatchAborted():
            state.state = BatchLifecycleState.ABORTED
            state.final_result = event.result
            state.pending, state.flights, state.lost = OrderedDict(), {}, {}
        case ev.BatchTrained():
            state.trained_step = event.step
        case ev.TasksetAdvanced() | ev.RecoveryDecided() | ev.StallDetected():
            pass
        case _:
            raise LogCorrupt(f"{type(event).__name__} does not belong in a batch's stream")
    return state


def _initial_state(event: ev.BatchSubmitted, version: int) -> BatchState:
    """Return the state after a submission. `version`: stream version before this event."""
    state = BatchState(
        batch_id=event.batch_id, batch_type=event.batch_type, expected_task_count=0, min_wait_num=event.min_wait_num,
        state=BatchLifecycleState.RUNNING if event.repeat_times else BatchLifecycleState.PENDING,
        max_attempts=event.max_attempts, detailed_stats=event.detailed_stats, submission=event.submission,
        version=version + 1, continues={c.task: c for c in event.continues},
    )
    _add_tasks(state, event)
    return state


def _add_tasks(state: BatchState, event: ev.BatchSubmitted | ev.TasksAdded) -> None:
    """Add the tasks of an event, numbered after the earlier ones, and queue their units."""
    evals = set(event.evals)
    for task, runs in enumerate(event.repeat_times, len(state.tasks)):
        state.tasks.append(TaskState(total_runs=runs, is_eval=task in evals))
        runs_per_unit = min(event.runs_per_unit or runs, runs)
        for first_run in range(0, runs, runs_per_unit):
            unit = ev.Unit(task=task, run_id_base=first_run, runs=min(runs_per_unit, runs - first_run), attempt=1)
            state.pending[task, first_run] = unit
    state.expected_task_count = len(state.tasks)


def _count_seconds(state: BatchState, task: TaskState, seconds: float) -> None:
    """Count an attempt in the mean attempt time, unless it is an eval's."""
    if state.batch_type != "eval" and not task.is_eval:
        state.timed_attempts += 1
        state.timed_seconds += seconds


def _close_runs(state: BatchState, key: tuple[int, int], runs: int) -> None:
    """Subtract `runs` from the open runs of the unit `key`, (task, first run). Remove the unit if none is left."""
    flight = state.flights.get(key)
    if flight is not None:
        flight.open_runs -= runs
        if flight.open_runs <= 0:
            del state.flights[key]


def _apply_finished(state: BatchState, event: ev.RunsFinished) -> None:
    task = state.tasks[event.task]
    task.done |= {run.run: run for run in event.runs}
    if event.payload is not None:
        task.payloads.append(event.payload)
    task.seconds = max(task.seconds, event.seconds)
    _count_seconds(state, task, event.seconds)
    oldest = state.oldest_version
    state.oldest_version = event.model_version if oldest is None else min(oldest, event.model_version)
    _close_runs(state, (event.task, event.run_id_base), len(event.runs))
    if task.settled:
        state.statuses[event.task] = task.status()


def _apply_failed(state: BatchState, event: ev.AttemptFailed) -> None:
    """Queue failed runs as new units, or record them as failed for good."""
    task = state.tasks[event.task]
    state.failed_attempts += 1
    if task.first_error is None:
        task.first_error = f"{event.kind}: {event.message}"
    if event.kind == "timeout":  # so that the mean grows even if all attempts time out
        _count_seconds(state, task, event.seconds)
    flight = state.flights.get((event.task, event.run_id_base))
    strikes = (0 if flight is None else flight.strikes) + event.blamed  # an attempt may have several such events
    _close_runs(state, (event.task, event.run_id_base), len(event.failed_runs))
    if event.retry:
        for first_run, runs in contiguous(event.failed_runs):
            state.pending[event.task, first_run] = ev.Unit(
                task=event.task, run_id_base=first_run, runs=runs, attempt=event.attempt + 1
            )
            state.avoid[event.task, first_run] = event.runner
            if event.kind in ("runner_lost", "infra"):  # not the workflow's fault, so the next attempt may continue it
                state.lost[event.task, first_run] = event.runner, event.incarnation
                if flight is not None and flight.kept is not None:
                    state.kept[event.task, first_run] = flight.kept
            state.strikes[event.task, first_run] = strikes
    else:
        task.ended_by = task.ended_by or f"{event.kind}: {event.message}"
        task.failed |= dict.fromkeys(event.failed_runs, event.message)
        if task.settled:
            state.statuses[event.task] = task.status()


def _apply_kept(state: BatchState, event: ev.AttemptKept) -> None:
    """Record the kept progress of a lost attempt. If it got further than earlier ones, its failure doesn't count."""
    key = event.task, event.run_id_base
    kept_before = state.kept.get(key)
    if (event.tokens, event.steps) > ((0, 0) if kept_before is None else (kept_before.tokens, kept_before.steps)):
        state.strikes[key] = max(0, state.strikes.get(key, 0) - 1)
    state.lost.pop(key, None)
    state.kept[key] = event


def _reopen(state: BatchState, event: ev.TaskReopened) -> None:
    """Reset a task to its submitted state, except for its attempt count. The batch's times and oldest version stay."""
    task = state.tasks[event.task]
    state.tasks[event.task] = TaskState(
        total_runs=task.total_runs, is_eval=task.is_eval, attempts=task.attempts, reopened=event.request
    )
    state.statuses.pop(event.task, None)
    state.dropped.pop(event.task, None)
    state.partial.discard(event.task)
    state.cut.discard(event.task)
    state.missing = None
    state.last_runners.pop(event.task, None)
    state.pending |= {(unit.task, unit.run_id_base): unit for unit in event.units}


def batch_result(
    state: BatchState, pipeline_metrics: dict[str, float] | None = None, *, form: int = RESULT_FORMS
) -> dict[str, Any]:
    """Return the result of finalize, computed from the state alone and bit-identical on every machine.

    Keys: `batch_id, batch_type, finished_task_count, metrics`. `metric_aggregation.py` computes the metrics from the
    tasks in order. A task that failed for good counts in both `finished_task_count` and `failed_task_count`, and its
    completed runs count in the means. Failed runs do not count in the means but in `missing_run_count`. In an eval the
    unfinished runs of dropped tasks count there too. A metric that some completed runs lack is averaged over the other
    runs, and `<name>/missing_run_count` is the number of runs that lack it. Delivered runs of dropped tasks count in
    the means, but these tasks do not count as finished. `form`: 1 to `RESULT_FORMS`.
    """
    is_eval, prefix = state.batch_type == "eval", aggregation.metric_prefix(state.batch_id, state.batch_type)
    counted = {**state.statuses, **{task: state.tasks[task].status() for task in state.partial if form > 2}}
    per_task, runs = [], []
    for task_id in sorted(counted):
        status = counted[task_id]
        runs += status.metrics
        if status.metrics:
            metrics = aggregation.aggregate_task(status.metrics, is_eval, status.total_runs if form > 1 else 0)
            metrics["time/task_execution"] = state.tasks[task_id].seconds
            per_task.append(metrics)
    metrics = dict(pipeline_metrics or {})
    if is_eval:
        metrics |= aggregation.aggregate_eval_batch(per_task, prefix=prefix, detailed_stats=state.detailed_stats)
        expected = state.tasks if form > 2 else counted.values()
        missing = sum(task.total_runs for task in expected) - sum(s.completed_runs for s in counted.values())
    else:
        metrics |= aggregation.aggregate_batch(per_task, prefix=prefix)
        missing = sum(s.total_runs - s.completed_runs for s in state.statuses.values()) if form > 3 else 0
        if state.additions and state.batch_type == "train":
            metrics[f"{prefix}/added_task_count"] = float(state.added_task_count)
    if missing and form > 1:
        metrics[f"{prefix}/missing_run_count"] = float(missing)
    for name, count in aggregation.missing_runs_by_metric(runs).items() if form > 2 else ():
        metrics[f"{prefix}/{name}/missing_run_count"] = float(count)
    for name, tasks in (("cut", state.cut), ("continued", state.continues)):
        metrics |= {f"{prefix}/{name}_task_count": float(len(tasks))} if tasks else {}
    metrics[f"{prefix}/finished_task_count"] = float(state.completed_task_count)
    metrics[f"{prefix}/failed_task_count"] = float(sum(not s.ok for s in state.statuses.values()))
    return {
        "batch_id": state.batch_id, "batch_type": state.batch_type, "finished_task_count": state.completed_task_count,
        "metrics": metrics,
    }

"""Fold of a batch's stream into a `BatchState`.

The coordinator and a replay both change a `BatchState` by `evolve` alone, so live and replayed states are equal.
`evolve` reads no clock and no database. It changes the state in place: copy it first if you need the old one.
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
"""Number of the newest form of `batch_result`. Each form changed how results are computed:

1: eval tasks that lost runs have a `mean@n` of their own.
2: an eval has one mean over all tasks and counts its missing runs.
3: a mean over only some completed runs comes with the count of the runs that lack its metric; finished runs of partly
delivered tasks count too.
4: a train batch also counts the failed runs of its tasks."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """Unit on a runner, with the number of its runs that are still open."""

    unit: ev.Unit
    runner: str
    incarnation: int
    open_runs: int
    strikes: int = 0
    """Earlier failed attempts that count against the unit."""
    model_version: int = 0
    """Weights of the runner when it got the unit."""
    timeout: float = 0.0
    """Limit of the attempt in seconds; 0: explorer.max_timeout."""
    kept: ev.AttemptKept | None = None
    """Record of what was kept of lost attempts, from which this attempt goes on."""


@dataclass(slots=True, kw_only=True)
class TaskState:
    total_runs: int
    done: dict[int, ev.RunResult] = field(default_factory=dict)
    """Result of each completed run, by run."""
    failed: dict[int, str] = field(default_factory=dict)
    """Message of the last failure of each run that failed for good, by run."""
    payloads: list[ev.PayloadRef] = field(default_factory=list)
    seconds: float = 0.0
    """Duration of its longest successful attempt."""
    first_error: str | None = None
    ended_by: str | None = None
    """The first failure after which runs were not attempted again."""
    is_eval: bool = False
    """An eval task, whose experiences are not kept."""
    attempts: int = 0
    """Highest number of an attempt so far."""
    reopened: str = ""
    """Id of the request that had the task run again; empty if none had."""

    @property
    def settled(self) -> bool:
        return len(self.done) + len(self.failed) == self.total_runs

    def status(self) -> Status:
        """Return the outcome so far: completed runs with their metrics, and a message if runs failed or are open."""
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
    """State of one batch as of its last event. Only `evolve` changes it."""

    batch_id: BatchId
    batch_type: BatchType
    expected_task_count: int
    min_wait_num: int | None = None
    state: BatchLifecycleState = BatchLifecycleState.PENDING
    statuses: dict[int, Status] = field(default_factory=dict)
    """Status of each settled task (finished, or failed after its last attempt), by task id."""
    final_result: dict[str, Any] | None = None
    tasks: list[TaskState] = field(default_factory=list)
    pending: OrderedDict[tuple[int, int], ev.Unit] = field(default_factory=OrderedDict)
    """Units to dispatch, in order, by (task, first run). An OrderedDict, because a plain dict scans all deleted entries
    to find its first."""
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)
    """Units on runners, by (task, first run)."""
    avoid: dict[tuple[int, int], str] = field(default_factory=dict)
    """Runner on which the unit failed last, by (task, first run)."""
    homes: dict[int, str] = field(default_factory=dict)
    """Runner that last got a unit of the task, for tasks that are split into several units."""
    lost: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    """Runner and incarnation whose journal may have the beginning of a pending unit, by (task, first run)."""
    kept: dict[tuple[int, int], ev.AttemptKept] = field(default_factory=dict)
    """Record of what was kept of lost attempts at a pending unit, by (task, first run)."""
    strikes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Failed attempts that count against a pending unit, by (task, first run)."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Reason why each task was dropped unfinished."""
    cut: set[int] = field(default_factory=set)
    """Dropped tasks that can go on in a later batch, with what `kept` has of them."""
    continues: dict[int, ev.ContinuedTask] = field(default_factory=dict)
    """What each of its tasks goes on with that an earlier batch cut, by task."""
    failed_attempts: int = 0
    oldest_version: int | None = None
    """Oldest weights version among the tokens of its completed runs."""
    experiences: list[ev.PayloadRef] = field(default_factory=list)
    trained_step: int | None = None
    max_attempts: int = 1
    detailed_stats: bool = False
    submission: str = ""
    additions: dict[str, int] = field(default_factory=dict)
    """First task id that each request for more tasks added, by request id."""
    partial: set[int] = field(default_factory=set)
    """Dropped tasks whose finished runs are still delivered."""
    groups: int = 0
    """Minimum number of tasks with delivered experiences, while the batch is in the pipeline."""
    missing: ev.GroupsMissing | None = None
    """Result of the pipeline if it left experiences of too few tasks, until tasks are added or run again."""
    taken: dict[int, str] = field(default_factory=dict)
    """Id of the request by which a scheduler took the task's results, by task."""
    paused: bool = False
    """Pending units are not dispatched, because the scheduler was stopped."""
    timed_attempts: int = 0
    """Attempts that count in the mean attempt time (see PaceMeasured)."""
    timed_seconds: float = 0.0
    version: int = 0
    """Stream version of the last event folded."""

    @property
    def completed_task_count(self) -> int:
        """Number of settled tasks, finished or failed for good."""
        return len(self.statuses)

    @property
    def added_task_count(self) -> int:
        """Number of tasks that were added after the submission."""
        return self.expected_task_count - min(self.additions.values(), default=self.expected_task_count)

    @property
    def has_enough(self) -> bool:
        """True if the batch can be finalized: enough tasks are settled, and all that were added for missing groups."""
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
        """True if the batch is finalized, and no run of its delivered tasks succeeded."""
        if self.state is not BatchLifecycleState.FINALIZED or not self.statuses:
            return False
        return not any(self.tasks[task].done for task in self.statuses.keys() | self.partial)

    def task_status(self, task: int) -> Status:
        """Return a task's status as a Scheduler gives it: one dict of metrics over all runs, and each run's own."""
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
        """Return, in order, the tasks whose results can be taken: settled, or dropped and partly delivered."""
        return sorted((self.statuses.keys() | self.partial) - self.taken.keys())


def contiguous(runs: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield each consecutive stretch as (first, length): [0, 1, 3] gives (0, 2), (3, 1)."""
    for _, stretch in groupby(enumerate(sorted(runs)), lambda pair: pair[1] - pair[0]):
        numbers = [run for _, run in stretch]
        yield numbers[0], len(numbers)


def fold(events: Iterable[ev.Event], state: BatchState | None = None) -> BatchState | None:
    """Apply these events to `state`, or from the batch's first event on. None: there is no event."""
    for event in events:
        state = evolve(state, event)
    return state


def evolve(state: BatchState | None, event: ev.Event) -> BatchState:
    """Apply one event. Raises LogCorrupt if the event can't follow this state."""
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
                    state.homes[unit.task] = event.runner
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
    """Return the state of a batch just submitted. `version`: stream version before this event."""
    state = BatchState(
        batch_id=event.batch_id, batch_type=event.batch_type, expected_task_count=0, min_wait_num=event.min_wait_num,
        state=BatchLifecycleState.RUNNING if event.repeat_times else BatchLifecycleState.PENDING,
        max_attempts=event.max_attempts, detailed_stats=event.detailed_stats, submission=event.submission,
        version=version + 1, continues={c.task: c for c in event.continues},
    )
    _add_tasks(state, event)
    return state


def _add_tasks(state: BatchState, event: ev.BatchSubmitted | ev.TasksAdded) -> None:
    """Add the tasks of an event, numbered after the earlier ones, and their units in dispatch order."""
    evals = set(event.evals)
    for task, runs in enumerate(event.repeat_times, len(state.tasks)):
        state.tasks.append(TaskState(total_runs=runs, is_eval=task in evals))
        runs_per_unit = min(event.runs_per_unit or runs, runs)
        for first_run in range(0, runs, runs_per_unit):
            unit = ev.Unit(task=task, run_id_base=first_run, runs=min(runs_per_unit, runs - first_run), attempt=1)
            state.pending[task, first_run] = unit
    state.expected_task_count = len(state.tasks)


def _count_seconds(state: BatchState, task: TaskState, seconds: float) -> None:
    """Count an attempt in the mean attempt time, unless it is of an eval."""
    if state.batch_type != "eval" and not task.is_eval:
        state.timed_attempts += 1
        state.timed_seconds += seconds


def _close_runs(state: BatchState, key: tuple[int, int], runs: int) -> None:
    """Count runs of the unit `key` (task, first run) as ended; after its last run, remove it from `flights`."""
    flight = state.flights.get(key)
    if flight is not None:
        flight.open_runs -= runs
        if flight.open_runs <= 0:
            del state.flights[key]


def _apply_finished(state: BatchState, event: ev.RunsFinished) -> None:
    """Add the results of finished runs, and the task's status if it is settled now."""
    task = state.tasks[event.task]
    for run in event.runs:
        task.done[run.run] = run
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
    """Put failed runs back into `pending`, or record them as failed for good."""
    task = state.tasks[event.task]
    state.failed_attempts += 1
    if task.first_error is None:
        task.first_error = f"{event.kind}: {event.message}"
    if event.kind == "timeout":  # if steps get longer and all time out, the mean must still grow
        _count_seconds(state, task, event.seconds)
    flight = state.flights.get((event.task, event.run_id_base))
    strikes = (0 if flight is None else flight.strikes) + event.blamed  # one attempt may fail in several events
    _close_runs(state, (event.task, event.run_id_base), len(event.failed_runs))
    if event.retry:
        for first_run, runs in contiguous(event.failed_runs):
            state.pending[event.task, first_run] = ev.Unit(
                task=event.task, run_id_base=first_run, runs=runs, attempt=event.attempt + 1
            )
            state.avoid[event.task, first_run] = event.runner
            if event.kind in ("runner_lost", "infra"):  # its workflow did nothing wrong and may go on
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
    """Note what was kept of a lost attempt. Its strike is taken back if it got further than the attempts before it."""
    key = event.task, event.run_id_base
    earlier = state.kept.get(key)
    if (event.tokens, event.steps) > ((0, 0) if earlier is None else (earlier.tokens, earlier.steps)):
        state.strikes[key] = max(0, state.strikes.get(key, 0) - 1)
    state.lost.pop(key, None)
    state.kept[key] = event


def _reopen(state: BatchState, event: ev.TaskReopened) -> None:
    """Reset a task to its submitted state, but keep its attempt count, and the batch's times and oldest weights."""
    task = state.tasks[event.task]
    state.tasks[event.task] = TaskState(
        total_runs=task.total_runs, is_eval=task.is_eval, attempts=task.attempts, reopened=event.request
    )
    state.statuses.pop(event.task, None)
    state.dropped.pop(event.task, None)
    state.partial.discard(event.task)
    state.cut.discard(event.task)
    state.missing = None
    state.homes.pop(event.task, None)
    for unit in event.units:
        state.pending[unit.task, unit.run_id_base] = unit


def batch_result(
    state: BatchState, pipeline_metrics: dict[str, float] | None = None, *, form: int = RESULT_FORMS
) -> dict[str, Any]:
    """Return the result of finalize, computed from the state alone and bit-identical on every machine.

    Keys: `batch_id, batch_type, finished_task_count, metrics`. `metric_aggregation.py` makes the metrics, of tasks in
    order of id. `finished_task_count` and `failed_task_count` both count a task that failed for good. Its completed
    runs count in the means. `missing_run_count` counts failed runs, which are not zeros in the means, and in an eval
    the unfinished runs of dropped tasks. If some completed runs lack a metric, its mean is over the others and
    `<name>/missing_run_count` counts those. Finished runs of dropped tasks count in the means if they are delivered,
    but these tasks do not count as finished. `form`: 1 to `RESULT_FORMS`.
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

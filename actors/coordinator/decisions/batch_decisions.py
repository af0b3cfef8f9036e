"""Decisions about batches: pure functions from state and command to events.

Handlers (`../handlers/`) append the events, fold them with `projections.batch.evolve`, and only then act. A refused
decision raises a TrinityError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from trinity_es.actors.coordinator.decisions.free_runners import Capacity, Room
from trinity_es.actors.message_sizes import shorten_error
from trinity_es.actors.messages import UnitOutcome
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchAlreadyActive, BatchNotFound, BatchTypeMismatch, DataError
from trinity_es.events.values import (
    BatchId,
    BatchLifecycleState,
    BatchType,
    FailureKind,
    require_batch_id,
    sort_batch_id,
)
from trinity_es.projections.batch import BatchState, Flight, batch_result
from trinity_es.projections.host_states import host_of

__all__ = [
    "Capacity", "abort", "add", "apply_outcome", "decide_recovery", "dispatch", "find_open_tasks",
    "lose_runner", "reopen", "report_missing_groups", "require_batch", "require_runs", "start_finalizing", "submit",
]

SLACK_PLACES = 0.25
"""A task's next units stay with its runner if that is at most this share of its places fuller than the least loaded."""
MOST_SERVERS_LOST = 10
"""From this attempt on, a unit is blamed if an external server ends while it serves the unit."""
MOST_HOSTS_LACK = 10
"""From this attempt on, a unit is blamed if a host lacks something that the unit needs. Other hosts may have it."""
RETRIED = frozenset({"workflow", "timeout", "grader", "runner_lost", "infra"})
"""Kinds of failure after which another attempt may succeed. A `data` error fails the same way every time."""


def submit(existing: BatchState | None, new: ev.BatchSubmitted) -> list[ev.Event]:
    """Return the event that begins a batch; none if its submission is repeated. Raises BatchAlreadyActive (a
    ValueError) for an active id, DataError."""
    batch_id = require_batch_id(new.batch_id)
    if existing is not None and existing.submission == new.submission:
        return []
    if existing is not None and not existing.state.ended:
        raise BatchAlreadyActive(
            f"batch {batch_id!r} is already active ({existing.state}): finalize or abort it before you use its id again"
        )
    require_runs(batch_id, new.repeat_times)
    if new.min_wait_num is not None and new.min_wait_num < 0:
        raise DataError(
            f"min_wait_num of batch {batch_id!r} is {new.min_wait_num}: give None (all tasks) or at least 0")
    return [new]


def dispatch(
    batches: Iterable[BatchState], runners: Room | Iterable[Capacity], timeout: float = 0.0,
    must_wait: Callable[[BatchState, tuple[int, int]], bool] = lambda batch, key: False,
) -> list[tuple[BatchState, ev.TasksDispatched]]:
    """Return the events that give waiting units to runners, each with its batch.

    The lowest batch id comes first, and each unit goes to the least loaded runner, with two exceptions. A unit that
    failed on a runner goes to another one if there is one. Units of one task stay with one runner, whose engine has
    cached their prompt, while it has a free place and is not much fuller than the least loaded one (`SLACK_PLACES`).
    If few units wait, runners get few beyond their places, since places elsewhere would stay idle.

    `timeout` is the seconds that an attempt may take; 0 means explorer.max_timeout. A lost unit waits while
    `must_wait` returns True for it. The function changes `load` of the capacities. Its cost depends only on the number
    of dispatched units.
    """
    room = runners if isinstance(runners, Room) else Room(runners)
    waiting_batches = [b for b in batches if b.pending and b.state is BatchLifecycleState.RUNNING and not b.paused]
    room.set_waiting_count(sum(len(b.pending) for b in waiting_batches))
    dispatches: list[tuple[BatchState, ev.TasksDispatched]] = []
    for batch in sorted(waiting_batches, key=lambda b: sort_batch_id(b.batch_id)):
        units_by_runner: dict[str, tuple[Capacity, list[ev.Unit]]] = {}
        runner_by_task: dict[int, str] = {}
        for key, unit in batch.pending.items():
            if room.least_loaded() is None:
                break
            if key in batch.lost and must_wait(batch, key):
                continue
            avoid = batch.avoid.get(key)
            if avoid is not None and not room.has_other(avoid):
                avoid = None
            least_loaded = room.least_loaded(avoid)
            if least_loaded is None:
                continue  # only the runner it failed on has room: wait for room on another one
            runner = least_loaded
            task_runner = room.find(runner_by_task.get(unit.task) or batch.last_runners.get(unit.task, ""))
            if (task_runner is not None and task_runner.name != avoid
                    and _prefers_task_runner(task_runner, least_loaded)):
                runner = task_runner
            if unit.runs < batch.tasks[unit.task].total_runs:
                runner_by_task[unit.task] = runner.name
            room.add_unit(runner)
            units_by_runner.setdefault(runner.name, (runner, []))[1].append(unit)
        for runner, units in units_by_runner.values():
            event = ev.TasksDispatched(
                runner=runner.name, incarnation=runner.incarnation, units=units, model_version=runner.model_version,
                timeout=timeout,
            )
            dispatches.append((batch, event))
    return dispatches


def _prefers_task_runner(task_runner: Capacity, least_loaded: Capacity) -> bool:
    """Return True if a unit should go to the runner that had other units of its task, not to the least loaded one."""
    waits_only_there = task_runner.load >= task_runner.places and least_loaded.load < least_loaded.places
    return task_runner.share <= least_loaded.share + SLACK_PLACES and not waits_only_there


def apply_outcome(
    batch: BatchState | None, runner: str, incarnation: int, result: UnitOutcome, *, on_servers: bool = False
) -> list[ev.Event]:
    """Return the events that record a unit's outcome; none if the unit is settled or another runner has it now.
    `on_servers` means that engines are external servers, whose failures are not blamed on units."""
    if batch is None or batch.submission != result.submission or batch.state.ended:
        return []
    unit = result.unit
    flight = batch.flights.get((unit.task, unit.run_id_base))
    if flight is None or (flight.runner, flight.incarnation, flight.unit) != (runner, incarnation, unit):
        return []
    events: list[ev.Event] = []
    task = batch.tasks[unit.task]
    if result.results:
        is_complete = not result.failures and len(task.done) + len(result.results) == task.total_runs
        event_type = ev.TaskFinished if is_complete else ev.RunsFinished
        events.append(event_type(
            task=unit.task, run_id_base=unit.run_id_base, attempt=unit.attempt, runner=runner, incarnation=incarnation,
            runs=result.results, payload=result.payload, model_version=result.model_version,
            model_version_end=result.model_version_end, seconds=result.seconds,
            other_prompt_tokens=result.other_tokens[0], other_response_tokens=result.other_tokens[1],
        ))
    failures_by_kind: dict[FailureKind, list[tuple[int, str]]] = {}
    for run, kind, message in result.failures:
        failures_by_kind.setdefault(kind, []).append((run, message))
    goes_elsewhere = result.lacks and host_of(runner) != "" and unit.attempt < MOST_HOSTS_LACK
    for kind, failures in failures_by_kind.items():
        blamed = not goes_elsewhere and (kind != "infra" or _is_blamed_for_end(unit, on_servers))
        events.append(ev.AttemptFailed(
            task=unit.task, run_id_base=unit.run_id_base, failed_runs=[run for run, _ in failures],
            attempt=unit.attempt, runner=runner, incarnation=incarnation, kind="infra" if goes_elsewhere else kind,
            message=shorten_error(failures[0][1]),
            retry=goes_elsewhere or (kind in RETRIED and (not blamed or _has_attempts_left(batch, unit))),
            seconds=result.seconds, blamed=blamed,
        ))
    return events


def _has_attempts_left(batch: BatchState, unit: ev.Unit) -> bool:
    """Return True if this unit gets another attempt after a failure for which it is blamed."""
    return batch.flights[unit.task, unit.run_id_base].strikes + 1 < batch.max_attempts


def _is_blamed_for_end(unit: ev.Unit, on_servers: bool) -> bool:
    """Return True if a unit is blamed when its engine ends. External servers end for reasons of their own, so there a
    unit is blamed only after many such attempts."""
    return not on_servers or unit.attempt >= MOST_SERVERS_LOST


def lose_runner(
    batch: BatchState, runner: str, incarnation: int, reason: str, *, blamed: bool = True, on_servers: bool = False,
    keys: Iterable[tuple[int, int]] | None = None,
) -> list[ev.Event]:
    """Return the events that a lost runner's attempts at units of this batch failed.

    The units are attempted again, or fail after their last attempt. All are blamed, since each may have ended the
    runner. None is blamed if the whole system ended (pass `blamed=False`), or at first if engines are external servers
    (`on_servers`). To save time, `keys` (task, first run) limits the units that are checked.
    """
    flights = list(batch.flights.values()) if keys is None else [batch.flights[key] for key in keys]
    return [
        _lost_attempt(batch, flight, reason, blamed=blamed and _is_blamed_for_end(flight.unit, on_servers))
        for flight in flights
        if (flight.runner, flight.incarnation) == (runner, incarnation)
    ]


def _lost_attempt(batch: BatchState, flight: Flight, reason: str, *, blamed: bool) -> ev.AttemptFailed:
    unit = flight.unit
    return ev.AttemptFailed(
        task=unit.task, run_id_base=unit.run_id_base,
        failed_runs=list(range(unit.run_id_base, unit.run_id_base + unit.runs)), attempt=unit.attempt,
        runner=flight.runner, incarnation=flight.incarnation, kind="runner_lost", message=shorten_error(reason),
        retry=not blamed or _has_attempts_left(batch, unit), blamed=blamed,
    )


def decide_recovery(
    batch: BatchState, alive: Mapping[str, int], *, version: int, max_staleness: int | None = None
) -> list[ev.Event]:
    """Return the events of a new coordinator's decision on an open batch, with its reason.

    If the pipeline of a batch was interrupted, it runs again. A train batch is aborted if its completed or running runs
    have tokens of weights more than `max_staleness` versions old. Any other batch goes on, and units whose runner is
    gone are attempted again. `alive` has the incarnation of each living runner, `version` is that of the current
    weights.
    """
    if batch.state is BatchLifecycleState.FINALIZING:
        reason = "it was in the pipeline when its coordinator ended; nothing of it was delivered"
        return [ev.RecoveryDecided(decision="finalize", reason=reason)]
    if batch.state is not BatchLifecycleState.RUNNING:  # it has no tasks, so nothing was lost
        return []
    lost_lives = {(f.runner, f.incarnation) for f in batch.flights.values()} - set(alive.items())
    living_flights = [f for f in batch.flights.values() if (f.runner, f.incarnation) not in lost_lives]
    versions = [version, *(f.model_version for f in living_flights)]
    if batch.oldest_version is not None:
        versions.append(batch.oldest_version)
    oldest = min(versions)
    if batch.batch_type == "train" and max_staleness is not None and version - oldest > max_staleness:
        reason = (f"it holds tokens of weights {oldest}, the current ones are {version}; explorer.max_staleness is "
                  f"{max_staleness}")
        drop = ev.RecoveryDecided(decision="drop_stale", reason=reason)
        return [drop, *abort(batch, reason=f"stale: {reason}", keep_partial_results=False)]
    settled, total = batch.completed_task_count, batch.expected_task_count
    reason = (f"{settled} of {total} tasks are settled, {len(living_flights)} units run on, {len(batch.pending)} were "
              "waiting")
    events: list[ev.Event] = [ev.RecoveryDecided(decision="resume", reason=reason)]
    reason = "its process did not outlive the actor system"
    for name, incarnation in sorted(lost_lives):
        failures = lose_runner(batch, name, incarnation, reason, blamed=False)
        units = [f.unit for f in batch.flights.values() if (f.runner, f.incarnation) == (name, incarnation)]
        redo_reason = f"{name} #{incarnation} had them: {reason}"
        events += [ev.RecoveryDecided(decision="redo", reason=redo_reason, units=units), *failures]
    return events


def require_batch(
    batch: BatchState | None, batch_id: BatchId, batch_type: BatchType, advice: str = ""
) -> BatchState:
    """Return the batch if it exists and has this type. Raises BatchNotFound (KeyError), BatchTypeMismatch (ValueError).
    `advice` ends the error about a batch of another type. By default it names the call that finalizes that type."""
    if batch is None:
        raise BatchNotFound(f"batch {batch_id!r} is not registered: submit it with submit_batch first")
    if batch.batch_type != batch_type:
        finalizer = "Scheduler.get_results" if batch.batch_type == "collect" else f"finalize_{batch.batch_type}_batch"
        raise BatchTypeMismatch(
            f"batch {batch_id!r} is of type {batch.batch_type}, expected {batch_type}: {advice or f'call {finalizer}'}")
    return batch


def find_open_tasks(batch: BatchState) -> list[int]:
    """Return the tasks that are neither settled nor dropped."""
    return [t for t in range(batch.expected_task_count) if t not in batch.statuses and t not in batch.dropped]


def add(batch: BatchState, new: ev.TasksAdded) -> list[ev.Event]:
    """Return the event that adds tasks to an open batch; none if its request is repeated. Raises DataError."""
    if new.request in batch.additions:
        return []
    if batch.state is not BatchLifecycleState.RUNNING:
        raise DataError(f"batch {batch.batch_id!r} is {batch.state}: tasks can be added only to a RUNNING batch")
    require_runs(batch.batch_id, new.repeat_times)
    return [new]


def require_runs(batch_id: BatchId, repeat_times: Sequence[int]) -> None:
    """Raise DataError if a task lacks a run."""
    for task, runs in enumerate(repeat_times):
        if runs < 1:
            raise DataError(f"task {task} of batch {batch_id!r} has repeat_times {runs}, expected at least 1")


def start_finalizing(
    batch: BatchState, *, return_partial: bool = False, groups: int = 0, cut: bool = False
) -> list[ev.Event]:
    """Return the events that drop a batch's open tasks, and begin to finalize a train batch or end an eval.

    With `return_partial` the finished runs of dropped tasks go through the pipeline too; with `cut` the dropped tasks
    of a train batch can go on in a later one. `groups`: as in BatchFinalizing.
    """
    open_tasks, is_eval = find_open_tasks(batch), batch.batch_type == "eval"
    events: list[ev.Event] = []
    if open_tasks:
        partly_done = [task for task in open_tasks if return_partial and not is_eval and batch.tasks[task].done]
        cut_tasks = open_tasks if cut and batch.batch_type == "train" else []
        reason = f"finalized with {batch.completed_task_count} tasks, enough"
        reason += "; cut, and goes on in a later batch" if cut_tasks else ""
        events.append(ev.TaskDropped(tasks=open_tasks, reason=reason, kept=partly_done, cut=cut_tasks))
    if is_eval:
        return [*events, ev.BatchFinalized(result=batch_result(batch))]
    return [*events, ev.BatchFinalizing(groups=groups)]


def report_missing_groups(batch: BatchState, lost_counts: Mapping[str, int], usable: int) -> ev.GroupsMissing:
    """Return the event that the pipeline left only `usable` tasks, which is too few. `lost_counts` has, by cause, the
    number of tasks whose experiences it dropped; the event adds the failed tasks."""
    failed = sum(not batch.tasks[number].payloads for number in batch.ready_tasks())
    causes = {**lost_counts, "failed": failed} if failed else dict(lost_counts)
    return ev.GroupsMissing(usable=usable, missing=batch.groups - usable, lost=causes)


def abort(batch: BatchState | None, *, reason: str, keep_partial_results: bool) -> list[ev.Event]:
    """Return the events that abort a batch with its result so far; none for an unknown or ended batch."""
    if batch is None or batch.state.ended:
        return []
    open_tasks = find_open_tasks(batch)
    events: list[ev.Event] = []
    if open_tasks:
        events.append(ev.TaskDropped(tasks=open_tasks, reason=f"batch aborted: {reason}"))
    events.append(
        ev.BatchAborted(reason=reason, result=batch_result(batch), kept_partial_results=keep_partial_results)
    )
    return events


def reopen(
    batch: BatchState | None, batch_id: BatchId, tasks: Sequence[int], *, reason: str, request: str,
    runs_per_unit: int | None,
) -> list[ev.Event]:
    """Return the events that run ended tasks of an open batch again: all their runs, with the usual number of attempts.

    A repeated `request` gives no events. Raises BatchNotFound, and DataError for an ended batch, whose result was
    handed out, and for an open task.
    """
    if batch is None:
        raise BatchNotFound(f"batch {batch_id!r} is not registered: no batch with this id was submitted")
    if batch.state.ended:
        raise DataError(
            f"batch {batch_id!r} is {batch.state}: its result was handed out and can't change; submit the tasks "
            "again, under this id or another"
        )
    if batch.state is BatchLifecycleState.FINALIZING:
        raise DataError(f"batch {batch_id!r} is being finalized: wait until finalize returns")
    last = batch.expected_task_count - 1
    events: list[ev.Event] = []
    for number in dict.fromkeys(tasks):
        if not 0 <= number <= last:
            raise DataError(f"batch {batch_id!r} has no task {number}: it has tasks 0 to {last}")
        task = batch.tasks[number]
        if request and task.reopened == request:
            continue
        if number in batch.taken:
            raise DataError(f"the results of task {number} of batch {batch_id!r} were handed out: schedule a new task")
        if number not in batch.statuses and number not in batch.dropped:
            raise DataError(f"task {number} of batch {batch_id!r} has not ended yet: redo takes ended tasks only")
        size = min(runs_per_unit or task.total_runs, task.total_runs)
        units = [
            ev.Unit(task=number, run_id_base=base, runs=min(size, task.total_runs - base), attempt=task.attempts + 1)
            for base in range(0, task.total_runs, size)
        ]
        events.append(ev.TaskReopened(
            task=number, units=units, reason=shorten_error(reason), request=request,
            finished=len(task.done) == task.total_runs, dropped=batch.dropped.get(number, ""),
            experiences=sum(result.experiences for result in task.done.values()),
        ))
    return events

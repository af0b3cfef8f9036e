"""The decisions about batches: pure functions from state and command to events.

No clock, no chance, no database, no actor. `BatchState` in, events out; the shell (`../handlers/`) appends them,
folds them with `projections.batch.evolve`, and only then acts. A decision that is refused raises a TrinityError and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trinity_es.actors.coordinator.decisions.room import Capacity, Room
from trinity_es.actors.message_sizes import shortened
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
    "Capacity",
    "abort",
    "dispatch",
    "finalize_failed",
    "finalized",
    "loads",
    "outcome",
    "recovery",
    "reopen",
    "require_batch",
    "runner_lost",
    "start_finalizing",
    "submit",
    "wanted",
]

SLACK_PLACES = 0.25
"""Share of a runner's places by which it may be fuller than the least loaded runner and still get a task's units."""

MOST_SERVERS_LOST = 10
"""Maximum number of attempts of a unit that is blamed for none of the servers of others that ended under it."""
MOST_HOSTS_LACK = 10
"""Maximum number of attempts of a unit that is blamed for nothing that joined hosts lack: others may have it."""
RETRIED = frozenset({"workflow", "timeout", "grader", "runner_lost", "infra"})
"""Kinds of failure that another attempt may mend; `data` fails the same way every time."""


def submit(
    existing: BatchState | None,
    *,
    batch_id: BatchId,
    batch_type: BatchType,
    repeat_times: list[int],
    tasks: list[dict[str, Any]] | None,
    tasks_digest: str | None,
    min_wait_num: int | None,
    max_attempts: int,
    runs_per_unit: int | None,
    detailed_stats: bool,
    submission: str,
) -> list[ev.Event]:
    """Submit a batch. The same submission again changes nothing; an active id is refused.

    Raises BatchAlreadyActive (a ValueError), DataError.
    """
    require_batch_id(batch_id)
    if existing is not None and existing.submission == submission:
        return []
    if existing is not None and not existing.state.ended:
        raise BatchAlreadyActive(
            f"batch {batch_id!r} is already active ({existing.state}): finalize or abort it before its id is used again"
        )
    if any(n < 1 for n in repeat_times):
        task = next(i for i, n in enumerate(repeat_times) if n < 1)
        raise DataError(f"task {task} of batch {batch_id!r} has repeat_times {repeat_times[task]}: at least 1")
    if min_wait_num is not None and min_wait_num < 0:
        raise DataError(f"min_wait_num of batch {batch_id!r} is {min_wait_num}: give None (all tasks) or 0 and more")
    return [
        ev.BatchSubmitted(
            batch_id=batch_id,
            batch_type=batch_type,
            repeat_times=repeat_times,
            tasks=tasks,
            tasks_digest=tasks_digest,
            min_wait_num=min_wait_num,
            max_attempts=max_attempts,
            runs_per_unit=runs_per_unit,
            detailed_stats=detailed_stats,
            submission=submission,
        )
    ]


def dispatch(
    batches: Iterable[BatchState], runners: Room | Iterable[Capacity], timeout: float = 0.0
) -> list[tuple[BatchState, ev.TasksDispatched]]:
    """Give waiting units to runners with room: lower batch first, first in first out inside it, least loaded runner.

    A unit that failed on a runner goes to another one where another exists. Units of one task go to the runner that had
    one before, whose engine has their prompt, while that has a place and is not much fuller than the least loaded one
    (`SLACK_PLACES`). Where few units wait, runners get few beyond their places, at the end none: the place of
    another would be idle beside them. `timeout`: seconds that an attempt may take, 0 for explorer.max_timeout. Changes
    `load` of the capacities. It costs what is given out, however many runners, units in flight and waiting there are.
    """
    room = runners if isinstance(runners, Room) else Room(runners)
    waiting = [b for b in batches if b.pending and b.state is BatchLifecycleState.RUNNING and not b.paused]
    room.expect(sum(len(b.pending) for b in waiting))
    chosen: list[tuple[BatchState, ev.TasksDispatched]] = []
    for batch in sorted(waiting, key=lambda b: sort_batch_id(b.batch_id)):
        groups: dict[str, tuple[Capacity, list[ev.Unit]]] = {}
        homes: dict[int, str] = {}
        for key, unit in batch.pending.items():
            if room.least() is None:
                break
            avoid = batch.avoid.get(key)
            if avoid is not None and not room.has_other(avoid):
                avoid = None
            least = room.least(avoid)
            if least is None:
                continue  # only the runner it failed on has room: wait for another, one will have
            home = room.find(homes.get(unit.task) or batch.homes.get(unit.task, ""))
            runner = home if home is not None and home.name != avoid and _stays(home, least) else least
            if unit.runs < batch.tasks[unit.task].total_runs:
                homes[unit.task] = runner.name
            room.give(runner)
            groups.setdefault(runner.name, (runner, []))[1].append(unit)
        chosen.extend(
            (
                batch,
                ev.TasksDispatched(
                    runner=runner.name,
                    incarnation=runner.incarnation,
                    units=units,
                    model_version=runner.model_version,
                    timeout=timeout,
                ),
            )
            for runner, units in groups.values()
        )
    return chosen


def _stays(home: Capacity, least: Capacity) -> bool:
    """Return True if a unit is to go to the runner that its task's other units had."""
    waits = home.load >= home.places and least.load < least.places  # for a place, where another has one
    return home.share <= least.share + SLACK_PLACES and not waits


def outcome(
    batch: BatchState | None, runner: str, incarnation: int, result: UnitOutcome, *, servers: bool = False
) -> list[ev.Event]:
    """Take what came of a unit. What was settled before, or is not this runner's any more, changes nothing.

    `servers`: engines are servers of others, whose failures no unit is blamed for (`_blamed`).
    """
    if batch is None or batch.submission != result.submission or batch.state.ended:
        return []
    unit = result.unit
    flight = batch.flights.get((unit.task, unit.run_id_base))
    if flight is None or (flight.runner, flight.incarnation, flight.unit) != (runner, incarnation, unit):
        return []
    events: list[ev.Event] = []
    task = batch.tasks[unit.task]
    if result.results:
        complete = not result.failures and len(task.done) + len(result.results) == task.total_runs
        events.append(
            (ev.TaskFinished if complete else ev.RunsFinished)(
                task=unit.task,
                run_id_base=unit.run_id_base,
                attempt=unit.attempt,
                runner=runner,
                incarnation=incarnation,
                runs=result.results,
                payload=result.payload,
                model_version=result.model_version,
                model_version_end=result.model_version_end,
                seconds=result.seconds,
                other_prompt_tokens=result.other_tokens[0],
                other_response_tokens=result.other_tokens[1],
            )
        )
    kinds: dict[FailureKind, list[tuple[int, str]]] = {}
    for run, kind, message in result.failures:
        kinds.setdefault(kind, []).append((run, message))
    elsewhere = result.lacks and host_of(runner) != "" and unit.attempt < MOST_HOSTS_LACK
    for cause, failed in kinds.items():
        blamed = not elsewhere and (cause != "infra" or _blamed(unit, servers))
        events.append(
            ev.AttemptFailed(
                task=unit.task,
                run_id_base=unit.run_id_base,
                failed_runs=[run for run, _ in failed],
                attempt=unit.attempt,
                runner=runner,
                incarnation=incarnation,
                kind="infra" if elsewhere else cause,
                message=shortened(failed[0][1]),
                retry=elsewhere or (cause in RETRIED and (not blamed or _may_fail(batch, unit))),
                seconds=result.seconds,
                blamed=blamed,
            )
        )
    return events


def _may_fail(batch: BatchState, unit: ev.Unit) -> bool:
    """Return True if this unit gets another attempt after a failure that it is blamed for."""
    return batch.flights[unit.task, unit.run_id_base].strikes + 1 < batch.max_attempts


def _blamed(unit: ev.Unit, servers: bool) -> bool:
    """Return True if a unit is blamed for the end of its engine.

    A server of others ends for reasons of its own, with all that it was asked: no unit is blamed, unless it was there
    each time.
    """
    return not servers or unit.attempt >= MOST_SERVERS_LOST


def runner_lost(
    batch: BatchState, runner: str, incarnation: int, reason: str, *, blamed: bool = True, servers: bool = False,
    had: Iterable[tuple[int, int]] | None = None,
) -> list[ev.Event]:
    """Take the loss of a runner: what it had of this batch is attempted again, and failed after its last attempt.

    Which of its units ended it nobody knows, so each is blamed; but not where the whole system ended, nor where engines
    are `servers` of others. `had`: keys of the flights to look at, where it is known which can be its own.
    """
    flights = list(batch.flights.values()) if had is None else [batch.flights[key] for key in had]
    return [
        _lost(batch, flight, reason, blamed and _blamed(flight.unit, servers))
        for flight in flights
        if (flight.runner, flight.incarnation) == (runner, incarnation)
    ]


def _lost(batch: BatchState, flight: Flight, reason: str, blamed: bool) -> ev.AttemptFailed:
    unit = flight.unit
    return ev.AttemptFailed(
        task=unit.task,
        run_id_base=unit.run_id_base,
        failed_runs=list(range(unit.run_id_base, unit.run_id_base + unit.runs)),
        attempt=unit.attempt,
        runner=flight.runner,
        incarnation=flight.incarnation,
        kind="runner_lost",
        message=shortened(reason),
        retry=not blamed or _may_fail(batch, unit),
        blamed=blamed,
    )


def recovery(
    batch: BatchState, alive: Mapping[str, int], *, version: int, max_staleness: int | None = None
) -> list[ev.Event]:
    """Return what becomes of a batch that a new coordinator found open: each choice is an event, with its reason.

    `alive`: the incarnation of each runner that lives; `version`: the current weights. A batch whose pipeline died goes
    through it again. One that has tokens of weights more than `max_staleness` versions old is aborted: those of its
    completed runs, and those that living runners make; what is run again will be made by the current weights. Any other
    goes on, and units whose runner is gone are attempted again.
    """
    if batch.state is BatchLifecycleState.FINALIZING:
        reason = "it was in the pipeline when its coordinator ended; nothing of it was delivered"
        return [ev.RecoveryDecided(decision="finalize", reason=reason)]
    if batch.state is not BatchLifecycleState.RUNNING:  # without tasks: nothing of it was lost
        return []
    lost = {(f.runner, f.incarnation) for f in batch.flights.values()} - set(alive.items())
    kept = [f for f in batch.flights.values() if (f.runner, f.incarnation) not in lost]
    oldest = min([version, *(f.model_version for f in kept), *([] if (v := batch.oldest_version) is None else [v])])
    if batch.batch_type == "train" and max_staleness is not None and version - oldest > max_staleness:
        reason = (f"it holds tokens of weights {oldest}, the current ones are {version}; explorer.max_staleness is "
                  f"{max_staleness}")
        drop = ev.RecoveryDecided(decision="drop_stale", reason=reason)
        return [drop, *abort(batch, reason=f"stale: {reason}", keep_partial_results=False)]
    done, of = batch.completed_task_count, batch.expected_task_count
    reason = f"{done} of {of} tasks are settled, {len(kept)} units run on, {len(batch.pending)} were waiting"
    events: list[ev.Event] = [ev.RecoveryDecided(decision="resume", reason=reason)]
    reason = "its process did not outlive the actor system"
    for name, incarnation in sorted(lost):
        failed = runner_lost(batch, name, incarnation, reason, blamed=False)
        units = [f.unit for f in batch.flights.values() if (f.runner, f.incarnation) == (name, incarnation)]
        why = f"{name} #{incarnation} had them: {reason}"
        events += [ev.RecoveryDecided(decision="redo", reason=why, units=units), *failed]
    return events


def require_batch(batch: BatchState | None, batch_id: BatchId, batch_type: BatchType) -> BatchState:
    """Return the batch, if it exists and is of this type.

    Raises BatchNotFound (KeyError), BatchTypeMismatch (ValueError).
    """
    if batch is None:
        raise BatchNotFound(f"batch {batch_id!r} is not registered: submit_batch it first")
    if batch.batch_type != batch_type:
        own = "Scheduler.get_results" if batch.batch_type == "collect" else f"finalize_{batch.batch_type}_batch"
        raise BatchTypeMismatch(f"batch {batch_id!r} is {batch.batch_type}, expected {batch_type}: call {own}")
    return batch


def wanted(batch: BatchState) -> int:
    """Return how many settled tasks finalize needs."""
    if batch.min_wait_num is None:
        return batch.expected_task_count
    return min(batch.min_wait_num, batch.expected_task_count)


def _open_tasks(batch: BatchState) -> list[int]:
    """Return tasks that are neither settled nor dropped. Tasks dropped before a failed finalize stay dropped."""
    return [t for t in range(batch.expected_task_count) if t not in batch.statuses and t not in batch.dropped]


def start_finalizing(batch: BatchState, return_partial: bool = False) -> list[ev.Event]:
    """Begin to finalize a batch: what is not done is dropped. A train batch goes through the pipeline, an eval ends.

    With `return_partial` the finished runs of dropped tasks go through it too.
    """
    open_tasks, is_eval = _open_tasks(batch), batch.batch_type == "eval"
    events: list[ev.Event] = []
    if open_tasks:
        kept = [task for task in open_tasks if return_partial and not is_eval and batch.tasks[task].done]
        reason = f"finalized with {batch.completed_task_count} tasks, enough"
        events.append(ev.TaskDropped(tasks=open_tasks, reason=reason, kept=kept))
    if is_eval:
        return [*events, ev.BatchFinalized(result=batch_result(batch))]
    return [*events, ev.BatchFinalizing()]


def finalized(
    batch: BatchState, *, metrics: dict[str, float], experiences: list[ev.PayloadRef], selected: int, dropped: int,
    dropped_by: dict[str, list[str]] | None = None, model_versions: list[tuple[int, int]] | None = None,
) -> list[ev.Event]:
    """Finalize a batch with what the pipeline made of it."""
    return [
        ev.BatchFinalized(
            result=batch_result(batch, metrics),
            pipeline_metrics=metrics,
            experiences=experiences,
            selected=selected,
            dropped=dropped,
            dropped_by=dropped_by or {},
            model_versions=model_versions or [],
        )
    ]


def finalize_failed(batch: BatchState, error: str) -> list[ev.Event]:
    """Record that the pipeline failed: the batch is RUNNING again, with all it has."""
    return [ev.FinalizeFailed(error=shortened(error))]


def abort(batch: BatchState | None, *, reason: str, keep_partial_results: bool) -> list[ev.Event]:
    """Give a batch up. Unknown and ended ids change nothing. The result tells what was done of it."""
    if batch is None or batch.state.ended:
        return []
    open_tasks = _open_tasks(batch)
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
    """Let tasks of an open batch run again that have ended: all runs of each, as often as any other may be tried.

    A batch that has ended stays as it is: its result was given out, and is settled. The same request again changes
    nothing. Raises BatchNotFound, DataError.
    """
    if batch is None:
        raise BatchNotFound(f"batch {batch_id!r} is not registered")
    if batch.state.ended:
        raise DataError(
            f"batch {batch_id!r} is {batch.state}: its result was given out and stands; submit the tasks again, under "
            "another id or, to begin it anew, this one"
        )
    if batch.state is BatchLifecycleState.FINALIZING:
        raise DataError(f"batch {batch_id!r} is in the pipeline: wait until its finalize has an answer")
    last = batch.expected_task_count - 1
    events: list[ev.Event] = []
    for number in dict.fromkeys(tasks):
        if not 0 <= number <= last:
            raise DataError(f"batch {batch_id!r} has no task {number}: it has tasks 0 to {last}")
        task = batch.tasks[number]
        if request and task.reopened == request:
            continue
        if number in batch.taken:
            raise DataError(f"the results of task {number} of batch {batch_id!r} were taken: schedule it again")
        if number not in batch.statuses and number not in batch.dropped:
            raise DataError(f"task {number} of batch {batch_id!r} has not ended: it is run anyway")
        step = min(runs_per_unit or task.total_runs, task.total_runs)
        units = [
            ev.Unit(task=number, run_id_base=base, runs=min(step, task.total_runs - base), attempt=task.attempts + 1)
            for base in range(0, task.total_runs, step)
        ]
        events.append(
            ev.TaskReopened(
                task=number,
                units=units,
                reason=shortened(reason),
                request=request,
                finished=len(task.done) == task.total_runs,
                dropped=batch.dropped.get(number, ""),
                experiences=sum(result.experiences for result in task.done.values()),
            )
        )
    return events


def loads(batches: Iterable[BatchState]) -> Mapping[tuple[str, int], int]:
    """Return units in flight by runner and incarnation."""
    count: dict[tuple[str, int], int] = {}
    for batch in batches:
        for flight in batch.flights.values():
            key = (flight.runner, flight.incarnation)
            count[key] = count.get(key, 0) + 1
    return count


"""Reading of all durations from a log, for `trinity_es.audit.whatif.simulation` to replay.

Each run of each attempt has a duration and an outcome. Each unit (runs of one task that a runner gets together) has an
overhead on its runner, and the delay until its outcome was in the log. If a run was cut off because its task was
dropped or its runner died, its duration is a lower bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from trinity_es.actors.runner.adaptive_places import START
from trinity_es.audit.whatif.history import Addition, Anchor, Duration, History, Life, PastBatch, WeightsUpdate
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import DataError
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.events.vocabulary import RUNNER_LIFE
from trinity_es.projections.batch import evolve
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.tables.batch_queries import BatchRow

__all__ = ["combine_seconds", "concurrent_groups", "read_history"]

MIN_GROUP_SIZE = 50
"""Least number of batches that are simulated together. A long log is split, since it does not fit into memory."""
TURN_SECONDS = 1e-4
"""Turns of the coordinator that were committed together get times this far apart, to keep their order."""
NEEDED_KEYS = (
    "max_timeout", "max_retry_times", "max_repeat_times_per_runner", "max_concurrency", "over_rollout",
    "dynamic_timeout",
)
"""Keys of `explorer` that the simulation reads."""


def combine_seconds(seconds: Sequence[float], *, sequential: bool) -> float:
    """Return the total time of a unit's runs: the sum if they run one after the other, else the longest.

    Equal times were measured once for all runs, so they count once.
    """
    if sequential and not (len(seconds) > 1 and len(set(seconds)) == 1):
        return sum(seconds)
    return max(seconds, default=0.0)


@dataclass(slots=True, kw_only=True)
class _Flight:
    """One attempt of a unit on a runner."""

    batch: PastBatch
    unit: ev.Unit
    runner: str
    incarnation: int
    dispatched_at: float
    limit: float
    ended_at: float | None = None
    cut_at: float | None = None
    seconds: float = 0.0
    run_seconds: dict[int, float] = field(default_factory=dict)
    failure_kinds: dict[int, str] = field(default_factory=dict)
    is_unblamed: bool = False
    """True if the runner was lost and the attempt does not count as failed."""


def concurrent_groups(rows: Sequence[BatchRow], chosen: Collection[BatchId] | None) -> Iterator[list[BatchRow]]:
    """Yield the chosen batches (None: all) and those open at the same time, in groups that never overlap in time.

    Each group but the last has MIN_GROUP_SIZE batches or more. Raises DataError if no batch can be simulated.
    """
    rows = sorted(rows, key=lambda r: r.first_position)
    selected = [r for r in rows if chosen is None or r.batch_id in chosen]
    members = rows if chosen is None else [r for r in rows if any(_are_concurrent(r, other) for other in selected)]
    members = [r for r in members if r.batch_type != "collect" and r.tasks]
    if not members:
        raise DataError("none of the chosen batches can be simulated: choose batches that have tasks and were not "
                        "submitted by a Scheduler")
    group: list[BatchRow] = []
    last_end_at = 0.0
    for row in members:
        if len(group) >= MIN_GROUP_SIZE and row.submitted_at > last_end_at:
            yield group
            group = []
        group.append(row)
        last_end_at = max(last_end_at, row.ended_at or 0.0)  # a batch that never ended is cut off here
    yield group


def read_history(log: Log, rows: Sequence[BatchRow], group: Sequence[BatchRow]) -> History:
    """Read the history of each batch since its last submission. Raises DataError if the log lacks a config."""
    head = log.head().position
    first, last = group[0].first_position, max(head if r.ended_at is None else r.last_position for r in group)
    last_at = max(r.ended_at or float("inf") for r in group)
    config = _config(log, first)
    flights: list[_Flight] = []
    events = [r for row in group for r in log.read(stream=batch_stream(row.batch_id), after=row.first_position - 1)]
    by_stream: dict[str, list[tuple[ev.Event, float]]] = {batch_stream(row.batch_id): [] for row in group}
    for stream, event, at in _with_turn_times(sorted(events, key=lambda r: r.position)):
        by_stream[stream].append((event, at))
    batches = [_read_batch(by_stream[batch_stream(row.batch_id)], config, flights) for row in group]
    if last_at == float("inf"):
        flight_ends = [f.ended_at or f.cut_at or f.dispatched_at for f in flights]
        last_at = max([*(b.submitted_at for b in batches), *flight_ends])
    unblamed = {(f.runner, f.incarnation) for f in flights if f.is_unblamed}
    lives = [
        replace(life, is_blamed=(life.runner, life.incarnation) not in unblamed) for life in _serving_lives(log, last)
        if life.ended_at is None or life.ended_at >= batches[0].submitted_at
    ]
    _set_overheads(flights, lives, config, last_at)
    updates = _weights_updates(log, first, last)
    pace = next((r.event for r in log.read_rare(["PaceMeasured"], before=first, limit=1, descending=True)), None)
    seconds = [f.seconds for f in flights if f.ended_at is not None]
    unit_seconds = median(seconds) if seconds and any(r.first_position < first for r in rows) else None
    anchors: list[tuple[float, Anchor]] = [(batches[0].submitted_at, ("begin", None))]
    for batch in batches:
        if batch.ended_at is not None:
            anchors.append((batch.ended_at, ("end", batch.batch_id)))
        if batch.trained_at is not None:
            anchors.append((batch.trained_at, ("trained", batch.batch_id)))
    for update in updates:
        anchors.append((update.published_at + max(update.loads.values(), default=0.0), ("weights", update.version)))
    anchors[1:] = sorted(anchors[1:], key=lambda a: a[0])
    return History(
        config=config, batches=batches, lives=lives, updates=updates, anchors=anchors, unit_seconds=unit_seconds,
        pace=pace if isinstance(pace, ev.PaceMeasured) else None,
    )


def _are_concurrent(a: BatchRow, b: BatchRow) -> bool:
    ends = [float("inf") if row.ended_at is None else row.ended_at for row in (a, b)]
    return a.submitted_at <= ends[1] and b.submitted_at <= ends[0]


def _config(log: Log, first: int) -> dict[str, Any]:
    """Return the config at position `first`, with defaults for settings that it lacks. Raises DataError without one."""
    config = log.config(first)[1]
    if "explorer" not in config:
        raise DataError(f"{log.url} holds no config of the run (SystemConfigured), so its settings are unknown: only "
                        "runs that were started with a config can be simulated")
    explorer = config["explorer"]
    if any(key not in explorer for key in NEEDED_KEYS):
        from trinity_es.actors.config.run_sections import ExplorerConfig  # rare, and 0.1 s to import

        explorer = ExplorerConfig().model_dump(mode="json", by_alias=True)  # defaults of keys newer than the run
        for key, value in config["explorer"].items():
            explorer[key] = {**explorer[key], **value} if isinstance(explorer.get(key), dict) else value
    if explorer["max_concurrency"] == "auto":
        explorer = {**explorer, "max_concurrency": START}
    return {**config, "explorer": explorer}


def _read_batch(events: Iterable[tuple[ev.Event, float]], config: dict[str, Any], flights: list[_Flight]) -> PastBatch:
    """Fold the events of a batch since its last submission into its history. Adds its attempts to `flights`."""
    explorer = config["explorer"]
    is_sequential = explorer.get("concurrent_mode") == "sequential"
    grace = explorer["over_rollout"]["wait_after_min"]
    past: PastBatch | None = None
    open_flights: dict[tuple[int, int], _Flight] = {}
    enough_at: float | None = None
    missing: tuple[ev.GroupsMissing, float] | None = None
    for event, at in events:
        if isinstance(event, ev.BatchSubmitted):
            past = PastBatch(submitted=event, submitted_at=at)
        assert past is not None
        past.state = state = evolve(past.state, event)
        match event:
            case ev.TasksDispatched():
                limit = event.timeout or explorer["max_timeout"]
                for unit in event.units:
                    past.attempts += 1
                    flight = _Flight(batch=past, unit=unit, runner=event.runner, incarnation=event.incarnation,
                                     dispatched_at=at, limit=limit)
                    open_flights[unit.task, unit.run_id_base] = flight
                    flights.append(flight)
            case ev.RunsFinished() | ev.AttemptFailed():
                _add_outcome(open_flights, event, at)
            case ev.BatchFinalizing():
                past.finalizing_at, past.pipeline_at = past.finalizing_at or at, past.pipeline_at or at
            case ev.GroupsMissing():
                missing = event, at
            case ev.TasksAdded():
                past.additions.append(_read_addition(event, at, missing, past.pipeline_at))
                missing = past.pipeline_at = None
            case ev.BatchFinalized() | ev.BatchAborted():
                past.finalizing_at, past.ended_at = past.finalizing_at or at, at
            case ev.BatchTrained():
                past.trained_at = past.trained_at or at
        flights_in_state = state.flights if not state.state.ended else {}
        for key in [k for k in open_flights if k not in flights_in_state]:
            flight = open_flights.pop(key)
            if flight.ended_at is None:
                flight.cut_at = at
        needed_count = state.expected_task_count if state.min_wait_num is None else state.min_wait_num
        if enough_at is None and state.completed_task_count >= min(needed_count, state.expected_task_count):
            enough_at = at
            past.due_at = at if state.is_complete else at + grace
        if past.due_at is not None and state.is_complete:
            past.due_at = min(past.due_at, at)
    assert past is not None
    for flight in flights:
        if flight.batch is past and flight.ended_at is not None:
            _set_durations(flight, sequential=is_sequential)
    return past


def _read_addition(
    event: ev.TasksAdded, at: float, missing: tuple[ev.GroupsMissing, float] | None, pipeline_at: float | None
) -> Addition:
    if missing is None or pipeline_at is None:
        return Addition(event=event, added_at=at)
    result, until = missing
    return Addition(event=event, added_at=at, missing=result, pipeline_seconds=until - pipeline_at, pause=at - until)


def _with_turn_times(recorded: Iterable[Recorded]) -> Iterable[tuple[str, ev.Event, float]]:
    """Yield (stream, event, time). Turns of the coordinator in one commit get times TURN_SECONDS apart."""
    commit_at, turn, was_dispatch = 0.0, 0, False
    for item in recorded:
        event = item.event
        if item.recorded_at != commit_at:
            commit_at, turn, was_dispatch = item.recorded_at, 0, False
        elif was_dispatch and not isinstance(event, ev.TasksDispatched):  # a turn ends with a dispatch to each runner
            turn += 1
        was_dispatch = isinstance(event, ev.TasksDispatched)
        yield item.stream, event, commit_at + turn * TURN_SECONDS


def _add_outcome(flights: dict[tuple[int, int], _Flight], event: ev.RunsFinished | ev.AttemptFailed, at: float) -> None:
    """Add an event with results or failures of a unit to its attempt. A unit may have several such events."""
    flight = flights.get((event.task, event.run_id_base))
    if flight is None or flight.unit.attempt != event.attempt:
        return
    if isinstance(event, ev.AttemptFailed):
        if event.kind == "runner_lost":
            flight.cut_at, flight.is_unblamed = at, not event.blamed
            return
        flight.failure_kinds |= dict.fromkeys(event.failed_runs, str(event.kind))
    else:
        flight.run_seconds |= {run.run: run.metrics.get("time/run_execution", event.seconds) for run in event.runs}
    flight.ended_at, flight.seconds = at, event.seconds


def _set_durations(flight: _Flight, *, sequential: bool) -> None:
    """Set the duration of each run of a unit. Failed runs share the unit's time, as the log has no time of theirs."""
    unit, durations = flight.unit, flight.batch.durations
    failed_seconds = flight.seconds
    if sequential and flight.failure_kinds:
        failed_seconds = max(0.0, flight.seconds - sum(flight.run_seconds.values())) / len(flight.failure_kinds)
    for run in range(unit.run_id_base, unit.run_id_base + unit.runs):
        seconds = flight.run_seconds.get(run, failed_seconds)
        durations[unit.task, run, unit.attempt] = Duration(
            seconds=seconds, kind=flight.failure_kinds.get(run, ""), limit=flight.limit)


def _set_overheads(flights: Iterable[_Flight], lives: Iterable[Life], config: dict[str, Any], last_at: float) -> None:
    """Set the overheads of each unit. Its start is not in the log, but follows from the free places of its runner."""
    places = {(life.runner, life.incarnation): life.places for life in lives}
    is_sequential = config["explorer"].get("concurrent_mode") == "sequential"
    place_ends_by_life: dict[tuple[str, int], list[float]] = {}
    for flight in sorted(flights, key=lambda f: f.dispatched_at):
        life, unit = (flight.runner, flight.incarnation), flight.unit
        place_ends = place_ends_by_life.setdefault(life, [])  # heap of the times at which the places get free
        begun_at = flight.dispatched_at
        if len(place_ends) >= max(1, places.get(life, config["explorer"]["max_concurrency"])):
            begun_at = max(begun_at, heapq.heappop(place_ends))
        key = (unit.task, unit.run_id_base, unit.attempt)
        runs = range(unit.run_id_base, unit.run_id_base + unit.runs)
        if flight.ended_at is None:
            cut_at = last_at if flight.cut_at is None else flight.cut_at
            for run in runs:
                if cut_at > begun_at:
                    cut = Duration(seconds=cut_at - begun_at, limit=flight.limit, cut=True)
                    flight.batch.durations.setdefault((unit.task, run, unit.attempt), cut)
            heapq.heappush(place_ends, max(begun_at, cut_at))
            continue
        begun_at = min(begun_at, max(flight.dispatched_at, flight.ended_at - flight.seconds))
        played_at = min(begun_at + flight.seconds, flight.ended_at)
        heapq.heappush(place_ends, played_at)
        seconds = [flight.batch.durations[unit.task, run, unit.attempt].seconds for run in runs]
        overhead = max(0.0, flight.seconds - combine_seconds(seconds, sequential=is_sequential))
        flight.batch.overheads[key] = (overhead, flight.ended_at - played_at)


def _serving_lives(log: Log, last: int) -> list[Life]:
    """Return the processes of runners of the rollout model that were ready by position `last`."""
    by_stream: dict[str, list[Recorded]] = {}  # read by type, because most events of a runner's stream are weight loads
    for item in log.read_rare([*RUNNER_LIFE, "ConcurrencyChanged"], before=last + 1):
        by_stream.setdefault(item.stream, []).append(item)
    lives: list[Life] = []
    for _, items in sorted(by_stream.items()):
        model, is_serving = "rollout", False
        for item in items:
            event, at = item.event, item.recorded_at
            if isinstance(event, ev.ConcurrencyChanged):
                if is_serving:  # the maximum counts for the whole life
                    lives[-1] = replace(lives[-1], places=max(lives[-1].places, event.places))
                continue
            if is_serving:  # any other event ends the life, at the latest the start of the next one
                lives[-1] = replace(lives[-1], ended_at=at)
                is_serving = False
            if isinstance(event, ev.RunnerStarted):
                model = event.model
            if isinstance(event, ev.RunnerReady) and model == "rollout":
                is_serving = True
                lives.append(Life(runner=event.runner, incarnation=event.incarnation, places=event.places,
                                  ready_at=at, ended_at=None))
    return lives


def _weights_updates(log: Log, first: int, last: int) -> list[WeightsUpdate]:
    """Return the weights published between two positions."""
    updates: dict[int, WeightsUpdate] = {}
    for item in log.read_rare(["WeightsPublished", "WeightsLoaded"], after=first - 1, before=last + 1):
        event, at = item.event, item.recorded_at
        if isinstance(event, ev.WeightsPublished):
            updates.setdefault(event.version, WeightsUpdate(version=event.version, published_at=at, loads={}))
        elif isinstance(event, ev.WeightsLoaded) and (update := updates.get(event.version)) is not None:
            update.loads.setdefault(event.runner, at - update.published_at)
    return list(updates.values())

"""State of a system that `projections.why.explain` needs: batches and times of their units, runners, hosts, weights.

`observe` folds this state from the log; the coordinator builds it from memory. `current_runners` updates runners from
the running system's status, which is newer than the log. `Followed` keeps folds between calls. Pure, except for
`read_snapshot`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.store.records.log_values import clock_offset, with_true_time
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState, contiguous, evolve
from trinity_es.projections.host_states import HOST_STATES, host_of
from trinity_es.projections.incremental_fold import KeptFold

__all__ = [
    "BatchTimes", "Followed", "HostSnapshot", "Key", "RunnerSnapshot", "SystemSnapshot", "current_runners", "observe",
    "read_snapshot",
]

NEWEST = ("WeightsLoaded", "WeightsFailed", "ConcurrencyChanged")
"""Event types of a runner; only the newest event of each type counts."""
Key = tuple[int, int]
"""(task, first run) of a unit."""


@dataclass(slots=True, kw_only=True)
class BatchTimes:
    """State of one batch, and times that `BatchState` does not hold (in unix seconds)."""

    state: BatchState
    moved_at: float
    """Time of the last event other than StallDetected."""
    pending_since: dict[Key, float] = field(default_factory=dict)
    flying_since: dict[Key, float] = field(default_factory=dict)
    durations: list[float] = field(default_factory=list)
    """Seconds of finished units."""
    finalizing_since: float | None = None
    error: str = ""
    """Why the batch was aborted, or why its last finalize failed."""
    finished_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """(runner, incarnation) -> time at which it last finished a unit of this batch id, in any submission."""


@dataclass(slots=True, kw_only=True)
class RunnerSnapshot:
    name: str
    incarnation: int = 0
    state: str = ""
    """`started`, `ready`, `failed`, `lost`, `quarantined`, `retired` or `down`."""
    since: float | None = None
    """Time at which this state began. All times are unix seconds."""
    reason: str = ""
    places: int = 0
    model_version: int = 0
    loading: int | None = None
    """Weights version that it is loading now."""
    loading_since: float | None = None
    """Time at which that load began (live). Fields marked with (live) come from the running system's status."""
    refused: tuple[int, str] | None = None
    """(version, error) of weights that it failed to load. It keeps the previous weights."""
    seen: float | None = None
    """Time of the last sign of life (live)."""
    progressed: float | None = None
    """Time at which it last finished a unit or became ready."""
    finished: float | None = None
    """Time at which it last finished a unit."""
    silent: float | None = None
    """Seconds since its engine's loop last answered (live)."""
    trouble: str = ""
    """Why it can't store finished results (live)."""
    restart_in: float | None = None
    """Seconds until the guardian restarts it (live)."""
    waits_for: str = ""
    """External thing that its engine waits for before it can start or answer, in words (live)."""
    runs_wait: str = ""
    """External thing that some of its runs wait for, in words (live)."""
    server: str = ""
    """URL of the external server that is its engine (live)."""
    leaving: bool = False
    """True if that server was removed, so that the runner gets no more units (live)."""
    model: str = "rollout"
    """Model that its engine serves. Units run on runners of the rollout model; workflows may call the other models."""

    def __str__(self) -> str:
        model = "" if self.model == "rollout" else f" of model {self.model}"
        return f"{self.name} #{self.incarnation}{model}" if self.incarnation else f"{self.name}{model}"


@dataclass(slots=True, kw_only=True)
class HostSnapshot:
    name: str
    state: str
    """`joined`, `draining`, `lost` or `left`."""
    since: float | None = None
    reason: str = ""
    heard: float | None = None
    """Time at which the coordinator last heard from it, if it is not connected now."""
    why_away: str = ""

    @property
    def is_present(self) -> bool:
        return self.state in ("joined", "draining")


@dataclass(slots=True, kw_only=True)
class SystemSnapshot:
    """State of everything that a batch may wait for."""

    batches: dict[BatchId, BatchTimes] = field(default_factory=dict)
    runners: dict[str, RunnerSnapshot] = field(default_factory=dict)
    hosts: dict[str, HostSnapshot] = field(default_factory=dict)
    host_timeout: float | None = None
    """Seconds after which a silent host is lost (`hosts.timeout`)."""
    weights: int = 0
    """Current weights version."""
    published_at: float | None = None
    limit: float | None = None
    """`explorer.max_timeout`."""
    sequential: bool = False
    """True if the runs of a unit are played one after the other, each with the whole time limit."""
    of_servers: bool = False
    """True if the engines of the rollout model are external servers."""
    stall_after: float | None = None
    of_run: bool = False
    """True if `trinity-es run` submits the batches, so that it can resume."""
    store: str = ""
    """URL of the log, from the recorded config, without a password."""
    last_at: float | None = None


def observe(snapshot: SystemSnapshot, recorded: Iterable[Recorded]) -> SystemSnapshot:
    """Fold events into the snapshot, in place. They come in log order, or by stream with runners before batches."""
    batches = {batch_stream(batch_id): batch_id for batch_id in snapshot.batches}
    for item in recorded:
        at, event = item.recorded_at, item.event
        snapshot.last_at = max(at, snapshot.last_at or at)
        match event:
            case ev.SystemConfigured():
                explorer = event.config.get("explorer", {})
                snapshot.limit, snapshot.stall_after = explorer.get("max_timeout"), explorer.get("stall_after")
                snapshot.sequential = explorer.get("concurrent_mode") == "sequential"
                snapshot.store = event.config.get("store", {}).get("url", "")
                snapshot.host_timeout = event.config.get("hosts", {}).get("timeout")
                snapshot.of_servers = explorer.get("rollout_model", {}).get("engine_type") == "http"
            case ev.TasksetAdvanced():
                snapshot.of_run = True
            case ev.WeightsPublished():
                snapshot.weights, snapshot.published_at = event.version, at
            case ev.HostJoined() | ev.HostDraining() | ev.HostLost() | ev.HostLeft():
                reason = "" if isinstance(event, ev.HostJoined) else event.reason
                snapshot.hosts[event.host] = HostSnapshot(
                    name=event.host, state=HOST_STATES[type(event)], since=at, reason=reason)
            case _ if item.stream.startswith("runner/"):
                _observe_runner(snapshot, event, at)
            case ev.BatchSubmitted():
                batches[item.stream] = event.batch_id
                earlier = snapshot.batches.get(event.batch_id)
                state = evolve(earlier.state if earlier else None, event)
                since = dict.fromkeys(state.pending, at)
                snapshot.batches[event.batch_id] = BatchTimes(
                    state=state, moved_at=at, pending_since=since, finished_at=earlier.finished_at if earlier else {}
                )
            case _ if item.stream in batches:
                _observe_batch(snapshot, snapshot.batches[batches[item.stream]], event, at)
    return snapshot


def _observe_runner(snapshot: SystemSnapshot, event: ev.Event, at: float) -> None:
    """Fold an event of a runner. A RunnerStarted resets the runner, so that only its last life counts."""
    if isinstance(event, ev.RunnerStarted):
        snapshot.runners[event.runner] = RunnerSnapshot(
            name=event.runner, incarnation=event.incarnation, state="started", since=at, model=event.model
        )
        return
    name = getattr(event, "runner", "")
    runner = snapshot.runners.setdefault(name, RunnerSnapshot(name=name))
    runner.incarnation = getattr(event, "incarnation", 0)
    match event:
        case ev.RunnerReady():
            runner.state, runner.since, runner.progressed = "ready", at, at
            runner.places, runner.model_version = event.places, event.model_version
        case ev.ConcurrencyChanged():
            runner.places = event.places
        case ev.RunnerFailed() | ev.RunnerLost():
            state = "failed" if isinstance(event, ev.RunnerFailed) else "lost"
            runner.state, runner.since, runner.reason = state, at, event.reason
        case ev.RunnerQuarantined():
            runner.state, runner.since = "quarantined", at
            lives = "1 life" if event.deaths == 1 else f"{event.deaths} lives"
            runner.reason = f"{lives} ended within {event.period_seconds:.0f} s, the last: {event.reason}"
        case ev.RunnerRetired():
            runner.state, runner.since = "retired", at
        case ev.WeightsLoaded():
            runner.model_version, runner.refused = event.version, None
        case ev.WeightsFailed():
            runner.refused = event.version, event.error


def _note_progress(snapshot: SystemSnapshot, name: str, incarnation: int, at: float) -> None:
    """Record that this incarnation of a runner finished a unit at this time. Earlier incarnations are ignored."""
    runner = snapshot.runners.get(name)
    if runner is not None and runner.incarnation == incarnation:
        runner.progressed = max(at, runner.progressed or at)
        runner.finished = max(at, runner.finished or at)


def _observe_batch(snapshot: SystemSnapshot, batch: BatchTimes, event: ev.Event, at: float) -> None:
    """Fold an event of a batch other than its submission."""
    batch.state = evolve(batch.state, event)
    if not isinstance(event, ev.StallDetected):
        batch.moved_at = at
    match event:
        case ev.TasksAdded() | ev.TaskReopened():
            for key in batch.state.pending:
                batch.pending_since.setdefault(key, at)
        case ev.TasksDispatched():
            for unit in event.units:
                batch.flying_since[unit.task, unit.run_id_base] = at
        case ev.RunsFinished():  # or its subclass TaskFinished
            batch.durations.append(event.seconds)
            batch.finished_at[event.runner, event.incarnation] = at
            _note_progress(snapshot, event.runner, event.incarnation, at)
        case ev.AttemptFailed():
            for base, _ in contiguous(event.failed_runs):
                batch.pending_since[event.task, base] = at
        case ev.BatchFinalizing():
            batch.finalizing_since, batch.error = at, ""
        case ev.FinalizeFailed():
            batch.error = event.error
        case ev.BatchAborted():
            batch.error = event.reason


def read_snapshot(events: EventLog, batch_ids: Iterable[BatchId], followed: Followed) -> SystemSnapshot:
    """Read the state of a system with these batches from its log.

    Pass all open batches, because they compete for the runners' places.
    """
    snapshot, offset = SystemSnapshot(), clock_offset()
    correct = partial(with_true_time, offset=offset)
    followed.drop_if_clock_was_set(offset)
    for stream, type_name in (("system", "SystemConfigured"), ("weights", "WeightsPublished")):
        observe(snapshot, map(correct, filter(None, [events.last(stream, type_name)])))
    observe(snapshot, map(correct, events.read(stream=ev.HostJoined.stream)))
    for stream, _ in events.streams("runner/"):
        observe(snapshot, map(correct, _last_life(events, stream)))
    followed.follow(
        snapshot, batch_ids, lambda b, after: map(correct, events.read(stream=batch_stream(b), after=after))
    )
    last_event = next(events.read(after=max(0, events.head().position - 1), limit=1), None)
    snapshot.of_run = bool(events.streams("taskset/"))
    snapshot.last_at = snapshot.last_at if last_event is None else correct(last_event).recorded_at
    return snapshot


def _last_life(events: EventLog, stream: str) -> list[Recorded]:
    """Return the events of a runner's last life, with only the newest of each type in `NEWEST`."""
    start = events.last(stream, "RunnerStarted")
    after = 0 if start is None else start.position - 1
    newest_events = [events.last(stream, name, after=after) for name in NEWEST]
    life_events = events.read(stream=stream, types=ev.RUNNER_LIFE, after=after)
    return sorted([*life_events, *(r for r in newest_events if r is not None)], key=lambda r: r.position)


class Followed:
    """Folds of batches that are kept between calls, so that each call reads only new events.

    Long-lived processes (`watch`, the dashboard) use it, because a batch of 20,000 tasks takes a second to fold. The
    caller holds `lock` during the call and while it uses the snapshot, which shares the kept batches.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._folds: dict[BatchId, KeptFold[BatchTimes | None]] = {}
        self._offset: float | None = None

    def drop_if_clock_was_set(self, offset: float) -> None:
        """Drop the folds if the clock was set since the last call. `offset`: wall clock minus monotonic clock."""
        if self._offset is None or abs(offset - self._offset) > STEP_SECONDS:
            self._folds, self._offset = {}, offset

    def follow(
        self, snapshot: SystemSnapshot, batch_ids: Iterable[BatchId],
        read: Callable[[BatchId, int], Iterable[Recorded]],
    ) -> SystemSnapshot:
        """Add these batches to a snapshot that has the runners already, and return it.

        The result is the same as that of `observe` on all events. Folds of other batches are dropped. `read(batch_id,
        position)` returns a batch's events after a position.
        """
        earlier_folds, self._folds = self._folds, {}
        for batch_id in batch_ids:
            kept_fold = earlier_folds.get(batch_id) or KeptFold(partial(_fold_batch, batch_id))
            batch = kept_fold.follow(partial(read, batch_id))
            if batch is None:
                continue
            self._folds[batch_id] = kept_fold
            snapshot.batches[batch_id] = batch
            for (name, incarnation), at in batch.finished_at.items():
                _note_progress(snapshot, name, incarnation, at)
        return snapshot


def _fold_batch(batch_id: BatchId, recorded: Iterable[Recorded], batch: BatchTimes | None) -> BatchTimes | None:
    """Fold events of one batch into `batch` (None: a new one), for KeptFold. Return None if none submits the batch."""
    snapshot = SystemSnapshot() if batch is None else SystemSnapshot(batches={batch_id: batch})
    return observe(snapshot, recorded).batches.get(batch_id)


STEP_SECONDS = 5.0
"""Minimum difference between two clocks that counts. A smaller one may be the delay of an answer."""


def current_runners(
    snapshot: SystemSnapshot, live: Mapping[str, Any] | None, now: float
) -> Iterator[tuple[str, RunnerSnapshot]]:
    """Yield (name, snapshot) of each runner of the log, updated from the running system's status."""
    status = live or {}
    clock_shift = now - status["clock"] if status.get("clock") else 0.0
    clock_shift = clock_shift if abs(clock_shift) > STEP_SECONDS else 0.0
    rows = {row["runner"]: row for row in status.get("runners", [])}
    servers = {s["runner"]: s for s in status.get("servers", [])}
    children = {c["name"]: c for c in status.get("system", {}).get("children", []) if c["name"] != "coordinator"}
    # The guardian reports only runners of this machine. Those of other hosts come from the coordinator's rows.
    local_hosts = {host_of(name) for name in children}
    remote = {name: row for name, row in rows.items() if host_of(name) not in local_hosts}
    names = {**snapshot.runners, **rows} if not children else {**children, **remote}
    for name in sorted(names):
        life = replace(snapshot.runners.get(name, RunnerSnapshot(name=name)))
        row, child = rows.get(name, {}), children.get(name, {})
        if row:
            if row.get("incarnation") != life.incarnation or row.get("state") != life.state:
                life.since = None
            for key in ("incarnation", "state", "places", "model_version", "loading", "model"):
                if row.get(key) not in (None, ""):
                    setattr(life, key, row[key])
            for key in ("seen", "progressed", "finished", "loading_since"):
                if row.get(key):
                    setattr(life, key, max(row[key] + clock_shift, getattr(life, key) or 0.0))
            if life.since is None or not life.reason:  # the log's reason is better
                life.reason = row.get("reason") or life.reason
            life.silent, life.trouble = row.get("silent"), row.get("trouble") or ""
            life.waits_for, life.runs_wait = row.get("waits_for") or "", row.get("runs_wait") or ""
            if "refused" in row:
                life.refused = (status["weights_version"], row["refused"]) if row["refused"] else None
            if life.seen is not None and life.silent:
                life.silent += max(0.0, now - life.seen)  # `silent` is as of `seen`
        if name in servers:
            life.server, life.leaving = servers[name]["url"], not servers[name]["wanted"]
        _apply_child(life, child, now)
        yield name, life


def _apply_child(life: RunnerSnapshot, child: Mapping[str, Any], now: float) -> None:
    """Update a runner, in place, from its row in the guardian's status."""
    state = child.get("state")
    if state is None:
        return
    life.model = child.get("model") or life.model
    new_state = {"waiting": "lost", "quarantined": "quarantined", "down": "down", "failed": "failed"}.get(state)
    is_newer = child.get("incarnation", 0) > life.incarnation
    if state in ("starting", "up") and (is_newer or life.state in ("", "lost")):
        new_state = "started"
    if new_state is not None and new_state != life.state:
        life.state, life.since = new_state, None
    if is_newer:
        life.incarnation, life.waits_for = child["incarnation"], ""
    if new_state in ("lost", "failed", "down") or not life.reason:
        life.reason = child.get("reason") or life.reason
    life.restart_in = child.get("restart_in")
    if child.get("seen_ago") is not None and state not in ("waiting", "quarantined", "down"):
        life.seen = max(now - child["seen_ago"], life.seen or 0.0)

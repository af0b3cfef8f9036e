"""What is known that a batch may wait for: batches with the times of their units, runners, weights.

`observe` folds it from the log, where a stream may come after the other; the coordinator makes one of what it has in
memory. `with_live` lays over it what a running system says of its runners, which is newer than its log. Pure, but for
`read_situation`. `projections.why.explain` explains from it. `Followed` keeps the fold between two questions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.store.records.recorded import Straightener
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState, contiguous, evolve
from trinity_es.projections.host_states import host_of
from trinity_es.projections.incremental_fold import KeptFold

__all__ = ["BatchTimes", "Followed", "HostSnapshot", "Key", "RunnerSnapshot", "SystemSnapshot", "observe",
           "read_situation", "with_live"]

NEWEST = ("WeightsLoaded", "WeightsFailed", "ConcurrencyChanged")
"""Events of a runner of which the last one says all."""
Key = tuple[int, int]
"""A unit of a batch: task, first run."""


@dataclass(slots=True, kw_only=True)
class BatchTimes:
    """One batch, and the times that its state does not hold."""

    state: BatchState
    moved_at: float
    """Its last event; a StallDetected moves nothing."""
    pending_since: dict[Key, float] = field(default_factory=dict)
    flying_since: dict[Key, float] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)
    """Seconds of the units that finished."""
    finalizing_since: float | None = None
    error: str = ""
    """Why it was aborted, or why its last finalize failed."""
    finished_at: dict[tuple[str, int], float] = field(default_factory=dict)
    """When each life of a runner (name, incarnation) last finished one of its units, whenever it was submitted."""


@dataclass(slots=True, kw_only=True)
class RunnerSnapshot:
    name: str
    incarnation: int = 0
    state: str = ""
    """`started`, `ready`, `failed`, `lost`, `quarantined`, `retired`, `down`."""
    since: float | None = None
    """When it came into this state."""
    reason: str = ""
    places: int = 0
    model_version: int = 0
    loading: int | None = None
    """The version of the weights that it is loading now."""
    loading_since: float | None = None
    """When it was told to, where the system told."""
    refused: tuple[int, str] | None = None
    """The version that it could not load, and why: it goes on with what it had."""
    seen: float | None = None
    """Its last sign of life, where the system told."""
    progressed: float | None = None
    """When it last finished a unit or came up."""
    finished: float | None = None
    """When it last finished a unit, in whatever life."""
    silent: float | None = None
    """Seconds that its engine's loop had not answered, where the system told."""
    trouble: str = ""
    """Why it can't store what it finished, where the system told."""
    restart_in: float | None = None
    """Seconds until it is started again."""
    waits_for: str = ""
    """What its engine waits for before it can start, or answer, in words, where the system told."""
    runs_wait: str = ""
    """What some of its runs wait for outside of the system, in words, where the system told."""
    server: str = ""
    """URL of the server of others that is its engine, where the system told."""
    leaving: bool = False
    """That server was taken away: it gets no units any more."""
    model: str = "rollout"
    """Which model it serves: a batch's units are for runners of the rollout model, its workflows ask the others."""

    def __str__(self) -> str:
        of = "" if self.model == "rollout" else f" of model {self.model}"
        return f"{self.name} #{self.incarnation}{of}" if self.incarnation else f"{self.name}{of}"


@dataclass(slots=True, kw_only=True)
class HostSnapshot:
    name: str
    state: str
    """`joined`, `draining`, `lost`, `left`."""
    since: float | None = None
    """When it came into this state."""
    reason: str = ""
    heard: float | None = None
    """When it was last heard of, where it has no connection and the system told."""
    why_away: str = ""

    @property
    def there(self) -> bool:
        return self.state in ("joined", "draining")


@dataclass(slots=True, kw_only=True)
class SystemSnapshot:
    """Everything that a batch may wait for. Made by `observe`, or by who knows it already."""

    courses: dict[BatchId, BatchTimes] = field(default_factory=dict)
    runners: dict[str, RunnerSnapshot] = field(default_factory=dict)
    hosts: dict[str, HostSnapshot] = field(default_factory=dict)
    host_timeout: float | None = None
    """hosts.timeout: seconds after which one that is not heard of is lost."""
    weights: int = 0
    """The current version."""
    published_at: float | None = None
    limit: float | None = None
    """explorer.max_timeout."""
    sequential: bool = False
    """The runs of a unit go one after the other, each with the whole limit."""
    of_servers: bool = False
    """Engines are servers of others, which come and go."""
    stall_after: float | None = None
    of_run: bool = False
    """`trinity-es run` submits its batches, and can go on with them."""
    store: str = ""
    """URL of the log, without a password, as its config names it."""
    last_at: float | None = None


_HOST_STATES: dict[type[ev.Event], str] = {
    ev.HostJoined: "joined", ev.HostDraining: "draining", ev.HostLost: "lost", ev.HostLeft: "left"}


def observe(situation: SystemSnapshot, recorded: Iterable[Recorded]) -> SystemSnapshot:
    """Return the situation after these events, in the order of the log, or stream by stream: runners before batches."""
    batches = {batch_stream(batch_id): batch_id for batch_id in situation.courses}
    for item in recorded:
        at, event = item.recorded_at, item.event
        situation.last_at = max(at, situation.last_at or at)
        match event:
            case ev.SystemConfigured():
                explorer = event.config.get("explorer", {})
                situation.limit, situation.stall_after = explorer.get("max_timeout"), explorer.get("stall_after")
                situation.sequential = explorer.get("concurrent_mode") == "sequential"
                situation.store = event.config.get("store", {}).get("url", "")
                situation.host_timeout = event.config.get("hosts", {}).get("timeout")
                situation.of_servers = explorer.get("rollout_model", {}).get("engine_type") == "http"
            case ev.TasksetAdvanced():
                situation.of_run = True
            case ev.WeightsPublished():
                situation.weights, situation.published_at = event.version, at
            case ev.HostJoined() | ev.HostDraining() | ev.HostLost() | ev.HostLeft():
                reason = "" if isinstance(event, ev.HostJoined) else event.reason
                situation.hosts[event.host] = HostSnapshot(
                    name=event.host, state=_HOST_STATES[type(event)], since=at, reason=reason)
            case _ if item.stream.startswith("runner/"):
                _observe_runner(situation, event, at)
            case ev.BatchSubmitted():
                batches[item.stream] = event.batch_id
                old = situation.courses.get(event.batch_id)
                state = evolve(old.state if old else None, event)
                since = dict.fromkeys(state.pending, at)
                situation.courses[event.batch_id] = BatchTimes(
                    state=state, moved_at=at, pending_since=since, finished_at=old.finished_at if old else {}
                )
            case _ if item.stream in batches:
                _observe_batch(situation, situation.courses[batches[item.stream]], event, at)
    return situation


def _observe_runner(situation: SystemSnapshot, event: ev.Event, at: float) -> None:
    if isinstance(event, ev.RunnerStarted):
        situation.runners[event.runner] = RunnerSnapshot(
            name=event.runner, incarnation=event.incarnation, state="started", since=at, model=event.model
        )
        return
    name = getattr(event, "runner", "")
    runner = situation.runners.setdefault(name, RunnerSnapshot(name=name))
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


def _progress(situation: SystemSnapshot, name: str, incarnation: int, at: float) -> None:
    runner = situation.runners.get(name)
    if runner is not None and runner.incarnation == incarnation:
        runner.progressed = max(at, runner.progressed or at)
        runner.finished = max(at, runner.finished or at)


def _observe_batch(situation: SystemSnapshot, course: BatchTimes, event: ev.Event, at: float) -> None:
    course.state = evolve(course.state, event)
    if not isinstance(event, ev.StallDetected):
        course.moved_at = at
    match event:
        case ev.TasksAdded() | ev.TaskReopened():
            for key in course.state.pending:
                course.pending_since.setdefault(key, at)
        case ev.TasksDispatched():
            for unit in event.units:
                course.flying_since[unit.task, unit.run_id_base] = at
        case ev.RunsFinished():  # TaskFinished is one
            course.took.append(event.seconds)
            course.finished_at[event.runner, event.incarnation] = at
            _progress(situation, event.runner, event.incarnation, at)
        case ev.AttemptFailed():
            for base, _ in contiguous(event.failed_runs):
                course.pending_since[event.task, base] = at
        case ev.BatchFinalizing():
            course.finalizing_since, course.error = at, ""
        case ev.FinalizeFailed():
            course.error = event.error
        case ev.BatchAborted():
            course.error = event.reason


def read_situation(events: EventLog, batch_ids: Iterable[BatchId], followed: Followed) -> SystemSnapshot:
    """Return what a log knows: open batches too where only one is asked for, since they take its places."""
    situation, straight = SystemSnapshot(), Straightener()
    followed.seen_from(straight.offset)
    for stream, type_name in (("system", "SystemConfigured"), ("weights", "WeightsPublished")):
        observe(situation, map(straight, filter(None, [events.last(stream, type_name)])))
    observe(situation, map(straight, events.read(stream=ev.HostJoined.stream)))
    for stream, _ in events.streams("runner/"):
        observe(situation, map(straight, _last_life(events, stream)))
    followed.follow(
        situation, batch_ids, lambda b, after: map(straight, events.read(stream=batch_stream(b), after=after))
    )
    last = next(events.read(after=max(0, events.head().position - 1), limit=1), None)
    situation.of_run = bool(events.streams("taskset/"))
    situation.last_at = situation.last_at if last is None else straight(last).recorded_at
    return situation


def _last_life(events: EventLog, stream: str) -> list[Recorded]:
    """Return what is known of a runner since it was last started; of loads and places, the last."""
    started = events.last(stream, "RunnerStarted")
    after = 0 if started is None else started.position - 1
    newest = [events.last(stream, name, after=after) for name in NEWEST]
    others = events.read(stream=stream, types=ev.RUNNER_LIFE, after=after)
    return sorted([*others, *(r for r in newest if r is not None)], key=lambda r: r.position)


class Followed:
    """Courses of batches, folded once and kept: whoever asks again and again reads only what came since.

    For a process that lives long (`watch`, the dashboard): a batch of 20,000 tasks takes a second to fold. Who calls
    holds `lock`, also while the situation is looked at: its courses are those that are kept.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._kept: dict[BatchId, KeptFold[BatchTimes | None]] = {}
        self._offset: float | None = None

    def seen_from(self, offset: float) -> None:
        """Forget what was folded where the clock, so far ahead of the monotonic one, was set since."""
        if self._offset is None or abs(offset - self._offset) > STEP_SECONDS:
            self._kept, self._offset = {}, offset

    def follow(
        self, situation: SystemSnapshot, batch_ids: Iterable[BatchId], read: Callable[[BatchId, int],
        Iterable[Recorded]]
    ) -> SystemSnapshot:
        """Return the situation, whose runners are known, with these batches; what other batches were is forgotten.

        `read`: a batch's events with a position greater than that. The same as `observe` of all their events.
        """
        before, self._kept = self._kept, {}
        for batch_id in batch_ids:
            kept = before.get(batch_id) or KeptFold(partial(_course_of, batch_id))
            course = kept.follow(partial(read, batch_id))
            if course is None:
                continue
            self._kept[batch_id] = kept
            situation.courses[batch_id] = course
            for (name, incarnation), at in course.finished_at.items():
                _progress(situation, name, incarnation, at)
        return situation


def _course_of(batch_id: BatchId, recorded: Iterable[Recorded], course: BatchTimes | None) -> BatchTimes | None:
    alone = SystemSnapshot() if course is None else SystemSnapshot(courses={batch_id: course})
    return observe(alone, recorded).courses.get(batch_id)


STEP_SECONDS = 5.0
"""Minimum difference of two clocks that is a step of one of them, and not the time that an answer was under way."""


def with_live(
    situation: SystemSnapshot, live: Mapping[str, Any] | None, now: float
) -> Iterator[tuple[str, RunnerSnapshot]]:
    """Yield the runners of the log, with what the system says of them laid over."""
    told = live or {}
    shift = now - told["clock"] if told.get("clock") else 0.0
    shift = shift if abs(shift) > STEP_SECONDS else 0.0
    rows = {row["runner"]: row for row in told.get("runners", [])}
    servers = {s["runner"]: s for s in told.get("servers", [])}
    children = {c["name"]: c for c in told.get("system", {}).get("children", []) if c["name"] != "coordinator"}
    # Slots of this system only, and those of other hosts: their guardians say nothing here.
    own = {host_of(name) for name in children}
    far = {name: row for name, row in rows.items() if host_of(name) not in own}
    names = {**situation.runners, **rows} if not children else {**children, **far}
    for name in sorted(names):
        life = replace(situation.runners.get(name, RunnerSnapshot(name=name)))
        row, child = rows.get(name, {}), children.get(name, {})
        if row:
            if row.get("incarnation") != life.incarnation or row.get("state") != life.state:
                life.since = None
            for key in ("incarnation", "state", "places", "model_version", "loading", "model"):
                if row.get(key) not in (None, ""):
                    setattr(life, key, row[key])
            for key in ("seen", "progressed", "finished", "loading_since"):
                if row.get(key):
                    setattr(life, key, max(row[key] + shift, getattr(life, key) or 0.0))
            if life.since is None or not life.reason:  # else the log tells more
                life.reason = row.get("reason") or life.reason
            life.silent, life.trouble = row.get("silent"), row.get("trouble") or ""
            life.waits_for, life.runs_wait = row.get("waits_for") or "", row.get("runs_wait") or ""
            if "refused" in row:
                life.refused = (told["weights_version"], row["refused"]) if row["refused"] else None
            if life.seen is not None and life.silent:
                life.silent += max(0.0, now - life.seen)  # it was silent then, and has been since
        if name in servers:
            life.server, life.leaving = servers[name]["url"], not servers[name]["wanted"]
        _lay_child(life, child, now)
        yield name, life


def _lay_child(life: RunnerSnapshot, child: Mapping[str, Any], now: float) -> None:
    """Lay what the guardian knows over the log: who is gone, who is started again and when."""
    state = child.get("state")
    if state is None:
        return
    life.model = child.get("model") or life.model
    becomes = {"waiting": "lost", "quarantined": "quarantined", "down": "down", "failed": "failed"}.get(state)
    newer = child.get("incarnation", 0) > life.incarnation
    if state in ("starting", "up") and (newer or life.state in ("", "lost")):
        becomes = "started"
    if becomes is not None and becomes != life.state:
        life.state, life.since = becomes, None
    if newer:
        life.incarnation, life.waits_for = child["incarnation"], ""
    if becomes in ("lost", "failed", "down") or not life.reason:
        life.reason = child.get("reason") or life.reason
    life.restart_in = child.get("restart_in")
    if child.get("seen_ago") is not None and state not in ("waiting", "quarantined", "down"):
        life.seen = max(now - child["seen_ago"], life.seen or 0.0)

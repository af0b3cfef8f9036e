"""The coordinator's crew: the runners, what they hold, which weights they serve, and who gets the next unit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from actors import decisions, rolling
from actors.book import Book
from actors.messages import (
    LIMIT,
    Alive,
    Census,
    LoadWeights,
    Outcomes,
    Revoke,
    RunnerDied,
    RunnerUp,
    WeightsDone,
    Work,
    WorkItem,
)
from actors.weight_group import WeightGroup
from events import codec
from events import vocabulary as ev
from events.errors import LogError, SyncError
from events.values import BatchId
from projections.batch import BatchState

__all__ = ["Crew", "Sender", "SyncWaiter", "ahead"]

AHEAD_SECONDS = 0.1
"""A runner gets units for this long beyond its places, to go on with while its outcomes travel (Little's law)."""
AHEAD_MOST = 8
"""... but not more than so many times its places."""
LOADING_LOST_SECONDS = 10.0
"""A runner that does not say for so long that it loads what it was told to is told again."""
FLEETING = ("memory", "nccl")
"""Ways to publish weights that leave no copy of them on a disk."""
GONE = ("lost", "quarantined")
"""States in which a life of a runner has ended."""


class Sender(Protocol):
    """The side of an actor that sends."""

    def send(self, to: Any, message: Any) -> None: ...
    def now(self) -> float: ...


@dataclass(slots=True)
class RunnerRecord:
    """What the coordinator knows of a runner beyond the log: its address, and how fast it is."""

    name: str
    incarnation: int
    address: Any
    pid: int
    state: str = ""
    places: int = 0
    model_version: int = 0
    unit_seconds: float | None = None
    """Moving mean of the time of a unit."""
    reason: str = ""
    loading: int | None = None
    """The version that it is loading now; until it has it, it gets no units."""
    loading_since: float = 0.0
    """When it was told to, monotonic seconds."""
    seen: float = 0.0
    """Unix seconds of its last sign of life."""
    progressed: float = 0.0
    """Unix seconds when it last finished a unit, or came up."""
    silent: float = 0.0
    """Seconds that its engine's loop had not answered, at the last sign of life."""
    endpoint: str = ""
    """URL of its engine's OpenAI-compatible endpoint; empty while it serves none."""
    model: str = "rollout"
    """Which model it serves: units and weights are for those of the rollout model."""
    served: bool = False
    """It has had what was the current version: when a newer one can't be loaded it goes on with that."""
    could_not_load: int | None = None
    """The version that it could not load when it tried last."""


@dataclass(slots=True)
class SyncWaiter:
    """Somebody who waits for all runners to have a version."""

    version: int
    waiting_on: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)
    from_group: bool = False
    """The trainer sends it; otherwise runners load it from its place."""

    def error(self, timed_out: str = "") -> SyncError | None:
        """What went wrong, when it is over."""
        errors = self.errors | (dict.fromkeys(self.waiting_on, timed_out) if timed_out else {})
        if not errors:
            return None
        what = "; ".join(f"{name}: {error}" for name, error in sorted(errors.items()))
        return SyncError(f"version {self.version} was not loaded everywhere ({what}); they serve what they had")


def ahead(places: int, unit_seconds: float | None) -> int:
    """Units that wait in a runner beyond its places: none where they are long, so that no runner hoards at the end."""
    if unit_seconds is None:
        return 0
    return int(places * min(AHEAD_MOST, AHEAD_SECONDS / max(unit_seconds, 1e-6)))


class Crew:
    """Runners by name. Records what happens to them in the book, and sends to them when it is durable."""

    def __init__(self, book: Book, sender: Sender, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives unix seconds, for what people are told."""
        self.book, self.sender, self.clock = book, sender, clock
        self.runners: dict[str, RunnerRecord] = {}
        self.sync_waiters: list[SyncWaiter] = []
        self.group = WeightGroup(self)
        self.timeout: Callable[[], float] = lambda: 0.0
        """Seconds that an attempt may take which is dispatched now; 0: explorer.max_timeout."""
        self._acks: dict[str, dict[int, None]] = {}
        self._keep: int | None = None
        self._take_out: Callable[[Callable[[], None]], None] = lambda load: load()
        self._unknown: set[str] = set()
        """Runners that live and have not said yet how they are."""

    def roll_with(self, keep: int, take_out: Callable[[Callable[[], None]], None], alive: Iterable[str]) -> None:
        """Load new weights engine by engine, so that `keep` of them go on serving.

        `take_out` is given what tells a runner to load: to be done when nothing new is sent to it. `alive`: runners
        that have a process.
        """
        self._keep, self._take_out, self._unknown = keep, take_out, set(alive)

    # --- their lives ------------------------------------------------------------------------------------------------
    def up(self, message: RunnerUp, address: Any) -> None:
        """A runner tells its state: when it changes, to every new coordinator, and every few seconds."""
        known = self.runners.get(message.name)
        if known is not None and known.incarnation > message.incarnation:
            return
        if known is not None and known.incarnation == message.incarnation and known.state in GONE:
            return  # its last words, which came after the guardian's
        now = self.clock()
        name, incarnation, stream = message.name, message.incarnation, f"runner/{message.name}"
        if known is None or known.incarnation < incarnation:
            known = RunnerRecord(name, incarnation, address, message.pid, progressed=now, model=message.model)
            self.runners[name] = known
            if self._keep is not None:
                with contextlib.suppress(LogError):  # then it gets its first weights before its first request
                    known.served = self.book.has_served(name, incarnation)
                known.loading, known.loading_since = message.loading, self.sender.now()
            self.forget_earlier_lives(name, incarnation)
            started = ev.RunnerStarted(
                runner=name,
                incarnation=incarnation,
                pid=message.pid,
                host=message.host,
                engine=message.engine,
                model=message.model,
            )
            self.book.record(stream, [started])
        self._unknown.discard(name)
        known.address, known.model_version, known.seen = address, message.model_version, now
        known.endpoint = message.endpoint
        if message.state != known.state:
            known.state, known.reason, known.places = message.state, message.reason, message.places
            event = _state_event(message)
            if event is not None:
                self.book.record(stream, [event])
        if known.model != "rollout":
            return
        self.send_missing(known, message)
        self.stop_unwanted(known, message)
        for waiter in self.sync_waiters:
            if message.state == "ready" and message.model_version == waiter.version:
                waiter.waiting_on.discard(name)  # it told a coordinator that could not write it
        version, path = self.book.weights
        if known.loading is not None and message.loading != known.loading:
            if message.model_version == known.loading:
                known.loading = None  # its answer was lost
            elif self.sender.now() - known.loading_since > LOADING_LOST_SECONDS:
                known.loading = None  # the order was lost: it is given again
        if message.state == "ready" and known.model_version != version and path:
            if self._keep is None or not known.served:
                self.load_weights(known)
            else:
                known.could_not_load = None  # it may try again
        elif message.state == "ready":
            known.served = True
        self.roll()

    def forget_earlier_lives(self, name: str, incarnation: int) -> None:
        """Whoever saw them end: what they had is attempted again."""
        for batch in list(self.book.batches.values()):
            older = {f.incarnation for f in batch.flights.values() if f.runner == name and f.incarnation < incarnation}
            for life in sorted(older):
                lost = decisions.runner_lost(batch, name, life, "the runner was started anew")
                self.book.record_batch(batch.batch_id, lost)

    def rollout(self) -> list[RunnerRecord]:
        """Those of the rollout model."""
        return [r for r in self.runners.values() if r.model == "rollout"]

    def forget(self) -> None:
        """What was known of them may not be in the log: know nothing, until each says again what it is."""
        self._unknown |= {r.name for r in self.runners.values() if r.state not in GONE}
        self.runners, self._acks = {}, {}
        self.group = WeightGroup(self)

    def died(self, message: RunnerDied) -> None:
        """The guardian saw a runner's process end."""
        name, incarnation = message.name, message.incarnation
        self._unknown.discard(name)
        again = message.asked and self.quarantined(name, incarnation)
        if again or self.runner_ended(name, incarnation):
            runner = self.runners.get(name)
            if runner is None or runner.incarnation < incarnation:
                runner = self.runners[name] = RunnerRecord(name, incarnation, None, 0, model=message.model)
            runner.state, runner.reason, runner.loading, runner.endpoint = "lost", message.reason, None, ""
            events: list[ev.Event] = []
            if again or self.book.runner_states.get(name) != (incarnation, "lost"):
                events.append(ev.RunnerLost(runner=name, incarnation=incarnation, reason=message.reason))
            if message.quarantined:
                runner.state = "quarantined"
                quarantined = ev.RunnerQuarantined(
                    runner=name,
                    incarnation=incarnation,
                    deaths=message.deaths,
                    period_seconds=message.period,
                    reason=message.reason,
                )
                events.append(quarantined)
            self.book.record(f"runner/{name}", events)
        for batch in list(self.book.batches.values()):
            lost = decisions.runner_lost(batch, name, incarnation, message.reason, blamed=not message.asked)
            self.book.record_batch(batch.batch_id, lost)
        for waiter in self.sync_waiters:
            waiter.waiting_on.discard(name)
        self.group.left(name, message.reason)
        self.roll()

    def runner_ended(self, name: str, incarnation: int) -> bool:
        """Whether the end of this life is news, to memory and to the log."""
        known = self.runners.get(name)
        if known is not None and known.incarnation >= incarnation:
            return known.incarnation == incarnation and known.state not in GONE
        recorded, state = self.book.runner_states.get(name, (0, ""))
        return recorded < incarnation or (recorded == incarnation and state != "quarantined")

    def quarantined(self, name: str, incarnation: int) -> bool:
        """Whether this life's slot was given up."""
        known = self.runners.get(name)
        if known is not None and known.incarnation == incarnation:
            return known.state == "quarantined"
        return self.book.runner_states.get(name) == (incarnation, "quarantined")

    def alive(self, message: Alive) -> None:
        """A runner's heartbeat."""
        runner = self.runners.get(message.name)
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen, runner.silent = self.clock(), message.silent

    def census(self, message: Census) -> None:
        """The guardian's word on who is gone, should an earlier one have been lost."""
        for name, last in message.ended.items():
            known = self.runners.get(name)
            if known is not None and known.incarnation <= last and known.state not in GONE:
                self.died(RunnerDied(name, known.incarnation, "it was gone at a census"))
            self.forget_earlier_lives(name, last + 1)

    def outcomes(self, message: Outcomes) -> list[BatchId]:
        """A group of outcomes; returns the batches that it changed. Acknowledged when it is durable."""
        runner = self.runners.get(message.name)
        touched: dict[BatchId, None] = {}
        for outcome in message.outcomes:
            batch = self.book.batches.get(outcome.batch_id)
            events = decisions.outcome(batch, message.name, message.incarnation, outcome)
            if events:
                self.book.record_batch(outcome.batch_id, events)
                touched[outcome.batch_id] = None
            if runner is not None:
                before = runner.unit_seconds
                runner.unit_seconds = outcome.seconds if before is None else 0.8 * before + 0.2 * outcome.seconds
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen = runner.progressed = self.clock()
            self._acks.setdefault(message.name, {})[message.number] = None
        return list(touched)

    # --- weights ----------------------------------------------------------------------------------------------------
    def publish(self, version: int, path: str, method: str = "checkpoint", again: bool = False) -> SyncWaiter:
        """New weights are current; every runner is to load them.

        A version that no runner could load may be published again from another place. One that was published from
        memory may be published again as a checkpoint: the same weights, which lie on a disk now too, so nobody loads
        them again. `again`: its place was lost and has been written anew. Raises SyncError for an older version, and
        for one that is served from another place.
        """
        current, current_path = self.book.weights
        if version < current:
            raise SyncError(f"weights version {version} is older than the current one, {current}")
        if again or (version, path) != (current, current_path):
            saved = method == "checkpoint" and self.book.weights_method in FLEETING
            serving = [r.name for r in self.rollout() if r.state == "ready" and r.model_version == version]
            if version == current and serving and not (saved or again):
                raise SyncError(
                    f"weights version {version} is served already by {', '.join(serving)}, from "
                    f"{current_path or 'the model as it was given'}: give {path} a new version"
                )
            published = ev.WeightsPublished(version=version, path=path, method=method)
            codec.check(published)
            self.book.record("weights", [published])
            self.book.weights, self.book.weights_method = (version, path), method
        waiter = SyncWaiter(version, from_group=method == "nccl" and self.group.whole())
        self.sync_waiters.append(waiter)
        for runner in self.rollout():
            if runner.state == "ready" and runner.model_version != version:
                waiter.waiting_on.add(runner.name)
                runner.could_not_load = None
                if self._keep is None or waiter.from_group:  # a transfer needs all of the group at once
                    self.load_weights(runner, waiter.from_group)
        self.roll()
        return waiter

    def roll(self) -> None:
        """Rolling: have those load that can be spared now."""
        version, path = self.book.weights
        if self._keep is None or not path:
            return
        turns = [
            rolling.Turn(r.name, r.model_version == version, r.loading is not None, r.could_not_load == version)
            for r in self.rollout()
            if r.state == "ready" and r.served
        ]
        for name in rolling.next_to_load(turns, self._keep, all_known=not self._unknown):
            self.load_weights(self.runners[name])

    def load_weights(self, runner: RunnerRecord, from_group: bool = False) -> None:
        """Have a runner load the current version, once."""
        version, path = self.book.weights
        if runner.loading == version:
            return
        runner.loading, runner.loading_since = version, self.sender.now()
        message = LoadWeights(runner.incarnation, version, path, from_group)
        self.book.then(lambda: self._take_out(lambda: self.sender.send(runner.address, message)))

    def weights_done(self, message: WeightsDone) -> None:
        """A runner loaded a version, or could not and goes on with the one it had."""
        runner = self.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        runner.loading = None
        who = {"runner": message.name, "incarnation": message.incarnation, "version": message.version}
        event: ev.Event
        if message.error is None:
            runner.model_version, runner.served, runner.could_not_load = message.version, True, None
            event = ev.WeightsLoaded(**who, seconds=message.seconds)  # type: ignore[arg-type]  # a dict of both types
        else:
            event = ev.WeightsFailed(**who, error=message.error)  # type: ignore[arg-type]  # a dict of both types
            runner.could_not_load = message.version
        events: list[ev.Event] = [event]
        if message.error is not None:
            self.group.left(message.name, message.error)
        if message.error is not None and not runner.served:
            # It came up with older weights than the current ones: better no runner than wrong weights.
            runner.state, runner.reason = "failed", f"it could not load weights {message.version}: {message.error}"
            if self.book.weights_method in FLEETING and not Path(self.book.weights[1]).is_dir():
                runner.reason += (
                    "; they were in shared memory, which a restart of the machine empties: publish them again "
                    "(sync_weights, or `trinity-es resume` where an explorer trains)"
                )
            events.append(
                ev.RunnerFailed(runner=message.name, incarnation=message.incarnation, reason=runner.reason)
            )
        self.book.record(f"runner/{message.name}", events)
        for waiter in self.sync_waiters:
            if waiter.version <= message.version and message.name in waiter.waiting_on:
                waiter.waiting_on.discard(message.name)
                if message.error is not None:
                    waiter.errors[message.name] = message.error
        if message.version < self.book.weights[0] and self._keep is None:
            self.load_weights(runner)
        self.roll()

    # --- units ------------------------------------------------------------------------------------------------------
    def dispatch(self) -> None:
        """Give out what can run, and say to each runner which outcomes are safe."""
        acks, self._acks = self._acks, {}
        items: dict[str, list[WorkItem]] = {}
        batches = self.book.batches.values()
        if any(b.pending for b in batches):
            load = decisions.loads(batches)
            capacities = [
                decisions.Capacity(
                    name=r.name,
                    incarnation=r.incarnation,
                    model_version=r.model_version,
                    places=r.places,
                    load=load.get((r.name, r.incarnation), 0),
                    limit=r.places + ahead(r.places, r.unit_seconds),
                )
                for r in self.rollout()
                if r.state == "ready" and r.loading is None
            ]
            for batch, event in decisions.dispatch(batches, capacities, self.timeout()):
                self.book.record_batch(batch.batch_id, [event])
                items.setdefault(event.runner, []).extend(self._item(batch, u, event.timeout) for u in event.units)
        for name in sorted(items.keys() | acks.keys()):
            self._send_work(self.runners[name], items.get(name, []), tuple(acks.get(name, {})))

    def send_missing(self, runner: RunnerRecord, message: RunnerUp) -> None:
        """What the log says this runner has and it does not know of never arrived: send it again."""
        items = []
        has = {(batch_id, submission): set(units) for batch_id, submission, units in message.running}
        for batch in self.book.batches.values():
            units = has.get((batch.batch_id, batch.submission), set())
            for (task, base), flight in batch.flights.items():
                its = (flight.runner, flight.incarnation) == (runner.name, runner.incarnation)
                if its and (task, base, flight.unit.attempt) not in units:
                    items.append(self._item(batch, flight.unit, flight.timeout))
        if items:
            self._send_work(runner, items, ())

    def stop_unwanted(self, runner: RunnerRecord, message: RunnerUp) -> None:
        """What this runner still does for a batch that has ended: the Revoke for it never arrived."""
        for batch_id, submission, units in message.running:
            batch = self.book.batches.get(batch_id)
            if batch is None or batch.submission != submission:
                revoke = Revoke(runner.incarnation, batch_id, submission, [(task, base) for task, base, _ in units])
                self.send_later(runner.address, revoke)

    def revoke(self, batch: BatchState) -> None:
        """Have runners stop what they still do for this batch."""
        by_runner: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for unit, flight in batch.flights.items():
            by_runner.setdefault((flight.runner, flight.incarnation), []).append(unit)
        for (name, incarnation), units in by_runner.items():
            runner = self.runners.get(name)
            if runner is not None and runner.incarnation == incarnation:
                self.send_later(runner.address, Revoke(incarnation, batch.batch_id, batch.submission, units))

    def _item(self, batch: BatchState, unit: ev.Unit, timeout: float) -> WorkItem:
        task = self.book.task(batch, unit.task)
        keep = batch.batch_type != "eval" and not batch.tasks[unit.task].is_eval
        if len(task) > LIMIT:
            return WorkItem(batch.batch_id, batch.submission, unit, None, self.book.payloads.put(task), keep, timeout)
        return WorkItem(batch.batch_id, batch.submission, unit, task, None, keep, timeout)

    def _send_work(self, runner: RunnerRecord, items: Sequence[WorkItem], acks: tuple[int, ...]) -> None:
        for group in in_parts(items):
            self.send_later(runner.address, Work(runner.incarnation, group, acks))

    def send_later(self, address: Any, message: Any) -> None:
        """Send when everything that was recorded so far is durable."""
        self.book.then(lambda: self.sender.send(address, message))

    def status(self) -> list[dict[str, Any]]:
        """Every runner at a glance, as plain JSON."""
        load = decisions.loads(self.book.batches.values())
        return [
            {
                "runner": r.name,
                "model": r.model,
                "incarnation": r.incarnation,
                "state": r.state,
                "pid": r.pid,
                "places": r.places,
                "load": load.get((r.name, r.incarnation), 0),
                "model_version": r.model_version,
                "reason": r.reason,
                "seen": r.seen,
                "progressed": r.progressed,
                "silent": r.silent,
                "endpoint": r.endpoint,
            }
            for r in sorted(self.runners.values(), key=lambda r: r.name)
        ]


def in_parts(items: Iterable[WorkItem]) -> list[list[WorkItem]]:
    """Groups that stay under the limit of a message; one, perhaps empty, at least."""
    groups: list[list[WorkItem]] = [[]]
    size = 0
    for item in items:
        own = 200 + len(item.task or b"")
        if size + own > LIMIT and groups[-1]:
            groups.append([])
            size = 0
        size += own
        groups[-1].append(item)
    return groups


def _state_event(message: RunnerUp) -> ev.Event | None:
    name, incarnation = message.name, message.incarnation
    match message.state:
        case "ready":
            return ev.RunnerReady(
                runner=name,
                incarnation=incarnation,
                places=message.places,
                model_version=message.model_version,
                load_seconds=message.load_seconds,
                engine_version=message.engine_version,
            )
        case "failed":
            return ev.RunnerFailed(runner=name, incarnation=incarnation, reason=message.reason)
        case "retired":
            return ev.RunnerRetired(runner=name, incarnation=incarnation)
    return None

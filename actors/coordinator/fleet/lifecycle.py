"""The runners' lives, what they hold, and who gets the next unit.

Which weights they serve is in `weights.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trinity_es.actors.coordinator.decisions import batches as decisions
from trinity_es.actors.coordinator.decisions import runners as runner_decisions
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.weights import WeightLoading
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import MessageSender
from trinity_es.actors.messages import (
    CancelUnits,
    EndedRunners,
    Heartbeat,
    OutcomeReport,
    RunnerDied,
    RunnerStatus,
    RunUnits,
    UnitAssignment,
    UnitOutcome,
    grouped,
)
from trinity_es.actors.reports import clean_text
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import InvalidEvent
from trinity_es.events.store.clock import steady_clock
from trinity_es.events.store.known import Mark
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState

__all__ = ["RunnerLifecycle", "ahead"]

AHEAD_SECONDS = 0.1
"""How long a runner can go on, while its outcomes travel, with the units beyond its places (Little's law)."""
AHEAD_MOST = 8
"""Maximum of these units, as a multiple of its places."""


def ahead(places: int, unit_seconds: float | None) -> int:
    """Return how many units may wait in a runner: none where they are long, so that no runner hoards at the end."""
    if unit_seconds is None:
        return 0
    return int(places * min(AHEAD_MOST, AHEAD_SECONDS / max(unit_seconds, 1e-6)))


class RunnerLifecycle(RunnerRegistry):
    """The registry of runners, and what happens to them: recorded in the live state, and told once it is durable."""

    def __init__(self, live: LiveState, sender: MessageSender, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives unix seconds, for what people are told; by default one that no step of the machine's moves."""
        super().__init__(live, sender)
        self.clock = clock or steady_clock()
        self.weights = WeightLoading(self)
        self.timeout: Callable[[], float] = lambda: 0.0
        """Seconds that an attempt may take which is dispatched now; 0: explorer.max_timeout."""
        self.end: Callable[[], Mark | None] = lambda: None
        """The end of the log now."""
        self._acks: dict[str, dict[int, None]] = {}

    # --- their lives ------------------------------------------------------------------------------------------------
    def up(self, message: RunnerStatus, address: Any) -> None:
        """Take a runner's state, told when it changes, to every new coordinator, and every few seconds."""
        name, incarnation, now = message.name, message.incarnation, self.clock()
        known = self.runners.get(name)
        if runner_decisions.is_late(None if known is None else known.life, message):
            return
        new = known is None or known.incarnation < incarnation
        if new:
            self.forget_earlier_lives(name, incarnation)
        self.live.record(*runner_decisions.reported(None if new or known is None else known.life, message))
        if new or known is None:
            known = self.runners[name] = RunnerRecord(self.live.runners[name], progressed=now)
            self.weights.began(known, message)
        known.address, known.model_version, known.seen = address, message.model_version, now
        known.endpoint = message.endpoint
        if known.life.model == "rollout":
            self.send_missing(known, message)
            self.stop_unwanted(known, message)
        self.weights.told(known, message)

    def forget_earlier_lives(self, name: str, incarnation: int) -> None:
        """Whoever saw them end: what they had is attempted again."""
        for batch in list(self.live.batches.values()):
            older = {f.incarnation for f in batch.flights.values() if f.runner == name and f.incarnation < incarnation}
            for life in sorted(older):
                lost = decisions.runner_lost(batch, name, life, "the runner was started anew")
                self.live.record_batch(batch.batch_id, lost)

    def forget(self) -> None:
        """Forget what was known of them, for it may not be in the log; each says again what it is."""
        self.weights.forget()
        self.runners, self._acks = {}, {}

    def died(self, message: RunnerDied) -> None:
        """Take note that the guardian saw a runner's process end."""
        name, incarnation = message.name, message.incarnation
        # A later life may have spoken first: the guardian's messages and its own come from two processes.
        self.live.record(*runner_decisions.ended(self.live.runners.get(name), message))
        life = self.live.runners[name]
        if life.incarnation == incarnation:
            known = self.runners.get(name)
            if known is None or known.incarnation < incarnation:
                life.model = message.model  # one that never spoke is known by its end alone
                known = self.runners[name] = RunnerRecord(life)
            known.loading, known.endpoint = None, ""
        for batch in list(self.live.batches.values()):
            lost = decisions.runner_lost(batch, name, incarnation, message.reason, blamed=not message.asked)
            self.live.record_batch(batch.batch_id, lost)
        if life.incarnation == incarnation:
            self.weights.lost(name, message.reason)

    def alive(self, message: Heartbeat) -> None:
        """Take a runner's heartbeat."""
        runner = self.runners.get(message.name)
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen, runner.silent, runner.trouble = self.clock(), message.silent, message.trouble

    def census(self, message: EndedRunners) -> None:
        """Take the guardian's word on who is gone, should an earlier one have been lost."""
        for name, last in message.ended.items():
            known = self.runners.get(name)
            if known is not None and known.incarnation <= last and not known.state.gone:
                self.died(RunnerDied(name, known.incarnation, "it was gone at a census"))
            self.forget_earlier_lives(name, last + 1)

    def outcomes(self, message: OutcomeReport) -> list[BatchId]:
        """Take a group of outcomes; returns the batches that it changed. Acknowledged when it is durable."""
        runner = self.runners.get(message.name)
        touched: dict[BatchId, None] = {}
        for outcome in message.outcomes:
            batch = self.live.batches.get(outcome.batch_id)
            events = decisions.outcome(batch, message.name, message.incarnation, outcome)
            if events:
                try:
                    self.live.record_batch(outcome.batch_id, events)
                except InvalidEvent as e:  # nothing of it was taken in: the unit has failed then
                    failed = decisions.outcome(batch, message.name, message.incarnation, unrecordable(outcome, e))
                    self.live.record_batch(outcome.batch_id, failed)
                touched[outcome.batch_id] = None
            if runner is not None:
                before = runner.unit_seconds
                runner.unit_seconds = outcome.seconds if before is None else 0.8 * before + 0.2 * outcome.seconds
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen = runner.progressed = self.clock()
            self._acks.setdefault(message.name, {})[message.number] = None
        return list(touched)

    # --- units ------------------------------------------------------------------------------------------------------
    def dispatch(self) -> None:
        """Give out what can run, and say to each runner which outcomes are safe."""
        acks, self._acks = self._acks, {}
        items: dict[str, list[UnitAssignment]] = {}
        batches = self.live.batches.values()
        if any(b.pending for b in batches):
            load = decisions.loads(batches)
            capacities = [
                decisions.Capacity(
                    name=r.name,
                    incarnation=r.incarnation,
                    model_version=r.model_version,
                    places=r.life.places,
                    load=load.get((r.name, r.incarnation), 0),
                    limit=r.life.places + ahead(r.life.places, r.unit_seconds),
                )
                for r in self.ready()
                if r.loading is None
            ]
            for batch, event in decisions.dispatch(batches, capacities, self.timeout()):
                self.live.record_batch(batch.batch_id, [event])
                items.setdefault(event.runner, []).extend(self._item(batch, u, event.timeout) for u in event.units)
        for name in sorted(items.keys() | acks.keys()):
            self._send_work(self.runners[name], items.get(name, []), tuple(acks.get(name, {})))

    def send_missing(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Send again what the log says this runner has and it does not know of: that never arrived."""
        items = []
        has = {(batch_id, submission): set(units) for batch_id, submission, units in message.running}
        for batch in self.live.batches.values():
            units = has.get((batch.batch_id, batch.submission), set())
            for (task, base), flight in batch.flights.items():
                its = (flight.runner, flight.incarnation) == (runner.name, runner.incarnation)
                if its and (task, base, flight.unit.attempt) not in units:
                    items.append(self._item(batch, flight.unit, flight.timeout))
        if items:
            self._send_work(runner, items, ())

    def stop_unwanted(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Stop what this runner still does for a batch that has ended: the Revoke for it never arrived."""
        for batch_id, submission, units in message.running:
            batch = self.live.batches.get(batch_id)
            if batch is None or batch.submission != submission:
                keys = [(task, base) for task, base, _ in units]
                self.send_later(runner.address, CancelUnits(runner.incarnation, batch_id, submission, keys))

    def revoke(self, batch: BatchState) -> None:
        """Have runners stop what they still do for this batch."""
        by_runner: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for unit, flight in batch.flights.items():
            by_runner.setdefault((flight.runner, flight.incarnation), []).append(unit)
        for (name, incarnation), units in by_runner.items():
            runner = self.runners.get(name)
            if runner is not None and runner.incarnation == incarnation:
                self.send_later(runner.address, CancelUnits(incarnation, batch.batch_id, batch.submission, units))

    def _item(self, batch: BatchState, unit: ev.Unit, timeout: float) -> UnitAssignment:
        task = self.live.task(batch, unit.task)
        keep = batch.batch_type != "eval" and not batch.tasks[unit.task].is_eval
        return UnitAssignment(batch.batch_id, batch.submission, unit, task.inline, task.digest, keep, timeout)

    def _send_work(self, runner: RunnerRecord, items: Sequence[UnitAssignment], acks: tuple[int, ...]) -> None:
        for group in in_parts(items):
            self.live.then(lambda group=group: self.sender.send(  # type: ignore[misc]  # binds the loop's value
                runner.address, RunUnits(runner.incarnation, group, acks, self.end())))

    def status(self) -> list[dict[str, Any]]:
        """Return every runner at a glance, as plain JSON."""
        load = decisions.loads(self.live.batches.values())
        return [
            {
                "runner": r.name,
                "model": r.life.model,
                "incarnation": r.incarnation,
                "state": r.state,
                "pid": r.life.pid,
                "places": r.life.places,
                "load": load.get((r.name, r.incarnation), 0),
                "model_version": r.model_version,
                "reason": r.life.reason,
                "seen": r.seen,
                "progressed": r.progressed,
                "silent": r.silent,
                "trouble": r.trouble,
                "endpoint": r.endpoint,
            }
            for r in sorted(self.runners.values(), key=lambda r: r.name)
        ]


def unrecordable(outcome: UnitOutcome, error: InvalidEvent) -> UnitOutcome:
    """Return the outcome of a unit whose results, or what was said of its failures, the log can't hold."""
    runs = range(outcome.unit.run_id_base, outcome.unit.run_id_base + outcome.unit.runs)
    said = clean_text(f"its outcome can't be recorded: {error}")
    return UnitOutcome(
        batch_id=outcome.batch_id, submission=outcome.submission, unit=outcome.unit,
        failures=[(run, "workflow", said) for run in runs],
    )


def in_parts(items: Iterable[UnitAssignment]) -> list[list[UnitAssignment]]:
    """Split into groups that stay under the limit of a message; one, perhaps empty, at least."""
    return grouped(items, lambda item: 200 + len(item.task or b""))

"""Handler of reports about runners' lives, by the runners and by the guardian."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.decisions import runner_decisions as runners
from trinity_es.actors.coordinator.fleet.adapter_loading import AdapterLoading
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.coordinator.fleet.weight_loading import WeightLoading
from trinity_es.actors.message_sizes import unpack_results
from trinity_es.actors.messages import EndedRunners, Heartbeat, OutcomeReport, RunnerDied, RunnerStatus, UnitOutcome
from trinity_es.actors.storable_text import clean_text
from trinity_es.events.errors import CorruptPayload, InvalidEvent, PayloadNotFound
from trinity_es.events.values import FailureKind
from trinity_es.projections.host_states import host_of
from trinity_es.projections.runner import newest_life

__all__ = ["RunnerLifecycle"]


class RunnerLifecycle:
    """Handler of messages about runners, which records them in the live state and answers once that is durable."""

    def __init__(
        self, registry: RunnerRegistry, weights: WeightLoading, dispatcher: Dispatcher, max_adapters: int = 0,
        servers: bool = False, models: Collection[str] = (),
    ) -> None:
        """Pass `servers` if the engines are external servers; `models` are names that adapters may not have."""
        self.registry, self.weights, self.dispatcher = registry, weights, dispatcher
        self.adapters = AdapterLoading(registry, max_adapters, models)
        self.live, self.servers = registry.live, servers
        self._reading: set[tuple[str, int, int]] = set()
        """Groups of outcomes whose results are being read, as (runner, incarnation, number)."""

    def on_status(self, message: RunnerStatus, address: Any) -> None:
        """Handle a runner's status, sent on each change, to each new coordinator, and every few seconds."""
        name, incarnation, now = message.name, message.incarnation, self.registry.clock()
        record = self.registry.runners.get(name)
        if runners.is_late(None if record is None else record.life, message):
            return
        new = record is None or record.incarnation < incarnation
        if new:
            self.forget_earlier_lives(name, incarnation)
        lacks = self.weights.lacks(message) or self.adapters.lacks(message)
        self.live.record(*runners.reported(None if new or record is None else record.life, message, lacks))
        if new or record is None:
            record = self.registry.runners[name] = RunnerRecord(self.live.lives[name, incarnation], progressed=now)
            self.weights.on_new_life(record, message)
        record.address, record.model_version, record.seen = address, message.model_version, now
        record.endpoint, record.up = message.endpoint, message.state == "ready"
        if record.life.model == "rollout":
            self.dispatcher.send_missing(record, message)
            self.dispatcher.stop_unwanted(record, message)
        self.weights.on_status(record, message)
        self.adapters.on_status(record, message)
        if message.state == "retired":
            self.weights.on_death(name, "it retired")
            self.adapters.on_death(name)
        self.registry.changed(name)

    def forget_earlier_lives(self, name: str, incarnation: int) -> None:
        """Have the units of a runner's earlier lives attempted again."""
        for life in self.live.in_flight.lives(name):
            if life < incarnation:
                self._lost(name, life, "the runner was restarted", blamed=True)

    def _lost(self, name: str, incarnation: int, reason: str, *, blamed: bool) -> None:
        """Have the units of a life attempted again."""
        for batch in list(self.live.batches.values()):
            units = self.live.in_flight.of(batch.batch_id, name, incarnation)
            lost = batches.runner_lost(
                batch, name, incarnation, reason, blamed=blamed, servers=self.servers, had=units
            )
            self.live.record_batch(batch.batch_id, lost)

    def forget(self) -> None:
        """Forget all runners, since their state may not be in the log; each reports its status again."""
        self.weights.forget()
        self.dispatcher.forget()
        self.registry.runners = {}

    def on_death(self, message: RunnerDied) -> None:
        """Record the end of a runner's process that the guardian saw."""
        name, incarnation = message.name, message.incarnation
        # A later life may have reported first: the guardian's messages and its own come from two processes.
        record = self.registry.runners.get(name)
        reported = record is not None and record.incarnation >= incarnation
        newest = record.life if reported and record is not None else newest_life(self.live.lives, name)
        self.live.record(*runners.ended(newest, message))
        outlived = newest is not None and newest.incarnation > incarnation
        if not outlived:
            life = self.live.lives[name, incarnation]
            if record is None or record.incarnation < incarnation:
                life.model = message.model  # it never reported a status, so only the guardian names its model
                record = self.registry.runners[name] = RunnerRecord(life)
            record.loading, record.endpoint, record.up = None, "", False
        self._lost(name, incarnation, message.reason, blamed=not message.asked)
        if not outlived:
            self.weights.on_death(name, message.reason)
            self.adapters.on_death(name)

    def on_heartbeat(self, message: Heartbeat) -> None:
        runner = self.registry.runners.get(message.name)
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen, runner.silent, runner.trouble = self.registry.clock(), message.silent, message.trouble
            runner.waits_for, runner.runs_wait = message.waits_for, message.runs_wait

    def on_ended_runners(self, message: EndedRunners) -> None:
        """Record the ends that the guardian lists, in case an earlier message about one was lost."""
        for name, last in message.ended.items():
            record = self.registry.runners.get(name)
            if record is not None and record.incarnation <= last and not record.state.gone:
                self.on_death(RunnerDied(name, record.incarnation, "its process was gone at a census"))
            self.forget_earlier_lives(name, last + 1)

    def with_results(self, message: OutcomeReport, take: Callable[[OutcomeReport], None]) -> None:
        """Call `take` with a group and its results: at once, or after reading them from the payload store.

        They are deleted there once they are in the log. If they can't be read now, the runner sends the group again.
        """
        digests = [o.results_digest for o in message.outcomes if o.results_digest]
        group = message.name, message.incarnation, message.number
        if not digests:
            take(message)
        elif group not in self._reading:
            self._reading.add(group)

            def delete() -> None:
                for digest in digests:
                    self.live.payloads.delete(digest)

            def read(report: OutcomeReport | Exception) -> None:
                self._reading.discard(group)
                if not isinstance(report, Exception):
                    take(report)
                    self.live.then(lambda: self.live.ask(delete, lambda _: None))

            self.live.ask(lambda: replace(message, outcomes=[*map(self._unpacked, message.outcomes)]), read)

    def _unpacked(self, outcome: UnitOutcome) -> UnitOutcome:
        try:
            return unpack_results(outcome, self.live.payloads)
        except (PayloadNotFound, CorruptPayload) as e:  # they are in the log already, or the unit has to run again
            return _failed(outcome, "infra", f"its results are lost: {e}")

    def on_outcomes(self, message: OutcomeReport) -> None:
        """Record a group of outcomes, and acknowledge it when it is durable."""
        runner = self.registry.runners.get(message.name)
        for outcome in message.outcomes:
            batch = self.live.batches.get(outcome.batch_id)
            events = batches.outcome(batch, message.name, message.incarnation, outcome, servers=self.servers)
            if events:
                try:
                    self.live.record_batch(outcome.batch_id, events)
                except InvalidEvent as e:  # none of the events was recorded, so the unit has failed
                    failed = batches.outcome(batch, message.name, message.incarnation, unrecordable(outcome, e))
                    self.live.record_batch(outcome.batch_id, failed)
            if outcome.lacks and (host := host_of(message.name)):
                self.dispatcher.rest(host)
            elif runner is not None:
                mean = runner.unit_seconds
                runner.unit_seconds = outcome.seconds if mean is None else 0.8 * mean + 0.2 * outcome.seconds
                self.registry.changed(message.name)
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen = runner.progressed = runner.finished = self.registry.clock()
            self.dispatcher.acknowledge(message.name, message.number)


def unrecordable(outcome: UnitOutcome, error: InvalidEvent) -> UnitOutcome:
    """Return the outcome of a unit whose results or error messages the log can't hold."""
    return _failed(outcome, "workflow", f"its outcome can't be recorded: {error}")


def _failed(outcome: UnitOutcome, kind: FailureKind, reason: str) -> UnitOutcome:
    runs = range(outcome.unit.run_id_base, outcome.unit.run_id_base + outcome.unit.runs)
    return UnitOutcome(
        batch_id=outcome.batch_id, submission=outcome.submission, unit=outcome.unit,
        failures=[(run, kind, clean_text(reason)) for run in runs],
    )

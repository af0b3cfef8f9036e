"""Handler of the messages of runners, and of the guardian's messages about runners."""

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

MEAN_WEIGHT = 0.2
"""Weight of a new unit in the moving mean of a runner's seconds per unit."""


class RunnerLifecycle:
    """Handler of messages about runners. It records them in the live state, and answers once that is durable."""

    def __init__(
        self, registry: RunnerRegistry, weights: WeightLoading, dispatcher: Dispatcher, max_adapters: int = 0, *,
        on_servers: bool = False, models: Collection[str] = (),
    ) -> None:
        """Pass `on_servers` if the engines are external servers; `models` are names that adapters may not have."""
        self.registry, self.weights, self.dispatcher = registry, weights, dispatcher
        self.adapters = AdapterLoading(registry, max_adapters, models)
        self.live, self.on_servers = registry.live, on_servers
        self._unread_groups: set[tuple[str, int, int]] = set()
        """(runner, incarnation, number) of each OutcomeReport whose results are being read."""

    def on_status(self, message: RunnerStatus, address: Any) -> None:
        """Handle a runner's status, sent on each change, to each new coordinator, and every few seconds."""
        name, incarnation, now = message.name, message.incarnation, self.registry.clock()
        record = self.registry.runners.get(name)
        if runners.is_late(None if record is None else record.life, message):
            return
        if record is not None and record.incarnation < incarnation:
            record = None
        if record is None:
            self.end_earlier_lives(name, incarnation)
        failure = self.weights.failure_reason(message) or self.adapters.failure_reason(message)
        self.live.record(*runners.apply_report(None if record is None else record.life, message, failure))
        if record is None:
            record = self.registry.runners[name] = RunnerRecord(self.live.lives[name, incarnation], progressed=now)
            self.weights.on_new_life(record, message)
        record.address, record.seen = address, now
        record.model_version, record.endpoint = message.model_version, message.endpoint
        record.up = message.state == "ready"
        if record.life.model == "rollout":
            self.dispatcher.send_missing(record, message)
            self.dispatcher.stop_unwanted(record, message)
        self.weights.on_status(record, message)
        self.adapters.on_status(record, message)
        if message.state == "retired":
            self.weights.on_death(name, "it retired")
            self.adapters.on_death(name)
        self.registry.mark_changed(name)

    def end_earlier_lives(self, name: str, incarnation: int) -> None:
        """Attempt the units of a runner's earlier processes again."""
        for earlier_incarnation in self.live.in_flight.incarnations(name):
            if earlier_incarnation < incarnation:
                self._retry_units(name, earlier_incarnation, "the runner was restarted", blamed=True)

    def _retry_units(self, name: str, incarnation: int, reason: str, *, blamed: bool) -> None:
        """Attempt the units of a runner's process again; `blamed` means that they may have ended it."""
        for batch in list(self.live.batches.values()):
            units = self.live.in_flight.units_of(batch.batch_id, name, incarnation)
            events = batches.lose_runner(
                batch, name, incarnation, reason, blamed=blamed, on_servers=self.on_servers, keys=units
            )
            self.live.record_batch(batch.batch_id, events)

    def forget(self) -> None:
        """Drop all state of runners, which may not be in the log. Each runner reports its status again."""
        self.weights.forget()
        self.dispatcher.forget()
        self.registry.runners = {}

    def on_death(self, message: RunnerDied) -> None:
        """Record that a runner's process ended, as the guardian reports, and attempt its units again."""
        name, incarnation = message.name, message.incarnation
        # A later life may have reported first: the guardian's messages and its own come from two processes.
        record = self.registry.runners.get(name)
        if record is not None and record.incarnation < incarnation:
            record = None
        newest = record.life if record is not None else newest_life(self.live.lives, name)
        self.live.record(*runners.apply_death(newest, message))
        has_later_life = newest is not None and newest.incarnation > incarnation
        if not has_later_life:
            life = self.live.lives[name, incarnation]
            if record is None:
                life.model = message.model  # it never reported a status, so only the guardian names its model
                record = self.registry.runners[name] = RunnerRecord(life)
            record.loading, record.endpoint, record.up = None, "", False
        self._retry_units(name, incarnation, message.reason, blamed=not message.asked)
        if not has_later_life:
            self.weights.on_death(name, message.reason)
            self.adapters.on_death(name)

    def on_heartbeat(self, message: Heartbeat) -> None:
        runner = self.registry.runners.get(message.name)
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen, runner.silent, runner.trouble = self.registry.clock(), message.silent, message.trouble
            runner.waits_for, runner.runs_wait = message.waits_for, message.runs_wait

    def on_ended_runners(self, message: EndedRunners) -> None:
        """Record the ends of processes that the guardian lists, in case a RunnerDied was lost."""
        for name, last_ended in message.ended.items():
            record = self.registry.runners.get(name)
            if record is not None and record.incarnation <= last_ended and not record.state.gone:
                self.on_death(RunnerDied(name, record.incarnation, "its process was gone at a census"))
            self.end_earlier_lives(name, last_ended + 1)

    def with_results(self, message: OutcomeReport, take: Callable[[OutcomeReport], None]) -> None:
        """Call `take` with a report that has all results. Large results are read from the payload store before, and are
        deleted there once they are in the log. If they can't be read now, the runner repeats its report."""
        digests = [o.results_digest for o in message.outcomes if o.results_digest]
        group = message.name, message.incarnation, message.number
        if not digests:
            take(message)
        elif group not in self._unread_groups:
            self._unread_groups.add(group)

            def delete() -> None:
                for digest in digests:
                    self.live.payloads.delete(digest)

            def done(report: OutcomeReport | Exception) -> None:
                self._unread_groups.discard(group)
                if not isinstance(report, Exception):
                    take(report)
                    self.live.when_durable(lambda: self.live.run_in_thread(delete, lambda _: None))

            unpack = lambda: replace(message, outcomes=[*map(self._unpack_outcome, message.outcomes)])  # noqa: E731
            self.live.run_in_thread(unpack, done)

    def _unpack_outcome(self, outcome: UnitOutcome) -> UnitOutcome:
        """Return an outcome with its results read from the payload store; a failed outcome if they are lost there."""
        try:
            return unpack_results(outcome, self.live.payloads)
        except (PayloadNotFound, CorruptPayload) as e:  # they are in the log already, or the unit has to run again
            return _failed_outcome(outcome, "infra", f"its results are lost: {e}")

    def on_outcomes(self, message: OutcomeReport) -> None:
        """Record the outcomes in a report, and acknowledge it when they are durable."""
        runner, life = self.registry.runners.get(message.name), (message.name, message.incarnation)
        for outcome in message.outcomes:
            batch = self.live.batches.get(outcome.batch_id)
            events = batches.apply_outcome(batch, *life, outcome, on_servers=self.on_servers)
            if events:
                try:
                    self.live.record_batch(outcome.batch_id, events)
                except InvalidEvent as e:  # none of the events was recorded, so the unit has failed
                    failed = _failed_outcome(outcome, "workflow", f"its outcome can't be recorded: {e}")
                    self.live.record_batch(outcome.batch_id, batches.apply_outcome(batch, *life, failed))
            host = host_of(message.name)
            if outcome.lacks and host:
                self.dispatcher.rest_host(host)
            elif runner is not None:
                mean, seconds = runner.unit_seconds, outcome.seconds
                runner.unit_seconds = seconds if mean is None else (1 - MEAN_WEIGHT) * mean + MEAN_WEIGHT * seconds
                self.registry.mark_changed(message.name)
        if runner is not None and runner.incarnation == message.incarnation:
            runner.seen = runner.progressed = runner.finished = self.registry.clock()
            self.dispatcher.acknowledge(message.name, message.number)


def _failed_outcome(outcome: UnitOutcome, kind: FailureKind, reason: str) -> UnitOutcome:
    runs = range(outcome.unit.run_id_base, outcome.unit.run_id_base + outcome.unit.runs)
    return UnitOutcome(
        batch_id=outcome.batch_id, submission=outcome.submission, unit=outcome.unit,
        failures=[(run, kind, clean_text(reason)) for run in runs],
    )

"""Known bugs, each a context manager that puts it into the real code: the invariants have to see every one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import trinity_es.actors.coordinator.live_state
from tests.simulation.store import Store
from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.fleet.runner_reports import RunnerLifecycle
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter
from trinity_es.actors.runner.actor import Runner
from trinity_es.projections.batch import Flight
from trinity_es.projections.experience_queue import QueueState
from trinity_es.projections.runner import RunnerState

Patch = AbstractContextManager[Any]


def ack_before_append() -> Patch:
    """A client gets its answer before the decision is durable."""

    def reply(self: CommandRouter, request: Any, value: Any = None, error: BaseException | None = None) -> None:
        self.answer(request, value, error)

    return mock.patch.object(CommandRouter, "reply", reply)


def no_dedup() -> Patch:
    """Every outcome is accepted, even if another runner has the unit now."""
    real = batches.apply_outcome

    def outcome(batch: Any, runner: str, incarnation: int, result: Any, **more: Any) -> Any:
        if batch is None or batch.submission != result.submission or batch.state.ended:
            return []
        key = (result.unit.task, result.unit.run_id_base)
        had = batch.flights.get(key)
        batch.flights[key] = Flight(
            unit=result.unit, runner=runner, incarnation=incarnation, open_runs=result.unit.runs,
            strikes=0 if had is None else had.strikes,
        )
        try:
            return real(batch, runner, incarnation, result, **more)
        finally:
            if had is None:
                del batch.flights[key]
            else:
                batch.flights[key] = had

    return mock.patch.object(batches, "apply_outcome", outcome)


def epoch_not_checked() -> Patch:
    """A writer continues after another one took its lease."""
    return mock.patch.object(Store, "checks_epoch", False)


def drain_before_success() -> Patch:
    """A runner forgets its outcomes once it has sent them, or without a coordinator."""
    real = Runner.report

    def report(self: Runner, outcomes: Any) -> None:
        real(self, outcomes)
        self.outbox.unconfirmed.clear()

    return mock.patch.object(Runner, "report", report)


def dead_runner_idle() -> Patch:
    """A runner that died counts as free."""
    real = RunnerLifecycle.on_death

    def died(self: RunnerLifecycle, message: Any) -> None:
        real(self, message)
        runner = self.registry.runners.get(message.name)
        if runner is not None and runner.incarnation == message.incarnation and runner.life.places:
            runner.life.state = RunnerState.READY

    return mock.patch.object(RunnerLifecycle, "on_death", died)


def takes_forgotten() -> Patch:
    """A coordinator that starts knows the queue's experiences, but not which were taken by whom."""

    def load(log: Any, delivered: Any, capacity: int) -> QueueState:
        return QueueState(capacity=capacity, unread=dict(delivered))

    return mock.patch.object(trinity_es.actors.coordinator.live_state, "load_queue", load)


BUGS: dict[str, Callable[[], Patch]] = {
    bug.__name__: bug
    for bug in (ack_before_append, no_dedup, epoch_not_checked, drain_before_success, dead_runner_idle, takes_forgotten)
}

"""Dispatch of units to runners, and acknowledgement of their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from trinity_es.actors.coordinator.decisions import batch_decisions as decisions
from trinity_es.actors.coordinator.decisions.free_runners import Capacity, Room
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord, RunnerRegistry
from trinity_es.actors.message_sizes import split_by_size
from trinity_es.actors.messages import CancelUnits, RunnerStatus, RunUnits, UnitAssignment
from trinity_es.events import vocabulary as ev
from trinity_es.events.store.checks.log_end import Mark
from trinity_es.projections.batch import BatchState
from trinity_es.projections.host_states import host_of
from trinity_es.projections.runner import RunnerState

__all__ = ["Dispatcher", "units_ahead"]

AHEAD_SECONDS = 0.1
"""Units wait in a runner to keep it busy for this time, while its outcomes travel (Little's law)."""
MAX_AHEAD_PER_PLACE = 32
"""Maximum number of units that wait in a runner, per place (a unit that it runs at once)."""
REST_SECONDS = 30.0
"""Time without units for a host that lacks something that a unit needs. It fails at once, so it would get all units."""


def units_ahead(places: int, unit_seconds: float | None) -> int:
    """Return how many units may wait in a runner that runs `places` units at once. It is 0 for long units, so that no
    runner hoards the last ones. `unit_seconds` is the mean duration of its units; None before the first."""
    if unit_seconds is None:
        return 0
    return int(places * min(MAX_AHEAD_PER_PLACE, AHEAD_SECONDS / max(unit_seconds, 1e-6)))


class Dispatcher:
    """Sender of units to runners. A unit is sent once the event of its dispatch is durable."""

    def __init__(
        self, registry: RunnerRegistry, timeout: Callable[[], float] = lambda: 0.0,
        log_end: Callable[[], Mark | None] = lambda: None,
        must_wait: Callable[[BatchState, tuple[int, int]], bool] = lambda batch, key: False,
    ) -> None:
        """`timeout` returns the seconds that an attempt dispatched now may take; 0 means explorer.max_timeout.

        `log_end` returns the current end of the log. `must_wait` returns True for a lost unit while the journal of its
        attempt is being read.
        """
        self.registry, self.live = registry, registry.live
        self._timeout, self._log_end, self._must_wait = timeout, log_end, must_wait
        self._acks: dict[str, dict[int, None]] = {}
        """Runner -> numbers of its OutcomeReports to acknowledge."""
        self._room = Room(fits=self._may_get_units)
        self._rests_until: dict[str, float] = {}
        """Host -> monotonic seconds until which it gets no units."""

    def rest_host(self, host: str) -> None:
        """Give no units to a host for REST_SECONDS, because it lacks something that a unit needs."""
        self._rests_until[host] = self.registry.actor.now() + REST_SECONDS

    def acknowledge(self, runner: str, number: int) -> None:
        """Acknowledge the OutcomeReport with this number in the next message to the runner."""
        self._acks.setdefault(runner, {})[number] = None

    def forget(self) -> None:
        """Drop the pending acknowledgements, whose outcomes may not be in the log, and all runners."""
        self._acks = {}
        self._room = Room(fits=self._may_get_units)

    def dispatch(self) -> None:
        """Give waiting units to runners, and send them with the pending acknowledgements."""
        acks, self._acks = self._acks, {}
        assignments: dict[str, list[UnitAssignment]] = {}
        batches = self.live.batches.values()
        if any(b.pending for b in batches):
            self._update_room()
            for batch, event in decisions.dispatch(batches, self._room, self._timeout(), self._must_wait):
                self.live.record_batch(batch.batch_id, [event])
                self.live.turn.follow_up_seconds = 0.0  # a runner waits for this turn
                runner_assignments = assignments.setdefault(event.runner, [])
                runner_assignments += [self._assignment(batch, unit, event.timeout) for unit in event.units]
        for name in sorted(assignments.keys() | acks.keys()):
            self._send_work(self.registry.runners[name], assignments.get(name, []), tuple(acks.get(name, {})))

    def _update_room(self) -> None:
        """Update the load and the limit of the runners that changed, and of runners on hosts whose rest is over."""
        changed_runners, self.live.in_flight.changed_runners = self.live.in_flight.changed_runners, {}
        for host in [h for h, until in self._rests_until.items() if until <= self.registry.actor.now()]:
            del self._rests_until[host]
            changed_runners |= {name: None for name in self.registry.runners if host_of(name) == host}
        for name in changed_runners:
            runner = self.registry.runners.get(name)
            if runner is None or runner.state is not RunnerState.READY or runner.life.model != "rollout":
                self._room.drop(name)
                continue
            self._room.put(Capacity(
                name=name, incarnation=runner.incarnation, model_version=runner.model_version,
                places=runner.life.places, load=self.live.in_flight.loads.get((name, runner.incarnation), 0),
                limit=runner.life.places + units_ahead(runner.life.places, runner.unit_seconds),
            ))

    def _may_get_units(self, capacity: Capacity) -> bool:
        runner = self.registry.runners[capacity.name]
        is_free = runner.loading is None and runner.has_adapters and not self.registry.is_leaving(capacity.name)
        return is_free and host_of(capacity.name) not in self._rests_until

    def send_missing(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Send again the units that the log assigns to a runner and that its status lacks. Their message was lost."""
        assignments = []
        reported = {(batch_id, submission): set(units) for batch_id, submission, units in message.running}
        for batch in self.live.batches.values():
            reported_units = reported.get((batch.batch_id, batch.submission), set())
            for task, base in self.live.in_flight.units_of(batch.batch_id, runner.name, runner.incarnation):
                flight = batch.flights[task, base]
                if (task, base, flight.unit.attempt) not in reported_units:
                    assignments.append(self._assignment(batch, flight.unit, flight.timeout))
        if assignments:
            self._send_work(runner, assignments, ())

    def stop_unwanted(self, runner: RunnerRecord, message: RunnerStatus) -> None:
        """Cancel the units that a runner still runs for an ended batch. The earlier message to cancel them was lost."""
        for batch_id, submission, units in message.running:
            batch = self.live.batches.get(batch_id)
            if batch is None or batch.submission != submission:
                keys = [(task, base) for task, base, _ in units]
                self.registry.send_later(runner.address, CancelUnits(runner.incarnation, batch_id, submission, keys))

    def cancel_units(self, batch: BatchState) -> None:
        keys_by_life: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for key, flight in batch.flights.items():
            keys_by_life.setdefault((flight.runner, flight.incarnation), []).append(key)
        for (name, incarnation), keys in keys_by_life.items():
            runner = self.registry.runners.get(name)
            if runner is not None and runner.incarnation == incarnation:
                cancel = CancelUnits(incarnation, batch.batch_id, batch.submission, keys)
                self.registry.send_later(runner.address, cancel)

    def _assignment(self, batch: BatchState, unit: ev.Unit, timeout: float) -> UnitAssignment:
        task = self.live.task(batch, unit.task)
        keep_experiences = batch.batch_type != "eval" and not batch.tasks[unit.task].is_eval
        kept = batch.flights[unit.task, unit.run_id_base].kept
        return UnitAssignment(
            batch.batch_id, batch.submission, unit, task.inline, task.digest, keep_experiences, timeout,
            kept="" if kept is None else kept.payload,
        )

    def _send_work(self, runner: RunnerRecord, assignments: Sequence[UnitAssignment], acks: tuple[int, ...]) -> None:
        """Send units and acknowledgements to a runner once this turn is durable, in several messages if necessary."""

        def send(group: list[UnitAssignment]) -> None:
            message = RunUnits(runner.incarnation, group, acks, self._log_end())
            self.registry.actor.send(runner.address, message)

        for group in group_assignments(assignments):
            self.live.when_durable(partial(send, group))


def group_assignments(assignments: Iterable[UnitAssignment]) -> list[list[UnitAssignment]]:
    """Split units into groups that each fit in a message. Without units, there is one empty group."""
    return split_by_size(assignments, lambda assignment: 200 + len(assignment.task or b""))  # 200 for other fields

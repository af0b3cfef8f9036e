"""Checks after every step, of the promises in docs/PROMISES.md that the control plane keeps.

`Invariants` is called with every committed event, every outcome that a runner reports and every answer to a client. It
compares the coordinator's state with the log after each of its steps. It raises Violation.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson

from tests.simulation.doubles import SimCoordinator, SimRunner
from tests.simulation.engine import reward
from tests.simulation.trainer import BatchPlan
from tests.simulation.world import Process, Violation, World
from trinity_es.actors.messages import UnitOutcome
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogUnavailable
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState, evolve, fold
from trinity_es.projections.experience_queue import QueueState, evolve_queue
from trinity_es.projections.reading.log_reader import canonical, recomputed_result

Run = tuple[str, int, int]
"""(stream of the batch, task, run)."""
Life = tuple[str, int]
"""(runner, incarnation)."""


class Invariants:
    """Account of one world, and its checks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.batches: dict[str, BatchState] = {}
        """State of every batch, folded from the log."""
        self.done: set[Run] = set()
        self.given_up: set[Run] = set()
        self.flying: dict[Run, tuple[Life, int]] = {}
        """Run in flight -> life and attempt to which it was dispatched."""
        self.blamed: Counter[Run] = Counter()
        self.lost: set[Life] = set()
        """Lives that ended."""
        self.weights = 0
        self.ready_before: set[Life] = set()
        """Lives that were ready when the current weights were published."""
        self.ready: set[Life] = set()
        self.kept_old: set[Life] = set()
        """Lives that could not load the current weights."""
        self.results: dict[str, bytes] = {}
        """Stream -> result in BatchFinalized or BatchAborted."""
        self.told: dict[BatchId, bytes] = {}
        """Batch -> answer of finalize."""
        self.taken: dict[tuple[str, int], str] = {}
        """(submission, task) -> request that got the result."""
        self.played: set[tuple[int, BatchId, str, ev.Unit]] = set()
        """Units whose outcome a process reported."""
        self.queue = QueueState(capacity=100_000)
        """Queue, folded from the whole log."""
        self.uses: Counter[tuple[BatchId, int, int]] = Counter()
        """(batch, version of its BatchFinalized, number) -> uses of the experience."""
        self.taken: dict[str, int] = {}
        """Request -> number of experiences that it took, by the log."""
        self.compared = -1
        self.begun = 0
        """Epoch of the last CoordinatorStarted."""
        self.failure: Violation | None = None

    def violated(self, what: str) -> None:
        """Record a violation, to raise at the end of the step. Raised at once, it would look like an actor's error."""
        if self.failure is None:
            self.failure = Violation(what)
            self.world.note(f"!!! {what}")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.violated(what)

    # --- the log ----------------------------------------------------------------------------------------------------
    def committed(self, row: Recorded) -> None:
        event, current = row.event, self.world.store.epoch
        epoch = row.metadata["epoch"]
        if isinstance(event, ev.CoordinatorStarted):
            self.begun = event.epoch
        elif not isinstance(event, ev.SystemConfigured):
            self.require(self.begun == epoch, f"epoch {epoch} wrote before it decided what becomes of what is open")
        if epoch != current:
            self.violated(f"{row.type} was written in epoch {epoch}, after epoch {current} took the lease (promise 5)")
        match event:
            case ev.RunnerLost():
                self.lost.add((event.runner, event.incarnation))
            case ev.RunnerReady():
                self.ready.add((event.runner, event.incarnation))
            case ev.WeightsFailed() if event.version == self.weights:
                self.kept_old.add((event.runner, event.incarnation))
            case ev.WeightsPublished():
                self.weights, self.ready_before, self.kept_old = event.version, set(self.ready), set()
            case ev.ExperiencesTaken():
                self._taken(event)
        evolve_queue(self.queue, row.stream, row.version, event)
        if not row.stream.startswith("batch/"):
            return
        before = self.batches.get(row.stream)
        if isinstance(event, ev.BatchSubmitted):
            self._submitted(row.stream, before)
        elif before is None or (before.state.ended and not isinstance(event, ev.BatchTrained)):
            self.violated(f"{row.type} in {row.stream}, which is not open")
        else:
            self._went_on(row, before, event)
        self.batches[row.stream] = evolve(before, event)

    def _taken(self, event: ev.ExperiencesTaken) -> None:
        self.require(event.request not in self.taken, f"request {event.request} was given experiences twice")
        self.taken[event.request] = sum(item.count for item in event.items)
        for item in event.items:
            for number in range(item.first, item.first + item.count):
                self.uses[item.batch_id, item.version, number] += 1
                uses = self.uses[item.batch_id, item.version, number]
                self.require(uses == item.use_count == 1, f"experience {number} of {item.batch_id} was taken twice")
            known = self.queue.deliveries.get((batch_stream(item.batch_id), item.version))
            there = known is not None and item.first + item.count <= len(known.use_counts)
            self.require(there, f"{item} was taken, and is not in the queue")

    def _submitted(self, stream: str, before: BatchState | None) -> None:
        self.require(before is None or before.state.ended, f"{stream} was submitted while it was open")
        for runs in (self.done, self.given_up, self.flying, self.blamed):
            for run in [r for r in runs if r[0] == stream]:
                runs.pop(run) if isinstance(runs, dict) else runs.discard(run)
        self.results.pop(stream, None)

    def _went_on(self, row: Recorded, batch: BatchState, event: ev.Event) -> None:
        stream = row.stream
        match event:
            case ev.TasksDispatched():
                life = (event.runner, event.incarnation)
                # Two systems that start at the same time may give the same incarnation to two processes.
                alone = len(self.world.lives.get(life, [])) < 2
                lost = alone and life in self.lost
                self.require(not lost, f"units of {stream} given to {life}, which is recorded lost")
                current = self._serves_current(life) or life in self.ready_before & self.kept_old
                self.require(current, f"{life} was given units with older weights than {self.weights} (promise 9)")
                self._dispatched(stream, batch, event)
            case ev.RunsFinished():
                for result in event.runs:
                    run = (stream, event.task, result.run)
                    self.require(run not in self.done, f"{run} was recorded finished twice (promise 3)")
                    self._lands(run, event)
                    self.done.add(run)
                    wanted = reward(batch.batch_id, event.task, result.run)
                    made = {"reward": wanted}
                    self.require(result.metrics == made, f"{run} has {result.metrics}, it made {made} (promise 8)")
            case ev.AttemptFailed():
                self._failed(stream, batch, event)
            case ev.ResultsTaken():
                for number in event.tasks:
                    self.require(number in batch.ready_tasks(), f"result {number} of {stream} taken that was not there")
            case ev.TaskDropped():
                for task in event.tasks:
                    self.require(not batch.tasks[task].settled, f"settled task {task} of {stream} dropped (promise 2)")
                self._land_all(stream, set(event.tasks))
            case ev.BatchFinalized() | ev.BatchAborted():
                left = batch.batch_type == "collect" and isinstance(event, ev.BatchFinalized) and batch.ready_tasks()
                self.require(not left, f"{stream} ended, and nobody has taken the results of {left}")
                self._land_all(stream, set(range(batch.expected_task_count)))
                self.results[stream] = canonical(event.result)
                self.require(
                    self.results[stream] == canonical(recomputed_result(batch, event)),
                    f"the result of {stream} is not what its events say (promise 6)",
                )

    def _dispatched(self, stream: str, batch: BatchState, event: ev.TasksDispatched) -> None:
        life = (event.runner, event.incarnation)
        for unit in event.units:
            for number in range(unit.run_id_base, unit.run_id_base + unit.runs):
                run = (stream, unit.task, number)
                self.require(run not in self.done, f"{run} is finished and was dispatched again (promise 2)")
                self.require(run not in self.given_up, f"{run} had failed for good and was dispatched again")
                self.require(
                    run not in self.flying, f"{run} was given to {life} while {self.flying.get(run)} has it (promise 2)"
                )
                self.require(
                    self.blamed[run] < batch.max_attempts, f"{run} got more than {batch.max_attempts} attempts"
                )
                self.flying[run] = (life, unit.attempt)

    def _serves_current(self, life: Life) -> bool:
        """Return True if the runner's engine has the current weights."""
        processes = self.world.lives.get(life, [])
        if len(processes) != 1:  # two systems gave the same incarnation
            return True
        engine = processes[0].receiver.engine_thread.engine
        return engine is None or engine.model_version == self.weights

    def _lands(self, run: Run, event: ev.RunsFinished | ev.AttemptFailed) -> None:
        by = ((event.runner, event.incarnation), event.attempt)
        self.require(self.flying.get(run) == by, f"{run} came back from {by}, but {self.flying.get(run)} has it")
        self.flying.pop(run, None)

    def _land_all(self, stream: str, tasks: set[int]) -> None:
        for run in [r for r in self.flying if r[0] == stream and r[1] in tasks]:
            del self.flying[run]

    def _failed(self, stream: str, batch: BatchState, event: ev.AttemptFailed) -> None:
        for number in event.failed_runs:
            run = (stream, event.task, number)
            self.require(run not in self.done, f"{run} is finished and then failed (promise 2)")
            self._lands(run, event)
            self.blamed[run] += event.blamed
            self.require(self.blamed[run] <= batch.max_attempts, f"{run} had more than {batch.max_attempts} attempts")
            if not event.retry:
                self.given_up.add(run)
                self.require(
                    event.kind == "data" or self.blamed[run] == batch.max_attempts,
                    f"{run} was given up after {self.blamed[run]} of {batch.max_attempts} attempts ({event.kind})",
                )
        if event.kind == "runner_lost":
            for process in self.world.lives.get((event.runner, event.incarnation), []):
                living = process.alive and not process.doomed and process.receiver.state != "retired"
                wrong = living and self._of_this_system(process)
                self.require(not wrong, f"{event.runner} life {event.incarnation} was taken for lost and lives")

    def _of_this_system(self, process: Process) -> bool:
        guardian = self.world.guardian
        return guardian is not None and process.system == guardian.system

    # --- the runners ------------------------------------------------------------------------------------------------
    def reported(self, runner: SimRunner, outcomes: Sequence[UnitOutcome]) -> None:
        if not runner.process.alive:
            return
        for outcome in outcomes:
            key = (runner.process.pid, outcome.batch_id, outcome.submission, outcome.unit)
            self.require(
                key not in self.played, f"{runner.name} played {outcome.batch_id} {outcome.unit} twice (promise 2)"
            )
            self.played.add(key)

    def delivered(self, experiences: list[list[Any]]) -> None:
        """Check that the pipeline read the experience of each run once."""
        self.require(
            len({tuple(e) for e in experiences}) == len(experiences), f"delivered twice: {experiences} (promise 3)"
        )

    def raised(self, process: Process, error: BaseException) -> None:
        """Record an error that an actor's handler raised, except for LogUnavailable."""
        started = hasattr(process.receiver, "config")  # otherwise the message that starts it was lost
        if started and not isinstance(error, LogUnavailable):
            self.violated(f"a handler of {process.label} raised {type(error).__name__}: {error}")

    # --- the clients ------------------------------------------------------------------------------------------------
    def submit_answered(self, plan: BatchPlan, submission: str, error: str | None) -> None:
        state = self.batches.get(batch_stream(plan.batch_id))
        if error is None:
            rows = self.world.store.streams.get(batch_stream(plan.batch_id), [])
            found = any(isinstance(r.event, ev.BatchSubmitted) and r.event.submission == submission for r in rows)
            self.require(found, f"submit of {plan.batch_id} was acknowledged and is not in the log (promise 1)")
        elif error == "BatchAlreadyActive":  # of an earlier try that was refused, or not answered
            self.require(state is not None, f"{plan.batch_id} is active, they say, and is not in the log")
        else:
            self.require(error == "LogUnavailable", f"submit of {plan.batch_id}: {error}")

    def schedule_answered(self, plan: BatchPlan, request: str, error: str | None) -> None:
        if error is None:
            rows = self.world.store.streams.get(batch_stream(plan.batch_id), [])
            named = [getattr(r.event, "submission", getattr(r.event, "request", "")) for r in rows]
            times = named.count(request)
            self.require(times == 1, f"schedule of {plan.batch_id} was acknowledged, and is {times} times in the log")
        else:
            self.require(error == "LogUnavailable", f"schedule of {plan.batch_id}: {error}")

    def took(self, plan: BatchPlan, submission: str, request: str, got: list[int]) -> None:
        logged = {n for row in self.world.store.streams[batch_stream(plan.batch_id)]
                  if isinstance(row.event, ev.ResultsTaken) and row.event.request == request for n in row.event.tasks}
        self.require(set(got) == logged, f"{got} of {plan.batch_id} were given out, the log says {logged} (promise 1)")
        for number in got:
            first = self.taken.setdefault((submission, number), request)
            self.require(first == request, f"result {number} of {plan.batch_id} was given out twice (promise 3)")

    def finalize_answered(self, plan: BatchPlan, error: str | None, value: bytes | None) -> None:
        if error is not None:
            fine = error in ("FinalizeTimeout", "LogUnavailable", "PipelineError")
            fine = fine or (error == "TooFewGroups" and plan.refills)
            self.require(fine, f"finalize of {plan.batch_id}: {error}")
            return
        told = canonical(orjson.loads(value or b""))
        logged = self.results.get(batch_stream(plan.batch_id))
        self.require(told == logged, f"finalize of {plan.batch_id} said {told!r}, the log says {logged!r} (promise 3)")
        earlier = self.told.setdefault(plan.batch_id, told)
        self.require(told == earlier, f"finalize of {plan.batch_id} said {told!r} after {earlier!r} (promise 3)")

    def add_answered(self, plan: BatchPlan, request: str, error: str | None) -> None:
        if error is not None:  # an aborted batch takes no tasks
            self.require(error in ("LogUnavailable", "DataError"), f"tasks for {plan.batch_id}: {error}")
            return
        added = [row for row in self.world.store.streams[batch_stream(plan.batch_id)]
                 if isinstance(row.event, ev.TasksAdded) and row.event.request == request]
        self.require(len(added) == 1, f"tasks of {request} are {len(added)} times in {plan.batch_id} (promise 1)")

    def acknowledge_answered(self, plan: BatchPlan, error: str | None) -> None:
        state = self.batches[batch_stream(plan.batch_id)]
        if error is None:
            self.require(state.trained_step == 1, f"acknowledge of {plan.batch_id} is not in the log (promise 1)")
        else:  # an aborted batch can't be acknowledged
            self.require(error in ("LogUnavailable", "DataError"), f"acknowledge of {plan.batch_id}: {error}")

    def take_answered(self, request: str, n: int, error: str | None, value: bytes | None) -> None:
        if error is not None:
            self.require(error in ("TakeTimeout", "LogUnavailable"), f"take: {error}")
            return
        got = sum(ref["count"] for item in orjson.loads(value or b"") for ref in item["refs"])
        self.require(got == n == self.taken.get(request), f"{n} were asked, {got} given, the log: {self.taken}")

    # --- live state -------------------------------------------------------------------------------------------------
    def after_step(self, process: Process | None) -> None:
        if self.failure is not None:
            raise self.failure
        actor = None if process is None else process.receiver
        if isinstance(actor, SimCoordinator) and actor.running and process is not None and process.alive:
            self._compare(actor, self.world.steps % 16 == 0)
            if self.failure is not None:
                raise self.failure

    def _compare(self, actor: SimCoordinator, all_of_it: bool) -> None:
        """Check that the coordinator's live state equals the fold of the log, if no write is in flight."""
        if actor.session.writer.in_flight or actor.session.lease.epoch != self.world.store.epoch:
            return
        at = len(self.world.store.rows)
        if at == self.compared and not all_of_it:
            return
        self.compared = at
        opened = {s: b for s, b in self.batches.items() if not b.state.ended}
        live = {batch_stream(b): state for b, state in actor.live.batches.items()}
        self.require(live.keys() == opened.keys(), f"live: {sorted(live)}, in the log: {sorted(opened)} (promise 6)")
        for stream in live.keys() & opened.keys():
            if live[stream] != opened[stream]:
                self.violated(f"live state of {stream} is not the log's (promise 6): {live[stream]} {opened[stream]}")

        in_flight = actor.live.in_flight
        counted = Counter((f.runner, f.incarnation) for b in actor.live.batches.values() for f in b.flights.values())
        self.require(in_flight.loads == counted, f"units in flight: {in_flight.loads}, of the batches: {counted}")
        for batch in actor.live.batches.values():
            for life in counted:
                of_life = [k for k, f in batch.flights.items() if (f.runner, f.incarnation) == life]
                had = in_flight.units_of(batch.batch_id, *life)
                self.require(had == of_life, f"{life} has {had}, the batch says {of_life}")
                self.require(life[1] in in_flight.incarnations(life[0]), f"{life} has units and is not known to")

        for key, delivery in actor.live.queue.deliveries.items():
            known = self.queue.deliveries.get(key)
            same = known is not None and known.takes == delivery.takes
            self.require(same, f"the live queue of {key} is not the log's (promise 6)")
        whole = actor.live.queue.unread or actor.live.queue.deliveries.keys() == self.queue.deliveries.keys()
        self.require(bool(whole), "the live queue lacks a batch")

    # --- the end ----------------------------------------------------------------------------------------------------
    def unfinished(self) -> str | None:
        """Describe something that is still unfinished; None if nothing is."""
        world = self.world
        if world.trainer.left:
            return f"{sorted(map(str, world.trainer.left))} are not finalized"
        coordinator = world.find("coordinator")
        if coordinator is None or not coordinator.receiver.running:
            return "there is no coordinator"
        if coordinator.receiver.session.writer.in_flight:
            return "the log is being written"
        for process in world.processes.values():
            if process.kind == "runner" and process.alive and not process.stopped and self._of_this_system(process):
                outbox = getattr(process.receiver, "outbox", None)  # none before it knows its runner
                groups = outbox and outbox.unconfirmed
                if groups:
                    return f"{process.label} keeps outcomes {sorted(groups)}"
        return None

    def at_the_end(self) -> None:
        """Check at the end that folding the log again gives the same state of every batch."""
        for stream, rows in self.world.store.streams.items():
            if stream.startswith("batch/"):
                again = fold(copy.deepcopy(row.event) for row in rows)
                self.require(again == self.batches[stream], f"{stream} folds to another state the second time")
        if self.failure is not None:
            raise self.failure

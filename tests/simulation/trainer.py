"""Simulated trainers, whose answers are checked. They submit batches, finalize each twice, take experiences from the
queue and acknowledge. For a batch of type `collect` a scheduler submits the tasks in two parts and takes results.

A call works like one of `trinity_es/client/connection.py`: it asks the guardian for the coordinator's address and sends
its request there. After `PATIENCE_SECONDS` without an answer it does both again, under the same request id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from tests.simulation.world import Process, Violation, World
from trinity_es.actors import commands
from trinity_es.actors.requests import Parcel, Reply, Request, Where, WhereReply
from trinity_es.events.store.checks.log_end import Mark, lost_between
from trinity_es.events.values import BatchId, batch_stream

PATIENCE_SECONDS = 5.0
LOOK_AGAIN_SECONDS = 0.3
"""Pause before the guardian is asked again, while there is no coordinator."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Plan of one batch."""

    batch_id: BatchId
    batch_type: str
    runs: tuple[int, ...]
    """Number of runs of each task."""
    start: float
    min_wait: int | None = None
    timeout: float | None = None
    """Timeout of finalize. The trainer then finalizes again."""
    abort_after: float | None = None

    @property
    def refills(self) -> bool:
        """True if the trainer requires one group more than the batch has, and then adds a task."""
        return self.batch_type == "train" and sum(self.runs) % 3 == 0


class Call:
    def __init__(self, trainer: Trainer, command: commands.Command[Any], done: Callable[[Reply], None]) -> None:
        trainer.last_id += 1
        self.trainer, self.done = trainer, done
        self.request = Request(f"q{trainer.last_id}", command.name, commands.encode(command), trainer.known)
        self.tries = 0
        self.over = False
        trainer.calls[self.request.id] = self
        self.go()

    def go(self) -> None:
        """Send the request, or ask the guardian for the coordinator's address first."""
        trainer = self.trainer
        if self.over:
            return
        self.tries += 1
        tries = self.tries
        if trainer.coordinator is not None:
            trainer.send(trainer.coordinator, replace(self.request, known=trainer.known, by="the trainer"))
        elif trainer.world.guardian is not None:
            trainer.send(trainer.world.guardian.address, Where(self.request.id))

        def again() -> None:
            if self.tries == tries:
                trainer.coordinator = None
                self.go()

        trainer.world.later(PATIENCE_SECONDS, trainer.process, "", again)

    def found(self, coordinator: Any) -> None:
        """Handle the guardian's answer: the coordinator's address, or None."""
        if self.over:
            return
        self.trainer.coordinator = coordinator
        if coordinator is not None:
            self.go()
            return
        self.tries += 1
        tries = self.tries
        wait = self.trainer.world.later
        wait(LOOK_AGAIN_SECONDS, self.trainer.process, "", lambda: self.go() if self.tries == tries else None)


class Trainer:
    """All clients of a run: one mailbox, and a script for each batch."""

    def __init__(
        self, world: World, plans: tuple[BatchPlan, ...], sync_at: float | None, restart_at: float | None = None
    ) -> None:
        self.world = world
        self.process = Process(99, "trainer", 0, None, 0.0)
        self.process.receiver = self
        self.coordinator: Any = None
        self.last_id = 0
        self.known: Mark | None = None
        self.life = 1
        self.calls: dict[str, Call] = {}
        self.plans = {plan.batch_id: plan for plan in plans}
        self.left = {plan.batch_id for plan in plans}
        for plan in plans:
            world.later(plan.start, None, "", lambda p=plan: self.submit(p))
        if sync_at is not None:
            world.later(sync_at, None, "", lambda: self.sync(1))
        if restart_at is not None:
            world.later(restart_at, None, "", lambda: self.restart("runner-0"))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule a call, which is skipped if the trainer restarts first."""
        life = self.life
        self.world.later(seconds, self.process, "", lambda: call() if self.life == life else None)

    def send(self, to: Any, message: Any) -> None:
        self.world.send(self.process, to, message)

    def receiveMessage(self, message: Any, sender: Any) -> None:  # as an actor's
        if isinstance(message, WhereReply):
            call = self.calls.get(message.id)
            if call is not None:
                call.found(message.coordinator)
        elif isinstance(message, Reply):
            call = self.calls.pop(message.id, None)
            if call is not None:
                if lost_between(call.request.known, message.end) is not None:
                    raise Violation(f"the answer to {call.request.id} is of a shorter log than the trainer has seen")
                self.known = message.end or self.known
                call.over = True
                call.done(message)

    def forget(self) -> None:
        """Replace the trainer's process by a new one, which continues from the state in the log."""
        for call in self.calls.values():
            call.over = True
        self.calls.clear()
        self.life += 1
        self.coordinator = None
        for batch_id, plan in self.plans.items():
            if batch_id not in self.left or plan.start > self.world.now:
                continue
            known = batch_stream(batch_id) in self.world.store.streams
            if plan.batch_type == "collect":
                (self.collect if known else self.schedule)(plan)
            elif known:
                self.finalize(plan)
            else:
                self.submit(plan)

    # --- the script of a scheduled batch ----------------------------------------------------------------------------
    def schedule(self, plan: BatchPlan, first: bool = True) -> None:
        half = (len(plan.runs) + 1) // 2
        runs = plan.runs[:half] if first else plan.runs[half:]
        tasks = [{"workflow": "sim:Sim", "repeat_times": n} for n in runs]

        def answered(reply: Reply) -> None:
            error = _error(reply)
            self.world.invariants.schedule_answered(plan, reply.id, error)
            if error is not None:
                self.later(0.5, lambda: self.schedule(plan, first))
            elif first and plan.runs[half:]:
                self.later(0.1, lambda: self.schedule(plan, first=False))
            else:
                if plan.abort_after is not None:
                    self.later(plan.abort_after, lambda: self.abort(plan))
                self.collect(plan)

        Call(self, commands.ScheduleTasks(batch_id=plan.batch_id, tasks=Parcel(orjson.dumps(tasks))), answered)

    def collect(self, plan: BatchPlan, since: float | None = None) -> None:
        since = self.world.now if since is None else since
        late = plan.timeout is not None and self.world.now - since > plan.timeout
        patience = min(4.0, plan.timeout or 4.0)
        seconds = 0.0 if late else patience

        def answered(reply: Reply) -> None:
            told = None if _error(reply) else orjson.loads(reply.value.inline or b"")
            if told is None:
                self.later(0.2, lambda: self.collect(plan, since))
            elif told["ready"]:
                self.take(plan, told["submission"], since)
            elif told["open"] == 0:
                self.left.discard(plan.batch_id)
            elif late:
                self.drop(plan, since)
            else:
                self.collect(plan, since)

        Call(self, commands.PollBatch(batch_id=plan.batch_id, at_least=1, seconds=seconds, resume=True), answered)

    def take(self, plan: BatchPlan, submission: str, since: float) -> None:
        state = self.world.invariants.batches[batch_stream(plan.batch_id)]  # as the log says
        numbers = state.ready_tasks() if state.submission == submission else []

        def answered(reply: Reply) -> None:
            if _error(reply) is None:
                got = orjson.loads(reply.value.inline or b"")
                self.world.invariants.took(plan, submission, reply.id, got)
            self.later(0.05, lambda: self.collect(plan, since))

        Call(self, commands.TakeResults(batch_id=plan.batch_id, submission=submission, tasks=numbers), answered)

    def drop(self, plan: BatchPlan, since: float) -> None:
        command = commands.DropOpenTasks(batch_id=plan.batch_id, reason="simulated")
        Call(self, command, lambda reply: self.later(0.1, lambda: self.collect(plan, since)))

    # --- the script of a batch --------------------------------------------------------------------------------------
    def submit(self, plan: BatchPlan) -> None:
        if plan.batch_type == "collect":
            self.schedule(plan)
            return
        tasks = [{"workflow": "sim:Sim", "repeat_times": n} for n in plan.runs]
        command = commands.SubmitBatch(
            batch_id=plan.batch_id, batch_type=plan.batch_type,  # type: ignore[arg-type]  # of a scheduled one above
            tasks=Parcel(orjson.dumps(tasks)), min_wait_num=plan.min_wait, cursor=None,
        )

        def answered(reply: Reply) -> None:
            error = _error(reply)
            self.world.invariants.submit_answered(plan, reply.id, error)
            if error == "LogUnavailable":
                self.later(0.5, lambda: self.submit(plan))
                return
            if plan.abort_after is not None:
                self.later(plan.abort_after, lambda: self.abort(plan))
            self.finalize(plan)

        Call(self, command, answered)

    def finalize(self, plan: BatchPlan, again: bool = False) -> None:
        state = self.world.invariants.batches.get(batch_stream(plan.batch_id))  # as the log says, or a bug has it
        command = commands.FinalizeBatch(
            batch_id=plan.batch_id, batch_type=plan.batch_type, timeout=plan.timeout,  # type: ignore[arg-type]  # as above
            groups=len(plan.runs) + 1 if plan.refills and state is not None and not state.additions else None,
        )

        def answered(reply: Reply) -> None:
            error = _error(reply)
            self.world.invariants.finalize_answered(plan, error, reply.value.inline)
            if error == "TooFewGroups":
                self.add(plan)
            elif error is not None:
                self.later(0.2, lambda: self.finalize(plan, again))
            elif not again:
                self.finalize(plan, again=True)
            elif plan.batch_type == "train":
                self.take_from_queue(plan)
            else:
                self.acknowledge(plan)

        Call(self, command, answered)

    def add(self, plan: BatchPlan) -> None:
        tasks = Parcel(orjson.dumps([{"workflow": "sim:Sim", "repeat_times": 1}]))

        def answered(reply: Reply) -> None:
            self.world.invariants.add_answered(plan, reply.id, _error(reply))
            self.later(0.1, lambda: self.finalize(plan))

        Call(self, commands.AddTasks(batch_id=plan.batch_id, tasks=tasks, cursor=None), answered)

    def take_from_queue(self, plan: BatchPlan) -> None:
        """Take some experiences from the queue, then acknowledge the batch."""
        n = 1 + sum(plan.runs) % 3

        def answered(reply: Reply) -> None:
            self.world.invariants.take_answered(reply.id, n, _error(reply), reply.value.inline)
            self.acknowledge(plan)

        Call(self, commands.TakeExperiences(n=n, timeout=1.0, step=1), answered)

    def acknowledge(self, plan: BatchPlan) -> None:
        def answered(reply: Reply) -> None:
            error = _error(reply)
            self.world.invariants.acknowledge_answered(plan, error)
            if error == "LogUnavailable":
                self.later(0.2, lambda: self.acknowledge(plan))
            else:
                self.left.discard(plan.batch_id)

        Call(self, commands.AcknowledgeBatch(batch_id=plan.batch_id, step=1, metrics={}), answered)

    def abort(self, plan: BatchPlan) -> None:
        command = commands.AbortBatch(batch_id=plan.batch_id, reason="simulated", keep_partial_results=True)

        def answered(reply: Reply) -> None:
            if _error(reply) == "LogUnavailable":
                self.later(0.2, lambda: self.abort(plan))

        Call(self, command, answered)

    def sync(self, version: int) -> None:
        Call(self, commands.SyncWeights(version=version, path=f"/weights/{version}", timeout=20.0), lambda reply: None)

    def restart(self, name: str) -> None:
        """Request a restart of a runner's current incarnation. Do nothing without a guardian."""
        children = getattr(self.world.guardian.receiver, "children", {}) if self.world.guardian is not None else {}
        if name in children:
            self.world.strike("restart_runner")
            command = commands.RestartRunner(runner=name, incarnation=children[name].incarnation, reason="simulated")
            Call(self, command, lambda reply: None)


def _error(reply: Reply) -> str | None:
    return None if reply.error is None else str(reply.error["type"])

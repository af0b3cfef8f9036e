"""The coordinator: the only writer of batch events.

It loads what is open from the log, answers clients, gives units to runners and takes their outcomes. One message is
one turn: decide (pure, `decisions.py`), fold at once, hand the events to the log's writer, and act (reply, dispatch)
only when they are durable. It never blocks: the log is written by a thread, the pipeline runs in another.

It may die at any moment. What was acknowledged is in the log; runners keep their outcomes until it acknowledges them;
clients send a request again under the same id. The next coordinator fences this one by taking the lease.
"""

from __future__ import annotations

import os
import socket
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from actors import decisions
from actors.base import SafeActor
from actors.jobs import PipelineJob, PipelineJobs
from actors.messages import (
    LIMIT,
    CoordinatorUp,
    Hello,
    LoadWeights,
    Outcomes,
    Parcel,
    Reply,
    Request,
    Retire,
    Revoke,
    RunnerDied,
    RunnerUp,
    StartCoordinator,
    WeightsDone,
    Work,
    WorkItem,
    unpack,
)
from actors.writer import LogWriter, Turn
from events import vocabulary as ev
from events.errors import (
    BatchNotFound,
    Fenced,
    FinalizeTimeout,
    PipelineError,
    SyncError,
    TrinityError,
    error_to_dict,
)
from events.log import EventLog, Write
from events.payloads import open_payloads
from events.values import BatchId, BatchLifecycleState, batch_stream, sort_batch_id
from events.version import VERSION
from projections.batch import BatchState, evolve, fold
from projections.readmodels import open_batches, projectors

__all__ = ["Coordinator"]

REMEMBERED = 4096
"""Requests whose answers are kept for a client that asks again."""
AHEAD_SECONDS = 0.1
"""A runner gets units for this long beyond its places, to go on with while its outcomes travel (Little's law)."""
AHEAD_MOST = 8
"""... but not more than so many times its places."""


@dataclass(slots=True)
class RunnerRecord:
    """What the coordinator knows of a runner beyond the log: its address, and how fast it is."""

    name: str
    incarnation: int
    address: Any
    state: str
    pid: int
    host: str
    engine: str
    places: int = 0
    model_version: int = 0
    unit_seconds: float | None = None
    """Moving mean of the time of a unit."""
    reason: str = ""
    loading: int | None = None
    """The version that it is loading now."""


@dataclass(slots=True)
class Waiter:
    """A client that waits for a batch."""

    request: Request
    sender: Any
    batch_id: BatchId
    grace_over: bool = False


@dataclass(slots=True)
class SyncWaiter:
    """A client that waits for all runners to have a version."""

    request: Request
    sender: Any
    version: int
    waiting_on: set[str] = field(default_factory=set)
    errors: dict[str, str] = field(default_factory=dict)


class Coordinator(SafeActor):
    """See the module. Started by the guardian with StartCoordinator."""

    writer: LogWriter

    # --- start ------------------------------------------------------------------------------------------------------
    def on_StartCoordinator(self, message: StartCoordinator, sender: Any) -> None:
        self.config = message.config
        self.guardian = sender
        self.admin = message.admin
        self.open_log(self.config["system"]["log_dir"], "coordinator")
        self.start_watch()
        self.send(sender, Hello("coordinator", 0, os.getpid()))
        store = self.config["store"]
        self.events = EventLog.open(store["url"], create=True, durability=store["durability"], projectors=projectors())
        self.payloads = open_payloads(store["url"], durability=store["durability"])
        self.host = socket.gethostname()
        self.lease = self.events.acquire_lease(
            "coordinator", {"pid": os.getpid(), "host": self.host, "admin": message.admin}
        )
        self.runners: dict[str, RunnerRecord] = {}
        self.jobs = PipelineJobs(self.config["buffer"]["pipeline"]["operators"], store["url"], self.post)
        self.sync_waiters: list[SyncWaiter] = []
        self.log_waiters: list[tuple[Request, Any]] = []
        self.answered: OrderedDict[str, Reply | None] = OrderedDict()
        self.senders: dict[str, Any] = {}
        self.turn = Turn()
        self.acks: dict[str, int] = {}
        self.retiring = False
        self.read_state()
        self.emit(
            "system",
            [
                ev.SystemConfigured(config=self.config["masked"]),
                ev.CoordinatorStarted(
                    epoch=self.lease.epoch,
                    pid=os.getpid(),
                    host=self.host,
                    version=VERSION,
                    open_batches=list(self.batches),
                ),
            ],
        )
        for batch in list(self.batches.values()):  # what runners of an earlier life had
            gone = {(f.runner, f.incarnation) for f in batch.flights.values()} - set(message.alive.items())
            for name, incarnation in sorted(gone):
                reason = "its process did not outlive the actor system"
                self.emit_batch(batch.batch_id, decisions.runner_lost(batch, name, incarnation, reason))
        up = CoordinatorUp(self.myAddress, self.lease.epoch)
        self.turn.then.append(lambda: self.send(self.guardian, up))

    def read_state(self) -> None:
        """Fold everything that is open from the log; what was in memory is forgotten."""
        self.batches: dict[BatchId, BatchState] = {}
        self.tasks: dict[BatchId, list[bytes]] = {}
        self.waiters: dict[BatchId, list[Waiter]] = {}
        self.versions: dict[str, int] = {}
        self.ended: OrderedDict[BatchId, BatchState] = OrderedDict()
        with self.events.engine.connect() as connection:
            found = open_batches(connection)
        for stream, batch_id in found:
            state = self.read_batch(batch_id)
            if state is not None and not state.state.ended:
                self.batches[batch_id] = state
                self.versions[stream] = state.version
        self.weights = (0, "")
        for recorded in self.events.read(stream="weights"):
            if isinstance(recorded.event, ev.WeightsPublished):
                self.weights = (recorded.event.version, recorded.event.path)
        for batch in self.batches.values():
            if batch.state is BatchLifecycleState.FINALIZING:  # its pipeline died with the last coordinator
                self.start_pipeline(batch)
        self.writer = LogWriter(
            self.events, self.lease, self.post, self.write_failed, {"epoch": self.lease.epoch, "host": self.host}
        )

    def read_batch(self, batch_id: BatchId) -> BatchState | None:
        return fold(r.event for r in self.events.read(stream=batch_stream(batch_id)))

    # --- one turn ---------------------------------------------------------------------------------------------------
    def emit(self, stream: str, events: Sequence[ev.Event]) -> None:
        """Record events of this turn. Batch streams are folded at once; nothing is acted on before it is durable."""
        if not events:
            return
        if stream not in self.versions:
            self.versions[stream] = self.events.stream_version(stream)
        self.turn.writes.append(Write(stream=stream, expected_version=self.versions[stream], events=list(events)))
        self.versions[stream] += len(events)

    def emit_batch(self, batch_id: BatchId, events: Sequence[ev.Event]) -> None:
        self.emit(batch_stream(batch_id), events)
        state = self.batches.get(batch_id)
        for event in events:
            if isinstance(event, ev.BatchSubmitted) and state is None:
                state = self.ended.pop(batch_id, None)  # its version counts on
            state = evolve(state, event)
        if state is None:
            return
        state.version = self.versions[batch_stream(batch_id)]
        if state.state.ended:
            self.batches.pop(batch_id, None)
            self.tasks.pop(batch_id, None)
            self.ended[batch_id] = state
            while len(self.ended) > 64:
                self.ended.popitem(last=False)
        else:
            self.batches[batch_id] = state

    def after_message(self) -> None:
        """The end of the turn: give out what can run, hand everything to the writer."""
        if not hasattr(self, "writer") or self.retiring:
            return
        self.dispatch()
        turn, self.turn = self.turn, Turn()
        if turn.writes or (turn.then and self.writer.in_flight):
            self.writer.submit(turn)
        else:  # nothing to wait for
            for call in turn.then:
                call()

    def write_failed(self, error: Exception, lost: Sequence[Turn]) -> None:
        """The log could not be written. Tell who asked; forget what was not written; read the state anew."""
        self.log.error("log not written: %s", error)
        for turn in lost:
            for tell in turn.failed:
                tell(error)
        if isinstance(error, Fenced):
            self.log.critical("another coordinator has the lease: this one ends")
            os._exit(3)
        if self.writer.in_flight > 0:
            return  # the rest of the queue comes with its own call
        waiting = [w for waiters in self.waiters.values() for w in waiters]
        self.turn = Turn()
        self.reload(waiting, 0.2)

    def reload(self, waiting: list[Waiter], delay: float) -> None:
        try:
            self.read_state()
        except Exception as e:  # the database is away: again soon, and longer each time
            self.log.error("log not readable: %s", e)
            self.after(delay, "reload", lambda: self.reload(waiting, min(delay * 2, 10.0)))
            return
        for waiter in waiting:
            self.waiters.setdefault(waiter.batch_id, []).append(waiter)
        for runner in self.runners.values():  # they send again what was not acknowledged
            self.send(runner.address, CoordinatorUp(self.myAddress, self.lease.epoch))

    def crashed(self, error: BaseException) -> None:
        """A handler broke: memory may be ahead of the log. End; the next coordinator reads the log."""
        os._exit(4)

    def on_Retire(self, message: Retire, sender: Any) -> None:
        """Write what is queued and give the lease back; batches that are open stay open."""
        self.retiring = True
        self.writer.stop()
        self.events.release_lease(self.lease)
        self.events.close()

    # --- clients ----------------------------------------------------------------------------------------------------
    def on_Request(self, request: Request, sender: Any) -> None:
        known = self.answered.get(request.id, False)
        if known is not False:
            self.senders[request.id] = sender  # the client asks again, perhaps from a new address
            if isinstance(known, Reply):
                self.send(sender, known)
            return
        self.answered[request.id] = None
        self.senders[request.id] = sender
        while len(self.answered) > REMEMBERED:
            old, _ = self.answered.popitem(last=False)
            self.senders.pop(old, None)
        self.turn.failed.append(lambda error: self.answer(request, error=error))
        handler = getattr(self, f"command_{request.command}", None)
        try:
            if handler is None:
                raise TrinityError(f"unknown command {request.command!r}: client and system are of different versions")
            handler(request, sender)
        except (TrinityError, KeyError, ValueError) as e:
            self.reply(request, error=e)

    def reply(self, request: Request, value: Any = None, error: BaseException | None = None) -> None:
        """Answer when this turn is durable."""
        self.turn.then.append(lambda: self.answer(request, value, error))

    def answer(self, request: Request, value: Any = None, error: BaseException | None = None) -> None:
        reply = Reply(request.id, value, None if error is None else error_to_dict(error))
        self.answered[request.id] = reply
        sender = self.senders.pop(request.id, None)
        if sender is not None:
            self.send(sender, reply)

    def command_submit(self, request: Request, sender: Any) -> None:
        args = request.args
        batch_id: BatchId = args["batch_id"]
        parcel: Parcel = args["tasks"]
        tasks = unpack(parcel, self.payloads)
        existing = self.batches.get(batch_id)
        events = decisions.submit(
            existing,
            batch_id=batch_id,
            batch_type=args["batch_type"],
            repeat_times=[t.get("repeat_times", 1) for t in tasks],
            tasks=tasks if parcel.digest is None else None,
            tasks_digest=parcel.digest,
            min_wait_num=args["min_wait_num"],
            max_attempts=1 + self.config["explorer"]["max_retry_times"],
            runs_per_unit=self.config["explorer"]["max_repeat_times_per_runner"],
            detailed_stats=self.config["monitor"]["detailed_stats"],
            submission=request.id,
        )
        if events:
            self.emit_batch(batch_id, events)
            self.tasks[batch_id] = [orjson.dumps(t) for t in tasks]
            cursor = args.get("cursor")
            if cursor is not None:
                self.emit(f"taskset/{cursor['taskset']}", [ev.TasksetAdvanced(batch_id=batch_id, **cursor)])
        self.reply(request)

    def command_finalize(self, request: Request, sender: Any) -> None:
        batch_id, batch_type = request.args["batch_id"], request.args["batch_type"]
        batch = decisions.require_batch(self.find(batch_id), batch_id, batch_type)
        if batch.state.ended:
            self.reply(request, batch.final_result)
            return
        self.waiters.setdefault(batch_id, []).append(Waiter(request, sender, batch_id))
        timeout = request.args["timeout"]
        if timeout is not None:
            self.after(timeout, f"finalize:{request.id}", lambda: self.finalize_timed_out(request, batch_id))
        self.check_finalize(batch_id)

    def find(self, batch_id: BatchId) -> BatchState | None:
        return self.batches.get(batch_id) or self.ended.get(batch_id) or self.read_batch(batch_id)

    def finalize_timed_out(self, request: Request, batch_id: BatchId) -> None:
        waiters = self.waiters.get(batch_id, [])
        if not any(w.request.id == request.id for w in waiters):
            return
        batch = self.batches.get(batch_id)
        if batch is not None and batch.state is BatchLifecycleState.FINALIZING:
            return  # it is in the pipeline: the answer is on its way
        self.waiters[batch_id] = [w for w in waiters if w.request.id != request.id]
        done, of = (batch.completed_task_count, batch.expected_task_count) if batch else (0, 0)
        self.reply(
            request,
            error=FinalizeTimeout(
                f"batch {batch_id!r}: {done} of {of} tasks done after {request.args['timeout']} s; nothing is lost, "
                "finalize it again to go on waiting",
                done=done,
                expected=of,
            ),
        )

    def check_finalize(self, batch_id: BatchId) -> None:
        """If somebody waits for this batch and it has enough, begin its end."""
        batch, waiters = self.batches.get(batch_id), self.waiters.get(batch_id)
        if batch is None or not waiters or batch.state.ended or batch.state is BatchLifecycleState.FINALIZING:
            return
        if batch.completed_task_count < decisions.wanted(batch):
            return
        grace = self.config["explorer"]["over_rollout"]["wait_after_min"]
        if not batch.is_complete and grace > 0 and not any(w.grace_over for w in waiters):
            name = f"grace:{batch_stream(batch_id)}"
            if name not in self._timers:
                self.after(grace, name, lambda: self.grace_over(batch_id))
            return
        self.revoke(batch)
        self.emit_batch(batch_id, decisions.start_finalizing(batch))
        if batch_id in self.batches:  # a train batch: FINALIZING
            self.turn.then.append(lambda: self.start_pipeline(batch))
        else:
            self.batch_ended(batch_id)

    def grace_over(self, batch_id: BatchId) -> None:
        for waiter in self.waiters.get(batch_id, []):
            waiter.grace_over = True
        self.check_finalize(batch_id)

    def start_pipeline(self, batch: BatchState) -> None:
        refs = [ref for task in batch.tasks for ref in task.payloads]
        self.jobs.run(PipelineJob(refs, lambda result: self.pipeline_done(batch.batch_id, batch.submission, result)))

    def pipeline_done(self, batch_id: BatchId, submission: str, result: Any) -> None:
        batch = self.batches.get(batch_id)
        if batch is None or batch.submission != submission or batch.state is not BatchLifecycleState.FINALIZING:
            return  # aborted meanwhile
        if isinstance(result, BaseException):
            error = result if isinstance(result, TrinityError) else PipelineError(f"{type(result).__name__}: {result}")
            self.emit_batch(batch_id, decisions.finalize_failed(batch, str(error)))
            for waiter in self.waiters.pop(batch_id, []):
                self.cancel(f"finalize:{waiter.request.id}")
                self.reply(waiter.request, error=error)
        else:
            self.emit_batch(
                batch_id,
                decisions.finalized(
                    batch,
                    metrics=result.metrics,
                    experiences=result.refs,
                    selected=result.selected,
                    dropped=result.dropped,
                ),
            )
            self.batch_ended(batch_id)

    def batch_ended(self, batch_id: BatchId) -> None:
        """Answer everyone who waited for this batch, with its one result."""
        batch = self.ended[batch_id]
        self.cancel(f"grace:{batch_stream(batch_id)}")
        for waiter in self.waiters.pop(batch_id, []):
            self.cancel(f"finalize:{waiter.request.id}")
            self.reply(waiter.request, batch.final_result)
        self.turn.then.append(self.check_log_waiters)

    def command_abort(self, request: Request, sender: Any) -> None:
        batch_id = request.args["batch_id"]
        batch = self.batches.get(batch_id)
        events = decisions.abort(
            batch, reason=request.args["reason"], keep_partial_results=request.args["keep_partial_results"]
        )
        if batch is not None and events:
            self.revoke(batch)
            self.emit_batch(batch_id, events)
            self.batch_ended(batch_id)
        self.reply(request)

    def command_process_experiences(self, request: Request, sender: Any) -> None:
        refs = [ev.PayloadRef(**ref) for ref in request.args["refs"]]

        def done(result: Any) -> None:
            if isinstance(result, BaseException):
                self.reply(request, error=result)
            else:
                self.emit(
                    "experiences",
                    [
                        ev.ExperiencesProcessed(
                            pipeline_metrics=result.metrics,
                            experiences=result.refs,
                            selected=result.selected,
                            dropped=result.dropped,
                        )
                    ],
                )
                self.reply(request, result.metrics)

        self.jobs.run(PipelineJob(refs, done))

    def command_acknowledge(self, request: Request, sender: Any) -> None:
        batch_id, step = request.args["batch_id"], request.args["step"]
        batch = self.find(batch_id)
        if batch is None:
            raise BatchNotFound(f"batch {batch_id!r} is not in the log")
        if batch.state is not BatchLifecycleState.FINALIZED:
            raise ValueError(f"batch {batch_id!r} is {batch.state}: only a finalized batch can be acknowledged")
        if batch.trained_step != step:
            event = ev.BatchTrained(step=step, metrics=request.args["metrics"])
            self.emit(batch_stream(batch_id), [event])
            evolve(batch, event)
        self.reply(request)

    def command_sync_weights(self, request: Request, sender: Any) -> None:
        version, path = request.args["version"], request.args["path"]
        current, _ = self.weights
        if version < current:
            raise SyncError(f"weights version {version} is older than the current one, {current}")
        if version > current:
            self.emit("weights", [ev.WeightsPublished(version=version, path=path)])
            self.weights = (version, path)
        waiter = SyncWaiter(request, sender, version)
        self.sync_waiters.append(waiter)
        for runner in self.runners.values():
            if runner.state == "ready" and runner.model_version != version:
                waiter.waiting_on.add(runner.name)
                self.load_weights(runner)
        self.after(
            request.args["timeout"],
            f"sync:{request.id}",
            lambda: self.end_sync(waiter, f"no answer within {request.args['timeout']} s"),
        )
        self.check_sync()

    def load_weights(self, runner: RunnerRecord) -> None:
        """Have a runner load the current version, once."""
        version, path = self.weights
        if runner.loading == version:
            return
        runner.loading = version
        message = LoadWeights(runner.incarnation, version, path)
        self.turn.then.append(lambda: self.send(runner.address, message))

    def check_sync(self) -> None:
        for waiter in list(self.sync_waiters):
            if not waiter.waiting_on:
                self.end_sync(waiter, "")

    def end_sync(self, waiter: SyncWaiter, timed_out: str) -> None:
        if waiter not in self.sync_waiters:
            return
        self.sync_waiters.remove(waiter)
        self.cancel(f"sync:{waiter.request.id}")
        errors = dict(waiter.errors)
        if timed_out:
            errors |= dict.fromkeys(waiter.waiting_on, timed_out)
        if errors:
            what = "; ".join(f"{name}: {error}" for name, error in sorted(errors.items()))
            self.reply(
                waiter.request,
                error=SyncError(f"version {waiter.version} was not loaded everywhere ({what}); they serve what they had"),
            )
        else:
            ready = [r.name for r in self.runners.values() if r.model_version == waiter.version]
            self.reply(waiter.request, {"version": waiter.version, "runners": ready})

    def command_next_batch(self, request: Request, sender: Any) -> None:
        self.log_waiters.append((request, sender))
        self.check_log_waiters()

    def check_log_waiters(self) -> None:
        """Who waits for the next finalized train batch after a position gets it as soon as it is in the log."""
        for request, sender in list(self.log_waiters):
            for recorded in self.events.read(types=["BatchFinalized"], after=request.args["after"]):
                event = recorded.event
                assert isinstance(event, ev.BatchFinalized)
                if event.result["batch_type"] == "train":
                    self.log_waiters.remove((request, sender))
                    self.answer(request, {"batch_id": event.result["batch_id"], "position": recorded.position})
                    break

    def command_status(self, request: Request, sender: Any) -> None:
        self.reply(request, self.status())

    def status(self) -> dict[str, Any]:
        """Everything at a glance, as plain JSON."""
        load = decisions.loads(self.batches.values())
        return {
            "epoch": self.lease.epoch,
            "pid": os.getpid(),
            "weights_version": self.weights[0],
            "batches": [
                {
                    "batch_id": b.batch_id,
                    "state": b.state.value,
                    "tasks": b.expected_task_count,
                    "settled": b.completed_task_count,
                    "running_units": len(b.flights),
                    "pending_units": len(b.pending),
                    "failed_attempts": b.failed_attempts,
                    "waited_for": len(self.waiters.get(b.batch_id, [])),
                }
                for b in sorted(self.batches.values(), key=lambda b: sort_batch_id(b.batch_id))
            ],
            "runners": [
                {
                    "runner": r.name,
                    "incarnation": r.incarnation,
                    "state": r.state,
                    "pid": r.pid,
                    "places": r.places,
                    "load": load.get((r.name, r.incarnation), 0),
                    "model_version": r.model_version,
                    "reason": r.reason,
                }
                for r in sorted(self.runners.values(), key=lambda r: r.name)
            ],
        }

    # --- runners ----------------------------------------------------------------------------------------------------
    def on_RunnerUp(self, message: RunnerUp, sender: Any) -> None:
        known = self.runners.get(message.name)
        if known is not None and known.incarnation > message.incarnation:
            return
        stream = f"runner/{message.name}"
        if known is None or known.incarnation < message.incarnation:
            known = RunnerRecord(
                name=message.name,
                incarnation=message.incarnation,
                address=sender,
                state="",
                pid=message.pid,
                host=message.host,
                engine=message.engine,
            )
            self.runners[message.name] = known
            for batch in list(self.batches.values()):  # its earlier lives are over, whoever saw them end
                for older in sorted({f.incarnation for f in batch.flights.values() if f.runner == message.name}):
                    if older < message.incarnation:
                        lost = decisions.runner_lost(batch, message.name, older, "the runner was started anew")
                        self.emit_batch(batch.batch_id, lost)
            self.emit(
                stream,
                [
                    ev.RunnerStarted(
                        runner=message.name,
                        incarnation=message.incarnation,
                        pid=message.pid,
                        host=message.host,
                        engine=message.engine,
                    )
                ],
            )
        known.address, known.model_version = sender, message.model_version
        if message.state != known.state:
            known.state, known.reason = message.state, message.reason
            if message.state == "ready":
                known.places = message.places
                self.emit(
                    stream,
                    [
                        ev.RunnerReady(
                            runner=message.name,
                            incarnation=message.incarnation,
                            places=message.places,
                            model_version=message.model_version,
                            load_seconds=message.load_seconds,
                        )
                    ],
                )
            elif message.state == "failed":
                self.emit(
                    stream,
                    [ev.RunnerFailed(runner=message.name, incarnation=message.incarnation, reason=message.reason)],
                )
            elif message.state == "retired":
                self.emit(stream, [ev.RunnerRetired(runner=message.name, incarnation=message.incarnation)])
        self.redo_missing(message)
        if message.state == "ready" and known.model_version != self.weights[0] and self.weights[1]:
            self.load_weights(known)

    def redo_missing(self, message: RunnerUp) -> None:
        """What the log says this runner has and it does not know of never arrived: attempt it again."""
        has = set(message.running)
        for batch in list(self.batches.values()):
            lost = [
                flight
                for flight in batch.flights.values()
                if (flight.runner, flight.incarnation) == (message.name, message.incarnation)
                and (batch.batch_id, batch.submission, flight.unit.task, flight.unit.run_id_base, flight.unit.attempt)
                not in has
            ]
            items = [self.work_item(batch, flight.unit) for flight in lost]
            if items:
                self.send_work(message.name, items, 0)

    def on_RunnerDied(self, message: RunnerDied, sender: Any) -> None:
        runner = self.runners.get(message.name)
        if runner is not None and runner.incarnation == message.incarnation and runner.state != "lost":
            runner.state, runner.reason = "lost", message.reason
            self.emit(
                f"runner/{message.name}",
                [ev.RunnerLost(runner=message.name, incarnation=message.incarnation, reason=message.reason)],
            )
        for batch in list(self.batches.values()):
            self.emit_batch(
                batch.batch_id,
                decisions.runner_lost(batch, message.name, message.incarnation, message.reason),
            )
            self.check_finalize(batch.batch_id)
        for waiter in self.sync_waiters:
            waiter.waiting_on.discard(message.name)
        self.check_sync()

    def on_Outcomes(self, message: Outcomes, sender: Any) -> None:
        runner = self.runners.get(message.name)
        touched: dict[BatchId, None] = {}
        for outcome in message.outcomes:
            batch = self.batches.get(outcome.batch_id)
            events = decisions.outcome(batch, message.name, message.incarnation, outcome)
            if events:
                self.emit_batch(outcome.batch_id, events)
                touched[outcome.batch_id] = None
            if runner is not None:
                before = runner.unit_seconds
                runner.unit_seconds = outcome.seconds if before is None else 0.8 * before + 0.2 * outcome.seconds
        if runner is not None and runner.incarnation == message.incarnation:
            self.acks[message.name] = message.number
        for batch_id in touched:
            self.check_finalize(batch_id)

    def on_WeightsDone(self, message: WeightsDone, sender: Any) -> None:
        runner = self.runners.get(message.name)
        if runner is None or runner.incarnation != message.incarnation:
            return
        stream = f"runner/{message.name}"
        runner.loading = None
        if message.error is None:
            runner.model_version = message.version
            self.emit(
                stream,
                [
                    ev.WeightsLoaded(
                        runner=message.name,
                        incarnation=message.incarnation,
                        version=message.version,
                        seconds=message.seconds,
                    )
                ],
            )
        else:
            self.emit(
                stream,
                [
                    ev.WeightsFailed(
                        runner=message.name,
                        incarnation=message.incarnation,
                        version=message.version,
                        error=message.error,
                    )
                ],
            )
        for waiter in self.sync_waiters:
            if waiter.version <= message.version and message.name in waiter.waiting_on:
                waiter.waiting_on.discard(message.name)
                if message.error is not None:
                    waiter.errors[message.name] = message.error
        if message.error is None and message.version < self.weights[0]:
            self.load_weights(runner)
        self.check_sync()

    # --- dispatch ---------------------------------------------------------------------------------------------------
    def dispatch(self) -> None:
        """Give out what can run, and say to each runner which outcomes are safe."""
        acks, self.acks = self.acks, {}
        items: dict[str, list[WorkItem]] = {}
        if any(b.pending for b in self.batches.values()):
            load = decisions.loads(self.batches.values())
            capacities = [
                decisions.Capacity(
                    name=r.name,
                    incarnation=r.incarnation,
                    model_version=r.model_version,
                    places=r.places,
                    load=load.get((r.name, r.incarnation), 0),
                    limit=r.places + ahead(r.places, r.unit_seconds),
                )
                for r in self.runners.values()
                if r.state == "ready" and r.loading is None
            ]
            for batch, event in decisions.dispatch(self.batches.values(), capacities):
                self.emit_batch(batch.batch_id, [event])
                items.setdefault(event.runner, []).extend(self.work_item(batch, unit) for unit in event.units)
        for name in items.keys() | acks.keys():
            self.send_work(name, items.get(name, []), acks.get(name, 0))

    def work_item(self, batch: BatchState, unit: ev.Unit) -> WorkItem:
        tasks = self.tasks.get(batch.batch_id)
        if tasks is None:
            tasks = self.tasks[batch.batch_id] = self.read_tasks(batch.batch_id)
        task = tasks[unit.task]
        keep = batch.batch_type == "train"
        if len(task) > LIMIT:
            ref = (self.payloads.put(task), -1)
            return WorkItem(batch.batch_id, batch.submission, unit, None, ref, keep)
        return WorkItem(batch.batch_id, batch.submission, unit, task, None, keep)

    def read_tasks(self, batch_id: BatchId) -> list[bytes]:
        """The tasks of a batch that this coordinator took over from the log."""
        submitted: ev.BatchSubmitted | None = None
        for recorded in self.events.read(stream=batch_stream(batch_id), types=["BatchSubmitted"]):
            assert isinstance(recorded.event, ev.BatchSubmitted)
            submitted = recorded.event
        assert submitted is not None
        if submitted.tasks is not None:
            return [orjson.dumps(t) for t in submitted.tasks]
        assert submitted.tasks_digest is not None
        return [orjson.dumps(t) for t in orjson.loads(self.payloads.get(submitted.tasks_digest))]

    def send_work(self, name: str, items: list[WorkItem], ack: int) -> None:
        runner = self.runners.get(name)
        if runner is None:
            return
        groups: list[list[WorkItem]] = [[]]
        size = 0
        for item in items:
            size += 200 + len(item.task or b"")
            if size > LIMIT and groups[-1]:
                groups.append([])
                size = 200 + len(item.task or b"")
            groups[-1].append(item)
        incarnation, address = runner.incarnation, runner.address
        for group in groups:
            message = Work(incarnation, group, ack)
            self.turn.then.append(lambda m=message: self.send(address, m))  # type: ignore[misc]  # binds the value

    def revoke(self, batch: BatchState) -> None:
        """Have runners stop what they still do for this batch."""
        by_runner: dict[tuple[str, int], list[tuple[BatchId, str, int, int]]] = {}
        for flight in batch.flights.values():
            unit = (batch.batch_id, batch.submission, flight.unit.task, flight.unit.run_id_base)
            by_runner.setdefault((flight.runner, flight.incarnation), []).append(unit)
        for (name, incarnation), units in by_runner.items():
            runner = self.runners.get(name)
            if runner is not None and runner.incarnation == incarnation:
                message = Revoke(incarnation, units)
                self.turn.then.append(lambda r=runner, m=message: self.send(r.address, m))  # type: ignore[misc]


def ahead(places: int, unit_seconds: float | None) -> int:
    """Units that wait in a runner beyond its places: none where they are long, so that no runner hoards at the end."""
    if unit_seconds is None:
        return 0
    return int(places * min(AHEAD_MOST, AHEAD_SECONDS / max(unit_seconds, 1e-6)))

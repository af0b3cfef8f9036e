"""The coordinator's desk: what clients ask for, who waits for what, and their answers.

A request is known by its id: sent again, it gets the same answer, or goes on waiting under its new address. Nobody is
answered before what the answer says is durable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from actors import decisions
from actors.book import Book
from actors.collecting import Collecting
from actors.crew import Crew, Sender, SyncWaiter
from actors.experience_queue import ExperienceQueue
from actors.jobs import PipelineDone, PipelineJob, PipelineJobs
from actors.messages import Parcel, Reply, Request, pack, unpack
from actors.outputs import Outputs
from actors.pacing import Pace
from actors.retention import Retention
from actors.served import Served
from actors.weight_group import GroupWaiter
from events import codec
from events import vocabulary as ev
from events.errors import (
    BatchNotFound,
    DataError,
    FinalizeTimeout,
    InvalidEvent,
    PayloadNotFound,
    PipelineError,
    SyncError,
    TrinityError,
    error_to_dict,
)
from events.log import Recorded
from events.values import BatchId, BatchLifecycleState, batch_stream, sort_batch_id
from projections.batch import BatchState
from projections.readmodels import untrained_since
from projections.retained import freed_at

__all__ = ["Desk"]

EXPERIENCES = "experiences"
"""The stream of what concerns experiences of no batch, or of many."""
REMEMBERED_ANSWERS = 4096
"""Requests whose answers are kept for a client that asks again."""


class Timers(Sender, Protocol):
    """The side of an actor that sends and has timers."""

    def after(self, seconds: float, name: str, call: Callable[[], None]) -> None: ...
    def cancel(self, name: str) -> None: ...
    def has_timer(self, name: str) -> bool: ...


@dataclass(slots=True)
class Waiter:
    """A client that waits for a batch."""

    request: Request
    batch_id: BatchId
    grace_over: bool = False
    """`wait_after_min` has passed since the batch had enough."""


class Desk:
    """Commands are methods `do_<command>(request)`."""

    def __init__(
        self, config: dict[str, Any], book: Book, crew: Crew, jobs: PipelineJobs, retention: Retention,
        outputs: Outputs, actor: Timers,
    ) -> None:
        self.config, self.book, self.crew, self.jobs, self.retention = config, book, crew, jobs, retention
        self.outputs, self.actor = outputs, actor
        self.queue = ExperienceQueue(config["buffer"]["queue"], book, self, actor, crew.clock)
        self.pace = Pace(config["explorer"], book)
        self.collecting = Collecting(config, book, crew, self.pace, self, actor)
        self.waiters: dict[BatchId, list[Waiter]] = {}
        self._answers: OrderedDict[str, Reply | None] = OrderedDict()
        self.trouble: Callable[[], str | None] = lambda: None
        """What keeps the log from being written now."""
        self.others: list[Any] = []
        """Further desks: objects with commands of their own."""
        self._senders: dict[str, Any] = {}
        self._syncs: list[tuple[Request, SyncWaiter]] = []
        self._joining: tuple[Request, GroupWaiter] | None = None
        self._next_batch: list[Request] = []
        self._processed: dict[str, dict[str, float]] | None = None
        self.recovered: dict[str, int] = {}
        """What was decided of the batches that were open when this coordinator started: how many, by decision."""
        self.served = Served(self)
        self.others += [self.collecting, self.served]

    def recover(self, alive: Mapping[str, int]) -> None:
        """A coordinator starts: decide what becomes of every open batch. `alive`: living runners' incarnations."""
        staleness = self.config["explorer"]["max_staleness"]
        self.recovered = {}
        for batch in list(self.book.batches.values()):
            events = decisions.recovery(batch, alive, version=self.book.weights[0], max_staleness=staleness)
            for event in events:
                if isinstance(event, ev.RecoveryDecided):
                    self.recovered[event.decision] = self.recovered.get(event.decision, 0) + 1
            self.book.record_batch(batch.batch_id, events)

    # --- requests and answers ---------------------------------------------------------------------------------------
    def take(self, request: Request, sender: Any) -> None:
        """A request arrived, perhaps not for the first time."""
        self._senders[request.id] = sender
        if request.id in self._answers:
            known = self._answers[request.id]
            if known is not None:
                self._deliver(known)
            else:
                self.queue.asked_again(request.id)
            return
        self._answers[request.id] = None
        while len(self._answers) > REMEMBERED_ANSWERS:
            old = next((i for i, reply in self._answers.items() if reply is not None), None)
            if old is None:
                break  # what is not answered yet would be done again
            del self._answers[old]
            self._senders.pop(old, None)
        self.book.turn.failed.append(lambda error: self.answer(request, error=error))
        named = f"do_{request.command}"
        command = next((getattr(desk, named) for desk in (self, *self.others) if hasattr(desk, named)), None)
        written = len(self.book.turn.writes)
        try:
            if command is None:
                raise TrinityError(f"unknown command {request.command!r}: client and system are of different versions")
            command(request)
        except Exception as e:
            if len(self.book.turn.writes) > written:
                raise  # memory may be ahead of the log
            plain = isinstance(e, TrinityError | ValueError)
            what = f"request {request.command!r} can't be used: {type(e).__name__}: {e}"
            self.reply(request, error=e if plain else DataError(what))

    def reply(self, request: Request, value: Any = None, error: BaseException | None = None) -> None:
        """Answer when this turn is durable, or that it could not be written."""
        self.book.then(lambda: self.answer(request, value, error))
        self.book.turn.failed.append(lambda lost: self.answer(request, error=lost))

    def answer(self, request: Request, value: Any = None, error: BaseException | None = None) -> None:
        """Answer now."""
        told = None if error is None else error_to_dict(error)
        reply = Reply(request.id, pack(value, self.book.payloads), told)
        self._answers[request.id] = reply
        self._deliver(reply)

    def _deliver(self, reply: Reply) -> None:
        sender = self._senders.pop(reply.id, None)
        if sender is not None:
            self.actor.send(sender, reply)

    # --- batches ----------------------------------------------------------------------------------------------------
    def do_submit(self, request: Request) -> None:
        args = request.args
        batch_id: BatchId = args["batch_id"]
        parcel: Parcel = args["tasks"]
        tasks = unpack(parcel, self.book.payloads)
        events = decisions.submit(
            self.book.find(batch_id),
            batch_id=batch_id,
            batch_type=args["batch_type"],
            repeat_times=[task.get("repeat_times", 1) for task in tasks],
            tasks=tasks if parcel.digest is None else None,
            tasks_digest=parcel.digest,
            min_wait_num=args["min_wait_num"],
            max_attempts=1 + self.config["explorer"]["max_retry_times"],
            runs_per_unit=self.config["explorer"]["max_repeat_times_per_runner"],
            detailed_stats=self.config["monitor"]["detailed_stats"],
            submission=request.id,
        )
        advanced = [ev.TasksetAdvanced(batch_id=batch_id, **cursor) for cursor in args["cursor"] or ()]
        _check(advanced)
        if events:
            _check(events)
            self.book.record_batch(batch_id, events)
            self.book.keep_tasks(batch_id, tasks)
            for cursor in advanced:
                self.book.record(f"taskset/{cursor.taskset}", [cursor])
        self.reply(request)

    def do_finalize(self, request: Request) -> None:
        batch_id, timeout = request.args["batch_id"], request.args["timeout"]
        batch = decisions.require_batch(self.book.find(batch_id), batch_id, request.args["batch_type"])
        if batch.state.ended:
            self.reply(request, batch.final_result)
            return
        if timeout is not None:
            self.actor.after(timeout, f"finalize:{request.id}", lambda: self._timed_out(request, batch_id))
        self.waiters.setdefault(batch_id, []).append(Waiter(request, batch_id))
        self.check_finalize([batch_id])

    def _timed_out(self, request: Request, batch_id: BatchId) -> None:
        waiters = self.waiters.get(batch_id, [])
        batch = self.book.batches.get(batch_id)
        if batch is None and any(w.request.id == request.id for w in waiters):  # the log is being read anew
            self.actor.after(1.0, f"finalize:{request.id}", lambda: self._timed_out(request, batch_id))
            return
        if batch is None or batch.state is BatchLifecycleState.FINALIZING:
            return  # it is over, or in the pipeline: the answer is on its way
        self.waiters[batch_id] = [w for w in waiters if w.request.id != request.id]
        done, of = batch.completed_task_count, batch.expected_task_count
        error = FinalizeTimeout(
            f"batch {batch_id!r}: {done} of {of} tasks done after {request.args['timeout']} s; nothing is lost, "
            "finalize it again to go on waiting",
            done=done,
            expected=of,
        )
        self.reply(request, error=error)

    def check_finalize(self, batch_ids: Iterable[BatchId]) -> None:
        """Where somebody waits for one of these batches and it has enough, begin its end."""
        batch_ids = list(batch_ids)
        self.collecting.check(batch_ids)
        for batch_id in batch_ids:
            batch, waiters = self.book.batches.get(batch_id), self.waiters.get(batch_id)
            if batch is None or not waiters or batch.state is BatchLifecycleState.FINALIZING:
                continue
            if batch.completed_task_count < decisions.wanted(batch):
                continue
            grace = self.config["explorer"]["over_rollout"]["wait_after_min"]
            if not batch.is_complete and grace > 0 and not any(w.grace_over for w in waiters):
                self._start_grace(batch_id, grace)
                continue
            self.crew.revoke(batch)
            partial = self.config["explorer"]["over_rollout"]["return_partial_tasks"]
            self.book.record_batch(batch_id, decisions.start_finalizing(batch, partial))
            if batch_id in self.book.batches:  # a train batch: FINALIZING
                self.book.then(lambda b=batch: self.start_pipeline(b))  # type: ignore[misc]  # binds the loop's value
            else:
                self._ended(batch_id)

    def _start_grace(self, batch_id: BatchId, seconds: float) -> None:
        def over() -> None:
            for waiter in self.waiters.get(batch_id, []):
                waiter.grace_over = True
            self.check_finalize([batch_id])

        name = f"grace:{batch_stream(batch_id)}"
        if not self.actor.has_timer(name):
            self.actor.after(seconds, name, over)

    def start_pipeline(self, batch: BatchState) -> None:
        """Run the batch's experiences through the pipeline, in its thread: those of settled tasks.

        With `return_partial_tasks` also those of the finished runs of tasks that were dropped.
        """
        refs = [ref for number in batch.ready_tasks() for ref in batch.tasks[number].payloads]
        self.jobs.run(PipelineJob(refs, lambda result: self._pipeline_done(batch.batch_id, batch.submission, result)))

    def _pipeline_done(self, batch_id: BatchId, submission: str, result: PipelineDone | BaseException) -> None:
        batch = self.book.batches.get(batch_id)
        if batch is None or batch.submission != submission or batch.state is not BatchLifecycleState.FINALIZING:
            return  # aborted meanwhile
        if isinstance(result, BaseException):
            error = result if isinstance(result, TrinityError) else PipelineError(f"{type(result).__name__}: {result}")
            self.book.record_batch(batch_id, decisions.finalize_failed(batch, str(error)))
            self._answer_waiters(batch_id, None, error)
            return
        events = decisions.finalized(
            batch, metrics=result.metrics, experiences=result.refs, selected=result.selected, dropped=result.dropped,
            dropped_by=result.dropped_by, model_versions=result.model_versions,
        )
        try:
            _check(events)
        except InvalidEvent as e:  # a metric's name that is no text for the log, say
            self._pipeline_done(batch_id, submission, e)
            return
        self.book.record_batch(batch_id, events)
        self._ended(batch_id)

    def _ended(self, batch_id: BatchId) -> None:
        self._answer_waiters(batch_id, self.book.ended[batch_id].final_result, None)
        self.collecting.check([batch_id])
        self.pace.ended(self.book.ended[batch_id])
        self.book.then(self._check_next_batch)
        self.book.then(self.outputs.wake)
        self.queue.check()

    def _answer_waiters(self, batch_id: BatchId, value: Any, error: BaseException | None) -> None:
        self.actor.cancel(f"grace:{batch_stream(batch_id)}")
        for waiter in self.waiters.pop(batch_id, []):
            self.actor.cancel(f"finalize:{waiter.request.id}")
            self.reply(waiter.request, value, error)

    def do_abort(self, request: Request) -> None:
        batch_id, args = request.args["batch_id"], request.args
        batch = self.book.batches.get(batch_id)
        events = decisions.abort(batch, reason=args["reason"], keep_partial_results=args["keep_partial_results"])
        if batch is not None and events:
            _check(events)
            self.crew.revoke(batch)
            self.book.record_batch(batch_id, events)
            self._ended(batch_id)
        self.reply(request)

    def do_process_experiences(self, request: Request) -> None:
        known = self.processed_before(request.id)
        if known is not None:
            self.reply(request, known)
            return

        def done(result: PipelineDone | BaseException) -> None:
            if isinstance(result, BaseException):
                self.reply(request, error=result)
                return
            processed = ev.ExperiencesProcessed(
                pipeline_metrics=result.metrics,
                experiences=result.refs,
                selected=result.selected,
                dropped=result.dropped,
                request=request.id,
            )
            try:
                _check([processed])
            except InvalidEvent as e:  # a metric's name that is no text for the log, say
                self.reply(request, error=e)
                return
            self.book.record(EXPERIENCES, [processed])
            self.reply(request, result.metrics)
            self.book.then(self.outputs.wake)

        self.jobs.run(PipelineJob([ev.PayloadRef(**ref) for ref in request.args["refs"]], done))

    def processed_before(self, request_id: str) -> dict[str, float] | None:
        """The metrics of this request where an earlier coordinator did it, and its answer was lost.

        What this coordinator itself did is known by its answer, so the log is read once, and only where it is needed.
        """
        if self._processed is None:
            self._processed = {}
            for recorded in self.book.log.read(stream=EXPERIENCES, types=["ExperiencesProcessed"]):
                event = recorded.event
                assert isinstance(event, ev.ExperiencesProcessed)
                self._processed[event.request] = event.pipeline_metrics
        return self._processed.get(request_id)

    def do_take_experiences(self, request: Request) -> None:
        self.queue.take(request)

    def do_acknowledge(self, request: Request) -> None:
        """The same step again changes nothing, except after a redelivery: then the batch was trained once more."""
        batch_id, step = request.args["batch_id"], request.args["step"]
        batch = self.book.find(batch_id)
        if batch is None:
            raise BatchNotFound(f"batch {batch_id!r} is not in the log")
        if batch.state is not BatchLifecycleState.FINALIZED:
            raise ValueError(f"batch {batch_id!r} is {batch.state}: only a finalized batch can be acknowledged")
        if batch.trained_step != step or self._redelivered_since_trained(batch_id):
            events = [ev.BatchTrained(step=step, metrics=request.args["metrics"])]
            _check(events)
            self.book.record_batch(batch_id, events)
            self.book.then(self.retention.wake)
        self.reply(request)

    def do_resume_trainer(self, request: Request) -> None:
        """A trainer is back at its checkpoint of `step`: what it has to use again, and what it never used.

        Answers with these batches and the position up to which it knows all that was finalized.
        """
        step, book = request.args["step"], self.book
        position = book.log.head().position
        with book.log.engine.connect() as connection:
            rows = untrained_since(connection, step, position)
        batches = [batch_id for batch_id, _, _ in rows]
        freed = freed_at(book.log.read(stream=EXPERIENCES, types=["PayloadsFreed"]))
        gone = [b for b, first, _ in rows if freed.get(batch_stream(b), 0) > first]
        if gone:
            raise PayloadNotFound(
                f"batches {gone} were trained after step {step}, and their experiences were freed: store.retention is "
                f"{self.config['store']['retention']} steps; resume from a later checkpoint",
                batches=gone,
            )
        last = self._last_redelivery()
        told = last is not None and last.event == ev.ExperiencesRedelivered(step=step, batches=batches)
        if batches and not (told and last is not None and all(at < last.position for _, _, at in rows)):
            book.record(EXPERIENCES, [ev.ExperiencesRedelivered(step=step, batches=batches)])
        self.queue.returned(step)
        self.reply(request, {"batches": batches, "position": position})

    def _last_redelivery(self, batch_id: BatchId | None = None) -> Recorded | None:
        """The last one, of this batch where it is named."""
        last: Recorded | None = None
        for recorded in self.book.log.read(stream=EXPERIENCES, types=["ExperiencesRedelivered"]):
            event = recorded.event
            assert isinstance(event, ev.ExperiencesRedelivered)
            if batch_id is None or batch_id in event.batches:
                last = recorded
        return last

    def _redelivered_since_trained(self, batch_id: BatchId) -> bool:
        last = self._last_redelivery(batch_id)
        if last is None:
            return False
        trained = self.book.log.read(stream=batch_stream(batch_id), types=["BatchTrained"], after=last.position)
        return next(trained, None) is None

    # --- weights, waiting for batches, status -----------------------------------------------------------------------
    def do_sync_weights(self, request: Request) -> None:
        timeout = request.args["timeout"]
        self.actor.after(timeout, f"sync:{request.id}", lambda: self._end_sync(request, f"no answer in {timeout} s"))
        how = {key: request.args[key] for key in ("method", "again") if key in request.args}
        waiter = self.crew.publish(request.args["version"], request.args["path"], **how)
        self._syncs.append((request, waiter))
        self.check_syncs()

    def check_syncs(self) -> None:
        """Answer who waited for weights that are everywhere now."""
        for request, waiter in list(self._syncs):
            if not waiter.waiting_on:
                self._end_sync(request, "")

    def _end_sync(self, request: Request, timed_out: str) -> None:
        for entry in [s for s in self._syncs if s[0].id == request.id]:
            self._syncs.remove(entry)
            self.crew.sync_waiters.remove(entry[1])
            self.actor.cancel(f"sync:{request.id}")
            error: SyncError | None = entry[1].error(timed_out)
            version = entry[1].version
            have = sorted(r.name for r in self.crew.rollout() if r.model_version == version)
            self.reply(request, {"version": version, "runners": have, "from_group": entry[1].from_group}, error)

    def do_weight_group(self, request: Request) -> None:
        self.answer(request, {"whole": self.crew.group.whole()})

    def do_join_weight_group(self, request: Request) -> None:
        timeout = request.args["timeout"]
        waiter = self.crew.group.join(request.id, request.args)
        self.check_group(timed_out="another group is being made")
        self._joining = (request, waiter)
        self.actor.after(timeout, "weight group", lambda: self.check_group(waiter, f"no answer in {timeout} s"))

    def check_group(self, waiter: GroupWaiter | None = None, timed_out: str = "") -> None:
        """Answer who waited for a group that is there now, or will not be."""
        if self._joining is None or waiter not in (None, self._joining[1]):
            return
        request, mine = self._joining
        if timed_out or not mine.waiting_on:
            self._joining = None
            self.actor.cancel("weight group")
            self.reply(request, {"runners": sorted(mine.members)}, mine.error(timed_out))

    def do_next_batch(self, request: Request) -> None:
        after, timeout = request.args["after"], request.args["timeout"]
        if not isinstance(after, int) or not 0 <= after < 2**63:
            raise DataError(f"after is {after!r}: a position in the log is expected")
        if timeout is not None:  # the client does not wait longer either
            self.actor.after(timeout + 1.0, f"next:{request.id}", lambda: self._forget_next(request))
        self._next_batch.append(request)
        self._check_next_batch()

    def _forget_next(self, request: Request) -> None:
        self._next_batch = [r for r in self._next_batch if r.id != request.id]

    def _check_next_batch(self) -> None:
        """Who waits for the next finalized train batch after a position gets it as soon as it is in the log."""
        for request in list(self._next_batch):
            for recorded in self.book.log.read(types=["BatchFinalized"], after=request.args["after"]):
                event = recorded.event
                assert isinstance(event, ev.BatchFinalized)
                if event.result["batch_type"] == "train":
                    self._next_batch.remove(request)
                    self.actor.cancel(f"next:{request.id}")
                    self.answer(request, {"batch_id": event.result["batch_id"], "position": recorded.position})
                    break

    def do_status(self, request: Request) -> None:
        batches = [
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
            for b in sorted(self.book.batches.values(), key=lambda b: sort_batch_id(b.batch_id))
        ]
        self.answer(  # now: it changes nothing, and is asked most where the log can't be written
            request,
            {
                "weights_version": self.book.weights[0],
                "batches": batches,
                "runners": self.crew.status(),
                "recovered": self.recovered,
                "outputs": self.outputs.status(),
                "queue": self.queue.status(),
                "trouble": self.trouble(),
                "proxies": self.served.urls(),
            },
        )


def _check(events: Sequence[ev.Event]) -> None:
    """Refuse now what the log can't hold: in the writer it would fail the turns of others too. Raises InvalidEvent."""
    for event in events:
        # tasks were read from JSON, and may be large
        codec.check(replace(event, tasks=None) if isinstance(event, ev.BatchSubmitted) else event)

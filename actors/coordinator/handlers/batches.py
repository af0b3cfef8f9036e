"""The coordinator's desk: what clients ask for, who waits for a batch, and their answers.

What they ask of schedulers' batches, weights, the proxy and so on goes to desks of its own (`Desk.others`).
A request is known by its id: sent again, it gets the same answer, or goes on waiting under its new address. Nobody is
answered before what the answer says is durable.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from trinity_es.actors.commands import check_request, is_known_by
from trinity_es.actors.coordinator.decisions import batches as decisions
from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone, PipelineJob, PipelineJobs
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.fleet.dynamic_timeout import Pace
from trinity_es.actors.coordinator.fleet.lifecycle import Crew
from trinity_es.actors.coordinator.handlers.answers import Served
from trinity_es.actors.coordinator.handlers.experiences import ExperienceQueue
from trinity_es.actors.coordinator.handlers.scheduler import Collecting
from trinity_es.actors.coordinator.handlers.submitted import given_tasks, processed_before
from trinity_es.actors.coordinator.handlers.trainer import TrainerDesk
from trinity_es.actors.coordinator.handlers.weights import WeightDesk
from trinity_es.actors.coordinator.live_state import Book
from trinity_es.actors.coordinator.log_reader import Fetch, NotRead, read_now
from trinity_es.actors.coordinator.log_writer import Undone
from trinity_es.actors.coordinator.ports import Timers
from trinity_es.actors.coordinator.requests_in_hand import Hands, fingerprint
from trinity_es.actors.messages import LIMIT, Parcel, Reply, Request
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import (
    CorruptPayload,
    DataError,
    FinalizeTimeout,
    InvalidEvent,
    PayloadNotFound,
    PipelineError,
    TrinityError,
    error_to_dict,
)
from trinity_es.events.values import BatchId, BatchLifecycleState, batch_stream, sort_batch_id
from trinity_es.projections.batch import BatchState
from trinity_es.projections.freed_payloads import EXPERIENCES

__all__ = ["Desk"]

REMEMBERED_ANSWERS = 4096
"""Maximum number of requests whose answers are kept for a client that asks again."""


STATUS_LIMIT = 8 * LIMIT
"""Maximum bytes of JSON of a status that travel in a message: it is told also while no payload can be stored."""


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
        self.epoch = 0
        """Of the coordinator whose desk it is."""
        self.hands = Hands()
        """What was in hand when a coordinator ended; of this one from its start on."""
        self.waiters: dict[BatchId, list[Waiter]] = {}
        self._answers: OrderedDict[str, Reply | None] = OrderedDict()
        self.trouble: Callable[[], str | None] = lambda: None
        """What keeps the log from being written now."""
        self.refuses: Callable[[], bool] = lambda: False
        """Whether who wants something written is refused for that, and not left waiting."""
        self.others: list[Any] = []
        """Further desks: objects with commands of their own."""
        self._senders: dict[str, Any] = {}
        self._again: dict[str, Request] = {}
        """Requests that were undone with others that could not be written: they are handled anew."""
        self.recovered: dict[str, int] = {}
        """What was decided of the batches that were open when this coordinator started: how many, by decision."""
        self.served = Served(self)
        self.weights = WeightDesk(crew.weights, self, actor)
        self.trainer = TrainerDesk(config, book, self, actor, self.queue, retention)
        self.others += [self.collecting, self.served, self.weights, self.trainer, self.queue]

    def recover(self, alive: Mapping[str, int]) -> None:
        """Decide what becomes of every open batch as a coordinator starts. `alive`: living runners' incarnations."""
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
        """Take a request, which arrives perhaps not for the first time."""
        if not is_known_by(request):
            return  # there is nobody to answer
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
        try:
            check_request(request)
        except TrinityError as e:
            self.answer(request, error=e)
        else:
            self._handle(request, Fetch())

    def _handle(self, request: Request, fetched: Fetch) -> None:
        """Have its desk do it; where that needs what is not in memory, again from its start when it was read."""
        self.book.turn.failed.append(lambda error: self.lost(request, error))
        named = f"do_{request.command}"
        command = next(getattr(desk, named) for desk in (self, *self.others) if hasattr(desk, named))
        written, self.book.fetch = len(self.book.turn.writes), fetched
        try:
            self.hands.take(request)
            command(request)
        except NotRead as missing:
            key = missing.key  # an exception's name ends with its block
            if len(self.book.turn.writes) > written:
                error = RuntimeError(f"{request.command} has to read {key!r} after it recorded something")
                self.hands.blame(request, error)
                raise error from None  # it would record it again, each time that it begins
            self.hands.put_aside(request)
            self.book.turn.failed.pop()  # it did nothing that could fail

            def done(found: Any) -> None:
                fetched.put(key, found)
                self._handle(request, fetched)

            self.book.ask(missing.read, done)
        except Exception as e:
            if len(self.book.turn.writes) > written:
                self.hands.blame(request, e)
                raise  # memory may be ahead of the log
            plain = isinstance(e, TrinityError | ValueError)
            what = f"request {request.command!r} can't be used: {type(e).__name__}: {e}"
            self.reply(request, error=e if plain else DataError(what))
        finally:
            self.book.fetch = read_now

    def lost(self, request: Request, error: Exception) -> None:
        """Its turn could not be written. Where that was another's fault, it is done again."""
        if isinstance(error, Undone):
            self._again[request.id] = request
        else:
            self.answer(request, error=error)

    def do_again(self) -> None:
        """Handle what was undone."""
        undone, self._again = self._again, {}
        for request in undone.values():
            if request.id in self._senders:
                self._handle(request, Fetch())

    def is_waiting(self, request: Request, sender: Any) -> bool:
        """Return True if this request came before: it goes on waiting under its new address, or has its answer again.
        """
        if request.id not in self._answers:
            return False
        self._senders[request.id] = sender
        known = self._answers[request.id]
        if known is not None:
            self._deliver(known)
        return True

    def reply(self, request: Request, value: Any = None, error: BaseException | None = None) -> None:
        """Answer when this turn is durable, or that it could not be written."""
        self.book.then(lambda: self.answer(request, value, error))
        self.book.turn.failed.append(lambda lost: self.lost(request, lost))

    def answer(self, request: Request, value: Any = None, error: BaseException | None = None) -> None:
        """Answer now, or when a payload holds what is too large for a message."""
        told = None if error is None else error_to_dict(error)
        try:
            data = orjson.dumps(value)
        except TypeError as e:
            data, told = b"null", error_to_dict(DataError(f"the answer can't be sent: {e}"))
        if len(data) <= (STATUS_LIMIT if request.command == "status" else LIMIT):
            self._tell(Reply(request.id, Parcel(data), told))
            return

        def stored(digest: str | Exception) -> None:
            if isinstance(digest, Exception):
                self._tell(Reply(request.id, Parcel(b"null"), error_to_dict(digest)))
            else:
                self._tell(Reply(request.id, Parcel(None, digest), told))

        self.book.ask(lambda: self.book.payloads.put(data), stored)

    def _tell(self, reply: Reply) -> None:
        self._answers[reply.id] = reply
        self._deliver(reply)

    def _deliver(self, reply: Reply) -> None:
        sender = self._senders.pop(reply.id, None)
        if sender is not None:
            self.actor.send(sender, replace(reply, end=self.crew.end()))

    def give_up(self, error: TrinityError) -> None:
        """Answer everybody who waits with this."""
        for request_id in [i for i, reply in self._answers.items() if reply is None]:
            self._deliver(Reply(request_id, Parcel(b"null"), error_to_dict(error)))

    # --- batches ----------------------------------------------------------------------------------------------------
    def do_submit(self, request: Request) -> None:
        args = request.args
        batch_id: BatchId = args["batch_id"]
        parcel: Parcel = args["tasks"]
        tasks, parcels = given_tasks(self.book, parcel)
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
        if events:
            self.book.record_batch(batch_id, events)
            self.book.keep_tasks(batch_id, parcels)
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
        others = [w for w in self.waiters.get(batch_id, []) if w.request.id != request.id]
        self.waiters[batch_id] = [*others, Waiter(request, batch_id)]
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
        """Begin to finalize those of these batches that have enough, and that somebody waits for."""
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
        job = PipelineJob(refs, lambda result: self._pipeline_done(batch.batch_id, batch.submission, result))
        self.run_job(f"batch {batch.batch_id!r} ({batch.submission})", job)

    def run_job(self, key: str, job: PipelineJob) -> None:
        """Run a pipeline, unless that has ended coordinators before; its outcome tells."""

        def done(result: PipelineDone | BaseException) -> None:
            self.hands.end_job(key)
            job.done(result)

        try:
            self.hands.take_job(key)
        except PipelineError as e:
            job.done(e)
        else:
            self.jobs.run(replace(job, done=done))

    def _pipeline_done(self, batch_id: BatchId, submission: str, result: PipelineDone | BaseException) -> None:
        batch = self.book.batches.get(batch_id)
        if batch is None or batch.submission != submission or batch.state is not BatchLifecycleState.FINALIZING:
            return  # aborted meanwhile
        if isinstance(result, BaseException):
            error = result if isinstance(result, TrinityError) else PipelineError(f"{type(result).__name__}: {result}")
            if isinstance(error, PayloadNotFound | CorruptPayload):
                error = _with_way_out(error, batch)
            self.book.record_batch(batch_id, decisions.finalize_failed(batch, str(error)))
            self._answer_waiters(batch_id, None, error)
            return
        events = decisions.finalized(
            batch, metrics=result.metrics, experiences=result.refs, selected=result.selected, dropped=result.dropped,
            dropped_by=result.dropped_by, model_versions=result.model_versions,
        )
        try:
            self.book.record_batch(batch_id, events)
        except InvalidEvent as e:  # a metric's name that is no text for the log, say
            self._pipeline_done(batch_id, submission, e)
            return
        self._ended(batch_id)

    def _ended(self, batch_id: BatchId) -> None:
        self._answer_waiters(batch_id, self.book.ended[batch_id].final_result, None)
        self.collecting.check([batch_id])
        self.pace.ended(self.book.ended[batch_id])
        self.book.then(self.trainer.check_next_batch)
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
            self.crew.revoke(batch)  # of what it has now; they are told when it is durable
            self.book.record_batch(batch_id, events)
            self._ended(batch_id)
        self.reply(request)

    def do_redo(self, request: Request) -> None:
        batch_id, args = request.args["batch_id"], request.args
        events = decisions.reopen(
            self.book.find(batch_id), batch_id, args["tasks"], reason=args["reason"], request=request.id,
            runs_per_unit=self.config["explorer"]["max_repeat_times_per_runner"],
        )
        self.book.record_batch(batch_id, events)
        self.reply(request)

    def do_process_experiences(self, request: Request) -> None:
        known = self.book.fetch("processed", lambda: processed_before(self.book.log, request.id))
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
                self.book.record(EXPERIENCES, [processed])
            except InvalidEvent as e:  # a metric's name that is no text for the log, say
                self.reply(request, error=e)
                return
            self.reply(request, result.metrics)
            self.book.then(self.outputs.wake)

        self.run_job(fingerprint(request), PipelineJob([ev.PayloadRef(**ref) for ref in request.args["refs"]], done))

    # --- status -----------------------------------------------------------------------------------------------------
    def do_status(self, request: Request) -> None:
        batches = [
            {
                "batch_id": b.batch_id,
                "batch_type": b.batch_type,
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
                "clock": self.crew.clock(),
                "recovered": self.recovered,
                "outputs": self.outputs.status(),
                "queue": self.queue.status(),
                "epoch": self.epoch,
                "trouble": self.trouble(),
                "refuses": self.refuses(),
                "proxies": self.served.urls(),
            },
        )


def _with_way_out(error: TrinityError, batch: BatchState) -> TrinityError:
    """Return the error of a payload that is lost, with the tasks whose experiences it held."""
    digest = error.details.get("digest")
    lost = [str(n) for n in batch.ready_tasks() if any(ref.digest == digest for ref in batch.tasks[n].payloads)]
    way = f"; `trinity-es redo {batch.batch_id} {' '.join(lost)}` lets what it held run again" if lost else ""
    return type(error)(error.message + way, **error.details)

"""Handlers of a trainer's commands about batches; a client that waits for a batch is answered however it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trinity_es.actors.commands import (
    AbortBatch,
    AddTasks,
    CommandRequest,
    Cursor,
    FinalizeBatch,
    ProcessExperiences,
    RedoTasks,
    SubmitBatch,
)
from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.coordinator.decisions import batch_decisions as batches
from trinity_es.actors.coordinator.decisions import cut_tasks
from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline import StalenessLimit
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone, PipelineJob, PipelineThread
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.dynamic_timeout import DynamicTimeout
from trinity_es.actors.coordinator.fleet.lost_journals import LostJournals
from trinity_es.actors.coordinator.handlers.command_router import Handled, handled
from trinity_es.actors.coordinator.handlers.request_inputs import processed_before, submitted_tasks
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import Responder, TimerHost
from trinity_es.actors.coordinator.suspect_requests import RequestsInHand, fingerprint
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import (
    CorruptPayload,
    FinalizeTimeout,
    InvalidEvent,
    PayloadNotFound,
    PipelineError,
    TooFewGroups,
    TrinityError,
)
from trinity_es.events.values import BatchId, BatchLifecycleState, batch_stream
from trinity_es.projections.batch import BatchState
from trinity_es.projections.event_texts import missing_text

__all__ = ["BatchHandlers"]


@dataclass(slots=True)
class Waiter:
    """Client that waits for a batch."""

    request: CommandRequest[FinalizeBatch]
    batch_id: BatchId
    grace_over: bool = False
    """Whether `wait_after_min` has passed since the batch had enough tasks."""


class BatchHandlers:

    def __init__(
        self, config: LaunchedConfig, live: LiveState, dispatcher: Dispatcher, pipeline: PipelineThread,
        in_hand: RequestsInHand, outputs: Outputs,
        router: Responder, actor: TimerHost, *, dynamic_timeout: DynamicTimeout, journals: LostJournals,
    ) -> None:
        self.config, self.live, self.dispatcher = config, live, dispatcher
        self.pipeline, self.in_hand = pipeline, in_hand
        self.outputs, self.router, self.actor = outputs, router, actor
        self.dynamic_timeout, self.journals = dynamic_timeout, journals
        self.waiters: dict[BatchId, list[Waiter]] = {}
        self.recovered: dict[str, int] = {}
        """Number of batches by recovery decision, for those that were open when this coordinator started."""

    def handlers(self) -> list[Handled]:
        return [
            handled(SubmitBatch, self.submit),
            handled(AddTasks, self.add),
            handled(FinalizeBatch, self.finalize),
            handled(AbortBatch, self.abort),
            handled(RedoTasks, self.redo),
            handled(ProcessExperiences, self.process_experiences),
        ]

    def recover(self, alive: Mapping[str, int]) -> None:
        """Decide on every open batch at a start; `alive` has the incarnations of living runners."""
        staleness = self.config.explorer.max_staleness
        self.recovered = {}
        for batch in list(self.live.batches.values()):
            events = batches.recovery(batch, alive, version=self.live.weights.version, max_staleness=staleness)
            for event in events:
                if isinstance(event, ev.RecoveryDecided):
                    self.recovered[event.decision] = self.recovered.get(event.decision, 0) + 1
            self.live.record_batch(batch.batch_id, events)

    # --- batches ----------------------------------------------------------------------------------------------------
    def submit(self, request: CommandRequest[SubmitBatch]) -> None:
        command = request.command
        batch_id, parcel = command.batch_id, command.tasks
        tasks, parcels = submitted_tasks(self.live, parcel)
        earlier = [self.live.find(cut.batch_id) for cut in command.continues or ()]
        continues = [
            cut_tasks.continued(cut.task, of, cut.cut_task)
            for cut, of in zip(command.continues or (), earlier, strict=True)
        ]
        events = batches.submit(
            self.live.find(batch_id),
            batch_id=batch_id,
            batch_type=command.batch_type,
            repeat_times=[task.get("repeat_times", 1) for task in tasks],
            tasks=tasks if parcel.digest is None else None,
            tasks_digest=parcel.digest,
            min_wait_num=command.min_wait_num,
            max_attempts=1 + self.config.explorer.max_retry_times,
            runs_per_unit=self.config.explorer.max_repeat_times_per_runner,
            detailed_stats=self.config.monitor.detailed_stats,
            submission=request.id,
            continues=continues,
        )
        if events:
            self.live.record_batch(batch_id, events)
            for task, of in zip(continues, earlier, strict=True):
                self.live.record_batch(batch_id, cut_tasks.kept(task, of, self.live.batches[batch_id]))
            self.live.keep_tasks(batch_id, parcels)
            self._advance(batch_id, command.cursor)
            for source in command.sources or ():
                self.live.record(ev.TasksetResolved(batch_id=batch_id, source=source))
        self.router.reply(request)

    def add(self, request: CommandRequest[AddTasks]) -> None:
        command, batch_id = request.command, request.command.batch_id
        advice = "submit the tasks in a batch of their own"
        batch = batches.require_batch(self.live.find(batch_id), batch_id, "train", advice)
        tasks, parcels = submitted_tasks(self.live, command.tasks)
        events = batches.add(
            batch,
            repeat_times=[task.get("repeat_times", 1) for task in tasks],
            tasks=tasks if command.tasks.digest is None else None,
            tasks_digest=command.tasks.digest,
            runs_per_unit=self.config.explorer.max_repeat_times_per_runner,
            request=request.id,
        )
        if events:
            self.live.record_batch(batch_id, events)
            self.live.keep_tasks(batch_id, parcels, more=True)
            self._advance(batch_id, command.cursor)
        self.router.reply(request, batch.additions[request.id])

    def _advance(self, batch_id: BatchId, cursors: Sequence[Cursor] | None) -> None:
        for cursor in cursors or ():
            advanced = ev.TasksetAdvanced(
                batch_id=batch_id, taskset=cursor.taskset, epoch=cursor.epoch, offset=cursor.offset
            )
            self.live.record(advanced)

    def finalize(self, request: CommandRequest[FinalizeBatch]) -> None:
        """Finalize a batch once it has enough settled tasks, and answer with its result."""
        batch_id, timeout = request.command.batch_id, request.command.timeout
        batch = batches.require_batch(self.live.find(batch_id), batch_id, request.command.batch_type)
        if batch.state.ended:
            self.router.reply(request, batch.final_result)
            return
        if batch.missing is not None and (request.command.groups or 0) > batch.missing.usable:
            # The pipeline would leave the same again.
            self.router.reply(request, error=_too_few(batch_id, batch.missing))
            return
        if timeout is not None:
            self.actor.after(timeout, f"finalize:{request.id}", lambda: self._timed_out(request, batch_id))
        others = [w for w in self.waiters.get(batch_id, []) if w.request.id != request.id]
        self.waiters[batch_id] = [*others, Waiter(request, batch_id)]
        self.check_finalize([batch_id])

    def _timed_out(self, request: CommandRequest[FinalizeBatch], batch_id: BatchId) -> None:
        waiters = self.waiters.get(batch_id, [])
        batch = self.live.batches.get(batch_id)
        if batch is None and any(w.request.id == request.id for w in waiters):  # the log is being read again
            self.actor.after(1.0, f"finalize:{request.id}", lambda: self._timed_out(request, batch_id))
            return
        if batch is None or batch.state is BatchLifecycleState.FINALIZING:
            return  # it has ended or is in the pipeline, so its answer follows
        self.waiters[batch_id] = [w for w in waiters if w.request.id != request.id]
        done, of = batch.completed_task_count, batch.expected_task_count
        error = FinalizeTimeout(
            f"batch {batch_id!r}: {done} of {of} tasks done after {request.command.timeout} s; nothing is lost, "
            "finalize it again to go on waiting",
            done=done,
            expected=of,
        )
        self.router.reply(request, error=error)

    def check_finalize(self, batch_ids: Sequence[BatchId], kept: Sequence[ev.AttemptKept] | None = None) -> None:
        """Begin to finalize the batches that have enough settled tasks and a waiting client.

        `kept` is what the open tasks of a single batch have; None: it is read first if tasks are cut.
        """
        cutting = self.config.synchronizer.in_flight == "cut"
        for batch_id in batch_ids:
            batch, waiters = self.live.batches.get(batch_id), self.waiters.get(batch_id)
            if batch is None or not waiters or batch.state is BatchLifecycleState.FINALIZING:
                continue
            if not batch.has_enough or self.must_end(batch):
                continue
            grace = self.config.explorer.over_rollout.wait_after_min
            if batch.open_task_count and grace > 0 and not any(w.grace_over for w in waiters):
                self._start_grace(batch_id, grace)
                continue
            cuts = cutting and batch.batch_type == "train" and batch.open_task_count > 0
            if cuts and kept is None:
                self.journals.cut(batch, lambda kept, b=batch_id: self.check_finalize([b], kept))  # type: ignore[misc]
                continue
            self.dispatcher.revoke(batch)
            partial = self.config.explorer.over_rollout.return_partial_tasks
            groups = max(w.request.command.groups or 0 for w in waiters)
            events = batches.start_finalizing(batch, partial, groups, cut=cuts)
            self.live.record_batch(batch_id, [*(kept if kept and cuts else ()), *events])
            if batch_id in self.live.batches:  # a train batch: FINALIZING
                self.live.then(lambda b=batch: self.start_pipeline(b))  # type: ignore[misc]  # binds the loop's value
            else:
                self._ended(batch_id)

    def must_end(self, batch: BatchState) -> bool:
        """Return True if the batch has to wait for a task that was cut as often as is good for it."""
        sync, bound = self.config.synchronizer, self.config.explorer.max_staleness
        most = None if bound is None else bound // sync.steps_ahead
        return sync.in_flight == "cut" and cut_tasks.must_end(batch, most)

    def _start_grace(self, batch_id: BatchId, seconds: float) -> None:
        def over() -> None:
            for waiter in self.waiters.get(batch_id, []):
                waiter.grace_over = True
            self.check_finalize([batch_id])

        name = f"grace:{batch_stream(batch_id)}"
        if not self.actor.has_timer(name):
            self.actor.after(seconds, name, over)

    def start_pipeline(self, batch: BatchState) -> None:
        """Run the experiences of settled tasks through the pipeline.

        With `return_partial_tasks`, those of finished runs of dropped tasks too.
        """
        refs = [ref for number in batch.ready_tasks() for ref in batch.tasks[number].payloads]
        job = PipelineJob(
            refs, lambda result: self._pipeline_done(batch.batch_id, batch.submission, result), refer=True,
            limit=self._staleness_limit(), groups=batch.groups,
        )
        self.run_job(f"batch {batch.batch_id!r} ({batch.submission})", job)

    def _staleness_limit(self) -> StalenessLimit | None:
        maximum = self.config.explorer.max_staleness
        if maximum is None:
            return None
        adapters = {name: event.version for name, event in self.live.adapters.items()}
        return StalenessLimit(maximum, self.live.weights.version, adapters)

    def run_job(self, key: str, job: PipelineJob) -> None:
        """Run a pipeline, or pass on the error if it has ended coordinators before."""

        def done(result: PipelineDone | BaseException) -> None:
            self.in_hand.end_job(key)
            job.done(result)

        try:
            self.in_hand.take_job(key)
        except PipelineError as e:
            job.done(e)
        else:
            self.pipeline.run(replace(job, done=done))

    def _pipeline_done(self, batch_id: BatchId, submission: str, result: PipelineDone | BaseException) -> None:
        batch = self.live.batches.get(batch_id)
        if batch is None or batch.submission != submission or batch.state is not BatchLifecycleState.FINALIZING:
            return  # aborted meanwhile
        if isinstance(result, BaseException):
            error = result if isinstance(result, TrinityError) else PipelineError(f"{type(result).__name__}: {result}")
            if isinstance(error, PayloadNotFound | CorruptPayload):
                error = _with_redo_command(error, batch)
            self.live.record_batch(batch_id, batches.finalize_failed(batch, str(error)))
            self._answer_waiters(batch_id, None, error)
            return
        if result.usable < batch.groups:
            missing = batches.groups_missing(batch, result.lost, result.usable)
            self.live.record_batch(batch_id, [missing])
            self._answer_waiters(batch_id, None, _too_few(batch_id, missing))
            return
        events = batches.finalized(
            batch, metrics=result.metrics, experiences=result.refs, selected=result.selected, dropped=result.dropped,
            dropped_by=result.dropped_by, model_versions=result.model_versions,
        )
        try:
            self.live.record_batch(batch_id, events)
        except InvalidEvent as e:  # for instance a metric's name that the log can't hold
            self._pipeline_done(batch_id, submission, e)
            return
        self._ended(batch_id)

    def _ended(self, batch_id: BatchId) -> None:
        self._answer_waiters(batch_id, self.live.ended[batch_id].final_result, None)
        self.dynamic_timeout.ended(self.live.ended[batch_id])
        self.live.then(self.outputs.wake)

    def _answer_waiters(self, batch_id: BatchId, value: Any, error: BaseException | None) -> None:
        self.actor.cancel(f"grace:{batch_stream(batch_id)}")
        for waiter in self.waiters.pop(batch_id, []):
            self.actor.cancel(f"finalize:{waiter.request.id}")
            self.router.reply(waiter.request, value, error)

    def abort(self, request: CommandRequest[AbortBatch]) -> None:
        command, batch_id = request.command, request.command.batch_id
        batch = self.live.batches.get(batch_id)
        events = batches.abort(batch, reason=command.reason, keep_partial_results=command.keep_partial_results)
        if batch is not None and events:
            self.dispatcher.revoke(batch)  # with its current units; runners hear of it once it is durable
            self.live.record_batch(batch_id, events)
            self._ended(batch_id)
        self.router.reply(request)

    def redo(self, request: CommandRequest[RedoTasks]) -> None:
        command, batch_id = request.command, request.command.batch_id
        events = batches.reopen(
            self.live.find(batch_id), batch_id, command.tasks, reason=command.reason, request=request.id,
            runs_per_unit=self.config.explorer.max_repeat_times_per_runner,
        )
        self.live.record_batch(batch_id, events)
        self.router.reply(request)

    def process_experiences(self, request: CommandRequest[ProcessExperiences]) -> None:
        """Run experiences through the pipeline, unless this request did so before."""
        metrics = self.live.fetch("processed", lambda: processed_before(self.live.log, request.id))
        if metrics is not None:
            self.router.reply(request, metrics)
            return

        def done(result: PipelineDone | BaseException) -> None:
            if isinstance(result, BaseException):
                self.router.reply(request, error=result)
                return
            processed = ev.ExperiencesProcessed(
                pipeline_metrics=result.metrics,
                experiences=result.refs,
                selected=result.selected,
                dropped=result.dropped,
                request=request.id,
            )
            try:
                self.live.record(processed)
            except InvalidEvent as e:  # for instance a metric's name that the log can't hold
                self.router.reply(request, error=e)
                return
            self.router.reply(request, result.metrics)
            self.live.then(self.outputs.wake)

        self.run_job(fingerprint(request), PipelineJob(request.command.refs, done))


def _too_few(batch_id: BatchId, event: ev.GroupsMissing) -> TooFewGroups:
    return TooFewGroups(
        f"batch {batch_id!r} is not finalized: {missing_text(event)}. Add tasks with add_tasks, or finalize it without "
        "groups",
        usable=event.usable, missing=event.missing, lost=event.lost,
    )


def _with_redo_command(error: TrinityError, batch: BatchState) -> TrinityError:
    """Add the `redo` command for the tasks whose payload is lost."""
    digest = error.details.get("digest")
    lost = [str(n) for n in batch.ready_tasks() if any(ref.digest == digest for ref in batch.tasks[n].payloads)]
    way = f"; run its tasks again with `trinity-es redo {batch.batch_id} {' '.join(lost)}`" if lost else ""
    return type(error)(error.message + way, **error.details)

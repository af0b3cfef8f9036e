"""Handlers of a trainer's commands about batches. However a batch ends, the clients that wait for it get an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.actors.coordinator.handlers.request_inputs import processed_before, submitted_tasks
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.actors.coordinator.suspect_requests import RequestsInHand, fingerprint
from trinity_es.actors.message_sizes import shorten_error
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
from trinity_es.projections.batch import BatchState, batch_result
from trinity_es.projections.event_texts import missing_text

__all__ = ["BatchHandlers"]

PIPELINE_SECONDS = 0.01
"""How long the log's writer waits for a pipeline, so that its result and the last outcome go into one append."""


@dataclass(slots=True)
class Waiter:
    """Client that waits for a batch."""

    request: CommandRequest[FinalizeBatch]
    grace_over: bool = False
    """True if `wait_after_min` has passed since the batch had enough tasks."""


class BatchHandlers:

    def __init__(
        self, config: LaunchedConfig, live: LiveState, dispatcher: Dispatcher, pipeline: PipelineThread,
        in_hand: RequestsInHand, outputs: Outputs,
        router: CommandRouter, actor: TimerHost, *, dynamic_timeout: DynamicTimeout, journals: LostJournals,
    ) -> None:
        self.config, self.live, self.dispatcher = config, live, dispatcher
        self.pipeline, self.in_hand = pipeline, in_hand
        self.outputs, self.router, self.actor = outputs, router, actor
        self.dynamic_timeout, self.journals = dynamic_timeout, journals
        self.waiters: dict[BatchId, list[Waiter]] = {}
        self.recovered = Counter[str]()
        """Recovery decision -> number of batches with it, among those open when this coordinator started."""

    def handlers(self) -> list[HandlerRow]:
        return [
            handler_row(SubmitBatch, self.submit),
            handler_row(AddTasks, self.add),
            handler_row(FinalizeBatch, self.finalize),
            handler_row(AbortBatch, self.abort),
            handler_row(RedoTasks, self.redo),
            handler_row(ProcessExperiences, self.process_experiences),
        ]

    def recover(self, alive: Mapping[str, int]) -> None:
        """Decide on every open batch when a coordinator starts. `alive` has the incarnations of living runners."""
        staleness = self.config.explorer.max_staleness
        self.recovered.clear()  # after a failed write, recovery is repeated
        for batch in list(self.live.batches.values()):
            events = batches.decide_recovery(batch, alive, version=self.live.weights.version, max_staleness=staleness)
            self.recovered.update(e.decision for e in events if isinstance(e, ev.RecoveryDecided))
            self.live.record_batch(batch.batch_id, events)

    # --- batches ----------------------------------------------------------------------------------------------------
    def submit(self, request: CommandRequest[SubmitBatch]) -> None:
        """Begin a batch. Record its tasks, the positions in their tasksets, and the cut tasks that it continues."""
        command = request.command
        batch_id, parcel = command.batch_id, command.tasks
        tasks, parcels = submitted_tasks(self.live, parcel)
        earlier_batches = [self.live.find_batch(cut.batch_id) for cut in command.continues or ()]
        continued_tasks = [
            cut_tasks.continued_task(cut.task, earlier_batch, cut.cut_task)
            for cut, earlier_batch in zip(command.continues or (), earlier_batches, strict=True)
        ]
        events = batches.submit(self.live.find_batch(batch_id), ev.BatchSubmitted(
            batch_id=batch_id, batch_type=command.batch_type,
            repeat_times=[task.get("repeat_times", 1) for task in tasks],
            tasks=tasks if parcel.digest is None else None, tasks_digest=parcel.digest,
            min_wait_num=command.min_wait_num, max_attempts=1 + self.config.explorer.max_retry_times,
            runs_per_unit=self.config.explorer.max_repeat_times_per_runner,
            detailed_stats=self.config.monitor.detailed_stats, submission=request.id, continues=continued_tasks,
        ))
        if events:
            self.live.record_batch(batch_id, events)
            for task, earlier_batch in zip(continued_tasks, earlier_batches, strict=True):
                batch = self.live.batches[batch_id]
                self.live.record_batch(batch_id, cut_tasks.kept_attempts(task, earlier_batch, batch))
            self.live.keep_tasks(batch_id, parcels)
            self._record_cursors(batch_id, command.cursor)
            for source in command.sources or ():
                self.live.record(ev.TasksetResolved(batch_id=batch_id, source=source))
        self.router.reply(request)

    def add(self, request: CommandRequest[AddTasks]) -> None:
        """Add tasks to an open train batch, and answer with the number of the first new task."""
        command, batch_id = request.command, request.command.batch_id
        advice = "submit the tasks in a batch of their own"
        batch = batches.require_batch(self.live.find_batch(batch_id), batch_id, "train", advice)
        tasks, parcels = submitted_tasks(self.live, command.tasks)
        events = batches.add(batch, ev.TasksAdded(
            repeat_times=[task.get("repeat_times", 1) for task in tasks],
            tasks=tasks if command.tasks.digest is None else None, tasks_digest=command.tasks.digest,
            runs_per_unit=self.config.explorer.max_repeat_times_per_runner, request=request.id,
        ))
        if events:
            self.live.record_batch(batch_id, events)
            self.live.keep_tasks(batch_id, parcels, are_added=True)
            self._record_cursors(batch_id, command.cursor)
        self.router.reply(request, batch.additions[request.id])

    def _record_cursors(self, batch_id: BatchId, cursors: Sequence[Cursor] | None) -> None:
        """Record how far the tasksets were read for a batch."""
        for cursor in cursors or ():
            advanced = ev.TasksetAdvanced(
                batch_id=batch_id, taskset=cursor.taskset, epoch=cursor.epoch, offset=cursor.offset
            )
            self.live.record(advanced)

    def finalize(self, request: CommandRequest[FinalizeBatch]) -> None:
        """Finalize a batch once it has enough settled tasks, and answer with its result."""
        batch_id, timeout = request.command.batch_id, request.command.timeout
        batch = batches.require_batch(self.live.find_batch(batch_id), batch_id, request.command.batch_type)
        if batch.state.ended:
            self.router.reply(request, batch.final_result)
            return
        if batch.missing is not None and (request.command.groups or 0) > batch.missing.usable:
            # The pipeline would leave the same again.
            self.router.reply(request, error=_too_few_groups(batch_id, batch.missing))
            return
        if timeout is not None:
            self.actor.after(timeout, f"finalize:{request.id}", lambda: self._on_timeout(request, batch_id))
        others = [w for w in self.waiters.get(batch_id, []) if w.request.id != request.id]
        self.waiters[batch_id] = [*others, Waiter(request)]
        self.finalize_if_ready([batch_id])

    def _on_timeout(self, request: CommandRequest[FinalizeBatch], batch_id: BatchId) -> None:
        """Answer with FinalizeTimeout, unless the batch has ended or is in the pipeline."""
        waiters = self.waiters.get(batch_id, [])
        batch = self.live.batches.get(batch_id)
        if batch is None and any(w.request.id == request.id for w in waiters):  # the log is being read again
            self.actor.after(1.0, f"finalize:{request.id}", lambda: self._on_timeout(request, batch_id))
            return
        if batch is None or batch.state is BatchLifecycleState.FINALIZING:
            return  # its answer follows
        self.waiters[batch_id] = [w for w in waiters if w.request.id != request.id]
        done, expected = batch.completed_task_count, batch.expected_task_count
        self.router.reply(request, error=FinalizeTimeout(
            f"batch {batch_id!r}: {done} of {expected} tasks done after {request.command.timeout} s; nothing is lost, "
            "so finalize the batch again to go on waiting",
            done=done, expected=expected,
        ))

    def finalize_if_ready(self, batch_ids: Sequence[BatchId], kept: Sequence[ev.AttemptKept] | None = None) -> None:
        """Begin to finalize each of these batches that has enough settled tasks and a waiting client.

        A batch waits for its grace period, and for tasks that can't be cut. `kept` has the events about tokens kept for
        the open tasks of a single batch. If it is None and tasks are to be cut, their journals are read first.
        """
        may_cut = self.config.synchronizer.in_flight == "cut"
        for batch_id in batch_ids:
            batch, waiters = self.live.batches.get(batch_id), self.waiters.get(batch_id)
            if batch is None or not waiters or batch.state is BatchLifecycleState.FINALIZING:
                continue
            if not batch.has_enough or self.has_uncuttable_task(batch):
                continue
            grace = self.config.explorer.over_rollout.wait_after_min
            if batch.open_task_count and grace > 0 and not any(w.grace_over for w in waiters):
                self._start_grace(batch_id, grace)
                continue
            cuts_tasks = may_cut and batch.batch_type == "train" and batch.open_task_count > 0
            if cuts_tasks and kept is None:
                self.journals.store_cut_units(batch, partial(self.finalize_if_ready, [batch_id]))
                continue
            self.dispatcher.cancel_units(batch)
            return_partial = self.config.explorer.over_rollout.return_partial_tasks
            groups = max(w.request.command.groups or 0 for w in waiters)
            events = batches.start_finalizing(batch, return_partial=return_partial, groups=groups, cut=cuts_tasks)
            self.live.record_batch(batch_id, [*(kept if kept and cuts_tasks else ()), *events])
            if batch_id in self.live.batches:  # a train batch: FINALIZING
                self.start_pipeline(batch)
                self.live.turn.follow_up_seconds = PIPELINE_SECONDS
            else:
                self._on_ended(batch_id)

    def has_uncuttable_task(self, batch: BatchState) -> bool:
        """Return True if the batch has to wait for an open task that may not be cut once more."""
        sync, max_staleness = self.config.synchronizer, self.config.explorer.max_staleness
        max_cuts = None if max_staleness is None else max_staleness // sync.steps_ahead
        return sync.in_flight == "cut" and cut_tasks.has_uncuttable_task(batch, max_cuts)

    def _start_grace(self, batch_id: BatchId, seconds: float) -> None:
        """Start a timer that finalizes a batch after `seconds`, unless the batch has one."""

        def end_grace() -> None:
            for waiter in self.waiters.get(batch_id, []):
                waiter.grace_over = True
            self.finalize_if_ready([batch_id])

        name = f"grace:{batch_stream(batch_id)}"
        if not self.actor.has_timer(name):
            self.actor.after(seconds, name, end_grace)

    def start_pipeline(self, batch: BatchState) -> None:
        """Run the pipeline on the experiences of settled tasks, while the turn is written.

        With `return_partial_tasks` it also gets the finished runs of dropped tasks. If the turn can't be written,
        `_on_pipeline_done` ignores the result.
        """
        refs = [ref for number in batch.ready_tasks() for ref in batch.tasks[number].payloads]
        maximum = self.config.explorer.max_staleness
        adapters = {name: event.version for name, event in self.live.adapters.items()}
        job = PipelineJob(
            refs, lambda result: self._on_pipeline_done(batch, result), may_refer=True,
            limit=None if maximum is None else StalenessLimit(maximum, self.live.weights.version, adapters),
            min_groups=batch.groups,
        )
        self.run_job(f"batch {batch.batch_id!r} ({batch.submission})", job)

    def run_job(self, key: str, job: PipelineJob) -> None:
        """Run a pipeline, or pass an error to `job.done` if coordinators ended while they ran the one with this key."""

        def done(result: PipelineDone | BaseException) -> None:
            self.in_hand.end_pipeline(key)
            job.done(result)

        try:
            self.in_hand.begin_pipeline(key)
        except PipelineError as e:
            job.done(e)
        else:
            self.pipeline.run(replace(job, done=done))

    def _on_pipeline_done(self, batch: BatchState, result: PipelineDone | BaseException) -> None:
        """Record the pipeline's result and end the batch, or record why it stays open. Answer the waiting clients."""
        batch_id = batch.batch_id
        if self.live.batches.get(batch_id) is not batch or batch.state is not BatchLifecycleState.FINALIZING:
            return  # it was aborted meanwhile, or read again from the log since its turn could not be written
        if isinstance(result, BaseException):
            error = result if isinstance(result, TrinityError) else PipelineError(f"{type(result).__name__}: {result}")
            if isinstance(error, PayloadNotFound | CorruptPayload):
                error = _with_redo_command(error, batch)
            self.live.record_batch(batch_id, [ev.FinalizeFailed(error=shorten_error(str(error)))])  # RUNNING again
            self._answer_waiters(batch_id, None, error)
            return
        if result.usable < batch.groups:
            missing = batches.report_missing_groups(batch, result.lost_counts, result.usable)
            self.live.record_batch(batch_id, [missing])
            self._answer_waiters(batch_id, None, _too_few_groups(batch_id, missing))
            return
        finalized = ev.BatchFinalized(
            result=batch_result(batch, result.metrics), pipeline_metrics=result.metrics, experiences=result.refs,
            selected=result.selected, dropped=result.dropped, dropped_by=result.dropped_by,
            model_versions=result.model_versions,
        )
        try:
            self.live.record_batch(batch_id, [finalized])
        except InvalidEvent as e:  # for instance a metric's name that the log can't hold
            self._on_pipeline_done(batch, e)
            return
        self._on_ended(batch_id)

    def _on_ended(self, batch_id: BatchId) -> None:
        batch = self.live.ended_batches[batch_id]
        self._answer_waiters(batch_id, batch.final_result, None)
        self.dynamic_timeout.record_attempt_times(batch)
        self.live.when_durable(self.outputs.wake)

    def _answer_waiters(self, batch_id: BatchId, value: Any, error: BaseException | None) -> None:
        self.actor.cancel_timer(f"grace:{batch_stream(batch_id)}")
        for waiter in self.waiters.pop(batch_id, []):
            self.actor.cancel_timer(f"finalize:{waiter.request.id}")
            self.router.reply(waiter.request, value, error)

    def abort(self, request: CommandRequest[AbortBatch]) -> None:
        """Abort an open batch and stop its runs. Clients that wait for it get its result so far."""
        command, batch_id = request.command, request.command.batch_id
        batch = self.live.batches.get(batch_id)
        events = batches.abort(batch, reason=command.reason, keep_partial_results=command.keep_partial_results)
        if batch is not None and events:
            self.dispatcher.cancel_units(batch)  # with its current units; runners hear of it once it is durable
            self.live.record_batch(batch_id, events)
            self._on_ended(batch_id)
        self.router.reply(request)

    def redo(self, request: CommandRequest[RedoTasks]) -> None:
        command, batch_id = request.command, request.command.batch_id
        events = batches.reopen(
            self.live.find_batch(batch_id), batch_id, command.tasks, reason=command.reason, request=request.id,
            runs_per_unit=self.config.explorer.max_repeat_times_per_runner,
        )
        self.live.record_batch(batch_id, events)
        self.router.reply(request)

    def process_experiences(self, request: CommandRequest[ProcessExperiences]) -> None:
        """Run experiences through the pipeline, unless an earlier coordinator did so for this request."""
        metrics = self.live.fetch("processed", lambda: processed_before(self.live.log, request.id))
        if metrics is not None:
            self.router.reply(request, metrics)
            return

        def done(result: PipelineDone | BaseException) -> None:
            if isinstance(result, BaseException):
                self.router.reply(request, error=result)
                return
            processed = ev.ExperiencesProcessed(
                pipeline_metrics=result.metrics, experiences=result.refs, selected=result.selected,
                dropped=result.dropped, request=request.id,
            )
            try:
                self.live.record(processed)
            except InvalidEvent as e:  # for instance a metric's name that the log can't hold
                self.router.reply(request, error=e)
                return
            self.router.reply(request, result.metrics)
            self.live.when_durable(self.outputs.wake)

        self.run_job(fingerprint(request), PipelineJob(request.command.refs, done))


def _too_few_groups(batch_id: BatchId, event: ev.GroupsMissing) -> TooFewGroups:
    return TooFewGroups(
        f"batch {batch_id!r} is not finalized: {missing_text(event)}. Add tasks with add_tasks, or finalize it without "
        "groups",
        usable=event.usable, missing=event.missing, lost=event.lost,
    )


def _with_redo_command(error: TrinityError, batch: BatchState) -> TrinityError:
    """Return the error about a lost payload, extended by the `redo` command for the tasks whose results are in it."""
    digest = error.details.get("digest")
    numbers = [str(n) for n in batch.ready_tasks() if any(ref.digest == digest for ref in batch.tasks[n].payloads)]
    if not numbers:
        return error
    advice = f"; run its tasks again with `trinity-es redo {batch.batch_id} {' '.join(numbers)}`"
    return type(error)(error.message + advice, **error.details)

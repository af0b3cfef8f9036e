"""Handlers of a scheduler's commands: it adds tasks, waits for results and takes them.

A poll gets its answer when the batch has made enough progress, or when its time is over. The scheduler reads the
results from the log and the payload store, and confirms them afterwards. If it dies in between, the next scheduler gets
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trinity_es.actors.commands import (
    BatchProgress,
    Command,
    CommandRequest,
    DropOpenTasks,
    PauseBatches,
    PollAllBatches,
    PollBatch,
    ResumeBatches,
    ScheduleTasks,
    StoreProgress,
    TakeResults,
)
from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.coordinator.decisions import collect_decisions
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.dynamic_timeout import DynamicTimeout
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.actors.coordinator.handlers.request_inputs import submitted_tasks
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId, sort_batch_id
from trinity_es.projections.batch import BatchState

__all__ = ["SchedulerHandlers"]


P = TypeVar("P")


@dataclass(slots=True)
class Poll(Generic[P]):
    """Request that waits until the progress of a batch (None: of all batches) is enough."""

    request: CommandRequest[Command[P]]
    batch_id: BatchId | None
    progress: Callable[[], P]
    is_enough: Callable[[P], bool]


class SchedulerHandlers:

    def __init__(
        self, config: LaunchedConfig, live: LiveState, dispatcher: Dispatcher, dynamic_timeout: DynamicTimeout,
        router: CommandRouter, actor: TimerHost
    ) -> None:
        self._explorer, self._live, self._dispatcher = config.explorer, live, dispatcher
        self._dynamic_timeout = dynamic_timeout
        self._router, self._actor = router, actor
        self._polls: dict[str, Poll[Any]] = {}

    def handlers(self) -> list[HandlerRow]:
        return [
            handler_row(ScheduleTasks, self.schedule),
            handler_row(PollBatch, self.poll),
            handler_row(PollAllBatches, self.poll_all),
            handler_row(DropOpenTasks, self.drop_open),
            handler_row(TakeResults, self.take),
            handler_row(PauseBatches, self.pause),
            handler_row(ResumeBatches, self.resume),
        ]

    def _scheduled_batches(self) -> list[BatchState]:
        scheduled = [b for b in self._live.batches.values() if b.batch_type == "collect"]
        return sorted(scheduled, key=lambda b: sort_batch_id(b.batch_id))

    def _open_batch(self, batch_id: BatchId) -> BatchState | None:
        """Return the scheduled batch with this id; None if it is not open. Raises BatchTypeMismatch for other types."""
        return collect_decisions.open_collect_batch(self._live.batches.get(batch_id), batch_id)

    def _record_and_end(self, batch: BatchState, events: list[ev.Event]) -> None:
        """Record events of a batch, and also its end if all its tasks are taken or dropped now."""
        self._live.record_batch(batch.batch_id, events)
        end_events = collect_decisions.end_if_done(batch)
        self._live.record_batch(batch.batch_id, end_events)
        if end_events:
            self._dynamic_timeout.record_attempt_times(batch)

    # --- tasks ------------------------------------------------------------------------------------------------------
    def schedule(self, request: CommandRequest[ScheduleTasks]) -> None:
        """Begin a batch with these tasks, or add them to it. Answer with the number of the first new task."""
        batch_id, parcel = request.command.batch_id, request.command.tasks
        tasks, parcels = submitted_tasks(self._live, parcel)
        events = collect_decisions.schedule(self._live.find_batch(batch_id), ev.BatchSubmitted(
            batch_id=batch_id, batch_type="collect", repeat_times=[task.get("repeat_times", 1) for task in tasks],
            tasks=tasks if parcel.digest is None else None, tasks_digest=parcel.digest,
            evals=[i for i, task in enumerate(tasks) if task.get("is_eval")],
            max_attempts=1 + self._explorer.max_retry_times,
            runs_per_unit=self._explorer.max_repeat_times_per_runner, submission=request.id,
        ))
        if events:
            self._live.record_batch(batch_id, events)
            self._live.keep_tasks(batch_id, parcels, are_added=isinstance(events[-1], ev.TasksAdded))
        batch = self._live.find_batch(batch_id)
        self._router.reply(request, 0 if batch is None else batch.additions.get(request.id, 0))

    # --- waiting ----------------------------------------------------------------------------------------------------
    def poll(self, request: CommandRequest[PollBatch]) -> None:
        """Answer with a batch's progress when it has enough results or no open task, or is paused and runs nothing."""
        command = request.command
        batch = self._open_batch(command.batch_id)
        if batch is not None and command.resume:
            self._live.record_batch(command.batch_id, collect_decisions.resume(batch))

        def is_enough(progress: BatchProgress) -> bool:
            if progress["ready"] >= command.at_least or progress["open"] == 0:
                return True
            return progress["paused"] and (command.resume or progress["running"] == 0)

        poll = Poll(request, command.batch_id, lambda: self._progress(command.batch_id), is_enough)
        self._answer_when_enough(poll, command.seconds)

    def poll_all(self, request: CommandRequest[PollAllBatches]) -> None:
        """Answer with the progress of all scheduled batches when a task was settled, or no task is open."""
        settled_before = request.command.settled

        def is_enough(progress: StoreProgress) -> bool:
            return progress["open"] == 0 or progress["settled"] != settled_before

        self._answer_when_enough(Poll(request, None, self._progress_of_all, is_enough), request.command.seconds)

    def _answer_when_enough(self, poll: Poll[P], seconds: float) -> None:
        """Answer a poll now if the progress is enough. Otherwise answer it when it is, or when `seconds` are over."""
        progress = poll.progress()
        if seconds <= 0 or poll.is_enough(progress):
            self._router.reply(poll.request, progress)
            return
        self._polls[poll.request.id] = poll
        self._actor.after(seconds, f"poll:{poll.request.id}", lambda: self._answer(poll))

    def answer_polls(self, batch_ids: Iterable[BatchId]) -> None:
        """Answer the polls about these batches whose progress is enough now."""
        if not self._polls:
            return
        changed_ids = set(batch_ids)
        for poll in list(self._polls.values()):
            if (poll.batch_id is None or poll.batch_id in changed_ids) and poll.is_enough(poll.progress()):
                self._answer(poll)

    def _answer(self, poll: Poll[P]) -> None:
        """Answer a poll with the current progress, unless it was answered before."""
        if self._polls.pop(poll.request.id, None) is not None:
            self._actor.cancel_timer(f"poll:{poll.request.id}")
            self._router.reply(poll.request, poll.progress())

    def _progress_of_all(self) -> StoreProgress:
        batches = self._scheduled_batches()
        return StoreProgress(
            open=sum(b.open_task_count for b in batches), settled=sum(b.completed_task_count for b in batches),
            batches=[b.batch_id for b in batches],
        )

    def _progress(self, batch_id: BatchId) -> BatchProgress:
        """Return a batch's progress. For an ended batch all numbers are 0."""
        batch = self._live.batches.get(batch_id)
        if batch is None or batch.batch_type != "collect":
            return BatchProgress(open=0, ready=0, running=0, paused=False, submission="")
        return BatchProgress(
            open=batch.open_task_count, ready=batch.ready_task_count, running=len(batch.flights), paused=batch.paused,
            submission=batch.submission,
        )

    # --- results ----------------------------------------------------------------------------------------------------
    def drop_open(self, request: CommandRequest[DropOpenTasks]) -> None:
        """Drop the unsettled tasks of one batch or of all, and stop their runs."""
        batch_id, reason = request.command.batch_id, request.command.reason
        if batch_id is None:
            batches = self._scheduled_batches()
        else:
            batch = self._open_batch(batch_id)
            batches = [] if batch is None else [batch]
        return_partial = request.command.return_partial
        if return_partial is None:
            return_partial = self._explorer.over_rollout.return_partial_tasks
        for batch in batches:
            events = collect_decisions.drop_rest(batch, reason=reason, return_partial=return_partial)
            if events:
                self._dispatcher.cancel_units(batch)
                self._record_and_end(batch, events)
        self._router.reply(request)

    def take(self, request: CommandRequest[TakeResults]) -> None:
        """Record that this client has the results of these tasks. Answer with the tasks that no other client took."""
        command = request.command
        batch = self._live.find_batch(command.batch_id)
        own_tasks: list[int] = []
        if batch is not None and batch.submission == command.submission:
            if not batch.state.ended:
                events = collect_decisions.take(batch, command.tasks, request.id)
                if events:
                    self._record_and_end(batch, events)
            own_tasks = [task for task in command.tasks if batch.taken.get(task) == request.id]
        self._router.reply(request, own_tasks)

    # --- start and stop ---------------------------------------------------------------------------------------------
    def pause(self, request: CommandRequest[PauseBatches]) -> None:
        """Pause the batches of a scheduler that stops. Their units wait until a scheduler resumes them."""
        for batch in self._scheduled_batches():
            if batch.batch_id in request.command.batches and batch.open_task_count:
                self._live.record_batch(batch.batch_id, collect_decisions.pause(batch, "its scheduler was stopped"))
        self._router.reply(request)

    def resume(self, request: CommandRequest[ResumeBatches]) -> None:
        """Resume all paused batches, since a scheduler has started."""
        for batch in self._scheduled_batches():
            self._live.record_batch(batch.batch_id, collect_decisions.resume(batch))
        self._router.reply(request)

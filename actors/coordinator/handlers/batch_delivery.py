"""Handlers of a trainer's commands: the next batch, the acknowledgement of a batch, and a restart from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from trinity_es.actors.commands import (
    AcknowledgeBatch,
    CommandRequest,
    DeliveredBatch,
    GetNextBatch,
    ResumedTrainer,
    ResumeTrainer,
)
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import TimerHost
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError, PayloadNotFound
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.values import BatchId, BatchLifecycleState, batch_stream
from trinity_es.projections.freed_payloads import EXPERIENCES, freed_positions
from trinity_es.projections.tables.experience_usage import next_delivered
from trinity_es.projections.tables.read_models import untrained_since

__all__ = ["TrainerHandlers"]


class TrainerHandlers:

    def __init__(
        self, live: LiveState, router: CommandRouter, actor: TimerHost, retention: Retention,
        on_trainer_restarted: Callable[[int], None],
    ) -> None:
        """`on_trainer_restarted` is called with the step of the checkpoint from which a trainer repeats later steps."""
        self.live, self.router, self.actor, self.retention = live, router, actor, retention
        self.on_trainer_restarted = on_trainer_restarted
        self._waiting_requests: dict[str, CommandRequest[GetNextBatch]] = {}
        """Request id -> request that waits for the next batch."""
        self._must_read_again: dict[str, bool] = {}
        """Id of each request for which a thread reads -> True if a batch was finalized after the read began."""

    def handlers(self) -> list[HandlerRow]:
        return [
            handler_row(GetNextBatch, self.next_batch),
            handler_row(AcknowledgeBatch, self.acknowledge),
            handler_row(ResumeTrainer, self.resume),
        ]

    # --- the next batch ---------------------------------------------------------------------------------------------
    def next_batch(self, request: CommandRequest[GetNextBatch]) -> None:
        """Answer with the first train batch that is finalized after the given position, once there is one."""
        timeout = request.command.timeout
        if timeout is not None:  # the client stops waiting then too
            self.actor.after(timeout + 1.0, f"next:{request.id}", lambda: self._forget(request))
        self._waiting_requests[request.id] = request
        self._read_next(request)

    def _forget(self, request: CommandRequest[GetNextBatch]) -> None:
        self._waiting_requests.pop(request.id, None)
        self.actor.cancel_timer(f"next:{request.id}")

    def check_next_batch(self) -> None:
        for request in list(self._waiting_requests.values()):
            self._read_next(request)

    def _read_next(self, request: CommandRequest[GetNextBatch]) -> None:
        """Have a thread read which batch is next. If it is reading already, it reads once more afterwards."""
        if request.id in self._must_read_again:
            self._must_read_again[request.id] = True  # the current read may miss the newest batch
            return
        self._must_read_again[request.id] = False
        log, after = self.live.log, request.command.after
        self.live.run_in_thread(lambda: next_delivered(log, after), lambda result: self._on_read(request, result))

    def _on_read(self, request: CommandRequest[GetNextBatch], result: tuple[BatchId, int] | Exception | None) -> None:
        """Answer a request with the batch and position that were read, or with the error. None: go on waiting."""
        must_read_again = self._must_read_again.pop(request.id)
        if request.id not in self._waiting_requests:
            return
        if isinstance(result, Exception):
            self._forget(request)
            self.router.answer(request, error=result)
        elif result is not None:
            self._forget(request)
            batch_id, position = result
            self.router.answer(request, DeliveredBatch(batch_id=batch_id, position=position))
        elif must_read_again:
            self._read_next(request)

    # --- used batches, and batches to use again ---------------------------------------------------------------------
    def acknowledge(self, request: CommandRequest[AcknowledgeBatch]) -> None:
        """Record that a step used a batch. A repetition is recorded only if the batch was delivered again meanwhile."""
        batch_id, step = request.command.batch_id, request.command.step
        batch = self.live.find_batch(batch_id)
        if batch is None:
            raise BatchNotFound(f"batch {batch_id!r} is not in the log: acknowledge a batch that was submitted")
        if batch.state is not BatchLifecycleState.FINALIZED:
            raise DataError(f"batch {batch_id!r} is {batch.state}: only a finalized batch can be acknowledged")
        if batch.trained_step != step or self.live.fetch(
            ("redelivered", batch_id), lambda: _is_redelivered(self.live.log, batch_id)
        ):
            self.live.record_batch(batch_id, [ev.BatchTrained(step=step, metrics=request.command.metrics)])
            self.live.when_durable(self.retention.wake)
        self.router.reply(request)

    def resume(self, request: CommandRequest[ResumeTrainer]) -> None:
        """Answer a trainer that resumed from its checkpoint at `step` with the batches that it has to use now.

        These are the batches that it used after `step`, and those that it never used, up to the answer's log position.
        Raises PayloadNotFound if a batch's experiences were deleted.
        """
        step, live = request.command.step, self.live
        position, rows, freed_at, redelivery = live.fetch("resumed", lambda: _resume_data(live.log, step))
        batches = [batch_id for batch_id, _, _ in rows]
        freed_batches = [b for b, first_position, _ in rows if freed_at.get(batch_stream(b), 0) > first_position]
        if freed_batches:
            raise PayloadNotFound(
                f"batches {freed_batches} were trained after step {step}, but store.retention "
                f"({self.retention.keep or 'off now'}) deleted their experiences: resume from a later checkpoint",
                batches=freed_batches,
            )
        event = ev.ExperiencesRedelivered(step=step, batches=batches)
        is_recorded = redelivery is not None and redelivery.event == event and all(
            last_position < redelivery.position for _, _, last_position in rows
        )
        if batches and not is_recorded:
            live.record(event)
        self.on_trainer_restarted(step)
        self.router.reply(request, ResumedTrainer(batches=batches, position=position))


def _resume_data(
    log: EventLog, step: int
) -> tuple[int, list[tuple[BatchId, int, int]], dict[str, int], Recorded | None]:
    """Read from the log what `resume` needs, and return a tuple of four.

    The log's last position; the batches that a trainer at `step` has to use, each with its first and last position;
    the position at which the payloads of each stream were deleted; the last ExperiencesRedelivered.
    """
    position = log.head().position
    rows = log.query(lambda connection: untrained_since(connection, step, position))
    freed = freed_positions(log.read_rare(["PayloadsFreed"]))
    return position, rows, freed, log.last(EXPERIENCES, "ExperiencesRedelivered")


def _is_redelivered(log: EventLog, batch_id: BatchId) -> bool:
    """Return True if the log has an ExperiencesRedelivered with this batch after the batch's last BatchTrained."""
    last_trained = log.last(batch_stream(batch_id), "BatchTrained")
    return last_trained is not None and any(
        isinstance(r.event, ev.ExperiencesRedelivered) and batch_id in r.event.batches
        for r in log.read_rare(["ExperiencesRedelivered"], after=last_trained.position)
    )

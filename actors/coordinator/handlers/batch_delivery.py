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
from trinity_es.actors.config.config import LaunchedConfig
from trinity_es.actors.coordinator.delivery.retention import Retention
from trinity_es.actors.coordinator.handlers.command_router import Handled, handled
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import Responder, TimerHost
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import BatchNotFound, DataError, PayloadNotFound
from trinity_es.events.store.log import EventLog, Recorded
from trinity_es.events.values import BatchId, BatchLifecycleState, batch_stream
from trinity_es.projections.freed_payloads import EXPERIENCES, freed_positions
from trinity_es.projections.tables.read_models import next_delivered, untrained_since

__all__ = ["TrainerHandlers"]


class TrainerHandlers:

    def __init__(
        self, config: LaunchedConfig, live: LiveState, router: Responder, actor: TimerHost, retention: Retention,
        on_trainer_restarted: Callable[[int], None],
    ) -> None:
        """`on_trainer_restarted` is called with a checkpoint's step: a trainer begins again there, and repeats later
        steps."""
        self.live, self.router, self.actor, self.retention = live, router, actor, retention
        self.on_trainer_restarted = on_trainer_restarted
        self.retained_steps = config.store.retention
        self._waiting_requests: dict[str, CommandRequest[GetNextBatch]] = {}
        """Requests that wait for the next batch, by id."""
        self._must_read_again: dict[str, bool] = {}
        """Requests whose next batch a thread is looking up, by id; True if a batch came after the lookup began."""

    def handlers(self) -> list[Handled]:
        return [
            handled(GetNextBatch, self.next_batch),
            handled(AcknowledgeBatch, self.acknowledge),
            handled(ResumeTrainer, self.resume),
        ]

    # --- the next batch ---------------------------------------------------------------------------------------------
    def next_batch(self, request: CommandRequest[GetNextBatch]) -> None:
        """Answer with the next batch, once there is one."""
        timeout = request.command.timeout
        if timeout is not None:  # the client stops waiting then too
            self.actor.after(timeout + 1.0, f"next:{request.id}", lambda: self._forget(request))
        self._waiting_requests[request.id] = request
        self._read_next(request)

    def _forget(self, request: CommandRequest[GetNextBatch]) -> None:
        """Stop waiting for a request, which is answered or whose client is gone."""
        self._waiting_requests.pop(request.id, None)
        self.actor.cancel(f"next:{request.id}")

    def check_next_batch(self) -> None:
        """Answer requests that wait for a finalized train batch after their position."""
        for request in list(self._waiting_requests.values()):
            self._read_next(request)

    def _read_next(self, request: CommandRequest[GetNextBatch]) -> None:
        """Have a thread look up the next batch, again if it does so now."""
        if request.id in self._must_read_again:
            self._must_read_again[request.id] = True  # the current read may miss the newest batch
            return
        self._must_read_again[request.id] = False
        log, after = self.live.log, request.command.after
        self.live.run_in_thread(lambda: next_delivered(log, after), lambda result: self._on_read(request, result))

    def _on_read(self, request: CommandRequest[GetNextBatch], result: tuple[BatchId, int] | Exception | None) -> None:
        """Answer a request with the batch and position that were read; None: go on waiting."""
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
        """Record that a step used a batch; a repetition changes nothing, except after a redelivery."""
        batch_id, step = request.command.batch_id, request.command.step
        batch = self.live.find(batch_id)
        if batch is None:
            raise BatchNotFound(f"batch {batch_id!r} is not in the log")
        if batch.state is not BatchLifecycleState.FINALIZED:
            raise DataError(f"batch {batch_id!r} is {batch.state}: only a finalized batch can be acknowledged")
        if batch.trained_step != step or self._redelivered_since_trained(batch_id):
            trained = ev.BatchTrained(step=step, metrics=request.command.metrics)
            self.live.record_batch(batch_id, [trained])
            self.live.when_durable(self.retention.wake)
        self.router.reply(request)

    def resume(self, request: CommandRequest[ResumeTrainer]) -> None:
        """Answer a trainer that resumed from its checkpoint at `step` with the batches that it has to train now.

        These are the batches that it trained after `step` and those that it never used, up to the answer's position in
        the log. Raises PayloadNotFound if a batch's experiences were freed.
        """
        step, live = request.command.step, self.live
        position, rows, freed_at, redelivery = live.fetch("resumed", lambda: _resume_data(live.log, step))
        batches = [batch_id for batch_id, _, _ in rows]
        freed_batches = [b for b, first_position, _ in rows if freed_at.get(batch_stream(b), 0) > first_position]
        if freed_batches:
            raise PayloadNotFound(
                f"batches {freed_batches} were trained after step {step}, but their experiences are deleted: "
                f"store.retention keeps {self.retained_steps} steps. Resume from a later checkpoint",
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

    def _redelivered_since_trained(self, batch_id: BatchId) -> bool:
        """Return True if a trainer that resumed got a batch again since it was trained. May raise NotRead."""
        log = self.live.log
        return bool(self.live.fetch(("redelivered", batch_id), lambda: _is_redelivered(log, batch_id)))


def _resume_data(
    log: EventLog, step: int
) -> tuple[int, list[tuple[BatchId, int, int]], dict[str, int], Recorded | None]:
    """Return what `resume` reads from the log.

    That is the log's last position; the batches that a trainer at `step` has yet to use, each with its first and last
    position; the position at which each stream was freed; and the last ExperiencesRedelivered.
    """
    position = log.head().position
    rows = log.query(lambda connection: untrained_since(connection, step, position))
    freed = freed_positions(log.rare(["PayloadsFreed"]))
    return position, rows, freed, log.last(EXPERIENCES, "ExperiencesRedelivered")


def _is_redelivered(log: EventLog, batch_id: BatchId) -> bool:
    """Return True if the log has a redelivery of a batch behind the batch's last BatchTrained."""
    trained = log.last(batch_stream(batch_id), "BatchTrained")
    return trained is not None and any(
        isinstance(r.event, ev.ExperiencesRedelivered) and batch_id in r.event.batches
        for r in log.rare(["ExperiencesRedelivered"], after=trained.position)
    )

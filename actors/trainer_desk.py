"""The desk for a trainer: which batch comes next, which it has used, and where it is again after a restart."""

from __future__ import annotations

from typing import Any

from actors.book import Book
from actors.experience_queue import ExperienceQueue
from actors.messages import Request
from actors.retention import Retention
from actors.sides import Answers, Timers
from events import codec
from events import vocabulary as ev
from events.errors import BatchNotFound, DataError, PayloadNotFound
from events.log import Recorded
from events.values import BatchId, BatchLifecycleState, batch_stream
from projections.readmodels import untrained_since
from projections.retained import EXPERIENCES, freed_at

__all__ = ["TrainerDesk"]


class TrainerDesk:
    """Commands are methods `do_<command>(request)`, as the desk's."""

    def __init__(
        self, config: dict[str, Any], book: Book, desk: Answers, actor: Timers, queue: ExperienceQueue,
        retention: Retention,
    ) -> None:
        self.book, self.desk, self.actor, self.queue, self.retention = book, desk, actor, queue, retention
        self.retained = config["store"]["retention"]
        self._waiting: list[Request] = []
        """For the next batch."""

    # --- the next batch ---------------------------------------------------------------------------------------------
    def do_next_batch(self, request: Request) -> None:
        after, timeout = request.args["after"], request.args["timeout"]
        if not isinstance(after, int) or not 0 <= after < 2**63:
            raise DataError(f"after is {after!r}: a position in the log is expected")
        if timeout is not None:  # the client does not wait longer either
            self.actor.after(timeout + 1.0, f"next:{request.id}", lambda: self._forget(request))
        self._waiting.append(request)
        self.check_next_batch()

    def _forget(self, request: Request) -> None:
        self._waiting = [r for r in self._waiting if r.id != request.id]

    def check_next_batch(self) -> None:
        """Who waits for the next finalized train batch after a position gets it as soon as it is in the log."""
        for request in list(self._waiting):
            for recorded in self.book.log.read(types=["BatchFinalized"], after=request.args["after"]):
                event = recorded.event
                assert isinstance(event, ev.BatchFinalized)
                if event.result["batch_type"] == "train":
                    self._waiting.remove(request)
                    self.actor.cancel(f"next:{request.id}")
                    self.desk.answer(request, {"batch_id": event.result["batch_id"], "position": recorded.position})
                    break

    # --- what was used, and what is to be used again ----------------------------------------------------------------
    def do_acknowledge(self, request: Request) -> None:
        """The same step again changes nothing, except after a redelivery: then the batch was trained once more."""
        batch_id, step = request.args["batch_id"], request.args["step"]
        batch = self.book.find(batch_id)
        if batch is None:
            raise BatchNotFound(f"batch {batch_id!r} is not in the log")
        if batch.state is not BatchLifecycleState.FINALIZED:
            raise ValueError(f"batch {batch_id!r} is {batch.state}: only a finalized batch can be acknowledged")
        if batch.trained_step != step or self._redelivered_since_trained(batch_id):
            trained = ev.BatchTrained(step=step, metrics=request.args["metrics"])
            codec.check(trained)
            self.book.record_batch(batch_id, [trained])
            self.book.then(self.retention.wake)
        self.desk.reply(request)

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
                f"{self.retained} steps; resume from a later checkpoint",
                batches=gone,
            )
        last = self._last_redelivery()
        told = last is not None and last.event == ev.ExperiencesRedelivered(step=step, batches=batches)
        if batches and not (told and last is not None and all(at < last.position for _, _, at in rows)):
            book.record(EXPERIENCES, [ev.ExperiencesRedelivered(step=step, batches=batches)])
        self.queue.returned(step)
        self.desk.reply(request, {"batches": batches, "position": position})

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

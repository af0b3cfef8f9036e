"""The desk's side for schedulers: tasks come in, somebody waits for results, results are taken.

Waiting changes nothing: a scheduler asks how far a batch is and is answered when it is far enough, or when its patience
is over. It reads the results themselves from the log and the payload store, and says then that it has them. So one that
dies in between leaves them to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trinity_es.actors.coordinator.decisions import collect
from trinity_es.actors.coordinator.fleet.dynamic_timeout import Pace
from trinity_es.actors.coordinator.fleet.lifecycle import Crew
from trinity_es.actors.coordinator.handlers.submitted import given_tasks
from trinity_es.actors.coordinator.live_state import Book
from trinity_es.actors.coordinator.ports import Answers, Timers
from trinity_es.actors.messages import Parcel, Request
from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId, sort_batch_id
from trinity_es.projections.batch import BatchState

__all__ = ["Collecting"]


@dataclass(slots=True)
class Poll:
    """Somebody waits for a batch (None: for all), until this is true of it."""

    request: Request
    batch_id: BatchId | None
    met: Callable[[dict[str, Any]], bool]


class Collecting:
    """Commands are methods `do_<command>(request)`, as the desk's."""

    def __init__(
        self, config: dict[str, Any], book: Book, crew: Crew, pace: Pace, desk: Answers, actor: Timers
    ) -> None:
        self._explorer, self._book, self._crew, self._pace = config["explorer"], book, crew, pace
        self._desk, self._actor = desk, actor
        self._polls: dict[str, Poll] = {}

    def _batches(self) -> list[BatchState]:
        found = [b for b in self._book.batches.values() if b.batch_type == "collect"]
        return sorted(found, key=lambda b: sort_batch_id(b.batch_id))

    def _open(self, batch_id: BatchId) -> BatchState | None:
        return collect.require_scheduled(self._book.batches.get(batch_id), batch_id)

    def _record(self, batch: BatchState, events: list[ev.Event]) -> None:
        """Record what was decided, and the end of the batch where it was the last."""
        self._book.record_batch(batch.batch_id, events)
        end = collect.over(batch)
        self._book.record_batch(batch.batch_id, end)
        if end:
            self._pace.ended(batch)
        self.check([batch.batch_id])

    # --- tasks ------------------------------------------------------------------------------------------------------
    def do_schedule(self, request: Request) -> None:
        """Begin a batch with these tasks, or have them join it. Answers with the number of the first of them."""
        args = request.args
        batch_id: BatchId = args["batch_id"]
        parcel: Parcel = args["tasks"]
        tasks, parcels = given_tasks(self._book, parcel)
        events = collect.schedule(
            self._book.find(batch_id),
            batch_id=batch_id,
            repeat_times=[task.get("repeat_times", 1) for task in tasks],
            tasks=tasks if parcel.digest is None else None,
            tasks_digest=parcel.digest,
            evals=[i for i, task in enumerate(tasks) if task.get("is_eval")],
            max_attempts=1 + self._explorer["max_retry_times"],
            runs_per_unit=self._explorer["max_repeat_times_per_runner"],
            request=request.id,
        )
        if events:
            self._book.record_batch(batch_id, events)
            self._book.keep_tasks(batch_id, parcels, more=isinstance(events[-1], ev.TasksAdded))
        batch = self._book.find(batch_id)
        self._desk.reply(request, 0 if batch is None else batch.additions.get(request.id, 0))

    # --- waiting ----------------------------------------------------------------------------------------------------
    def do_poll(self, request: Request) -> None:
        """Tell how far a batch is. Answered when `at_least` tasks are ready, or nothing is open, or after `seconds`.

        With `resume` a batch that is paused goes on. One that stays paused is answered for when no unit of it is with
        a runner, since no more will come then.
        """
        batch_id, args = request.args["batch_id"], request.args
        batch = self._open(batch_id)
        if batch is not None and args["resume"]:
            self._book.record_batch(batch_id, collect.resume(batch))

        def met(told: dict[str, Any]) -> bool:
            enough = told["ready"] >= args["at_least"] or told["open"] == 0
            return bool(enough or (told["paused"] and (args["resume"] or told["running"] == 0)))

        self._wait(Poll(request, batch_id, met))

    def do_poll_all(self, request: Request) -> None:
        """Answer for all scheduled batches when nothing is open, or not `settled` tasks are settled."""
        settled = request.args["settled"]
        self._wait(Poll(request, None, lambda told: told["open"] == 0 or told["settled"] != settled))

    def _wait(self, poll: Poll) -> None:
        told, seconds = self._told(poll.batch_id), poll.request.args["seconds"]
        if seconds <= 0 or poll.met(told):
            self._desk.reply(poll.request, told)
            return
        self._polls[poll.request.id] = poll
        self._actor.after(seconds, f"poll:{poll.request.id}", lambda: self._answer(poll))

    def check(self, batch_ids: Iterable[BatchId]) -> None:
        """Answer who waited for these batches, which may have moved."""
        if not self._polls:
            return
        touched = set(batch_ids)
        for poll in list(self._polls.values()):
            if (poll.batch_id is None or poll.batch_id in touched) and poll.met(self._told(poll.batch_id)):
                self._answer(poll)

    def _answer(self, poll: Poll) -> None:
        if self._polls.pop(poll.request.id, None) is not None:
            self._actor.cancel(f"poll:{poll.request.id}")
            self._desk.reply(poll.request, self._told(poll.batch_id))

    def _told(self, batch_id: BatchId | None) -> dict[str, Any]:
        if batch_id is None:
            batches = self._batches()
            return {
                "open": sum(b.open_task_count for b in batches),
                "settled": sum(b.completed_task_count for b in batches),
                "batches": [b.batch_id for b in batches],
            }
        batch = self._book.batches.get(batch_id)
        if batch is None or batch.batch_type != "collect":
            return {"open": 0, "ready": 0, "running": 0, "paused": False, "submission": ""}
        return {
            "open": batch.open_task_count,
            "ready": batch.ready_task_count,
            "running": len(batch.flights),
            "paused": batch.paused,
            "submission": batch.submission,
        }

    # --- results ----------------------------------------------------------------------------------------------------
    def do_drop_rest(self, request: Request) -> None:
        """Give up what is not settled, of one batch or of all; runners stop it.

        `return_partial`: whether the runs are kept that such a task finished; None: as the config says.
        """
        batch_id, reason = request.args["batch_id"], request.args["reason"]
        found = self._batches() if batch_id is None else [self._open(batch_id)]
        partial = request.args.get("return_partial")
        if partial is None:
            partial = self._explorer["over_rollout"]["return_partial_tasks"]
        for batch in found:
            events = [] if batch is None else collect.drop_rest(batch, reason=reason, return_partial=partial)
            if batch is not None and events:
                self._crew.revoke(batch)
                self._record(batch, events)
        self._desk.reply(request)

    def do_take(self, request: Request) -> None:
        """Somebody has these results: answers with those that nobody else had taken."""
        batch_id, args = request.args["batch_id"], request.args
        batch = self._book.find(batch_id)
        mine: list[int] = []
        if batch is not None and batch.submission == args["submission"]:
            if not batch.state.ended:
                events = collect.take(batch, args["tasks"], request.id)
                if events:
                    self._record(batch, events)
            mine = [task for task in args["tasks"] if batch.taken.get(task) == request.id]
        self._desk.reply(request, mine)

    # --- start and stop ---------------------------------------------------------------------------------------------
    def do_pause(self, request: Request) -> None:
        """Pause the batches of a scheduler that stops: they get no runners until somebody wants them."""
        for batch in self._batches():
            if batch.batch_id in request.args["batches"] and batch.open_task_count:
                self._book.record_batch(batch.batch_id, collect.pause(batch, "its scheduler was stopped"))
        self.check(request.args["batches"])
        self._desk.reply(request)

    def do_resume(self, request: Request) -> None:
        """Let what was paused go on, as a scheduler starts."""
        for batch in self._batches():
            self._book.record_batch(batch.batch_id, collect.resume(batch))
        self._desk.reply(request)

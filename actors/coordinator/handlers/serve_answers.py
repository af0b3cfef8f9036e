"""Handlers of commands about the proxy's answers in mode `serve`. Each command can be repeated.

The proxy records an answer before its client gets the end of it. Later a client gives it a reward, by the answer's
message id. A commit delivers all rewarded answers through the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from trinity_es.actors.commands import (
    CommandRequest,
    CountAnswers,
    DeliverAnswers,
    DeliveredAnswers,
    RecordAnswers,
    RewardAnswers,
)
from trinity_es.actors.coordinator.delivery.outputs import Outputs
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone, PipelineJob
from trinity_es.actors.coordinator.handlers.command_router import CommandRouter, HandlerRow, handler_row
from trinity_es.actors.coordinator.handlers.request_inputs import processed_before
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AnswerDelivered, AnswerNotFound, InvalidEvent
from trinity_es.events.experience import Experience
from trinity_es.projections.tables import serve_answers

__all__ = ["BATCH", "AnswerHandlers", "put_rewards"]

BATCH = "serve"
"""Batch id of all experiences of the proxy."""


class AnswerHandlers:

    def __init__(
        self, live: LiveState, outputs: Outputs, router: CommandRouter, run_job: Callable[[str, PipelineJob], None]
    ) -> None:
        """`run_job(name, job)` runs the pipeline."""
        self._live, self._outputs, self._router, self._run_job = live, outputs, router, run_job
        self._deliveries: deque[CommandRequest[DeliverAnswers]] = deque()
        """Requests for deliveries; the first is in progress."""
        self._delivery_count = 0
        """Number of deliveries that have ended."""
        self._ids_being_rewarded: set[str] = set()
        """Ids of answers whose reward is not durable yet, so that they wait for the next delivery."""
        self._ids_in_delivery: frozenset[str] = frozenset()
        """Ids of the answers in the present delivery."""

    def handlers(self) -> list[HandlerRow]:
        return [
            handler_row(RecordAnswers, self.record),
            handler_row(RewardAnswers, self.reward),
            handler_row(DeliverAnswers, self.deliver),
            handler_row(CountAnswers, self.count),
        ]

    def record(self, request: CommandRequest[RecordAnswers]) -> None:
        """Record the proxy's answers to its clients. Reply with the number of answers that were not recorded before."""
        answers = request.command.answers
        recorded_states = self._find([a.message for a in answers])
        new_answers = [a for a in answers if a.message not in recorded_states]  # the reply for the others was lost
        if new_answers:
            self._live.record(ev.AnswersRecorded(answers=new_answers))
        self._router.reply(request, len(new_answers))

    def reward(self, request: CommandRequest[RewardAnswers]) -> None:
        """Give a reward to all of these answers, or to none. Raises AnswerNotFound, AnswerDelivered."""
        command = request.command
        message_ids = list(dict.fromkeys(command.messages))
        event = ev.AnswersRewarded(messages=message_ids, reward=command.reward, task=command.task, run=command.run)
        states = self._find(message_ids)
        unknown_ids = [i for i in message_ids if i not in states]
        if unknown_ids:
            raise AnswerNotFound(f"no answer has the message id {', '.join(unknown_ids[:5])}: give the ids that the "
                                 "proxy's answers contain", messages=unknown_ids)
        changed_ids = [i for i in message_ids if (states[i].reward, states[i].task, states[i].run)
                       != (event.reward, event.task, event.run)]
        delivered_ids = [i for i in changed_ids if states[i].delivered or i in self._ids_in_delivery]
        if delivered_ids:
            raise AnswerDelivered(
                f"answers {', '.join(delivered_ids[:5])} already went to the pipeline, so their reward can't change",
                messages=delivered_ids,
            )
        if changed_ids:
            self._live.record(event)
            self._ids_being_rewarded.update(changed_ids)
            self._live.when_durable(lambda: self._ids_being_rewarded.difference_update(changed_ids))
            self._live.turn.failure_calls.append(lambda _: self._ids_being_rewarded.difference_update(changed_ids))
        self._router.reply(request, len(message_ids))

    def deliver(self, request: CommandRequest[DeliverAnswers]) -> None:
        """Run all rewarded answers through the pipeline, after the earlier deliveries have ended."""
        self._deliveries.append(request)
        if len(self._deliveries) == 1:
            self._start_delivery()

    def _start_delivery(self) -> None:
        """Have a thread read which answers the first request has to deliver, then run the pipeline on them."""
        request, log = self._deliveries[0], self._live.log
        self._live.run_in_thread(
            lambda: (processed_before(log, request.id), log.query(serve_answers.to_deliver)),
            lambda result: self._run_pipeline(request, result),
        )

    def _run_pipeline(
        self, request: CommandRequest[DeliverAnswers],
        result: tuple[dict[str, float] | None, list[serve_answers.AnswerState]] | Exception,
    ) -> None:
        """Run the pipeline on the answers that were read, or end the delivery if there is nothing to do. `result` has
        the answers, and the metrics if an earlier coordinator handled this request (else None)."""
        if isinstance(result, Exception):
            self._end_delivery(request, None, result)
            return
        earlier_metrics, answers = result[0], [a for a in result[1] if a.message not in self._ids_being_rewarded]
        if earlier_metrics is not None or not answers:
            self._end_delivery(request, DeliveredAnswers(count=0, metrics=earlier_metrics or {}))
            return
        answer_by_id = {a.message: a for a in answers}
        self._ids_in_delivery = frozenset(answer_by_id)
        self._run_job("the answers that are rewarded", PipelineJob(
            [a.payload for a in answers if a.payload is not None],
            lambda result: self._on_pipeline_done(request, result),
            prepare=lambda experiences: put_rewards(experiences, answer_by_id),
        ))

    def _on_pipeline_done(self, request: CommandRequest[DeliverAnswers], result: PipelineDone | BaseException) -> None:
        message_ids = sorted(self._ids_in_delivery)
        if isinstance(result, BaseException):
            self._end_delivery(request, None, result)
            return
        processed = ev.ExperiencesProcessed(
            pipeline_metrics=result.metrics, experiences=result.refs, selected=result.selected,
            dropped=result.dropped, request=request.id,
        )
        try:
            self._live.record(processed, ev.AnswersDelivered(messages=message_ids, request=request.id))
        except InvalidEvent as e:  # for instance a metric's name that the log can't hold
            self._end_delivery(request, None, e)
            return
        self._live.when_durable(self._outputs.wake)
        self._end_delivery(request, DeliveredAnswers(count=len(message_ids), metrics=result.metrics))

    def _end_delivery(
        self, request: CommandRequest[DeliverAnswers], value: DeliveredAnswers | None,
        error: BaseException | None = None,
    ) -> None:
        """Answer the request. Once the turn is durable, and so in the table of answers, start the next delivery."""
        self._router.reply(request, value, error)

        def start_next() -> None:
            self._ids_in_delivery = frozenset()
            self._delivery_count += 1
            self._deliveries.popleft()
            if self._deliveries:
                self._start_delivery()

        def fail_all(error: Exception) -> None:
            self._ids_in_delivery = frozenset()
            while self._deliveries:
                self._router.on_turn_lost(self._deliveries.popleft(), error)

        self._live.when_durable(start_next)
        self._live.turn.failure_calls.append(fail_all)

    def _find(self, message_ids: list[str]) -> dict[str, serve_answers.AnswerState]:
        """Return the states of the recorded answers among these message ids. May raise NotRead."""
        # The count is in the key, since a read before the end of the last delivery shows its answers as not delivered.
        log, key = self._live.log, ("answers", self._delivery_count, *message_ids)
        states: dict[str, serve_answers.AnswerState] = self._live.fetch(
            key, lambda: log.query(lambda connection: serve_answers.find(connection, message_ids))
        )
        return states

    def count(self, request: CommandRequest[CountAnswers]) -> None:
        counts = self._live.fetch("answers", lambda: self._live.log.query(serve_answers.counts))
        self._router.answer(request, counts)


def put_rewards(experiences: list[Experience], answer_by_id: dict[str, serve_answers.AnswerState]) -> None:
    """Set the reward, task, run and step of each experience from its answer, whose id is `info["message_id"]`.
    The answers of one run become its steps, in order."""
    steps_by_run: dict[tuple[str, int], dict[str, int]] = {}
    for answer in answer_by_id.values():
        steps = steps_by_run.setdefault((answer.task or answer.message, answer.run or 0), {})
        steps[answer.message] = len(steps)
    for experience in experiences:
        answer = answer_by_id[experience.info["message_id"]]
        experience.reward = answer.reward
        eid = experience.eid
        eid.task, eid.run = answer.task or answer.message, answer.run or 0
        eid.step = steps_by_run[eid.task, eid.run][answer.message]

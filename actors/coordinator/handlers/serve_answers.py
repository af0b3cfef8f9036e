"""Handlers of commands about the proxy's answers in mode `serve`; each can be repeated.

The proxy records an answer before its client gets the end of it. A client rewards it later by message id, and a commit
delivers all rewarded answers through the pipeline.
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
from trinity_es.actors.coordinator.handlers.command_router import Handled, handled
from trinity_es.actors.coordinator.handlers.request_inputs import processed_before
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.coordinator.ports import Responder
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AnswerDelivered, AnswerNotFound, InvalidEvent
from trinity_es.events.experience import Experience
from trinity_es.projections.tables import serve_answers

__all__ = ["BATCH", "AnswerHandlers", "rewarded"]

BATCH = "serve"
"""Batch id of every experience of the proxy."""


class AnswerHandlers:

    def __init__(
        self, live: LiveState, outputs: Outputs, router: Responder, run_job: Callable[[str, PipelineJob], None]
    ) -> None:
        """`run_job` takes the job's name, and runs the pipeline."""
        self._live, self._outputs, self._router, self._run_job = live, outputs, router, run_job
        self._deliveries: deque[CommandRequest[DeliverAnswers]] = deque()
        """Requests for deliveries; the first is in progress."""
        self._round = 0
        """Number of deliveries that have ended."""
        self._rewarding: set[str] = set()
        """Messages whose reward is being written, so they wait for the next delivery."""
        self._delivering: frozenset[str] = frozenset()

    def handlers(self) -> list[Handled]:
        return [
            handled(RecordAnswers, self.record),
            handled(RewardAnswers, self.reward),
            handled(DeliverAnswers, self.deliver),
            handled(CountAnswers, self.count),
        ]

    def record(self, request: CommandRequest[RecordAnswers]) -> None:
        answers = request.command.answers
        recorded = self._find([a.message for a in answers])
        new = [a for a in answers if a.message not in recorded]  # the reply for the others was lost
        if new:
            self._live.record(ev.AnswersRecorded(answers=new))
        self._router.reply(request, len(new))

    def reward(self, request: CommandRequest[RewardAnswers]) -> None:
        """Reward answers: all of them, or none. Raises AnswerNotFound, AnswerDelivered."""
        command = request.command
        messages = list(dict.fromkeys(command.messages))
        event = ev.AnswersRewarded(messages=messages, reward=command.reward, task=command.task, run=command.run)
        states = self._find(messages)
        missing = [m for m in messages if m not in states]
        if missing:
            raise AnswerNotFound(f"no answer has the message id {', '.join(missing[:5])}", messages=missing)
        new = [m for m in messages if (states[m].reward, states[m].task, states[m].run)
               != (event.reward, event.task, event.run)]
        gone = [m for m in new if states[m].delivered or m in self._delivering]
        if gone:
            raise AnswerDelivered(
                f"{', '.join(gone[:5])} went to the pipeline already with another reward, which stays", messages=gone
            )
        if new:
            self._live.record(event)
            self._rewarding.update(new)
            self._live.when_durable(lambda: self._rewarding.difference_update(new))
            self._live.turn.failure_calls.append(lambda _: self._rewarding.difference_update(new))
        self._router.reply(request, len(messages))

    def deliver(self, request: CommandRequest[DeliverAnswers]) -> None:
        """Take all rewarded answers through the pipeline, one delivery at a time."""
        self._deliveries.append(request)
        if len(self._deliveries) == 1:
            self._deliver_next()

    def _deliver_next(self) -> None:
        request, log = self._deliveries[0], self._live.log
        self._live.run_in_thread(
            lambda: (processed_before(log, request.id), log.query(serve_answers.to_deliver)),
            lambda result: self._run_pipeline(request, result),
        )

    def _run_pipeline(
        self, request: CommandRequest[DeliverAnswers],
        result: tuple[dict[str, float] | None, list[serve_answers.AnswerState]] | Exception,
    ) -> None:
        if isinstance(result, Exception):
            self._delivered(request, None, result)
            return
        done_before, ready = result[0], [a for a in result[1] if a.message not in self._rewarding]
        if done_before is not None or not ready:
            self._delivered(request, DeliveredAnswers(count=0, metrics=done_before or {}))
            return
        self._delivering = frozenset(a.message for a in ready)
        refs = [a.payload for a in ready if a.payload is not None]
        by_message = {a.message: a for a in ready}
        self._run_job("the answers that are rewarded", PipelineJob(
            refs,
            lambda result: self._pipeline_done(request, result),
            prepare=lambda experiences: rewarded(experiences, by_message),
        ))

    def _pipeline_done(self, request: CommandRequest[DeliverAnswers], result: PipelineDone | BaseException) -> None:
        messages = sorted(self._delivering)
        if isinstance(result, BaseException):
            self._delivered(request, None, result)
            return
        processed = ev.ExperiencesProcessed(
            pipeline_metrics=result.metrics, experiences=result.refs, selected=result.selected,
            dropped=result.dropped, request=request.id,
        )
        try:
            self._live.record(processed, ev.AnswersDelivered(messages=messages, request=request.id))
        except InvalidEvent as e:  # for instance a metric's name that the log can't hold
            self._delivered(request, None, e)
            return
        self._live.when_durable(self._outputs.wake)
        self._delivered(request, DeliveredAnswers(count=len(messages), metrics=result.metrics))

    def _delivered(
        self, request: CommandRequest[DeliverAnswers], value: DeliveredAnswers | None,
        error: BaseException | None = None,
    ) -> None:
        """Answer, and start the next delivery once this is durable, since the table shows it only then."""
        self._router.reply(request, value, error)

        def over() -> None:
            self._delivering, self._round = frozenset(), self._round + 1
            self._deliveries.popleft()
            if self._deliveries:
                self._deliver_next()

        def lost(error: Exception) -> None:
            self._delivering = frozenset()
            while self._deliveries:
                self._router.lost(self._deliveries.popleft(), error)

        self._live.when_durable(over)
        self._live.turn.failure_calls.append(lost)

    def _find(self, messages: list[str]) -> dict[str, serve_answers.AnswerState]:
        # A read from before the end of the last delivery may show an answer as not delivered.
        log, key = self._live.log, ("answers", self._round, *messages)
        states: dict[str, serve_answers.AnswerState] = self._live.fetch(
            key, lambda: log.query(lambda connection: serve_answers.find(connection, messages))
        )
        return states

    def count(self, request: CommandRequest[CountAnswers]) -> None:
        log = self._live.log
        self._router.answer(request, self._live.fetch("answers", lambda: log.query(serve_answers.counts)))


def rewarded(experiences: list[Experience], by_message: dict[str, serve_answers.AnswerState]) -> None:
    """Put the posted rewards into the proxy's experiences, by `info["message_id"]`.

    The answers of one run become its steps, in order.
    """
    steps: dict[tuple[str, int], dict[str, int]] = {}
    for answer in by_message.values():
        messages = steps.setdefault((answer.task or answer.message, answer.run or 0), {})
        messages[answer.message] = len(messages)
    for experience in experiences:
        answer = by_message[experience.info["message_id"]]
        eid = experience.eid
        experience.reward, eid.task, eid.run = answer.reward, answer.task or answer.message, answer.run or 0
        eid.step = steps[eid.task, eid.run][answer.message]

"""The coordinator's side of mode `serve`: the answers that the proxy gives, and the way to the engines.

Answers: recorded before their clients get the end of them, rewarded later by message id, delivered through the pipeline
when somebody says so. Each of these commands can be sent again and changes nothing then.

Ways: a proxy asks with `routes` which engines serve, and is answered when that changes, or after `POLL_SECONDS`. An
engine that is to load weights is taken out first: it is told to load when every proxy has asked again, and so knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone, PipelineJob
from trinity_es.actors.coordinator.fleet.registry import RunnerRecord
from trinity_es.actors.coordinator.handlers.submitted import processed_before
from trinity_es.actors.messages import Request
from trinity_es.events import codec
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import AnswerDelivered, AnswerNotFound, DataError, InvalidEvent
from trinity_es.events.experience import Experience
from trinity_es.projections.freed_payloads import EXPERIENCES
from trinity_es.projections.tables import answers

if TYPE_CHECKING:
    from trinity_es.actors.coordinator.handlers.batches import Desk

__all__ = ["BATCH", "Served", "rewarded"]

BATCH = "serve"
"""What stands as the batch in the id of every experience of the proxy."""
POLL_SECONDS = 2.0
"""How long a proxy waits for news of the engines before it asks again."""
GONE_SECONDS = 5.0
"""How long a proxy may ask nothing before it is gone."""
TAKEN_OUT_SECONDS = 1.0
"""How long every proxy may take to know that an engine is taken out."""


@dataclass(slots=True)
class _Proxy:
    """A proxy that asks for ways."""

    url: str
    knows: int = -1
    """The newest table that it has."""
    asked_at: float = 0.0
    request: Request | None = None
    """Its question, where it waits for news."""


class Served:
    """Commands are methods `do_<command>(request)`, for the desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._book, self._crew, self._actor = desk, desk.book, desk.crew, desk.actor
        self._deliveries: deque[Request] = deque()
        """The first is being done."""
        self._round = 0
        """Deliveries that have ended."""
        self._rewarding: set[str] = set()
        """Messages whose reward is on its way into the log: they wait for the next delivery."""
        self._delivering: frozenset[str] = frozenset()
        self._table: list[dict[str, Any]] = []
        self._number = int(self._actor.now() * 1e6)  # none that a proxy has of an earlier coordinator
        self._proxies: dict[str, _Proxy] = {}
        self._leaving: list[tuple[int, Callable[[], None]]] = []
        """(table in which an engine is taken out, what to do when every proxy has it)."""

    # --- answers ----------------------------------------------------------------------------------------------------
    def do_record_answers(self, request: Request) -> None:
        """`answers`: fields of ev.Answer each."""
        given = [_answer(a) for a in request.args["answers"]]
        known = self._find([a.message for a in given])
        new = [a for a in given if a.message not in known]  # the rest was recorded, and the reply was lost
        if new:
            self._record(answers.STREAM, ev.AnswersRecorded(answers=new))
        self._desk.reply(request, len(new))

    def do_reward_answers(self, request: Request) -> None:
        """`messages, reward, task, run`. Raises AnswerNotFound, AnswerDelivered: then none of them is rewarded."""
        messages: list[str] = list(dict.fromkeys(request.args["messages"]))
        event = ev.AnswersRewarded(
            messages=messages, reward=request.args["reward"], task=request.args["task"], run=request.args["run"]
        )
        known = self._find(messages)
        missing = [m for m in messages if m not in known]
        if missing:
            raise AnswerNotFound(f"no answer has the message id {', '.join(missing[:5])}", messages=missing)
        new = [m for m in messages if (known[m].reward, known[m].task, known[m].run)
               != (event.reward, event.task, event.run)]
        gone = [m for m in new if known[m].delivered or m in self._delivering]
        if gone:
            raise AnswerDelivered(
                f"{', '.join(gone[:5])} went to the pipeline already with another reward, which stays", messages=gone
            )
        if new:
            self._record(answers.STREAM, event)
            self._rewarding.update(new)
            self._book.then(lambda: self._rewarding.difference_update(new))
            self._book.turn.failed.append(lambda _: self._rewarding.difference_update(new))
        self._desk.reply(request, len(messages))

    def do_deliver_answers(self, request: Request) -> None:
        """All that is rewarded goes through the pipeline; what has no reward stays. One delivery at a time."""
        self._deliveries.append(request)
        if len(self._deliveries) == 1:
            self._deliver()

    def _deliver(self) -> None:
        request, log = self._deliveries[0], self._book.log
        self._book.ask(
            lambda: (processed_before(log, request.id), log.query(answers.to_deliver)),
            lambda found: self._go_through(request, found),
        )

    def _go_through(
        self, request: Request, found: tuple[dict[str, float] | None, list[answers.AnswerState]] | Exception
    ) -> None:
        """Give the pipeline what is rewarded."""
        if isinstance(found, Exception):
            self._delivered(request, None, found)
            return
        done_before, ready = found[0], [a for a in found[1] if a.message not in self._rewarding]
        if done_before is not None or not ready:
            self._delivered(request, {"count": 0, "metrics": done_before or {}})
            return
        self._delivering = frozenset(a.message for a in ready)
        refs = [a.payload for a in ready if a.payload is not None]
        by_message = {a.message: a for a in ready}
        self._desk.run_job("the answers that are rewarded", PipelineJob(
            refs,
            lambda result: self._pipeline_done(request, result),
            prepare=lambda experiences: rewarded(experiences, by_message),
        ))

    def _pipeline_done(self, request: Request, result: PipelineDone | BaseException) -> None:
        messages = sorted(self._delivering)
        if isinstance(result, BaseException):
            self._delivered(request, None, result)
            return
        processed = ev.ExperiencesProcessed(
            pipeline_metrics=result.metrics, experiences=result.refs, selected=result.selected,
            dropped=result.dropped, request=request.id,
        )
        try:
            codec.check(processed)
        except InvalidEvent as e:  # a metric's name that is no text for the log, say
            self._delivered(request, None, e)
            return
        self._record(EXPERIENCES, processed)
        self._record(answers.STREAM, ev.AnswersDelivered(messages=messages, request=request.id))
        self._book.then(self._desk.outputs.wake)
        self._delivered(request, {"count": len(messages), "metrics": result.metrics})

    def _delivered(self, request: Request, value: Any, error: BaseException | None = None) -> None:
        """Answer, and go on with the next when it is durable, since the table says only then what is delivered."""
        self._desk.reply(request, value, error)

        def over() -> None:
            self._delivering, self._round = frozenset(), self._round + 1
            self._deliveries.popleft()
            if self._deliveries:
                self._deliver()

        def lost(error: Exception) -> None:
            self._delivering = frozenset()
            while self._deliveries:
                self._desk.lost(self._deliveries.popleft(), error)

        self._book.then(over)
        self._book.turn.failed.append(lost)

    def _find(self, messages: list[str]) -> dict[str, answers.AnswerState]:
        # What was read before the last delivery ended may say of an answer that it is not delivered.
        log, key = self._book.log, ("answers", self._round, *messages)
        found: dict[str, answers.AnswerState] = self._book.fetch(
            key, lambda: log.query(lambda connection: answers.find(connection, messages))
        )
        return found

    def _record(self, stream: str, event: ev.Event) -> None:
        codec.check(event)
        self._book.record(stream, [event])

    def do_answers(self, request: Request) -> None:
        """Count the answers: `recorded`, `rewarded`, `delivered`."""
        log = self._book.log
        self._desk.answer(request, self._book.fetch("answers", lambda: log.query(answers.counts)))

    # --- ways -------------------------------------------------------------------------------------------------------
    def do_routes(self, request: Request) -> None:
        """`proxy, url, knows`: who asks, where it serves, and the number of the table that it has.

        Answers with `number` and `engines`.
        """
        proxy = self._proxies.setdefault(request.args["proxy"], _Proxy(request.args["url"]))
        self.look()
        proxy.knows, proxy.asked_at, proxy.request = request.args["knows"], self._actor.now(), request
        self._actor.after(POLL_SECONDS, f"routes:{request.args['proxy']}", lambda: self._tell(proxy))
        if proxy.knows != self._number:
            self._tell(proxy)
        self._let_go()

    def _tell(self, proxy: _Proxy) -> None:
        request, proxy.request = proxy.request, None
        if request is not None:
            self._actor.cancel(f"routes:{request.args['proxy']}")
            self._desk.answer(request, {"number": self._number, "engines": self._table})

    def look(self) -> None:
        """Tell the proxies, at the end of a turn, what has changed."""
        if not self._proxies:
            return
        table = [_way(r) for r in self._crew.rollout() if r.state == "ready" and r.served]
        if table != self._table:
            self._table, self._number = table, self._number + 1
            for proxy in self._proxies.values():
                self._tell(proxy)

    def urls(self) -> list[str]:
        """Return where proxies serve now."""
        now = self._actor.now()
        return sorted(p.url for p in self._proxies.values() if p.url and now - p.asked_at < GONE_SECONDS)

    def take_out(self, load: Callable[[], None]) -> None:
        """Call `load` when no proxy sends anything new to a runner that was marked as loading."""
        self.look()
        number = self._number
        self._leaving.append((number, load))
        self._actor.after(TAKEN_OUT_SECONDS, f"taken out:{number}", lambda: self._let_go(number))
        self._let_go()

    def _let_go(self, overdue: int = -1) -> None:
        """Have those load that every proxy knows of, and those that were taken out long enough ago."""
        now = self._actor.now()
        self._proxies = {name: p for name, p in self._proxies.items() if now - p.asked_at < GONE_SECONDS}
        known = min((p.knows for p in self._proxies.values()), default=self._number)
        due = [load for number, load in self._leaving if number <= max(known, overdue)]
        self._leaving = [(number, load) for number, load in self._leaving if number > max(known, overdue)]
        for load in due:
            load()


def rewarded(experiences: list[Experience], by_message: dict[str, answers.AnswerState]) -> None:
    """Write into experiences of the proxy what was posted for them. Each knows its message: `info["message_id"]`.

    The answers of one run are its steps, in the order in which they were given.
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


def _answer(fields: dict[str, Any]) -> ev.Answer:
    ref = fields["payload"]
    try:
        return ev.Answer(**{**fields, "payload": None if ref is None else ev.PayloadRef(**ref)})
    except TypeError as e:
        raise DataError(f"this is no answer: {e}") from e


def _way(runner: RunnerRecord) -> dict[str, Any]:
    return {
        "runner": runner.name, "incarnation": runner.incarnation, "endpoint": runner.endpoint,
        "model_version": runner.model_version, "serving": runner.loading is None,
    }

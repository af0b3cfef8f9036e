"""Mode `serve` on the coordinator's side: answers and their rewards, and which engine may load weights when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from tests.helpers.answers import evolve_answers, fold_answers
from tests.helpers.live_log import LiveLog
from trinity_es.actors.commands import (
    Command,
    CommandRequest,
    DeliverAnswers,
    GetRoutes,
    RecordAnswers,
    RewardAnswers,
)
from trinity_es.actors.coordinator.decisions.rolling_update import EngineStatus, next_to_load
from trinity_es.actors.coordinator.delivery.pipeline_thread import PipelineDone
from trinity_es.actors.coordinator.fleet.dispatcher import Dispatcher
from trinity_es.actors.coordinator.fleet.registry import RunnerRegistry
from trinity_es.actors.coordinator.fleet.runner_reports import RunnerLifecycle
from trinity_es.actors.coordinator.fleet.weight_loading import Rolling, WeightLoading
from trinity_es.actors.coordinator.handlers.serve_answers import AnswerHandlers, put_rewards
from trinity_es.actors.coordinator.handlers.serve_routes import RouteHandlers
from trinity_es.actors.coordinator.live_state import LiveState
from trinity_es.actors.messages import LoadWeights, RunnerDied, RunnerStatus, WeightsLoadResult
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import (
    AnswerDelivered,
    AnswerNotFound,
    InvalidEvent,
    LogUnavailable,
    PipelineError,
    TrinityError,
)
from trinity_es.events.experience import EID, Experience
from trinity_es.projections.tables import serve_answers
from trinity_es.projections.tables.serve_answers import STREAM, AnswerState


def answer(message: str, *, digest: str | None = "d", version: int = 0) -> ev.Answer:
    ref = None if digest is None else ev.PayloadRef(digest=digest, first=0, count=1)
    return ev.Answer(
        message=message, runner="runner-0", incarnation=1, model_version=version, model_version_end=version, payload=ref
    )


class Place(LiveLog):
    """The handlers of answers and routes, and the runners."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answered: dict[str, Any] = {}
        self.jobs_run: list[Any] = []
        self.woken = 0
        self.come_up()

    def come_up(self, alive: Iterable[str] = ()) -> None:
        """Another coordinator takes over: nothing that is not in the log is known."""
        registry = RunnerRegistry(self.live, self, clock=lambda: self.clock)
        self.answers = AnswerHandlers(self.live, self, self, self.run_job)  # type: ignore[arg-type]  # it has what is used here
        self.routes = RouteHandlers(registry, self)
        weights = WeightLoading(registry, Rolling(1, self.routes.take_out, alive))
        self.fleet = RunnerLifecycle(registry, weights, Dispatcher(registry))

    # --- the outputs of the pipeline ---
    def wake(self) -> None:
        self.woken += 1

    # --- the router ---
    def run_job(self, key: str, job: Any) -> None:
        self.jobs_run.append(job)

    def on_turn_lost(self, request: CommandRequest[Any], error: Exception) -> None:
        self.answer(request, error=error)

    def answer(self, request: CommandRequest[Any], value: Any = None, error: BaseException | None = None) -> None:
        self.answered[request.id] = value if error is None else error

    def reply(self, request: CommandRequest[Any], value: Any = None, error: BaseException | None = None) -> None:
        self.live.when_durable(lambda: self.answer(request, value, error))

    # --- what a test does ---
    def look(self) -> None:
        self.routes.update()

    def ask(self, id: str, command: Command[Any]) -> Any:
        handlers = {row.command: row.handler for row in [*self.answers.handlers(), *self.routes.handlers()]}
        try:
            handlers[type(command)](CommandRequest(id, command))
        except TrinityError as e:
            self.answered[id] = e
        self.turn()
        return self.answered.get(id)

    def record(self, *messages: str, id: str = "record") -> Any:
        rows = [replace(answer(m), payload=ev.PayloadRef(digest="d", first=i, count=1)) for i, m in enumerate(messages)]
        return self.ask(id, RecordAnswers(answers=rows))

    def reward(self, *messages: str, reward: float = 1.0, task: str | None = None, run: int | None = None) -> Any:
        return self.ask("reward", RewardAnswers(messages=list(messages), reward=reward, task=task, run=run))

    def end(self, job: Any, result: PipelineDone | Exception) -> None:
        job.done(result)
        self.turn()

    def told(self, *statuses: RunnerStatus) -> None:
        for status in statuses:
            self.fleet.on_status(status, status.name)
        self.turn()

    def publish(self, version: int) -> None:
        self.fleet.weights.publish(version, f"/v{version}")
        self.turn()

    def loaded(self, name: str, incarnation: int, version: int, error: str | None = None) -> None:
        self.fleet.weights.on_load_result(WeightsLoadResult(name, incarnation, version, 0.1, error=error))
        self.turn()

    def state(self) -> dict[str, AnswerState]:
        return fold_answers(self.log.read(stream=STREAM))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.close()


# --- answers --------------------------------------------------------------------------------------------------------
MESSAGES = [f"chatcmpl-{i}" for i in range(6)]


@given(st.lists(st.tuples(st.sampled_from(["reward", "deliver"]), st.sets(st.sampled_from(MESSAGES), min_size=1),
                          st.floats(-2, 2), st.sampled_from([None, "a"])), max_size=8))
def test_p36_the_table_of_answers_is_their_fold(steps: list[tuple[str, set[str], float, str | None]]) -> None:
    events: list[ev.Event] = [ev.AnswersRecorded(answers=[answer(m, digest=None if m[-1] == "5" else m)
                                                          for m in MESSAGES])]
    for kind, messages, reward, task in steps:
        chosen = sorted(messages)
        events.append(
            ev.AnswersRewarded(messages=chosen, reward=reward, task=task) if kind == "reward"
            else ev.AnswersDelivered(messages=chosen, request="r")
        )
    state: dict[str, AnswerState] = {}
    delivered: set[str] = set()
    with create_engine("sqlite://").connect() as connection:
        serve_answers.metadata.create_all(connection)
        for event in events:
            if isinstance(event, ev.AnswersRewarded) and delivered & set(event.messages):
                continue  # the coordinator refuses it
            if isinstance(event, ev.AnswersDelivered):
                delivered |= set(event.messages)
            serve_answers.apply(connection, event)
            evolve_answers(state, event)
        assert serve_answers.find(connection, MESSAGES) == state
        ready = [s for s in state.values() if s.reward is not None and not s.delivered]
        assert serve_answers.to_deliver(connection) == ready
        counted = serve_answers.counts(connection)
    assert counted["delivered"] == len(delivered)
    assert sum(counted.values()) == len(MESSAGES)


def test_p36_an_answer_is_recorded_once_and_a_reward_is_for_all_of_its_messages_or_for_none(place: Place) -> None:
    assert place.record("a", "b") == 2
    assert place.record("b", "c", id="again") == 1  # "b" came twice: its reply was lost
    assert isinstance(place.reward("a", "x"), AnswerNotFound)
    assert place.state()["a"].reward is None
    assert place.reward("a", "a", reward=0.5, task="t", run=3) == 1
    assert place.reward("a", reward=0.5, task="t", run=3) == 1
    assert place.log.stream_version(STREAM) == 3  # said again, it is no event
    assert place.reward("a", reward=0.75) == 1
    assert (place.state()["a"].reward, place.state()["a"].task) == (0.75, None)


def test_p36_a_delivery_takes_what_is_rewarded_and_nothing_twice(place: Place) -> None:
    place.record("a", "b", "c")
    place.reward("a")
    place.reward("b", reward=2.0)
    assert place.ask("one", DeliverAnswers()) is None
    assert place.ask("two", DeliverAnswers()) is None  # waits for the first
    [job] = place.jobs_run
    assert [ref.first for ref in job.refs] == [0, 1]
    assert isinstance(place.reward("a", reward=9.0), AnswerDelivered)  # it is in the pipeline
    assert place.reward("c") == 1  # too late for this one
    place.end(job, PipelineDone({"m": 1.0}, [], 2, 0))
    assert place.answered["one"] == {"count": 2, "metrics": {"m": 1.0}}
    assert place.woken == 1  # there is something to write
    assert [m for m, s in place.state().items() if s.delivered] == ["a", "b"]
    [_, second] = place.jobs_run
    assert [ref.first for ref in second.refs] == [2]
    place.end(second, PipelineError("operator broke"))
    assert isinstance(place.answered["two"], PipelineError)
    assert not place.state()["c"].delivered
    place.ask("three", DeliverAnswers())
    place.end(place.jobs_run[-1], PipelineDone({}, [], 1, 0))
    assert place.answered["three"]["count"] == 1
    # A coordinator that comes later is asked again: that delivery is in the log.
    place.come_up()
    assert place.ask("one", DeliverAnswers()) == {"count": 0, "metrics": {"m": 1.0}}
    assert place.ask("four", DeliverAnswers()) == {"count": 0, "metrics": {}}


def test_p36_what_the_log_can_not_hold_fails_its_delivery_and_no_other(place: Place) -> None:
    place.record("a")
    place.reward("a")
    place.ask("one", DeliverAnswers())
    place.end(place.jobs_run[0], PipelineDone({"\ud800": 1.0}, [], 1, 0))
    assert isinstance(place.answered["one"], InvalidEvent)
    place.ask("two", DeliverAnswers())
    place.end(place.jobs_run[1], PipelineDone({"m": 1.0}, [], 1, 0))
    assert place.answered["two"]["count"] == 1


def test_p36_a_reward_that_is_not_durable_yet_waits_for_the_next_delivery(place: Place) -> None:
    place.record("a", "b")
    place.reward("a", "b")
    changed = RewardAnswers(messages=["a"], reward=9.0, task=None, run=None)
    place.answers.reward(CommandRequest("late", changed))  # its turn is not written yet
    place.answers.deliver(CommandRequest("one", DeliverAnswers()))
    [job] = place.jobs_run
    assert [ref.first for ref in job.refs] == [1]
    place.turn()
    place.end(job, PipelineDone({}, [], 1, 0))
    assert {m: (s.reward, s.delivered) for m, s in place.state().items()} == {"a": (9.0, False), "b": (1.0, True)}


def test_p36_a_delivery_that_can_not_read_the_log_hinders_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.record("a")
    place.reward("a")
    with monkeypatch.context() as patch:
        away = LogUnavailable("away")
        read = "trinity_es.actors.coordinator.handlers.serve_answers.processed_before"
        patch.setattr(read, lambda *_: (_ for _ in ()).throw(away))
        assert isinstance(place.ask("one", DeliverAnswers()), LogUnavailable)
    place.ask("two", DeliverAnswers())
    place.end(place.jobs_run[0], PipelineDone({}, [], 1, 0))
    assert place.answered["two"]["count"] == 1


def test_p36_rewards_are_written_into_experiences_and_the_answers_of_a_run_are_its_steps() -> None:
    def experience(message: str) -> Experience:
        return Experience(eid=EID(batch="serve", task=message), tokens=[1, 2], prompt_length=1,
                          info={"message_id": message})

    def state(message: str, task: str | None, run: int | None) -> AnswerState:
        return AnswerState(message=message, payload=None, model_version=0, reward=1.5, task=task, run=run)

    states = {m: state(m, t, r) for m, t, r in [("a", "t", 1), ("b", None, None), ("c", "t", 1), ("d", "t", 2)]}
    found = [experience(m) for m in "dacba"]
    put_rewards(found, states)
    assert [(e.eid.task, e.eid.run, e.eid.step, e.reward) for e in found] == [
        ("t", 2, 0, 1.5), ("t", 1, 0, 1.5), ("t", 1, 1, 1.5), ("b", 0, 0, 1.5), ("t", 1, 0, 1.5)
    ]


# --- rolling updates ------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=6), st.integers(1, 4), st.booleans())
def test_p36_of_the_engines_that_serve_at_least_so_many_are_left_where_there_are_more(
    flags: list[tuple[bool, bool, bool]], keep: int, all_known: bool
) -> None:
    runners = [EngineStatus(str(i), c, loading and not c, f) for i, (c, loading, f) in enumerate(flags)]
    chosen = next_to_load(runners, keep, all_reported=all_known)
    serving = [r.name for r in runners if not r.is_loading]
    left = len(serving) - len(chosen)
    assert set(chosen) <= {r.name for r in runners if not (r.has_version or r.is_loading or r.has_failed)}
    if chosen:
        alone = len(chosen) == 1 and all_known and not any(r.is_loading for r in runners)
        assert left >= keep or alone
    elif any(not (r.has_version or r.is_loading or r.has_failed) for r in runners) and all_known:
        assert any(r.is_loading for r in runners)  # who waits, waits for somebody


def up(name: str, version: int = 0, incarnation: int = 1, loading: int | None = None) -> RunnerStatus:
    return RunnerStatus(name, incarnation, "ready", 1, "host", "scripted", places=1, model_version=version,
                    loading=loading, endpoint=f"http://{name}")


def ordered(place: Place) -> list[tuple[Any, int]]:
    """Who was told to load what, since the last look."""
    found = [(to, m.version) for to, m in place.sent if isinstance(m, LoadWeights)]
    place.sent.clear()
    return found


def test_p36_engines_load_one_after_the_other_and_a_new_coordinator_goes_on_so(place: Place) -> None:
    place.told(up("a"), up("b"))
    place.publish(1)
    assert ordered(place) == [("a", 1)]
    place.loaded("a", 1, 1)
    assert ordered(place) == [("b", 1)]
    place.loaded("b", 1, 1, "it is broken")
    assert ordered(place) == []  # it is tried again when it announces itself, not at once
    place.told(up("b"))
    assert ordered(place) == [("b", 1)]

    place.live = LiveState(place.log, place.payloads)  # that coordinator died
    place.come_up(alive=["a", "b", "c"])
    place.fleet.weights.publish(2, "/v2")
    place.told(up("a", version=1))
    assert ordered(place) == []  # the others may be loading: it may be the one that serves
    place.told(up("b", loading=1))
    assert ordered(place) == []  # so it is
    place.told(up("c", incarnation=7))  # never had the current weights: nobody misses it
    assert ordered(place) == [("c", 2)]
    place.loaded("b", 1, 1)
    assert ordered(place) == [("a", 2)]  # "b" serves, if not the newest
    place.loaded("a", 1, 2)
    assert ordered(place) == [("b", 2)]
    place.fleet.weights.on_load_result(WeightsLoadResult("c", 7, 2, 0.1))
    place.fleet.on_death(RunnerDied("b", 1, "killed"))
    place.turn()
    assert ordered(place) == []


def test_p36_an_engine_that_leaves_is_none_of_those_that_go_on_serving(place: Place) -> None:
    for name in ("a", "b", "c"):
        place.fleet.on_status(up(name), name)
    place.fleet.registry.leaving = frozenset("c")
    place.turn()
    place.publish(1)
    assert ordered(place) == [("c", 1), ("a", 1)], "c can always be spared"
    place.loaded("c", 1, 1)
    assert ordered(place) == [], "b goes on while a loads: nobody is sent to c"


def test_p36_an_engine_loads_when_every_proxy_knows_that_it_is_taken_out(place: Place) -> None:
    place.told(up("a"), up("b"))
    table = place.ask("ask 1", GetRoutes(proxy="p", url="http://p", knows=-1))
    assert [(e["runner"], e["endpoint"], e["serving"]) for e in table["engines"]] == [
        ("a", "http://a", True), ("b", "http://b", True)
    ]
    assert place.routes.urls() == ["http://p"]
    assert place.ask("ask 2", GetRoutes(proxy="p", url="http://p", knows=table["number"])) is None  # no news
    place.publish(1)
    news = place.answered["ask 2"]
    assert [e["serving"] for e in news["engines"]] == [False, True]
    assert ordered(place) == []  # it may still send it something
    place.ask("ask 3", GetRoutes(proxy="p", url="http://p", knows=news["number"]))
    assert ordered(place) == [("a", 1)]
    place.loaded("a", 1, 1)
    assert [e["serving"] for e in place.answered["ask 3"]["engines"]] == [True, False]
    [overdue] = [call for name, call in place.timers.items() if name.startswith("taken out:")][-1:]
    assert ordered(place) == []
    overdue()  # a proxy that says nothing is not waited for
    assert ordered(place) == [("b", 1)]
    place.clock += 60
    assert place.routes.urls() == []

"""Steps of workflows (promise 12): known ends are not repeated, possibly delivered ones start the run over."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest

from tests.helpers.journals import RUN, Steady, Written
from trinity_es import Task, Workflow
from trinity_es.actors.rollout.model import Model
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.run_journal import RunJournal
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.errors import DataError, EngineError, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.journal import KeptRun, attempt, frames, kept_runs, step, without_open_steps


class Dead(BaseException):
    """The death of the process, as a step sees it."""


def workflow(kept: KeptRun | None, writer: Written | None) -> Workflow:
    journal = None if writer is None else RunJournal(RUN, writer, kept)
    return Workflow(task=Task(), model=Model(cast(Any, Steady()), journal=journal))


async def played(
    sync: bool, kept: KeptRun | None, writer: Written | None, play: Callable[[Callable[..., Any]], Any]
) -> Any:
    """Return what `play` returns when it is given a function that makes steps, in a sync or an async workflow."""
    made = workflow(kept, writer)
    if sync:
        return await asyncio.to_thread(lambda: play(made.step))
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: play(
        lambda *args, **how: asyncio.run_coroutine_threadsafe(made.step_async(*args, **how), loop).result()))


def life(play: Callable[[Callable[..., Any]], Any], kept: KeptRun | None, writer: Written | None, sync: bool) -> Any:
    return asyncio.run(asyncio.wait_for(played(sync, kept, writer, play), 30))


BOTH = pytest.mark.parametrize("sync", [True, False])


async def executed(task: Task, kept: KeptRun | None, writer: Written) -> UnitResult:
    engine = Steady()
    running = asyncio.ensure_future(WorkflowRunner(cast(Any, engine)).execute(
        task, 7, range(1), journal=lambda run: RunJournal(RUN, writer, kept)))
    while not running.done():
        await engine.tick(1)
    return running.result()


@BOTH
def test_trap_5_a_step_that_is_known_to_be_done_is_not_repeated(sync: bool) -> None:
    calls: list[Any] = []

    def send(*what: Any) -> Any:
        calls.append(what)
        return {"receipt": len(calls), "of": what}

    def play(make: Callable[..., Any]) -> Any:
        return [make("send", send, 1, "a"), make("send", send, 2, "a"), make("send", send, 1, "a"),
                make("other", send, 1, "a", idempotent=True)]

    writer, again = Written(), Written()
    first = life(play, None, writer, sync)
    assert first[0] == {"receipt": 1, "of": [1, "a"]}
    assert life(play, writer.kept(), again, sync) == first
    assert calls == [(1, "a"), (2, "a"), (1, "a"), (1, "a")]
    assert again.data == b""


@BOTH
def test_a_step_is_recorded_before_its_function_is_called_and_before_its_value_is_used(sync: bool) -> None:
    writer, seen = Written(), list[tuple[bool, int]]()

    def look() -> None:
        kept = writer.kept()
        seen.extend((s.done, len(kept.steps)) for s in kept.steps.values())

    def play(make: Callable[..., Any]) -> None:
        make("look", look)
        look()

    life(play, None, writer, sync)
    assert seen == [(False, 1), (True, 1)]


@BOTH
def test_trap_5_a_run_with_a_possibly_delivered_step_starts_over_and_names_it(sync: bool) -> None:
    calls: list[str] = []

    def deliver() -> None:
        calls.append("deliver")
        if len(calls) == 2:
            raise Dead

    def play(make: Callable[..., Any]) -> None:
        make("first", calls.append, "first")
        make("deliver it", deliver)

    writer = Written()
    with pytest.raises(Dead):
        life(play, None, writer, sync)
    other = step((*RUN[:3], 1), 1.0, "x 1", 0, done=True, value=2)
    data = without_open_steps(writer.data + other)
    kept = kept_runs([data])
    assert (kept[0].steps, kept[0].calls, kept[0].possibly_delivered) == ({}, {}, ["deliver it"])
    assert kept[1].steps["x 1", 0].value == 2, "another run of the unit keeps its steps"
    life(play, kept[0], Written(), sync)
    assert calls == ["first", "deliver", "first", "deliver"]
    twice = without_open_steps(data + step(RUN, 5.0, "y 1", 0, done=False))
    assert kept_runs([twice])[0].possibly_delivered == ["deliver it", "y"]


@BOTH
def test_trap_5_an_idempotent_step_without_an_end_is_done_again_and_the_rest_is_kept(sync: bool) -> None:
    calls: list[str] = []

    def put() -> None:
        calls.append("put")
        if len(calls) == 2:
            raise Dead

    def play(make: Callable[..., Any]) -> None:
        make("first", calls.append, "first")
        make("put", put, idempotent=True)

    writer = Written()
    with pytest.raises(Dead):
        life(play, None, writer, sync)
    assert without_open_steps(writer.data) == writer.data
    life(play, writer.kept(), Written(), sync)
    assert calls == ["first", "put", "put"]


class OwnError(Exception):
    pass


@BOTH
@pytest.mark.parametrize(("error", "expected"), [
    (KeyError("a"), (KeyError, "'a'")), (DataError("bad", field="x"), (DataError, "bad")),
    (OwnError("\ud800"), (Exception, "OwnError: '\\ud800'")),
])
def test_the_error_of_a_step_stays_the_one(sync: bool, error: Exception, expected: tuple[type[Exception], str]) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise error

    def play(make: Callable[..., Any]) -> tuple[type[Exception], str, Any]:
        try:
            make("fail", fail)
        except Exception as e:
            return type(e), str(e), getattr(e, "details", None)
        raise AssertionError("no error")

    writer = Written()
    first = life(play, None, writer, sync)
    assert issubclass(first[0], expected[0])
    assert first[1] == expected[1]
    assert life(play, writer.kept(), Written(), sync) == first
    assert calls == [1]


def test_a_failure_of_the_infrastructure_is_not_kept_as_the_value_of_a_step() -> None:
    def fail() -> None:
        raise EngineError("the judge is away")

    writer = Written()
    with pytest.raises(EngineError):
        life(lambda make: make("judge", fail, idempotent=True), None, writer, True)
    assert life(lambda make: make("judge", lambda: 3, idempotent=True), writer.kept(), Written(), True) == 3


@BOTH
@pytest.mark.parametrize("writer", [None, Written()])
def test_what_is_no_plain_json_or_no_function_names_the_step(sync: bool, writer: Written | None) -> None:
    calls: list[Any] = []
    with pytest.raises(WorkflowError, match=r"the arguments of step 'pay' must be plain JSON, but \[1\] is a object"):
        life(lambda make: make("pay", calls.append, 1, object()), None, writer, sync)
    assert calls == []
    with pytest.raises(WorkflowError, match=r"the value of step 'pay' must be plain JSON, but \.at is a set"):
        life(lambda make: make("pay", lambda: {"at": {1}}), None, writer, sync)
    with pytest.raises(WorkflowError, match=r"step 'pay' needs a function, and got 3: give the function and its arg"):
        life(lambda make: make("pay", 3), None, writer, sync)


async def test_an_async_step_takes_async_functions_and_steps_side_by_side_find_their_values() -> None:
    calls: list[int] = []

    async def fetch(page: int) -> int:
        await asyncio.sleep(0.01 * (3 - page))
        calls.append(page)
        return page * 10

    async def play(kept: KeptRun | None, writer: Written) -> list[int]:
        made = workflow(kept, writer)
        return list(await asyncio.gather(*(made.step_async("fetch", fetch, page) for page in range(3))))

    writer = Written()
    assert await play(None, writer) == [0, 10, 20]
    assert await play(writer.kept(), Written()) == [0, 10, 20]
    assert sorted(calls) == [0, 1, 2]


async def test_a_blocking_step_on_an_event_loop_says_what_to_await() -> None:
    with pytest.raises(WorkflowError, match="await step_async"):
        workflow(None, None).step("send", time.time)


async def test_trap_6_time_and_chance_are_the_same_in_each_life(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    seen: list[Any] = []

    class Draws(Workflow):
        is_async = True

        async def run_async(self) -> list[Experience]:
            draws = [self.random.random(), self.random.randrange(1000)]
            seen.append((draws, await self.now_async(), await self.now_async()))
            return await self.model.generate_async([1], max_tokens=1, n=1)  # type: ignore[no-any-return]

    writer = Written()
    for task_id, kept, out in ((0, None, writer), (0, writer.kept, Written()), (1, None, Written())):
        done = await executed(Task(workflow=Draws, task_id=task_id), kept and kept(), out)
        assert done.failures == []
    first, again, other = seen
    assert again == first
    assert first[1] < first[2]
    assert other[0] != first[0]
    assert other[1] > first[2]


async def test_experiences_of_a_run_that_started_over_name_the_step() -> None:
    class One(Workflow):
        is_async = True

        async def run_async(self) -> list[Experience]:
            return await self.model.generate_async([1], max_tokens=1, n=1)  # type: ignore[no-any-return]

    [experience] = (await executed(Task(workflow=One), KeptRun(possibly_delivered=["pay"]), Written())).experiences
    assert experience.info["possibly_delivered"] == ["pay"]
    [experience] = (await executed(Task(workflow=One), KeptRun(), Written())).experiences
    assert "possibly_delivered" not in experience.info


@BOTH
def test_without_a_journal_steps_call_their_functions(sync: bool) -> None:
    assert life(lambda make: make("add", lambda a, b: (a + b,), 1, 2), None, None, sync) == [3]
    alone = Workflow(task=Task(), model=None)
    assert alone.step("add", lambda: 3) == 3
    assert alone.now() > 0
    assert alone.random.random() != alone.random.random()


def test_a_later_attempt_of_the_same_life_begins_with_a_record() -> None:
    [(head, _, _)] = frames(attempt(RUN, 2))
    assert head == {"run": list(RUN), "attempt": 2}


class Mortal(Written):
    """A process that dies before or after its nth write or effect; a write that it dies before is lost."""

    def __init__(self, dies: int) -> None:
        super().__init__()
        self.left = dies

    def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Dead

    async def write(self, records: Sequence[bytes], *, durable: bool = False) -> None:
        self.pass_by()
        await super().write(records, durable=durable)
        self.pass_by()


def test_trap_5_of_1000_deaths_none_repeats_a_known_step_unless_its_run_started_over_and_names_why() -> None:
    names, chance, over, deaths = [f"step {number}" for number in range(4)], random.Random(3), 0, 0

    def do(name: str, writer: Mortal, effects: Counter[str]) -> int:
        writer.pass_by()
        effects[name] += 1
        writer.pass_by()
        return effects[name]

    async def play(writer: Mortal, kept: KeptRun | None, effects: Counter[str]) -> list[int]:
        made = workflow(kept, writer)
        return [await made.step_async(name, partial(do, name, writer, effects)) for name in names]

    while deaths < 1000:
        effects, data, values, named = Counter[str](), b"", list[int](), 0
        before = effects.copy()
        while not values:
            writer = Mortal(chance.randrange(1, 40))
            try:
                values = asyncio.run(play(writer, kept_runs([data]).get(0), effects))
            except Dead:
                deaths += 1
                data = without_open_steps(data + writer.data)
            repeated = max((effects - before).values(), default=0)
            assert repeated <= 1, "a step was done twice in a run that had not started over"
            if named < (named := len(kept_runs([data]).get(0, KeptRun()).possibly_delivered)):
                before = effects.copy()
        assert values == [effects[name] for name in names], "the value of the last time"
        over += named
    assert over > 100

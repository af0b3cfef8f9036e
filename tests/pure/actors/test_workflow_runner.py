"""A task is run on an engine, in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.recorded_engine import Recorder
from trinity_es import AsyncSimpleWorkflow, SimpleWorkflow
from trinity_es.actors.commands import AcknowledgeBatch
from trinity_es.actors.commands.fields import read_fields
from trinity_es.actors.engines.interface import EngineConfig, Sampling
from trinity_es.actors.plugin_lookup import resolve
from trinity_es.actors.rollout.result import UnitResult
from trinity_es.actors.rollout.workflow_runner import RUNS_AT_ONCE, WorkflowRunner
from trinity_es.events.errors import DataError, EngineError, UnknownWorkflow
from trinity_es.events.experience import EID, Experience
from trinity_es.events.values import Task
from trinity_es.events.vocabulary import RunResult
from trinity_es.testing import ManualClock, ScriptedEngine, SleepWorkflow
from trinity_es.workflows.workflow import Workflow


def runner(**options: Any) -> WorkflowRunner:
    return WorkflowRunner(ScriptedEngine(EngineConfig(model_path="", initial_version=3)), **options)


def one() -> Experience:
    return Experience(eid=EID(), tokens=[1, 2, 3], prompt_length=1, reward=0.5, metrics={"score": 2.0})


def half(response: str) -> float:
    return 0.5


class Repeats(Workflow):
    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        found = []
        for i in range(self.repeat_times):
            experience = one()
            experience.eid.run = self.run_id_base + i
            found.append(experience)
        return found


class FailsOnTheSecond(Workflow):
    is_async = True
    built = 0

    async def run_async(self) -> list[Experience]:
        type(self).built += 1
        if type(self).built % 3 == 2:
            raise RuntimeError("the second one")
        return [one()]


class Returns(Workflow):
    is_async = True

    async def run_async(self) -> Any:
        return self.task.workflow_args["it"]


def saying(*each: dict[str, Any]) -> Task:
    """Return the task of a workflow whose run gives an experience with each of these metrics."""
    told = [one() for _ in each]
    for experience, metrics in zip(told, each, strict=True):
        experience.metrics = metrics
    return Task(workflow=Returns, workflow_args={"it": told})


class Blocking(Workflow):
    def run(self) -> list[Experience]:
        [experience] = self.model.chat([{"role": "user", "content": "hello"}], max_tokens=4)
        experience.reward = 1.0
        return [experience]


class DeadEngine(ScriptedEngine):
    async def generate(self, *_: Any) -> Any:
        raise EngineError("the core is gone", dead=True)


def test_p8_a_run_is_stamped_with_where_it_is_from_and_which_weights_made_it() -> None:
    clock = ManualClock()
    task = Task(workflow=Repeats, index={"taskset": "t", "index": 7}, task_id=4)
    status, experiences = asyncio.run(runner(clock=clock).run_task(task, 12, repeat_times=2, run_id_base=6))
    assert (status.ok, status.completed_runs, status.total_runs) == (True, 2, 2)
    assert [(e.eid.batch, e.eid.task, e.eid.run) for e in experiences] == [(12, 4, 6), (12, 4, 7)]
    for e in experiences:
        assert e.info["model_version"] == 3
        assert e.info["model_version_drift"] == 0
        assert e.info["task_index"] == {"taskset": "t", "index": 7}
        assert e.info["use_count"] == 0
    assert status.metrics[0] == {"score": 2.0, "reward": 0.5, "time/run_execution": 0.0}


def test_a_run_s_reward_is_the_one_that_it_is_trained_with_whatever_its_workflow_calls_by_that_name() -> None:
    status, experiences = asyncio.run(runner().run_task(saying({"reward": 7.0}, {"reward:mean": 8.0}), 1))
    assert [e.reward for e in experiences] == [0.5, 0.5]
    assert status.metrics[0]["reward"] == 0.5


class TwoVersions(Workflow):
    """Asks once before and once after a change of weights; and makes an experience that says nothing of versions."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        found = await self.model.chat_async([{"role": "user", "content": "hello"}], max_tokens=4)
        self.model.engine.model_version += 1
        found += await self.model.chat_async([{"role": "user", "content": "hello"}], max_tokens=4)
        found.append(Experience(tokens=[1, 2], prompt_length=1))
        for step, experience in enumerate(found):
            experience.reward, experience.eid.step = 1.0, step
        self.model.engine.model_version += 1
        return found


def test_p9_an_experience_is_stamped_with_the_weights_that_made_its_own_tokens() -> None:
    _, experiences = asyncio.run(runner().run_task(Task(workflow=TwoVersions), 1))
    stamps = [(e.info["model_version"], e.info["model_version_drift"]) for e in experiences]
    assert stamps == [(3, 2), (4, 1), (3, 2)]
    assert [e.model_versions for e in experiences] == [(3, 3), (4, 4), (3, 5)]


def test_p8_evals_return_no_experiences() -> None:
    status, experiences = asyncio.run(runner().run_task(Task(workflow=Repeats, is_eval=True), "1/x", 2))
    assert (status.ok, experiences) == (True, [])


@pytest.mark.parametrize("mode", ["sequential", "asynchronous", "multi-threading"])
def test_p10_one_failed_run_does_not_lose_its_group(mode: str) -> None:
    FailsOnTheSecond.built = 0
    done: UnitResult = asyncio.run(runner(concurrent_mode=mode).execute(Task(workflow=FailsOnTheSecond), 1, range(3)))
    assert [r.run for r in done.results] == [0, 2]
    [(run, kind, message)] = done.failures
    assert (run, kind) == (1, "workflow")
    assert "the second one" in message


@pytest.mark.parametrize(("it", "says"), [
    ([one(), 2], "Returns returned a list whose item 1 is of type int: a list of Experience is expected"),
    ([], "Returns completed without an experience"),
])
def test_p8_what_a_run_returns_that_is_no_list_of_experiences_is_its_failure(it: list[Any], says: str) -> None:
    done = asyncio.run(runner().execute(Task(workflow=Returns, workflow_args={"it": it}), 1, range(1)))
    [(_, kind, message)] = done.failures
    assert kind == "workflow"
    assert says in message


def test_p9_a_sync_workflow_talks_to_the_model_from_its_thread() -> None:
    status, [experience] = asyncio.run(runner().run_task(Task(workflow=Blocking), 1))
    assert status.ok
    assert experience.tokens.size - experience.prompt_length == 4


def test_p12_a_run_that_takes_too_long_is_stopped_and_its_kind_is_timeout() -> None:
    task = Task(workflow=SleepWorkflow, workflow_args={"seconds": 60})
    done = asyncio.run(runner(timeout=0.05).execute(task, 1, range(1)))
    assert done.failures == [(0, "timeout", "no end after 0.05 s (max_timeout)")]


def test_a_dead_engine_is_infrastructure_and_the_runner_is_told() -> None:
    workflows = WorkflowRunner(DeadEngine(EngineConfig(model_path="")))
    done = asyncio.run(workflows.execute(Task(workflow=Blocking), 1, range(1)))
    assert [f[1] for f in done.failures] == ["infra"]
    assert workflows.engine_dead == "the core is gone"


def test_a_seed_differs_from_run_to_run_and_is_the_same_again() -> None:
    def answers() -> list[list[int]]:
        task = Task(workflow=Blocking, rollout_args={"seed": 5})
        _, experiences = asyncio.run(runner().run_task(task, 1, repeat_times=3))
        return [e.tokens.tolist() for e in experiences]

    first = answers()
    assert answers() == first
    assert len({tuple(a) for a in first}) == 3


async def test_an_evals_sampling_is_that_of_no_other_task_of_its_runner_before_beside_or_after_it() -> None:
    """Elsewhere it became that of training from the first eval on (Trinity-RFT 400)."""
    engine = Recorder(response="a")
    runs = WorkflowRunner(engine, defaults={"top_p": 0.5})
    asked = {"train": {"temperature": 1.0, "max_tokens": 9}, "eval": {"temperature": 0.01, "top_p": 0.9}, "other": {}}
    for workflow in (SimpleWorkflow, AsyncSimpleWorkflow):  # the first is reset, and used again
        for _ in range(2):
            await asyncio.gather(*(
                runs.run_task(Task(workflow=workflow, raw_task={"prompt": name}, reward_fn=half,
                                   rollout_args=args, is_eval=name == "eval"), 1, 2)
                for name, args in asked.items()
            ))
    found: dict[str, set[tuple[float, float, int]]] = {}
    for prompt, s in engine.asked:
        text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
        [name] = [name for name in asked if name in text]
        found.setdefault(name, set()).add((s.temperature, s.top_p, s.max_tokens))
    longest = Sampling().max_tokens
    assert found == {"train": {(1.0, 0.5, 9)}, "eval": {(0.01, 0.9, longest)}, "other": {(1.0, 0.5, longest)}}


def test_an_unknown_name_says_what_is_known_and_what_to_do() -> None:
    with pytest.raises(UnknownWorkflow, match=r"known: a.*module:name"):
        resolve("b", {"a": "x:Y"}, "workflow")
    with pytest.raises(UnknownWorkflow, match="can't be imported"):
        resolve("nowhere:Y", {}, "workflow")


class ChangesItsRow(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await asyncio.sleep(0)
        row, args, found = self.task.raw_task or {}, self.task.workflow_args, one()
        found.info = {"seen": [row.pop("answer"), len(row["tags"]), args.pop("k")]}
        row["tags"].append("seen")
        return [found]


class ChangesItsRowInAThread(ChangesItsRow):
    is_async = False

    def run(self) -> list[Experience]:
        return asyncio.run(self.run_async())


@pytest.mark.parametrize("workflow", [ChangesItsRow, ChangesItsRowInAThread])
@pytest.mark.parametrize("mode", ["sequential", "asynchronous"])
def test_each_run_has_a_task_of_its_own(workflow: type[Any], mode: str) -> None:
    row = {"answer": "4", "tags": ["a"]}
    task = Task(workflow=workflow, raw_task=row, workflow_args={"k": 1})
    done = asyncio.run(runner(concurrent_mode=mode).execute(task, 1, range(3)))
    assert [f[2] for f in done.failures] == []
    assert [e.info["seen"] for e in done.experiences] == [["4", 1, 1]] * 3
    status, _ = asyncio.run(runner(concurrent_mode=mode).run_task(task, 1))
    assert status.ok
    assert row == {"answer": "4", "tags": ["a"]}


class Counted(Workflow):
    is_async = True
    begun = playing = most = 0

    async def run_async(self) -> list[Experience]:
        Counted.begun += 1
        Counted.playing += 1
        Counted.most = max(Counted.most, Counted.playing)
        for _ in range(3):
            await asyncio.sleep(0)
        Counted.playing -= 1
        return [one()]


@pytest.fixture
def counted() -> None:
    Counted.begun = Counted.playing = Counted.most = 0


async def test_a_unit_of_very_many_runs_keeps_no_other_unit_waiting(counted: None) -> None:
    plays = runner()
    many = asyncio.create_task(plays.execute(Task(workflow=Counted), 1, range(5000)))
    while not Counted.begun:
        await asyncio.sleep(0)
    few = await plays.execute(Task(workflow=Repeats), 2, range(4))
    assert len(few.results) == 4
    assert Counted.begun <= 2 * RUNS_AT_ONCE, "all 5000 would begin before the four"
    done = await many
    assert [r.run for r in done.results] == list(range(5000))
    assert [e.eid.run for e in done.experiences] == list(range(5000))
    assert Counted.most <= RUNS_AT_ONCE


async def test_sync_runs_wait_for_a_worker_no_more_than_there_are_workers(counted: None) -> None:
    """The others of a unit would stand before those of all later units."""
    waiting = most = 0

    class Pool:
        places, graders = 3, None

        async def run(self, task: Any, *, runs: range, **_: Any) -> tuple[UnitResult, None]:
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            await asyncio.sleep(0)
            waiting -= 1
            return UnitResult(results=[RunResult(run=runs.start, metrics={})]), None

    done = await runner(workers=Pool()).execute(Task(workflow=SyncOne), 1, range(50))
    assert [r.run for r in done.results] == list(range(50))
    assert most == 3


class SyncOne(Workflow):
    def run(self) -> list[Experience]:
        return [one()]


async def test_failures_of_very_many_runs_cost_no_square_of_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looked through all that was known of the unit: 100,000 runs took hours to fail."""
    looked = 0

    class Known(list[Any]):
        def __iter__(self) -> Any:
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    made = UnitResult.__init__

    def counted(self: UnitResult, **given: Any) -> None:
        made(self, **given)
        self.failures = Known(self.failures)

    monkeypatch.setattr(UnitResult, "__init__", counted)
    done = await runner().execute(Task(workflow=Fails), 1, range(300))
    assert [run for run, _, _ in done.failures] == list(range(300))
    assert looked < 300 * 10


class Fails(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        raise ValueError("no")


def test_a_metric_that_is_no_number_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    task = saying({"score": 2.0, "mood": "high", "times": [1.0, 2.0]})
    done = asyncio.run(runner().execute(task, 1, range(2)))
    assert [set(result.metrics) for result in done.results] == [{"score", "reward", "time/run_execution"}] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "the metric 'mood' of a workflow is a str, not a number: it is left out",
        "the metric 'times' of a workflow is a list, not a number: it is left out",
    ]


def test_two_metrics_that_are_one_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    task = saying({"score": 2.0, "score:mean": 4.0, "score:max": 3.0, "reward:mean": 8.0})
    done = asyncio.run(runner().execute(task, 1, range(2)))
    assert [result.metrics["score"] for result in done.results] == [3.0, 3.0]
    assert [r.getMessage() for r in caplog.records] == [
        "a workflow gives a metric as 'score' and as 'score:mean': their mean is kept"]


@pytest.mark.parametrize(("metrics", "told"), [
    ({"x" * 201: 1.0}, "a metric has a name of 201 characters, 'xxx"),
    ({f"m{i}": 1.0 for i in range(10_001)}, "at most 10,000 are expected"),
    ({"big": 10**5000}, "metrics.big is a int: whole numbers must fit into 64 bits"),
])
def test_metrics_that_a_trainer_may_not_give_either_fail_their_run(metrics: dict[str, float], told: str) -> None:
    [(run, kind, error)] = asyncio.run(runner().execute(saying(metrics), 1, range(1))).failures
    assert (run, kind) == (0, "data")
    assert told in error
    assert len(error) < 400
    if "big" not in metrics:
        with pytest.raises(DataError, match=r"200|10,?000"):
            read_fields(AcknowledgeBatch, "acknowledge", {"batch_id": 1, "step": 1, "metrics": metrics})


async def test_requests_without_a_name_are_given_token_by_token_side_by_side() -> None:
    engine = ScriptedEngine(EngineConfig(model_path="", options={"token_seconds": 0.001}))

    answers = await asyncio.gather(*(engine.generate("question", Sampling(max_tokens=n)) for n in (2, 5)))
    assert [len(answer.token_ids) for [answer] in answers] == [2, 5]

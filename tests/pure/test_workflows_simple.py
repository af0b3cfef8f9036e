"""P2, P9: workflows under the names that users of the known system have subclassed, and what they read of a task;
the script of the scripted engine.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from trinity_es import WORKFLOWS, AsyncSimpleWorkflow, Experience, RewardFn, SimpleWorkflow, Workflow
from trinity_es.actors.engines.interface import EngineConfig, Sampling
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.errors import ConfigError
from trinity_es.events.errors import EngineError, WorkflowError
from trinity_es.events.values import Args, Status, Task, task_from_dict, task_to_dict
from trinity_es.testing import ScriptedEngine
from trinity_es.workflows.rewards import Reward

HERE = "tests.pure.test_workflows_simple"


class Share(RewardFn):
    def __init__(self, scale: float = 1.0, **kwargs: Any) -> None:
        self.scale = scale

    def __call__(self, **kwargs: Any) -> dict[str, float]:
        assert set(kwargs) == {"response", "prompt", "truth", "completion_ids"}
        return {"share": self.scale * kwargs["response"].count(kwargs["truth"]), "bonus": 0.5}


def played(workflow: type[Any] | str, response: str = "aab", runs: int = 3, **fields: Any) -> list[Experience]:
    engine = ScriptedEngine(EngineConfig(model_path="", options={"response": response}))
    fields = {"reward_fn": Share, "reward_fn_args": {"scale": 2.0}, **fields}
    task = Task(workflow=workflow, raw_task={"prompt": "question", "answer": "a"}, **fields)
    status, experiences = asyncio.run(WorkflowRunner(engine).run_task(task, 1, runs, run_id_base=4))
    assert status.ok, status.message
    return experiences


@pytest.mark.parametrize("workflow", [SimpleWorkflow, AsyncSimpleWorkflow])
def test_p9_a_simple_workflow_rewards_every_run(workflow: type[Any]) -> None:
    found = played(workflow)
    assert [e.eid.run for e in found] == [4, 5, 6]
    assert {e.reward for e in found} == {4.5}
    assert found[0].metrics == {"share": 4.0, "bonus": 0.5}


def test_p9_a_simple_workflow_is_found_by_its_registered_name() -> None:
    assert WORKFLOWS.get("simple_workflow") is SimpleWorkflow
    assert WORKFLOWS.get("async_simple_workflow") is AsyncSimpleWorkflow


class Builds(Workflow):
    """Builds its reward itself, as workflows of the known system do."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        assert self.task.reward_fn is Share, self.task.reward_fn
        [answer] = await self.model.chat_async([{"role": "user", "content": "question"}])
        known = {"prompt": "question", "truth": self.task.truth, "completion_ids": []}
        parts = self.task.reward_fn(**self.task.reward_fn_args)(response=answer.response_text, **known)
        answer.reward = sum(parts.values())
        return [answer]


@pytest.mark.parametrize("reward", [Share, f"{HERE}:Share"])
def test_p9_a_workflow_finds_the_class_of_its_reward_in_the_task(reward: Any) -> None:
    assert {e.reward for e in played(Builds, reward_fn=reward)} == {4.5}


def test_p9_messages_have_the_system_prompt_and_the_start_of_the_answer() -> None:
    [one] = played(SimpleWorkflow, runs=1, format_args={"system_prompt": "be brief", "reply_prefix": "well,"})
    assert [(m["role"], m["content"]) for m in one.messages[:3]] == [
        ("system", "be brief"), ("user", "question"), ("assistant", "well,")
    ]


def test_p9_a_task_without_a_reward_is_told() -> None:
    with pytest.raises(AssertionError, match="the task has no reward_fn"):
        played(SimpleWorkflow, reward_fn=None, reward_fn_args={})


def test_p9_a_sampling_of_none_is_that_of_the_task() -> None:
    class Asks(SimpleWorkflow):
        can_repeat = False

        def run(self) -> list[Experience]:
            return self._rewarded(self.model.chat(self.format_messages(), max_tokens=None, temperature=None))

    [one] = played(Asks, response="abcdef", runs=1, rollout_args={"max_tokens": 2})
    assert one.response_text == "ab"


def test_p2_a_task_may_be_built_by_position_and_outside_of_a_runner_has_the_known_defaults() -> None:
    task = Task(SimpleWorkflow, 4, {}, {}, {}, {"scale": 1.0}, True, Share, {"prompt": "q"}, 3, 1, {"index": 0})
    assert task == Task(
        workflow=SimpleWorkflow, repeat_times=4, reward_fn_args={"scale": 1.0}, is_eval=True, reward_fn=Share,
        raw_task={"prompt": "q"}, batch_id=3, task_id=1, index={"index": 0},
    )
    assert task.to_dict() == {"prompt": "q"}
    known = Task().rollout_args, Task().format_args
    assert [a.n for a in known] == [1, 1]  # type: ignore[attr-defined]
    assert Task().format_args.prompt_key == "prompt"  # type: ignore[attr-defined]
    assert known == ({}, {}), "what nobody set is not recorded"
    status = Status(1, 2, [{"reward": 1.0}], "one is late")
    assert status == Status(completed_runs=1, total_runs=2, metrics=[{"reward": 1.0}], message="one is late")


def test_p2_arguments_of_a_task_are_keys_and_attributes() -> None:
    task = Task(format_args={"prompt_key": "q"}, rollout_args={"n": 2})
    assert (task.format_args.prompt_key, task.format_args.system_prompt) == ("q", None)  # type: ignore[attr-defined]
    task.rollout_args.n = 4  # type: ignore[attr-defined]
    assert task.rollout_args == {"n": 4}
    task.rollout_args = {"temperature": 0.5}
    assert task.rollout_args.temperature == 0.5  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="there is no 'temprature' among these arguments: temperature"):
        task.rollout_args.temprature  # type: ignore[attr-defined]  # noqa: B018  # what is tested
    for again in (pickle.loads(pickle.dumps(task)), copy.deepcopy(task), task_from_dict(task_to_dict(task))):
        assert again == task
        assert isinstance(again.rollout_args, Args)


async def test_the_scripted_engine_has_the_room_that_max_model_len_says() -> None:
    engine = ScriptedEngine(EngineConfig(model_path="", max_model_len=8))
    assert [len(c.token_ids) for c in await engine.generate([65] * 5, Sampling(max_tokens=16, n=2))] == [3, 3]
    assert len([piece async for piece in engine.stream([65] * 5, Sampling(max_tokens=16))]) == 3
    with pytest.raises(EngineError, match=r"a prompt of 8 tokens leaves no room .* max_model_len 8") as failed:
        await engine.generate([65] * 8, Sampling())
    assert failed.value.details["refused"]


@dataclass
class Points:
    """A reward that can't be a key, as it is compared by its value."""

    value: float

    def __call__(self, response: str) -> float:
        return self.value * len(response)


def scaled(response: str, scale: float) -> float:
    return scale * len(response)


def test_the_parameters_of_a_reward_are_read_for_each_set_of_preset_names_and_of_any_callable() -> None:
    values: dict[str, Any] = {"response": "abc", "prompt": "", "truth": None}
    for points in (2.0, 3.0):
        assert Reward(Task(reward_fn=Points(points)))(**values) == 3 * points
    assert Reward(Task(reward_fn=scaled, reward_fn_args={"scale": 2.0}))(**values) == 6.0
    with pytest.raises(WorkflowError, match="needs scale"):
        Reward(Task(reward_fn=scaled))(**values)
    assert Reward(Task(reward_fn=scaled, raw_task={"scale": 5.0}))(**values) == 15.0


@pytest.mark.parametrize(("script", "told"), [
    ({"token_seconds": -1}, "token_seconds is -1 in the script: give a number of seconds, at least 0"),
    ({"token_seconds": "abc"}, "token_seconds is 'abc' in the script"),
    ({"load_seconds": float("inf")}, "load_seconds is inf in the script"),
    ({"latency_seconds": [0, "x"]}, r"latency_seconds is \[0, 'x'\] in the script: .*, or two of them"),
    ({"rules": [{}, {"latency_seconds": -2}]}, "latency_seconds is -2 in rule 2 of the script"),
])
def test_a_duration_that_is_none_is_named(script: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ScriptedEngine(EngineConfig(model_path="", options=script))


def test_durations_are_numbers_or_for_latency_two() -> None:
    script = {"token_seconds": 1, "latency_seconds": [0.0, 0.1], "rules": [{"prompt": "a"}]}
    ScriptedEngine(EngineConfig(model_path="", options=script))

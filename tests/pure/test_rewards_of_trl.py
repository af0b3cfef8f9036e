"""Rewards in TRL's form: the same functions, called as its GRPOTrainer calls them, in every workflow of ours."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.reward_forms import FORMS
from tests.helpers.reward_forms import ROW as FORMS_ROW
from tests.helpers.tables import write_parquet
from trinity_es import AsyncSimpleWorkflow, Experience, SimpleWorkflow, SingleTurnWorkflow
from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.actors.engines.interface import EngineConfig
from trinity_es.actors.rollout.workflow_runner import WorkflowRunner
from trinity_es.events.errors import TasksetError
from trinity_es.events.values import Task
from trinity_es.tasksets.taskset import Taskset
from trinity_es.testing import ScriptedEngine

HERE = "tests.pure.test_rewards_of_trl"

WORKFLOWS: list[type[Any]] = [SingleTurnWorkflow, SimpleWorkflow, AsyncSimpleWorkflow]
"""All others, with processes: tests/full/workflows/test_every_reward.py."""
ROW = {"prompt": "How many a?", "answer": "2", "letter": "a"}
CHAT = [{"role": "user", "content": "How many a?"}]


def played(workflow: type[Any], reward: Any, row: dict[str, Any] = ROW, **fields: Any) -> tuple[Any, list[Experience]]:
    engine = ScriptedEngine(EngineConfig(model_path="", options={"response": "aab"}))
    task = Task(workflow=workflow, raw_task=row, reward_fn=reward, **fields)
    return asyncio.run(WorkflowRunner(engine).run_task(task, 1, 2))


def of_messages(prompts: list[Any], completions: list[Any], log_metric: Any, trainer_state: Any) -> list[float]:
    assert prompts == [CHAT]
    log_metric("seen", 1.0)
    return [float(len(completion[0]["content"])) for completion in completions]


def scaled(completions: list[str], scale: float, **kwargs: Any) -> list[float]:
    return [scale * len(text) for text in completions]


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("reward", FORMS)
def test_a_reward_of_any_form_is_called_with_what_it_asks_for(workflow: type[Any], reward: Any) -> None:
    status, found = played(workflow, reward, FORMS_ROW, reward_fn_args=FORMS[reward])
    assert status.ok, status.message
    assert [e.reward for e in found] == [e.metrics.get("reward", e.reward) for e in found] == [3.0, 3.0]


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize(("reward", "fields", "expected"), [
    (of_messages, {"row": {"prompt": CHAT, "completion": "x"}}, 3.0),
    (scaled, {"reward_fn_args": {"scale": 0.5}, "row": {**ROW, "scale": 7.0}}, 1.5),
], ids=["messages", "arguments before columns"])
def test_a_reward_of_trl_is_called_as_trl_calls_it(
    workflow: type[Any], reward: Any, fields: dict[str, Any], expected: float
) -> None:
    status, found = played(workflow, reward, **fields)
    assert status.ok, status.message
    assert [e.reward for e in found] == [expected, expected]


def asks(response: str, difficulty: float) -> float:
    return difficulty


def no_reward(workflow: type[Any], judge: Any) -> str:
    status, found = played(workflow, judge)
    assert not status.ok
    assert found == []
    return str(status.message)


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize(("value", "said"), [
    ([None], "the reward judge returned None for this task"),
    ([1.0, 2.0], r"the reward judge gave \[1.0, 2.0\] for one completion: return a list of one number"),
    (1.0, r"the reward judge gave 1.0 for one completion"),
    ([{"acc": 1.0}], r"the reward judge gave \[{'acc': 1.0}\] for one completion: a reward of TRL's form returns"),
])
def test_what_is_no_reward_is_no_zero(workflow: type[Any], value: Any, said: str) -> None:
    def judge(completions: list[str], **kwargs: Any) -> Any:
        return value

    assert re.search(said, no_reward(workflow, judge))


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize(("value", "said"), [
    ({}, "the reward judge gave {}: return a finite number, or a dict from names to finite numbers with at least one"),
    ({0: 1.0}, "the reward judge gave {0: 1.0}: return a finite number, or a dict"),
    ({"reward": 1.0, "acc": 1.0}, "a sum among them counts twice: return the sum alone, or the parts without it"),
    (10**400, r"the reward judge gave 1000\d*: return a finite number"),
    ("good", "judge gave 'good': return a finite number"), ("1.0", "judge gave '1.0': return a finite number"),
    (float("nan"), "judge gave nan: return a finite number"),
    ({"right": 1.0, "style": None}, "judge gave None as style: return a finite number"),
])
def test_what_is_no_part_is_no_zero(workflow: type[Any], value: Any, said: str) -> None:
    def judge(response: str) -> Any:
        return value

    assert re.search(said, no_reward(workflow, judge))


def of_columns(completions: list[str], difficulty: list[float]) -> list[float]:
    return difficulty


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_parameter_without_a_default_is_a_key_of_the_row(workflow: type[Any]) -> None:
    for row, given in (({**ROW, "difficulty": 3.0}, {}), (ROW, {"difficulty": 3.0})):
        status, found = played(workflow, asks, row, reward_fn_args=given)
        assert status.ok, status.message
        assert {e.reward for e in found} == {3.0}
    for reward in (asks, of_columns):
        said = f"the reward {reward.__name__} needs difficulty, but only .*answer.* are available: set what is"
        assert re.search(said, no_reward(workflow, reward))


@pytest.mark.parametrize(("workflow", "reward", "lacks"), [
    ("single_turn", "asks", "difficulty"), ("async_math_boxed_workflow", "asks", "difficulty"),
    ("single_turn", "of_columns", "difficulty"), ("math_rm_workflow", "of_the_workflow", ""),
    ("simple_workflow", "of_the_workflow", "ground_truth"), (f"{HERE}:Own", "asks", ""),
])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_without_what_its_reward_needs_is_refused_when_its_file_is_opened(
    workflow: str, reward: str, lacks: str, kind: str, tmp_path: Path
) -> None:
    named, file = f"{HERE}:{reward}", tmp_path / f"rows.{kind}"
    for own in (False, True):
        rows: list[dict[str, Any]] = [
            {"prompt": "a", "answer": "b", "difficulty": 1.0}, {"prompt": "c", "answer": "d", "difficulty": None}]
        rows = [{**row, "judge": named} for row in rows] if own else rows
        if kind == "jsonl":
            file.write_text("\n".join(map(json.dumps, rows)))
        else:
            write_parquet(file, rows)
        settings = TasksetConfig.model_validate({
            "name": "x", "path": str(file), "workflow": workflow, "reward_fn": None if own else named,
            "format": {"reward_fn_key": "judge"} if own else {},
        })
        if not lacks:
            assert len(Taskset(settings)) == 2
            continue
        where = "line" if kind == "jsonl" else "row"
        number = (lacks == "difficulty") + (kind == "jsonl")
        with pytest.raises(TasksetError, match=rf"{where} {number}: the reward {named} needs {lacks}, but the row has "
                                               rf"only prompt, answer.*: set {lacks} in reward_fn_args"):
            Taskset(settings)
    given = settings.model_copy(update={"reward_fn_args": {lacks: 1.0}})
    assert len(Taskset(given)) == 2


def of_the_workflow(response: str, ground_truth: str) -> float:
    return 1.0


class Own(SingleTurnWorkflow):
    """Gives its rewards what nobody else knows of."""


def changes_its_column(completions: list[str], tags: list[list[str]], **kwargs: Any) -> list[float]:
    tags[0].append("seen")
    return [float(len(tags[0]))]


def changes_the_truth(response: str, truth: Any, prompt: Any) -> float:
    prompt[0]["content"] += "?"
    return float(truth.pop("target"))


def changes_its_argument(response: str, seen: list[int]) -> float:
    seen.append(1)
    return float(len(seen))


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize(("reward", "fields", "expected"), [
    (changes_its_column, {"row": {**ROW, "tags": ["a"]}}, 2.0),
    (changes_the_truth, {"row": {"prompt": CHAT, "answer": {"target": 3}}}, 3.0),
    (changes_its_argument, {"reward_fn_args": {"seen": []}}, 1.0),
])
def test_a_reward_that_changes_its_row_or_an_argument_changes_it_for_no_other_answer(
    workflow: type[Any], reward: Any, fields: dict[str, Any], expected: float
) -> None:
    status, found = played(workflow, reward, **fields)
    assert status.ok, status.message
    assert [e.reward for e in found] == [expected, expected]
    assert CHAT == [{"role": "user", "content": "How many a?"}]

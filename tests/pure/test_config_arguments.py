"""Arguments in a config that what they are for does not take are refused before anything is started."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from trinity_es.actors.commands.fields import check_tasks
from trinity_es.client import argument_checks
from trinity_es.client.argument_checks import encode_tasks
from trinity_es.config.config import Config, ConfigError
from trinity_es.events.errors import DataError
from trinity_es.events.values import Task, require_batch_id
from trinity_es.workflows.registry import WORKFLOWS
from trinity_es.workflows.simple import SimpleWorkflow

TASKSET = "buffer.explorer_input.tasksets[0]"


class Mine(SimpleWorkflow):
    """A user's own, which takes what it likes."""


class MineThatSays(SimpleWorkflow):
    ARGS = frozenset({"weight"})


class Trainer:
    def __init__(self, model_path: str, *, lr: float = 1e-3, clip: float = 0.2) -> None: ...


class Takes:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class Share:
    def __init__(self, scale: float = 1.0) -> None: ...


def near(response: str, truth: str, *, within: float = 1.0) -> float:
    return 0.0


def problems(folder: Path, taskset: dict[str, Any] | None = None, **more: Any) -> list[str]:
    """Return what `check` says is wrong with a config that has this taskset."""
    (folder / "a.jsonl").write_text("{}")
    tasksets = [] if taskset is None else [{"name": "a", "path": "a.jsonl", **taskset}]
    given = {"explorer": {"rollout_model": {"engine_type": "scripted"}},
             "buffer": {"explorer_input": {"tasksets": tasksets}}, **more}
    try:
        Config.from_dict(given, folder=folder).check()
    except ConfigError as e:
        return [p.replace(str(folder) + os.sep, "") for p in e.details["problems"]]
    return []


@pytest.mark.parametrize(("workflow", "args", "says"), [
    ("math_boxed_workflow", {"with_thinking": True},
     "MathBoxedWorkflow has no argument 'with_thinking'; did you mean with_think?"),
    ("openenv", {"observe": "json:laods"}, "json:laods: json .* has no laods; did you mean loads?"),
    ("openenv", {"parser": "nowhere_to_be_found:f"}, "nowhere_to_be_found:f: importing nowhere_to_be_found failed"),
    ("openenv", {"parser": 3}, '3 is no "module:name"'),
    ("react_workflow", {"tools": ["json:dumps", "json:laods"]}, "json:laods: json .* has no laods; did you mean loads"),
    (f"reward {__name__}:near", {"answer_tag": None},
     "near has no argument 'answer_tag'; it takes response, truth, within"),
    (f"reward {__name__}:near", {"witin": 2.0}, "near has no argument 'witin'; did you mean within?"),
    (f"reward {__name__}:Share", {"scal": 2.0}, "Share has no argument 'scal'; did you mean scale?"),
    ("async_math_boxed_workflow", {"use_bas": 1}, "AsyncMathBoxedWorkflow has no argument 'use_bas'; did you mean use"),
    ("openenv", {"url": "http://h:1", "max_turn": 3}, "OpenEnvWorkflow has no argument 'max_turn'; did you mean max_t"),
    ("openenv", {"qqq": 3}, "OpenEnvWorkflow has no argument 'qqq'; it takes answer_timeout, connect_timeout, headers"),
    ("verifiers", {"env": "letters-env", "confg": 3},
     "VerifiersWorkflow has no argument 'confg'; did you mean config?"),
    ("react_workflow", {"tool": []}, "ReActWorkflow has no argument 'tool'; did you mean tools?"),
    ("single_turn", {"seconds": 3}, "SingleTurnWorkflow has no argument 'seconds'; it takes none: leave it out"),
    (f"{__name__}:MineThatSays", {"wieght": 1}, "MineThatSays has no argument 'wieght'; did you mean weight?"),
])
def test_an_argument_that_a_workflow_or_a_reward_does_not_take_is_refused(
    tmp_path: Path, workflow: str, args: dict[str, Any], says: str
) -> None:
    key = "reward_fn" if workflow.startswith("reward ") else "workflow"
    [problem] = problems(tmp_path, {key: workflow.removeprefix("reward "), f"{key}_args": args})
    assert re.match(f"{re.escape(TASKSET)}.{key}_args.{list(args)[-1]}: {says.replace('?', '[?]')}", problem), problem


@pytest.mark.parametrize(("key", "name", "args"), [
    ("workflow", "math_boxed_workflow", {"with_think": True, "format_score_coef": 0.2, "use_base": True}),
    ("workflow", f"{__name__}:Mine", {"whatever": 1}), ("workflow", f"{__name__}:MineThatSays", {"weight": 2.0}),
    ("workflow", "openenv", {"url": "http://h:1", "observe": "json:dumps", "parser": None}),
    ("workflow", "react_workflow", {"tools": ["json:dumps", "json:loads"], "max_turns": 3}),
    ("workflow", "trinity_es.testing:SleepWorkflow", {"seconds": 1, "mine": 2}),
    ("reward_fn", f"{__name__}:near", {"within": 2.0, "grader_timeout": 3.0}),
    ("reward_fn", f"{__name__}:Share", {"scale": 2.0}), ("reward_fn", f"{__name__}:Takes", {"whatever": 1}),
])
def test_arguments_that_a_workflow_or_a_reward_takes_are_fine_and_so_are_any_of_a_user_s_own(
    tmp_path: Path, key: str, name: str, args: dict[str, Any]
) -> None:
    assert problems(tmp_path, {key: name, f"{key}_args": args}) == []


def test_every_registered_workflow_says_what_it_takes() -> None:
    assert [name for name in WORKFLOWS.names() if WORKFLOWS.get(name).taken_args() is None] == []


def test_the_reward_that_a_workflow_or_reasoning_gym_brings_is_looked_at_too(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, {"workflow": "math_workflow", "reward_fn_args": {"patern": "x"}})
    assert problem == f"{TASKSET}.reward_fn_args.patern: MathRewardFn has no argument 'patern'; did you mean pattern?"
    taskset = {"path": "reasoning_gym:leg_counting", "reward_fn_args": {"answer_tg": None}}
    assert f"{TASKSET}.reward_fn_args.answer_tg: Score has no argument 'answer_tg'; did you mean answer_tag?" in (
        problems(tmp_path, taskset))
    right = {**taskset, "reward_fn_args": {"answer_tag": None}}
    assert [p for p in problems(tmp_path, right) if "reward_fn_args" in p] == []


def test_arguments_for_what_rows_name_themselves_are_not_looked_at(tmp_path: Path) -> None:
    keys = {"workflow_key": "workflow", "reward_fn_key": "reward"}
    taskset = {"workflow_args": {"mine": 1}, "reward_fn": f"{__name__}:near", "reward_fn_args": {"mine": 1}}
    assert len(problems(tmp_path, taskset)) == 2
    assert problems(tmp_path, {**taskset, "format": keys}) == []


def test_all_that_is_wrong_with_a_taskset_is_told_at_once(tmp_path: Path) -> None:
    wrong = {"workflow": "openenv", "workflow_args": {"observ": "json:dumps"}, "reward_fn": f"{__name__}:near",
             "reward_fn_args": {"answer_tag": None}}
    assert len(problems(tmp_path, wrong)) == 2


def test_an_argument_that_a_trainer_does_not_take_is_refused(tmp_path: Path) -> None:
    mine = f"{__name__}:Trainer"
    assert problems(tmp_path, trainer={"class": mine, "args": {"lr": 1e-4, "clp": 1}}) == [
        "trainer.args.clp: Trainer has no argument 'clp'; did you mean clip?"]
    assert problems(tmp_path, trainer={"class": mine, "args": {"model_path": "m"}}) == [
        "trainer.args.model_path: Trainer has no argument 'model_path'; it takes clip, lr"]
    assert problems(tmp_path, trainer={"class": mine, "args": {"lr": 1e-4}}) == []
    assert problems(tmp_path, trainer={"class": f"{__name__}:Takes", "args": {"lrr": 1}}) == []


def test_a_file_where_checkpoints_are_to_lie_is_refused(tmp_path: Path) -> None:
    trainer = {"class": f"{__name__}:Trainer"}
    assert problems(tmp_path, trainer=trainer, checkpoint_root_dir="there") == []
    (tmp_path / "there").touch()
    assert problems(tmp_path, checkpoint_root_dir="there") == [], "nobody writes any"
    [problem] = problems(tmp_path, trainer=trainer, checkpoint_root_dir="there")
    assert problem == "checkpoint_root_dir: there is a file: name a folder"


@pytest.mark.parametrize(("given", "said"), [
    ({"tempreture": 0.7}, "no sampling option is called tempreture; known are temperature, top_p"),
    ({"temperature": -1.0}, "temperature is -1.0: give a number, 0 (greedy) or more"),
    ({"n": True}, "n is True: give an integer, 1 to 4,096"),
])
def test_sampling_that_can_t_be_is_refused_before_a_start(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    [problem] = problems(tmp_path, {"rollout_args": given})
    assert f"{TASKSET}.rollout_args is wrong: {said}" in problem
    with pytest.raises(DataError, match=r"^task 1: rollout_args: ") as refused:
        encode_tasks([Task(workflow=SimpleWorkflow, rollout_args=args) for args in ({"top_k": -1}, given)], Config())
    assert said in str(refused.value)


def test_a_key_of_format_args_that_nothing_reads_is_refused() -> None:
    fine = {"prompt_key": "q", "response_key": "a", "system_prompt": "Be brief.", "reply_prefix": "So:"}
    assert encode_tasks([Task(workflow=SimpleWorkflow, format_args=fine)], Config())[0]["format_args"] == fine
    with pytest.raises(DataError, match=r"task 1: unknown key in format_args: sytem_prompt\. Put arguments of your own "
                                        "workflow into workflow_args; known keys are prompt_key, reply_prefix, "):
        encode_tasks([Task(workflow=SimpleWorkflow, format_args=args) for args in (fine, {"sytem_prompt": "x"})],
                     Config())


# --- what is given in Python ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [True, 10**400, 10**5000, -(10**5000)], ids=["True", "400", "5000", "-5000"])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(DataError, match=r"^timeout is "):
        argument_checks.timeout_seconds(value)
    with pytest.raises(DataError, match=r"^metrics.loss is "):
        argument_checks.number("metrics.loss", value)
    with pytest.raises(DataError, match=r"^step is "):
        argument_checks.whole_number("step", value)
    with pytest.raises(DataError, match=r"^batch_id is "):
        require_batch_id(value)
    with pytest.raises(DataError, match=r"^cursor: "):
        argument_checks.cursors({"epoch": value})


def test_so_many_runs_of_a_task_are_refused_with_the_bounds_that_there_are() -> None:
    with pytest.raises(DataError, match="task 0: repeat_times must be a whole number from 1 to 1000000, not 100000000"):
        check_tasks([{"workflow": "w", "repeat_times": 10**8}])

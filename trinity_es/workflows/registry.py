"""Short names of workflows and rewards: those that come with the package, and those that users register."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from trinity_es.actors.plugins import resolve
from trinity_es.events.errors import UnknownWorkflow
from trinity_es.events.values import class_path

__all__ = ["REWARD_FUNCTIONS", "WORKFLOWS", "WorkflowRegistry", "missing_package"]


class WorkflowRegistry:
    """Short names for classes. A name that has a colon is "module:Class" and needs no registration.

    `what` is what they are of: `workflow` or `reward`.
    """

    def __init__(self, paths: Mapping[str, str] | None = None, what: str = "workflow") -> None:
        self.paths: dict[str, str] = dict(paths or {})
        self.what = what

    def register_module(self, name: str) -> Callable[[Any], Any]:
        """Register a class, as its decorator. Raises UnknownWorkflow when another class has the name already."""

        def add(cls: Any) -> Any:
            path = class_path(cls)
            if self.paths.get(name, path) != path:
                raise UnknownWorkflow(f"{self.what} name {name!r} is taken by {self.paths[name]}: choose another")
            self.paths[name] = path
            return cls

        return add

    def path(self, given: type[Any] | str) -> str:
        """Return the "module:Class" of a class, a registered name or a path.

        Raises UnknownWorkflow if it can't be found.
        """
        name = class_path(given)
        path = self.paths.get(name, name)
        resolve(path, self.paths, self.what)
        return path

    def get(self, name: str) -> type[Any]:
        return resolve(name, self.paths, self.what)

    def names(self) -> list[str]:
        return sorted(self.paths)


_HERE = "trinity_es.workflows"

WORKFLOWS = WorkflowRegistry({
    "single_turn": f"{_HERE}.workflow:SingleTurnWorkflow",
    "simple_workflow": f"{_HERE}.simple:SimpleWorkflow",
    "async_simple_workflow": f"{_HERE}.simple:AsyncSimpleWorkflow",
    "math_workflow": f"{_HERE}.math_workflows:MathWorkflow",
    "async_math_workflow": f"{_HERE}.math_workflows:AsyncMathWorkflow",
    "math_boxed_workflow": f"{_HERE}.math_workflows:MathBoxedWorkflow",
    "async_math_boxed_workflow": f"{_HERE}.math_workflows:AsyncMathBoxedWorkflow",
    "math_eval_workflow": f"{_HERE}.math_workflows:MathEvalWorkflow",
    "async_math_eval_workflow": f"{_HERE}.math_workflows:AsyncMathEvalWorkflow",
    "math_rm_workflow": f"{_HERE}.math_workflows:MathRMWorkflow",
    "async_math_rm_workflow": f"{_HERE}.math_workflows:AsyncMathRMWorkflow",
    "multiple_choice_workflow": f"{_HERE}.choices:MultipleChoiceWorkflow",
    "async_multiple_choice_workflow": f"{_HERE}.choices:AsyncMultipleChoiceWorkflow",
    "code_workflow": f"{_HERE}.code:CodeWorkflow",
    "async_code_workflow": f"{_HERE}.code:AsyncCodeWorkflow",
    "react_workflow": f"{_HERE}.react:ReActWorkflow",
    "verifiers": "trinity_es.environments.verifiers_workflow:VerifiersWorkflow",
    "openenv": "trinity_es.environments.openenv:OpenEnvWorkflow",
})
"""The registry that tasks and tasksets look workflows up in."""

REWARD_FUNCTIONS = WorkflowRegistry({
    "accuracy_reward": f"{_HERE}.math_rewards:AccuracyReward",
    "format_reward": f"{_HERE}.math_rewards:FormatReward",
    "math_reward": f"{_HERE}.math_rewards:MathRewardFn",
    "math_boxed_reward": f"{_HERE}.math_rewards:MathBoxedRewardFn",
    "math_eval_reward": f"{_HERE}.math_rewards:MathEvalRewardFn",
    "math_dapo_reward": f"{_HERE}.math_rewards:MathDAPORewardFn",
    "gsm8k_reward": f"{_HERE}.math_rewards:GSM8KReward",
    "countdown_reward": f"{_HERE}.countdown:CountDownRewardFn",
    "multiple_choice_reward": f"{_HERE}.choices:MultipleChoiceReward",
    "code_reward": f"{_HERE}.code:CodeReward",
}, "reward")
"""The registry that tasks and tasksets look rewards up in."""


def missing_package(workflow: str, reward_fn: str | None) -> str:
    """Return what a workflow with this reward, or without one of the task's, needs and is not here; "" for nothing.

    Raises UnknownWorkflow.
    """
    named = reward_fn or getattr(WORKFLOWS.get(workflow), "default_reward", None)
    module, extra = (getattr(REWARD_FUNCTIONS.get(named), "needs", None) if named else None) or ("", "")
    if not module or importlib.util.find_spec(module) is not None:
        return ""
    return f'{named} needs the package {module}: pip install "trinity-es[{extra}]"'

"""How a reward is called: ours by `response`, `prompt` and `truth`; those of TRL as TRL calls them; and where.

A reward that has a `grader_timeout` (seconds) is called in a process of its own, which is killed then
(`actors/rollout/graders.py`): that is a failure of kind `grader`, and no zero. Others are called where their workflow
plays.

A function (or a callable object) with a parameter `completions` has TRL's form (trl 1.16, `GRPOTrainer.reward_funcs`):
`fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, async or not. It is called with lists of
one: the answer, and each column of the task's row. Where the row's prompt is a list of messages, so is the completion.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson

from trinity_es.events.errors import TaskNotSerializable, WorkflowError
from trinity_es.events.values import Task, class_path, task_to_dict
from trinity_es.workflows.registry import REWARD_FUNCTIONS

__all__ = ["GradedReward", "RewardFn", "TRLReward", "as_parts", "call_of", "reward_of", "rewarded"]

_NO_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Keys of a row that TRL passes on under other names."""


class RewardFn(ABC):
    """A reward: built with `reward_fn_args`, called with `response` and `truth`, gives its parts, which are added."""

    grader_timeout: float | None = None
    """Seconds after which a call is killed, which has a process of its own then; None: it is called in place."""
    grader_imports: str = ""
    """A module that this process has imported beforehand; empty: the reward's own."""

    @abstractmethod
    def __init__(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def reward_of(task: Task, workflow: Any = None) -> Callable[..., Any]:
    """Return what gives a task's reward, called with `response`, `prompt` and `truth` by keyword.

    It is a class's object or a function with its `reward_fn_args`; of TRL's form, a `TRLReward`; with a
    `grader_timeout`, its own or among the arguments, a `GradedReward` of the workflow, where there is one. Raises
    WorkflowError where the task has none.
    """
    if task.reward_fn is None:
        raise WorkflowError("the task has no reward_fn: name one in the taskset, or compute it in your workflow")
    found = REWARD_FUNCTIONS.get(task.reward_fn) if isinstance(task.reward_fn, str) else task.reward_fn
    arguments = dict(task.reward_fn_args)
    timeout = arguments.pop("grader_timeout", getattr(found, "grader_timeout", None))
    if timeout is not None and workflow is not None:
        return GradedReward(task, workflow, timeout, getattr(found, "grader_imports", ""))
    called: Any = found(**arguments) if isinstance(found, type) else functools.partial(found, **arguments)
    taken = _parameters(called)
    return TRLReward(called, taken, task) if "completions" in taken else called


def call_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return a call as a grader gets it: the function's "module:name", and JSON of its arguments.

    Raises WorkflowError for a function that can't be imported by its name, and for arguments that are no plain JSON.
    """
    try:
        path = class_path(function)
    except TaskNotSerializable:
        raise WorkflowError(f"{function!r} can't be graded with: give a function at the top of a module that can be "
                            "imported") from None
    try:
        return path, orjson.dumps([args, kwargs])
    except TypeError as e:
        raise WorkflowError(f"the arguments of the grader {path} must be plain JSON: {e}") from None


class GradedReward:
    """A task's reward, called in a process of its own. What it gives is its parts, or is awaited for them."""

    def __init__(self, task: Task, workflow: Any, timeout: float, imports: str) -> None:
        self._task, self._workflow, self._timeout, self._imports = task, workflow, timeout, imports

    def __call__(self, **said: Any) -> Any:
        """Call it with what is said: plain JSON."""
        task = {name: value for name, value in task_to_dict(self._task).items() if name in _OF_A_REWARD}
        task["reward_fn"] = REWARD_FUNCTIONS.paths.get(task["reward_fn"], task["reward_fn"])
        grade = self._workflow.grade_async if type(self._workflow).is_async else self._workflow.grade
        imports = self._imports or task["reward_fn"]
        return grade(rewarded, task, said, timeout=self._timeout, imports=imports)


_OF_A_REWARD = ("reward_fn", "reward_fn_args", "raw_task", "format_args")
"""Fields of a task that its reward may read."""


def rewarded(task: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts that a task's reward gives: what a grader calls. Raises WorkflowError for what is no number."""
    value = reward_of(Task(**task))(**said)
    parts = as_parts(asyncio.run(_value(value)) if inspect.isawaitable(value) else value)
    wrong = next((name for name, part in parts.items() if not math.isfinite(part)), None)
    if wrong is not None:
        raise WorkflowError(f"the reward {task['reward_fn']} gave {parts[wrong]} as {wrong}: give a finite number")
    return parts


async def _value(value: Awaitable[Any]) -> Any:
    return await value


class TRLReward:
    """A reward of TRL's form, for one task. What it gives is a number, or is awaited for one."""

    def __init__(self, called: Callable[..., Any], taken: Mapping[str, inspect.Parameter], task: Task) -> None:
        self._called, self._task = called, task
        whatever = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
        self._taken = None if whatever else taken

    def __call__(
        self, *, response: str, prompt: Any = None, truth: Any = None, completion_ids: Sequence[int] | None = None
    ) -> Any:
        """Call it with lists of one. `prompt` and `truth` are in its columns, by their names in the row."""
        row, prompt = self._task.raw_task or {}, self._task.task_desc
        whole: Any = [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response
        given: dict[str, Any] = {name: [value] for name, value in row.items() if name not in _NO_COLUMNS}
        given |= {"prompts": [prompt], "completions": [whole], "trainer_state": None,
                  "log_extra": _ignored, "log_metric": _ignored}
        if completion_ids is not None:
            given["completion_ids"] = [[int(token) for token in completion_ids]]
        if isinstance(self._called, functools.partial):  # its own arguments go before columns of these names
            given = {name: value for name, value in given.items() if name not in self._called.keywords}
        if self._taken is not None:
            given = {name: value for name, value in given.items() if name in self._taken}
        said = self._called(**given)
        return _awaited(self._called, said) if inspect.isawaitable(said) else _first(self._called, said)


def _parameters(called: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(called).parameters
    except (TypeError, ValueError):  # of a builtin
        return {}


def _ignored(*what: Any, **more: Any) -> None:
    """Take what TRL would log of a completion: parts of a reward are metrics here."""


async def _awaited(called: Any, said: Awaitable[Any]) -> float:
    return _first(called, await said)


def _first(called: Any, said: Any) -> float:
    named = called.func if isinstance(called, functools.partial) else called
    name = getattr(named, "__name__", type(named).__name__)
    try:
        [reward] = said
    except (TypeError, ValueError):
        raise WorkflowError(f"the reward {name} gave {said!r} for one completion: give a list of one number") from None
    if reward is None:
        raise WorkflowError(f"the reward {name} gave None: it does not apply to this task, so its run has no reward")
    return float(reward)


def as_parts(said: Any) -> dict[str, float]:
    """Return what a reward gave as its parts, which are added up."""
    return {k: float(v) for k, v in said.items()} if isinstance(said, Mapping) else {"reward": float(said)}

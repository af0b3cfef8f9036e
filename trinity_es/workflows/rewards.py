"""How a reward is called: ours by `response`, `prompt` and `truth`; those of TRL as TRL calls them.

A function (or a callable object) with a parameter `completions` has TRL's form (trl 1.16, `GRPOTrainer.reward_funcs`):
`fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, async or not. It is called with lists of
one: the answer, and each column of the task's row. Where the row's prompt is a list of messages, so is the completion.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from trinity_es.actors.plugins import resolve
from trinity_es.events.errors import WorkflowError
from trinity_es.events.values import Task

__all__ = ["TRLReward", "as_parts", "reward_of"]

_NO_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Keys of a row that TRL passes on under other names."""


def reward_of(task: Task) -> Callable[..., Any]:
    """Return what gives a task's reward, called with `response`, `prompt` and `truth` by keyword.

    It is a class's object or a function with its `reward_fn_args`; of TRL's form, a `TRLReward`. Raises WorkflowError
    where the task has none.
    """
    if task.reward_fn is None:
        raise WorkflowError("the task has no reward_fn: name one in the taskset, or compute it in your workflow")
    found: Any = resolve(task.reward_fn, {}, "reward_fn") if isinstance(task.reward_fn, str) else task.reward_fn
    arguments = dict(task.reward_fn_args)
    called = found(**arguments) if isinstance(found, type) else functools.partial(found, **arguments)
    taken = _parameters(called)
    return TRLReward(called, taken, task) if "completions" in taken else called


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

"""Calls of rewards, the same in every workflow: a reward gets the arguments that its signature has.

The arguments are `response`, `prompt`, `truth` (None for a row without an answer), `completion_ids` (the response's
tokens), and values that a workflow adds. All are passed by keyword, and a reward with `**kwargs` gets all of them. Any
other parameter without a default is a key of the task's row. `reward_fn_args` override all of these.

A reward with a `grader_timeout` (seconds) is called in its own process, which is killed after that time
(`actors/rollout/workers/graders.py`). The run then fails with kind `grader` and does not get a zero. Other rewards are
called in the workflow's process.

A reward with a parameter `completions` or `prompts`, or with `completion_ids` and no `response`, has TRL's form (trl
1.16, `GRPOTrainer.reward_funcs`): `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, async or
not. It is called with lists of one: the answer, and each column of the task's row. If the row's prompt is a list of
messages, so is the completion.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from trinity_es.events.errors import GraderError, TaskNotSerializable, WorkflowError
from trinity_es.events.experience import Experience
from trinity_es.events.values import Task, class_path, task_to_dict
from trinity_es.workflows.registry import REWARD_FUNCTIONS

__all__ = [
    "TRL_ARGUMENTS", "Reward", "RewardFn", "answer_values", "as_parts", "call_of", "has_trl_form", "keys_needed",
    "rewarded", "value_of",
]

TRL_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""Arguments of a TRL reward beside the columns of its rows (trl 1.16, `GRPOTrainer._calculate_rewards`)."""
_NO_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Keys of a row that TRL passes on under other names."""


class RewardFn(ABC):
    """Base of reward classes: built with `reward_fn_args`, called for each answer, returning {name: part} to add up."""

    grader_timeout: float | Callable[..., float] | None = None
    """Time limit in seconds of a call, which is then made in a grader process, or a function of `reward_fn_args` that
    returns it. None: no grader process."""
    grader_imports: str = ""
    """Module that the grader process imports beforehand; empty: the reward's own."""
    needs: tuple[str, str] | None = None
    """(module outside the base package, extra that installs it), checked before a run starts."""

    @abstractmethod
    def __init__(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Reward:
    """A task's reward, called by keyword with the values of an answer.

    A call returns a number, a dict of parts to add up, or an awaitable of these. A reward with a `grader_timeout` is
    called in the graders of `workflow`, if there is one. Raises WorkflowError if the task has no reward, and the errors
    of building a class with its `reward_fn_args`.
    """

    def __init__(self, task: Task, workflow: Any = None) -> None:
        if task.reward_fn is None:
            raise WorkflowError("the task has no reward_fn: name one in the taskset, or compute the reward in your "
                                "workflow")
        reward: Any = REWARD_FUNCTIONS.get(task.reward_fn) if isinstance(task.reward_fn, str) else task.reward_fn
        self._name: Any = task.reward_fn
        self._row = task.raw_task or {}
        arguments = dict(task.reward_fn_args)
        timeout = arguments.pop("grader_timeout", getattr(reward, "grader_timeout", None))
        if callable(timeout):
            timeout = timeout(**arguments)
        self._signature = _signature_of(reward, arguments)
        self._function: Any
        if timeout is not None and workflow is not None:
            imports = getattr(reward, "grader_imports", "")
            self._function = functools.partial(_call_in_grader, task, workflow, timeout, imports, self._signature)
        else:
            self._function = reward(**arguments) if isinstance(reward, type) else _Bound(reward, **arguments)
            if self._signature.is_trl:
                self._function = functools.partial(_call_trl_reward, self._function, self._signature, task)

    def __call__(self, *args: Any, **values: Any) -> Any:
        """Call the reward with the values that it has parameters for, and return its result.

        Values of the row and `reward_fn_args` are copied, since a reward may change them in place. `args` are for
        workflows that call their reward by position. Raises WorkflowError if a value is missing.
        """
        row, copied_names = self._row, {"prompt", "truth"}
        if not self._signature.is_trl and not args:
            columns = {name: row[name] for name in self._signature.missing_names(values) if name in row}
            values |= columns
            copied_names |= columns.keys()
            _require_arguments(self._name, self._signature.missing_names(values), [*values, *row])
        values = {name: copy.deepcopy(value) if name in copied_names else value for name, value in values.items()}
        if self._signature.is_trl:
            return self._function(**{name: values[name] for name in ("response", "completion_ids") if name in values})
        return self._function(*args, **self._signature.accepted(values))


def answer_values(answer: Experience) -> dict[str, Any]:
    """Return an answer's arguments for rewards: its text as `response`, its tokens as `completion_ids`."""
    ids = answer.tokens[answer.prompt_length :].tolist()
    return {"response": answer.response_text or "", "completion_ids": ids}


class _Bound(functools.partial[Any]):
    """A function with its `reward_fn_args`, which are copied for each call."""

    def __call__(self, /, *args: Any, **values: Any) -> Any:
        return self.func(*args, **(copy.deepcopy(self.keywords) | values))


@dataclass(frozen=True, slots=True)
class _Signature:
    """Parameters of a reward's call."""

    names: frozenset[str]
    has_kwargs: bool
    preset_names: frozenset[str]
    """Names set by `reward_fn_args`."""
    required_names: tuple[str, ...] = ()
    """Names without a default."""

    def accepted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items()
                if (self.has_kwargs or name in self.names) and name not in self.preset_names}

    def missing_names(self, available: Collection[str]) -> list[str]:
        return [name for name in self.required_names if name not in available and name not in self.preset_names]

    @property
    def is_trl(self) -> bool:
        """True if the reward has TRL's form (see the module's docstring)."""
        names = self.names - self.preset_names
        return bool(names & {"completions", "prompts"}) or ("completion_ids" in names and "response" not in names)


def keys_needed(workflow: Any, reward: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return the keys that a row must have for its reward; [] if the workflow is the user's own.

    `workflow` and `reward` are classes or functions; `arguments`: the `reward_fn_args`.
    """
    is_ready_made = getattr(workflow, "__module__", "").startswith("trinity_es.")
    available = getattr(workflow, "KNOWN_TO_REWARDS", None) if is_ready_made else None
    if available is None:
        return []
    signature = _signature_of(reward, arguments)
    return signature.missing_names(TRL_ARGUMENTS if signature.is_trl else available)


def _require_arguments(reward: Any, missing_names: Collection[str], available: Collection[str]) -> None:
    if missing_names:
        raise WorkflowError(f"the reward {_reward_name(reward)} needs {', '.join(missing_names)}, but only "
                            f"{', '.join(dict.fromkeys(available))} are available: set what is missing in "
                            "reward_fn_args, or add it to the row")


def has_trl_form(reward: Any, arguments: Mapping[str, Any]) -> bool:
    """Return True if a reward has TRL's form. `arguments`: its `reward_fn_args`."""
    return _signature_of(reward, arguments).is_trl


def _signature_of(reward: Any, arguments: Mapping[str, Any]) -> _Signature:
    """Return the parameters of a function, or of a class's `__call__`. `arguments`: the `reward_fn_args`."""
    signature = _signature if isinstance(reward, Hashable) else _signature.__wrapped__
    return signature(reward, frozenset(arguments))


@functools.lru_cache(maxsize=64)  # each answer asks, and `inspect` takes as long as a short answer's other work
def _signature(reward: Any, preset_names: frozenset[str]) -> _Signature:
    is_class = isinstance(reward, type)  # its constructor is called later, so only `__call__` is looked at here
    try:
        signature = inspect.signature(reward.__call__ if is_class else reward)
        parameters = list(signature.parameters.values())[int(is_class) :]  # without `self`
    except (TypeError, ValueError):  # a builtin has no signature: it is taken to accept a reward's usual arguments
        return _Signature(names=frozenset({"response", "prompt", "truth"}), has_kwargs=False, preset_names=frozenset())
    named_parameters = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return _Signature(
        names=frozenset(p.name for p in named_parameters),
        has_kwargs=any(p.kind is p.VAR_KEYWORD for p in parameters),
        preset_names=frozenset() if is_class else preset_names,  # a class gets them in its constructor
        required_names=tuple(p.name for p in named_parameters if p.default is p.empty),
    )


def call_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return a call in the form for a grader process: the function's "module:name", and its arguments as JSON.

    Raises WorkflowError for a function that can't be imported by its name, and for arguments that are not plain JSON.
    """
    try:
        path = class_path(function)
    except TaskNotSerializable:
        raise WorkflowError(f"{function!r} can't be used as a grader: give a function at the top level of a module "
                            "that can be imported") from None
    try:
        return path, orjson.dumps([args, kwargs])
    except TypeError as e:
        raise WorkflowError(f"the arguments of the grader {path} must be plain JSON: {e}") from None


def _call_in_grader(
    task: Task, workflow: Any, timeout: float, imports: str, signature: _Signature, /, **values: Any
) -> Any:
    """Call a task's reward in a grader process. Raises WorkflowError if the reward takes an Experience."""
    fields = {name: value for name, value in task_to_dict(task).items() if name in _REWARD_FIELDS}
    fields["reward_fn"] = REWARD_FUNCTIONS.paths.get(fields["reward_fn"], fields["reward_fn"])
    experiences = {name for name, value in values.items() if isinstance(value, Experience)}
    if refused := experiences & signature.names:
        raise WorkflowError(f"the reward {fields['reward_fn']} takes {', '.join(refused)}, an Experience, which can't "
                            "be sent to the grader's process: take response and completion_ids instead, or leave out "
                            "grader_timeout")
    plain_values = {name: value for name, value in values.items() if name not in experiences}
    grade = workflow.grade_async if type(workflow).is_async else workflow.grade
    return grade(rewarded, fields, plain_values, timeout=timeout, imports=imports or fields["reward_fn"])


_REWARD_FIELDS = ("reward_fn", "reward_fn_args", "raw_task", "format_args")
"""Fields of a task that its reward may read."""


def rewarded(task: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, float]:
    """Call a task's reward with these values, in a grader process, and return its parts.

    Raises GraderError for a value that is not a number, WorkflowError for a number that is not finite.
    """
    value = value_of(Reward(Task(**task))(**values))
    try:
        return as_parts(value, task["reward_fn"])
    except WorkflowError as e:
        if all(isinstance(part, int | float) for part in (value.values() if isinstance(value, Mapping) else [value])):
            raise
        raise GraderError(e.message) from None


def value_of(result: Any) -> Any:
    """Return a reward's result; await it if necessary. Only for threads without an event loop."""

    async def value() -> Any:
        return await result

    return asyncio.run(value()) if inspect.isawaitable(result) else result


def _call_trl_reward(
    function: Callable[..., Any], signature: _Signature, task: Task, /, *, response: str,
    completion_ids: Sequence[int] | None = None,
) -> Any:
    """Call a reward of TRL's form for one answer, and return its number, or an awaitable of it."""
    row, prompt = task.raw_task or {}, task.task_desc
    completion: Any = [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response
    row, prompt = copy.deepcopy((row, prompt))  # a reward may change its columns
    values: dict[str, Any] = {name: [value] for name, value in row.items() if name not in _NO_COLUMNS}
    values |= {"prompts": [prompt], "completions": [completion], "trainer_state": None,
               "log_extra": _discard, "log_metric": _discard}
    if completion_ids is not None:
        values["completion_ids"] = [[int(token) for token in completion_ids]]
    _require_arguments(function, signature.missing_names(values), values)
    result = function(**signature.accepted(values))
    return _awaited_number(function, result) if inspect.isawaitable(result) else _only_number(function, result)


def _discard(*values: Any, **named_values: Any) -> None:
    """Ignore values that TRL would log: here the parts of a reward are the metrics."""


async def _awaited_number(function: Any, result: Awaitable[Any]) -> float:
    return _only_number(function, await result)


def _only_number(function: Any, rewards: Any) -> float:
    """Return the number in a TRL reward's list of one. Raises WorkflowError, which names the reward."""
    name = _reward_name(function)
    try:
        [reward] = rewards
    except (TypeError, ValueError):
        raise WorkflowError(f"the reward {name} gave {rewards!r} for one completion: return a list of one "
                            "number") from None
    if reward is None:
        raise WorkflowError(f"the reward {name} returned None for this task: return a number, such as 0.0")
    if isinstance(reward, Mapping):
        raise WorkflowError(f"the reward {name} gave {[reward]!r:.100} for one completion: a reward of TRL's form "
                            "returns a list of one number")
    return as_parts(reward, function)["reward"]


def as_parts(result: Any, reward: Any) -> dict[str, float]:
    """Return a reward's result as {name: part}; a single number is the part "reward".

    `reward`: its name in the task, or the called object, for errors. Raises WorkflowError if there is no part, if a
    part is not a finite number or its name not a text, or if a part "reward" stands beside others.
    """
    name = _reward_name(reward)
    if isinstance(result, Mapping) and not (result and all(isinstance(part, str) for part in result)):
        raise WorkflowError(f"the reward {name} gave {result!r:.100}: return a finite number, or a dict from names to "
                            "finite numbers with at least one; raise an exception if the answer can't be judged")
    if isinstance(result, Mapping) and "reward" in result and len(result) > 1:
        raise WorkflowError(f"the reward {name} gave {result!r:.100}: parts are added up, so a sum among them counts "
                            "twice: return the sum alone, or the parts without it")
    parts = {}
    for part, value in (result if isinstance(result, Mapping) else {"reward": result}).items():
        try:
            parts[part] = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            parts[part] = math.nan
        if not math.isfinite(parts[part]):
            part_name = f" as {part}" if isinstance(result, Mapping) else ""
            raise WorkflowError(f"the reward {name} gave {repr(value)[:100]}{part_name}: return a finite number, or a "
                                "dict of finite numbers, which are added")
    return parts


def _reward_name(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    if isinstance(reward, type):
        return f"{reward.__module__}:{reward.__qualname__}"
    function = reward.func if isinstance(reward, functools.partial) else reward
    return getattr(function, "__name__", type(function).__name__)

"""Checks and encoding of the arguments that users pass to the client and the scheduler."""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from trinity_es.actors.commands import Cursor, CutTask
from trinity_es.actors.commands.fields import read_fields
from trinity_es.actors.config.data_sections import FormatConfig
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.sampling_checks import with_options
from trinity_es.actors.plugin_lookup import add_import_folders
from trinity_es.config.config import Config
from trinity_es.events.errors import DataError, TaskNotSerializable, TrinityError
from trinity_es.events.secrets import SecretFile, unmarked
from trinity_es.events.values import Task, shown, task_to_dict
from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS

__all__ = [
    "cursors", "cut_tasks", "encode_tasks", "list_of", "mapping", "number", "reason_with_caller", "text",
    "timeout_seconds", "whole_number",
]

_FORMAT_KEYS = frozenset(FormatConfig.task_keys())
_FIELDS_WITH_SECRETS = ("workflow_args", "reward_fn_args", "rollout_args", "raw_task")
_FOREVER_SECONDS = 1e9
"""Longest timeout. Longer ones mean no limit, because timers can't be set that late."""


def encode_tasks(tasks: Sequence[Task], config: Config) -> list[dict[str, Any]]:
    """Encode tasks as plain JSON: workflows and reward functions become full paths, and secrets are hidden.

    Raises TaskNotSerializable, UnknownWorkflow, and DataError for a wrong argument. Each names the task's number.
    """
    add_import_folders(config.code_path, first=False)
    encoded = []
    tasks = list_of("tasks", tasks, "tasks")
    path_by_workflow: dict[Any, str] = {}
    secret_file = SecretFile(config.system.log_dir)
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TaskNotSerializable(f"task {i} is a {type(task).__name__}: give a trinity_es.Task")
        try:
            try:
                # JSON can't hold pydantic's SecretStr: `Secret` takes its place.
                marked = {name: unmarked(value) for name in _FIELDS_WITH_SECRETS if (value := getattr(task, name))}
                data = secret_file.hide(task_to_dict(replace(task, **marked)))
            except RecursionError as e:
                raise TaskNotSerializable("a value is nested too deeply or contains itself: give a flat value") from e
            if task.repeat_times is not None:
                whole_number("repeat_times", task.repeat_times, least=1)
            with_options(Sampling(), task.rollout_args, DataError, "rollout_args")
            if unknown := task.format_args.keys() - _FORMAT_KEYS:
                raise DataError(f"unknown key in format_args: {', '.join(sorted(map(str, unknown)))}. Put arguments of "
                                "your own workflow into workflow_args; known keys are "
                                f"{', '.join(sorted(_FORMAT_KEYS))}")
            if task.workflow is None:
                raise TaskNotSerializable("Task.workflow is not set: give a class, a registered name or "
                                          "\"module:Class\"")
            if task.workflow not in path_by_workflow:
                path_by_workflow[task.workflow] = WORKFLOWS.path(task.workflow)
            data["workflow"] = path_by_workflow[task.workflow]
            if "reward_fn" in data and ":" not in data["reward_fn"]:  # a registered name
                data["reward_fn"] = REWARD_FUNCTIONS.path(data["reward_fn"])
        except TrinityError as e:
            raise type(e)(f"task {i}: {e}", **e.details) from e
        encoded.append(data)
    return encoded


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int, from `least` to 2**31 - 1 (an integer column). Raises DataError, also for a bool."""
    try:
        integer = operator.index(value)  # takes numpy's integers, and no text
    except TypeError:
        integer = least - 1  # fails the check below
    if isinstance(value, bool | np.bool_) or not least <= integer < 2**31:
        raise DataError(f"{name} is {shown(value)}: a whole number from {least} to {2**31 - 1} is expected")
    return integer


def number(name: str, value: Any) -> float:
    """Return `value` as a float. Raises DataError for a value that is no number, and for True and False."""
    try:
        if not isinstance(value, str | bytes | bool | np.bool_):
            return float(value)  # takes numpy's and torch's scalars
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(f"{name} is {shown(value)}: a number is expected")


def timeout_seconds(value: Any) -> float | None:
    """Return a timeout in seconds; None means no limit. Raises DataError for a negative value and NaN."""
    if value is None:
        return None
    seconds = number("timeout", value)
    if not seconds >= 0:  # also for NaN
        raise DataError(f"timeout is {shown(value)}: a number of seconds is expected, or None to wait for ever")
    return seconds if seconds < _FOREVER_SECONDS else None


def text(name: str, value: Any) -> str:
    """Return `value`. Raises DataError unless it is a str."""
    if not isinstance(value, str):
        raise DataError(f"{name} is {shown(value)}: a text is expected")
    return value


def reason_with_caller(reason: Any) -> str:
    """Return `reason` with the pid and host of this process, for the log. Raises DataError unless it is a str."""
    caller = f"pid {os.getpid()} on {socket.gethostname()} asked for this"
    return f"{caller}: {reason}" if text("reason", reason) else caller


def list_of(name: str, value: Any, items: str) -> list[Any]:
    """Convert a sequence, set or iterator to a list; `items` names its items in the DataError for any other value."""
    if isinstance(value, Sequence | np.ndarray | Set | Iterator) and not isinstance(value, str | bytes):
        return list(value)
    raise DataError(f"{name} is a {type(value).__name__}: a list of {items} is expected")


def mapping(name: str, value: Any) -> dict[Any, Any]:
    """Return a mapping as a dict, {} for None. Raises DataError for other values."""
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    raise DataError(f"{name} is a {type(value).__name__}: a mapping is expected")


def cursors(value: Any) -> list[Cursor]:
    """Convert a mapping or a list of mappings to cursors, which are read positions in tasksets. Raises DataError."""
    mappings = [value] if isinstance(value, Mapping) else list_of("cursor", () if value is None else value, "mappings")
    return [read_fields(Cursor, "cursor", dict(c) if isinstance(c, Mapping) else c) for c in mappings]


def cut_tasks(value: Any) -> list[CutTask]:
    """Convert `{new task: (batch, task)}` to CutTasks: each new task continues an unfinished one. Raises DataError."""
    try:
        fields_of_tasks = [{"task": task, "batch_id": batch_id, "cut_task": cut_task}
                           for task, (batch_id, cut_task) in value.items()]
    except (AttributeError, TypeError, ValueError):
        raise DataError(f"continues is {shown(value)}: give a mapping from new tasks to the batch and task that each "
                        f"continues, such as {{0: (12, 3)}}") from None
    return [read_fields(CutTask, "continues", fields) for fields in fields_of_tasks]

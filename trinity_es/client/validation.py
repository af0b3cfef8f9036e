"""What users hand to the client and the scheduler: checked, and made what is sent. Nothing is sent from here."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from trinity_es.actors.commands import Cursor
from trinity_es.actors.commands.fields import read_fields
from trinity_es.actors.config.buffer import FormatConfig
from trinity_es.actors.engines.interface import Sampling
from trinity_es.actors.engines.sampling import merged
from trinity_es.actors.plugins import look_in
from trinity_es.config.config import Config
from trinity_es.events.errors import DataError, TaskNotSerializable, TrinityError
from trinity_es.events.secrets import SecretFile, unmarked
from trinity_es.events.values import Task, shown, task_to_dict
from trinity_es.workflows.registry import REWARD_FUNCTIONS, WORKFLOWS

__all__ = ["cursors", "encode_tasks", "listed", "mapping", "number", "seconds", "text", "whole"]

_FORMAT = frozenset(FormatConfig.of_tasks())
_ARGS = ("workflow_args", "reward_fn_args", "rollout_args", "raw_task")
"""Fields of a task that may hold secrets."""
_FOREVER_SECONDS = 1e9
"""Maximum of a timeout; one of more is none, for a timer can't be set so late."""


def encode_tasks(tasks: Sequence[Task], config: Config) -> list[dict[str, Any]]:
    """Return the tasks as they are recorded and sent.

    Raises TaskNotSerializable, UnknownWorkflow and, for sampling that can't be, DataError, naming the task.
    """
    look_in(config.code_path, first=False)
    out = []
    tasks = listed("tasks", tasks, "tasks")
    paths: dict[Any, str] = {}
    kept = SecretFile(config.system.log_dir)
    for i, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise TaskNotSerializable(f"task {i} is a {type(task).__name__}: a trinity_es.Task is expected")
        try:
            try:
                data = kept.hide(task_to_dict(_unwrapped(task)))
            except RecursionError as e:
                raise TaskNotSerializable("is nested too deeply, or holds itself") from e
            if task.repeat_times is not None:
                whole("repeat_times", task.repeat_times, least=1)
            merged(Sampling(), task.rollout_args, DataError, "rollout_args")
            if other := task.format_args.keys() - _FORMAT:
                raise DataError(f"format_args has no {', '.join(sorted(map(str, other)))}: it has "
                                f"{', '.join(sorted(_FORMAT))}; what a workflow of yours reads is for workflow_args")
            if task.workflow is None:
                raise TaskNotSerializable("has no workflow: give a class, a registered name or \"module:Class\"")
            if task.workflow not in paths:
                paths[task.workflow] = WORKFLOWS.path(task.workflow)
            data["workflow"] = paths[task.workflow]
            if ":" not in data.get("reward_fn", ":"):
                data["reward_fn"] = REWARD_FUNCTIONS.path(data["reward_fn"])
        except TrinityError as e:
            raise type(e)(f"task {i}: {e}", **e.details) from e
        out.append(data)
    return out


def _unwrapped(task: Task) -> Task:
    """Return the task with pydantic's SecretStr, which JSON does not know, as `Secret`."""
    given = {name: getattr(task, name) for name in _ARGS}
    plain = {name: unmarked(value) for name, value in given.items() if value}
    return replace(task, **plain) if plain and plain != given else task


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return a whole number of at least `least`, and less than 2**31: what a column holds in every database. Raises
    DataError; True and False are no numbers.
    """
    try:
        found = operator.index(value)  # takes numpy's integers, and no text
    except TypeError:
        found = least - 1
    if isinstance(value, bool | np.bool_) or not least <= found < 2**31:
        raise DataError(f"{name} is {shown(value)}: a whole number from {least} to {2**31 - 1} is expected")
    return found


def number(name: str, value: Any) -> float:
    """Return a number. Raises DataError; True and False are no numbers."""
    try:
        if not isinstance(value, str | bytes | bool | np.bool_):
            return float(value)  # takes numpy's and torch's scalars
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(f"{name} is {shown(value)}: a number is expected")


def seconds(name: str, value: Any) -> float | None:
    """Return a timeout; None where it never comes. Raises DataError."""
    if value is None:
        return None
    found = number(name, value)
    if not found >= 0:
        raise DataError(f"{name} is {shown(value)}: a number of seconds is expected, or None to wait for ever")
    return found if found < _FOREVER_SECONDS else None


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is {shown(value)}: a text is expected")
    return value


def listed(name: str, value: Any, of: str) -> list[Any]:
    """Return a list of these. Raises DataError for what is none: a text, a mapping, a single one."""
    if isinstance(value, Sequence | np.ndarray | Set | Iterator) and not isinstance(value, str | bytes):
        return list(value)
    raise DataError(f"{name} is a {type(value).__name__}: a list of {of} is expected")


def mapping(name: str, value: Any) -> dict[Any, Any]:
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    raise DataError(f"{name} is a {type(value).__name__}: a mapping is expected")


def cursors(given: Any) -> list[Cursor]:
    """Return what was given as `cursor`: a mapping, or a list of such. Raises DataError."""
    several = [given] if isinstance(given, Mapping) else listed("cursor", () if given is None else given, "mappings")
    return [read_fields(Cursor, "cursor", dict(c) if isinstance(c, Mapping) else c) for c in several]

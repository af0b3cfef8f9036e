"""Rows that TRL gets for a batch: one for each completion that it requested, failed runs included."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from trinity_es.actors.plugin_lookup import did_you_mean
from trinity_es.events.errors import ConfigError
from trinity_es.events.experience import Experience
from trinity_es.integrations.step_batches import Runs
from trinity_es.workflows.rewards import TRL_ARGUMENTS

__all__ = ["COLUMNS", "none_for_failed_runs", "require_columns", "result_rows"]

COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "rollout_failed", "rollout_version",
           "rollout_id")
"""Columns of a row: the first three go to the trainer, the fourth masks the loss, the rest go to reward functions."""


def require_columns(
    fn: Callable[..., Any], columns: Collection[str], *, given: Iterable[str] = COLUMNS,
    tasks_get: Sequence[str] | None = None,
) -> None:
    """Raise ConfigError if a reward function needs an argument that it will not get.

    `columns`: columns of the data; `given`: further arguments; `tasks_get`: the columns that tasks get, None: all. A
    function without a signature is not checked.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return
    row_columns = columns if tasks_get is None else ["prompt", *tasks_get]
    available = {*row_columns, *given, *TRL_ARGUMENTS}
    for parameter in parameters:
        name = parameter.name
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and name not in available:
            need = f"the reward {getattr(fn, '__name__', fn)} asks for {name!r}"
            if name in columns:
                raise ConfigError(f"{need}, a column of the data that columns={list(tasks_get or ())!r} leaves out: "
                                  f"add {name!r} to columns, or omit columns, so that tasks get all")
            raise ConfigError(f"{need}, but the rows have no such column: the data has the columns "
                              f"{', '.join(sorted(columns))}{did_you_mean(name, available)}")


def result_rows(batch_id: str, runs: Runs, tasks: int, group: int, eos: int) -> list[dict[str, Any]]:
    """Return a row for each of the `group` runs of each of the `tasks` tasks, in order, failed runs included."""
    rows = []
    for task in range(tasks):
        # A failed run has no tokens: it gets the prompt of another run of its task.
        prompt = next((_prompt(runs[task, run][-1]) for run in range(group) if (task, run) in runs), [eos])
        for run in range(group):
            experiences = runs.get((task, run))
            row = _failed_row(prompt, eos) if experiences is None else _row(experiences[-1], eos)
            rows.append({**row, "rollout_id": f"{batch_id}/{task}/{run}"})
    return rows


def _prompt(experience: Experience) -> list[int]:
    return [int(token) for token in experience.tokens[: experience.prompt_length]]


def _failed_row(prompt: list[int], eos: int) -> dict[str, Any]:
    """Return a row without training signal: TRL ignores a row in its group's mean if all its rewards are None."""
    return {
        "prompt_ids": prompt, "completion_ids": [eos], "logprobs": [0.0], "env_mask": [0], "reward": None,
        "rollout_failed": True, "rollout_version": None,
    }


def _row(experience: Experience, eos: int) -> dict[str, Any]:
    """Return the row of a run that succeeded."""
    ids = [int(token) for token in experience.tokens[experience.prompt_length :]]
    outcome = {"reward": experience.reward, "rollout_failed": False,
               "rollout_version": experience.info.get("model_version")}
    if not ids:  # TRL reads the last token of each completion, so there has to be one
        return {**_failed_row(_prompt(experience), eos), **outcome}
    mask = [1] * len(ids) if experience.action_mask is None else [int(bit) for bit in experience.action_mask]
    logprobs = [None] * len(ids) if experience.logprobs is None else [float(value) for value in experience.logprobs]
    return {"prompt_ids": _prompt(experience), "completion_ids": ids, "logprobs": logprobs, "env_mask": mask, **outcome}


def none_for_failed_runs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function, so that it returns None for failed runs, whose column `rollout_failed` is true."""

    def replace_failed(rewards: Sequence[float | None], failures: Sequence[bool]) -> list[float | None]:
        return [None if has_failed else reward for reward, has_failed in zip(rewards, failures, strict=True)]

    if _is_async(fn):

        @functools.wraps(fn)
        async def call_async(**columns: Any) -> list[float | None]:
            return replace_failed(await fn(**columns), columns["rollout_failed"])

        return call_async

    @functools.wraps(fn)
    def call(**columns: Any) -> list[float | None]:
        return replace_failed(fn(**columns), columns["rollout_failed"])

    return call


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004

"""Rows that TRL gets for a batch: one for each completion that it requested, also for failed runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from trinity_es.actors.plugin_lookup import did_you_mean
from trinity_es.events.errors import ConfigError
from trinity_es.events.experience_columns import ExperienceColumns
from trinity_es.workflows.rewards import TRL_ARGUMENTS

__all__ = ["COLUMNS", "none_for_failed_runs", "require_columns", "result_rows"]

COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "rollout_failed", "rollout_version",
           "rollout_id")
"""Columns of a row. The first three go to the trainer, `env_mask` masks the loss, the others go to reward functions."""


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


def result_rows(
    batch_id: str, experiences: ExperienceColumns, tasks: int, group: int, eos: int
) -> dict[str, list[Any]]:
    """Return {column: values} for COLUMNS, with a row for each run: `tasks` tasks in order, with `group` runs each.

    `experiences` are ordered by task, run and step. A run's row is its last experience; failed runs have a row, too.
    """
    last_rows = {place: row for row, place in enumerate(zip(experiences.tasks, experiences.runs.tolist(), strict=True))}
    rewards, infos = experiences.field("reward"), experiences.field("info")
    run_rows = {
        place: {**_row(experiences, row, eos), "reward": rewards[row], "rollout_failed": False,
                "rollout_version": infos[row].get("model_version")}
        for place, row in last_rows.items()
    }
    rows = []
    for task in range(tasks):
        # A failed run has no tokens: it gets the prompt of another run of its task.
        prompt = next((run_rows[task, run]["prompt_ids"] for run in range(group) if (task, run) in run_rows), [eos])
        for run in range(group):
            row = run_rows.get((task, run)) or _failed_row(prompt, eos)
            rows.append({**row, "rollout_id": f"{batch_id}/{task}/{run}"})
    return {column: [row[column] for row in rows] for column in COLUMNS}


def _failed_row(prompt: list[int], eos: int) -> dict[str, Any]:
    """Return a row without training signal. TRL leaves it out of its group's mean, since its rewards are None."""
    return {
        "prompt_ids": prompt, "completion_ids": [eos], "logprobs": [0.0], "env_mask": [0], "reward": None,
        "rollout_failed": True, "rollout_version": None,
    }


def _row(experiences: ExperienceColumns, row: int, eos: int) -> dict[str, Any]:
    start, end = experiences.tokens.offsets[row : row + 2]
    tokens, prompt_length = experiences.tokens.values[start:end].tolist(), experiences.prompt_lengths[row]
    prompt, ids = tokens[:prompt_length], tokens[prompt_length:]
    if not ids:  # TRL reads the last token of each completion, so there has to be one
        return _failed_row(prompt, eos)
    mask, logprobs = experiences.action_mask[row], experiences.logprobs[row]
    return {
        "prompt_ids": prompt, "completion_ids": ids,
        "logprobs": [None] * len(ids) if logprobs is None else logprobs.tolist(),
        "env_mask": [1] * len(ids) if mask is None else mask.astype(int).tolist(),
    }


def none_for_failed_runs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function so that it returns None for failed runs (column `rollout_failed` is true)."""

    def replace_failed(rewards: Sequence[float | None], failures: Sequence[bool]) -> list[float | None]:
        return [None if has_failed else reward for reward, has_failed in zip(rewards, failures, strict=True)]

    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004

        @functools.wraps(fn)
        async def call_async(**columns: Any) -> list[float | None]:
            return replace_failed(await fn(**columns), columns["rollout_failed"])

        return call_async

    @functools.wraps(fn)
    def call(**columns: Any) -> list[float | None]:
        return replace_failed(fn(**columns), columns["rollout_failed"])

    return call

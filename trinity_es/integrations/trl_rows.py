"""What TRL gets of a batch's runs: a row for each completion that it asked for, also for those that failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from trinity_es.events.experience import Experience
from trinity_es.integrations.step_batches import Runs

__all__ = ["COLUMNS", "result_rows", "sparing"]

COLUMNS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "reward", "rollout_failed", "rollout_version",
           "rollout_id")
"""What a row has: the first three go into the trainer, the fourth masks the loss, the others reach reward functions."""


def result_rows(batch_id: str, runs: Runs, tasks: int, group: int, eos: int) -> list[dict[str, Any]]:
    """Return a row for each run of each task, in order, also for those that failed."""
    rows = []
    for task in range(tasks):
        prompt = next((_prompt(runs[task, run][-1]) for run in range(group) if (task, run) in runs), [eos])
        for run in range(group):
            found = runs.get((task, run))
            row = _failed(prompt, eos) if found is None else _row(found[-1], eos)
            rows.append({**row, "rollout_id": f"{batch_id}/{task}/{run}"})
    return rows


def _prompt(experience: Experience) -> list[int]:
    return [int(token) for token in experience.tokens[: experience.prompt_length]]


def _failed(prompt: list[int], eos: int) -> dict[str, Any]:
    """Return a row that nothing is learned from: TRL leaves out of a group's mean what every reward function left out.
    """
    return {
        "prompt_ids": prompt, "completion_ids": [eos], "logprobs": [0.0], "env_mask": [0], "reward": None,
        "rollout_failed": True, "rollout_version": None,
    }


def _row(experience: Experience, eos: int) -> dict[str, Any]:
    ids = [int(token) for token in experience.tokens[experience.prompt_length :]]
    given = {"reward": experience.reward, "rollout_failed": False,
             "rollout_version": experience.info.get("model_version")}
    if not ids:  # TRL looks at the last token of each completion
        return {**_failed(_prompt(experience), eos), **given}
    mask = [1] * len(ids) if experience.action_mask is None else [int(own) for own in experience.action_mask]
    logprobs = [None] * len(ids) if experience.logprobs is None else [float(value) for value in experience.logprobs]
    return {"prompt_ids": _prompt(experience), "completion_ids": ids, "logprobs": logprobs, "env_mask": mask, **given}


def sparing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function that gives runs that failed no reward, whatever this one says of their empty answer."""

    def spared(said: Sequence[float | None], failed: Sequence[bool]) -> list[float | None]:
        return [None if lost else reward for reward, lost in zip(said, failed, strict=True)]

    if _is_async(fn):

        @functools.wraps(fn)
        async def call_async(**columns: Any) -> list[float | None]:
            return spared(await fn(**columns), columns["rollout_failed"])

        return call_async

    @functools.wraps(fn)
    def call(**columns: Any) -> list[float | None]:
        return spared(fn(**columns), columns["rollout_failed"])

    return call


def _is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004

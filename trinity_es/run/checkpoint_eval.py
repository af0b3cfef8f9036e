"""The benchmark (mode `bench`): evals of a run's checkpoints, in order, in their own log.

Checkpoint `global_step_12` is weights version 12. Its eval on taskset gsm8k is batch "12/bench/gsm8k", with metrics
under `bench/gsm8k/`. Version 0 is the model of the config. An eval that ended is not repeated, so an interrupted
benchmark goes on, and a later benchmark evaluates only new checkpoints. Engines never go back to older weights, so a
checkpoint older than the last evaluated one is skipped, with a message.

The run's log can't be used, since its weights are newer than these. The default is `bench/log.sqlite` beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_es.config.config import Config
from trinity_es.events.errors import ConfigError
from trinity_es.events.values import BatchLifecycleState
from trinity_es.projections.metric_aggregation import mean_reward
from trinity_es.projections.reading.log_reader import Log
from trinity_es.run.checkpointing import Checkpoints

__all__ = ["BenchRow", "batch_id_of", "read_results", "steps_wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Result of one checkpoint."""

    step: int
    """0: the model of the config."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Mean reward of each taskset (mean@n)."""
    metrics: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    """Reason why the checkpoint was not evaluated, if it was not."""


def batch_id_of(step: int, taskset: str) -> str:
    return f"{step}/bench/{taskset}"


def steps_wanted(config: Config, checkpoints: Checkpoints) -> list[int]:
    if not config.buffer.explorer_input.eval_tasksets:
        raise ConfigError("buffer.explorer_input.eval_tasksets is empty: name a taskset to evaluate on")
    saved = checkpoints.steps()
    if config.explorer.bench_on_latest_checkpoint:
        steps = saved[-1:]
    else:
        steps = [0, *saved] if config.explorer.eval_on_startup else saved
    if not steps:
        raise ConfigError(
            f"there is no checkpoint in {checkpoints.folder}: set `project`, `name` and `checkpoint_root_dir` of the "
            "config to those of the run"
        )
    return steps


def read_results(log: Log, steps: Sequence[int], names: Sequence[str], problems: dict[int, str]) -> list[BenchRow]:
    """Return a row for each of `steps` and for each other step that this log has evals of, in order.

    `names`: tasksets whose mean rewards a row gets. `problems`: {step: reason why it was not evaluated}.
    """
    results_by_step: dict[int, dict[str, dict[str, Any]]] = {step: {} for step in steps}
    for row in log.batches():
        step_text, _, name = str(row.batch_id).partition("/bench/")
        if name and step_text.isdecimal() and row.state == BatchLifecycleState.FINALIZED:
            result, _ = log.check_result(row.batch_id)
            results_by_step.setdefault(int(step_text), {})[name] = result or {"metrics": {}}
    rows = []
    for step, results in sorted(results_by_step.items()):
        metrics = {key: value for result in results.values() for key, value in result["metrics"].items()}
        rows.append(BenchRow(
            step=step, rewards={name: mean_reward(results[name]) if name in results else None for name in names},
            metrics=metrics, problem=problems.get(step),
        ))
    return rows

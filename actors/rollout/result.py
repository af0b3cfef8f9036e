"""Results of runs: experiences, metrics and token counts, or the kind of failure."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from typing import Any

from trinity_es.actors.rollout.conversation.history import Usage
from trinity_es.events import errors
from trinity_es.events.experience import Experience
from trinity_es.events.values import FailureKind, Task, check_metric_names, require_finite
from trinity_es.events.vocabulary import RunResult
from trinity_es.projections.metric_aggregation import aggregate_run

__all__ = [
    "OutOfTime", "UnitResult", "classify", "divide_usage", "error_of_exit", "grouped_by_run", "run_result",
    "stamp_and_validate", "with_usage",
]

TRACEBACK_CHARACTERS = 3000
_KINDS: dict[type[Exception], FailureKind] = {
    errors.StartupError: "infra", errors.UnknownWorkflow: "data", errors.DataError: "data",
    errors.GraderError: "grader", errors.TrinityError: "workflow",
}
_log = logging.getLogger(__name__)
_warn_once = lru_cache(maxsize=1000)(_log.warning)


class OutOfTime(Exception):
    """An attempt exceeded its timeout. Not TimeoutError, which a workflow may raise for its own reasons."""


@dataclass(slots=True, kw_only=True)
class UnitResult:
    """Results and failures of a unit, which is some runs of one task."""

    results: list[RunResult] = field(default_factory=list)
    experiences: list[Experience] = field(default_factory=list)
    failures: list[tuple[int, FailureKind, str]] = field(default_factory=list)
    model_version: int = 0
    model_version_end: int = 0
    seconds: float = 0.0
    timeout: float | None = None
    """Seconds that an attempt may take, together with the lost attempts that it continues; None: no limit."""
    lost_seconds: float = 0.0
    """Seconds taken by the lost attempts that this attempt continues."""
    other_tokens: tuple[int, int] = (0, 0)
    """Prompt and response tokens that belong to no single run; see `RunsFinished`."""
    lacks: bool = False
    """True if runs failed because this machine lacks something, such as a module."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds that this attempt may take, at least 1; None without a limit."""
        return None if self.timeout is None else max(self.timeout - self.lost_seconds, 1.0)

    def add(self, part: UnitResult) -> None:
        self.results += part.results
        self.experiences += part.experiences
        self.failures += part.failures
        self.other_tokens = (self.other_tokens[0] + part.other_tokens[0], self.other_tokens[1] + part.other_tokens[1])
        self.lacks = self.lacks or part.lacks


def _number_runs(experiences: Sequence[Experience], runs: range) -> None:
    """Set `eid.run` of experiences if the workflow did not set it, or numbered the runs from 0.

    If not set: with one experience per run in each step they belong to the runs in order, else they are divided evenly.
    """
    n, numbers = len(runs), {e.eid.run for e in experiences}
    if numbers <= set(runs) and not (n > 1 and numbers == {0}):
        return
    if numbers == {0}:  # the default of `eid.run`
        by_step: dict[int, list[Experience]] = {}
        for experience in experiences:
            by_step.setdefault(experience.eid.step, []).append(experience)
        if all(len(group) == n for group in by_step.values()):
            for group in by_step.values():
                for run, experience in zip(runs, group, strict=True):
                    experience.eid.run = run
        else:
            for i, experience in enumerate(experiences):
                experience.eid.run = runs[i * n // max(len(experiences), n)]
    elif numbers <= set(range(n)):
        for experience in experiences:
            experience.eid.run += runs.start


def grouped_by_run(
    experiences: Sequence[Experience], runs: range, workflow: str, failed_runs: Collection[int] = ()
) -> dict[int, list[Experience]]:
    """Return the experiences of each run. Raises WorkflowError for an experience of a run that is not in `runs`.

    `failed_runs`: runs that the workflow reports as failed. If there are any, the workflow must have set `eid.run`.
    """
    if not failed_runs:
        _number_runs(experiences, runs)
    by_run: dict[int, list[Experience]] = {run: [] for run in runs}
    for experience in experiences:
        if experience.eid.run not in by_run:
            raise errors.WorkflowError(
                f"{workflow} gave an experience of run {experience.eid.run}: "
                f"runs {runs.start} to {runs.stop - 1} are expected (set eid.run = run_id_base + i)"
            )
        by_run[experience.eid.run].append(experience)
    return by_run


def stamp_and_validate(
    experiences: Sequence[Experience], task: Task, run: int, version: int, current_version: int
) -> None:
    """Set the ids of a run's experiences, and the oldest version that generated a token of each (default: `version`).

    Raises DataError for an invalid experience, WorkflowError for a number that is not finite.
    """
    for experience in experiences:
        oldest = min((v for v, _, _ in experience.version_spans), default=version)
        eid = experience.eid
        eid.batch, eid.run = task.batch_id, run
        if eid.task == "":
            eid.task = task.task_id
        experience.info = {
            **(experience.info or {}), "model_version": oldest, "model_version_drift": current_version - oldest,
            "task_index": task.index, "use_count": 0,
        }
        try:
            experience.validate()
        except errors.NotFinite as e:  # a WorkflowError, so that another attempt is made
            raise errors.WorkflowError(e.message, **e.details) from e


def with_usage(result: RunResult, usage: Usage) -> RunResult:
    """Return a run's result with all tokens of its model, which no other run used."""
    return replace(
        result, prompt_tokens=usage.prompt_tokens, response_tokens=usage.response_tokens,
        metrics={**result.metrics, **_fork_metrics(usage, 1)},
    )


def _fork_metrics(usage: Usage, runs: int) -> dict[str, float]:
    """Return the metric of a run's mean number of forks, prompts in which earlier answers were changed; {} if no prompt
    followed an answer."""
    return {"conversation_forks": usage.forks / runs} if usage.continued or usage.forks else {}


def divide_usage(
    results: Sequence[RunResult], experiences: Sequence[Experience], usage: Usage
) -> tuple[list[RunResult], tuple[int, int]]:
    """Divide the usage of a model among the runs that shared it. Return their results, and the tokens of no run.

    Each run gets the tokens of its experiences, and the mean number of forks. Without requests nothing is changed.
    """
    if usage.requests == 0:
        return list(results), (0, 0)
    prompt_tokens = dict.fromkeys((r.run for r in results), 0)
    response_tokens = dict(prompt_tokens)
    for experience in experiences:
        mask = experience.action_mask
        sampled = 0 if mask is None else int(mask.sum())
        response_tokens[experience.eid.run] += sampled
        prompt_tokens[experience.eid.run] += len(experience.tokens) - sampled
    forks = _fork_metrics(usage, max(len(results), 1))
    parts = [
        replace(
            r, prompt_tokens=prompt_tokens[r.run], response_tokens=response_tokens[r.run],
            metrics={**r.metrics, **forks},
        ) for r in results
    ]
    assigned = sum(prompt_tokens.values()), sum(response_tokens.values())
    return parts, (usage.prompt_tokens - assigned[0], usage.response_tokens - assigned[1])


def error_of_exit(cls: type[Any], error: BaseException) -> errors.WorkflowError:
    """Return the WorkflowError for a run whose workflow raised SystemExit or the like."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return errors.WorkflowError(f"{cls.__name__} raised {text}: raise an Exception to fail a run")


def run_result(run: int, experiences: list[Experience], seconds: float) -> RunResult:
    """Return a run's result with metrics and without token counts. Raises DataError if a metric can't be recorded."""
    metrics_of_each = [_metrics(e) for e in experiences]
    names = {name for metrics in metrics_of_each for name in metrics}
    check_metric_names(names)
    for name in names:
        if f"{name}:mean" in names:
            _warn_once("a workflow gives a metric as %r and as %r: their mean is kept", name, f"{name}:mean")
    metrics = aggregate_run(metrics_of_each)
    items: list[tuple[str, Any]] = [item for e in experiences for item in e.metrics.items()]
    for name, value in items:
        if not isinstance(value, Real):
            kind = type(value).__name__
            _warn_once("the metric %r of a workflow is a %s, not a number: it is left out", name, kind)
    require_finite(metrics, "metrics")
    metrics["time/run_execution"] = seconds
    return RunResult(run=run, metrics=metrics, experiences=len(experiences))


def _metrics(experience: Experience) -> dict[str, float]:
    """Return an experience's metrics. If it has a reward, that is its metric `reward`, whatever the workflow set."""
    metrics = dict(experience.metrics or {})
    if experience.reward is not None:
        metrics.pop("reward:mean", None)
        metrics["reward"] = float(experience.reward)
    return metrics


def classify(error: BaseException, timeout: float | None = None, key: str = "max_timeout") -> tuple[FailureKind, str]:
    """Return the kind and the message of a run's error. `key`: the config key of `timeout`."""
    if isinstance(error, OutOfTime):
        return "timeout", f"no end after {round(timeout, 3)} s ({key})" if timeout else "timed out"
    if isinstance(error, errors.EngineError):
        return "data" if error.details.get("refused") else "infra", str(error)
    if isinstance(error, errors.EnvironmentFailed):
        return error.details.get("kind", "infra"), str(error)
    for error_class, kind in _KINDS.items():
        if isinstance(error, error_class):
            return kind, str(error)
    frames = "".join(traceback.format_exception(error)).rstrip()
    return "workflow", f"{type(error).__name__}: {error}\n{frames[-TRACEBACK_CHARACTERS:]}"

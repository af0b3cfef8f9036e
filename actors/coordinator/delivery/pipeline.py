"""The experience pipeline, which takes the experiences of a batch through the operators of the config.

The coordinator runs it while a train batch is finalized; it neither reads nor writes payloads. After a failure it runs
again from the payloads, so operators may change experiences in place, and should be deterministic. Operators may be
coroutines: one event loop in the pipeline's thread runs them one after the other.

Experiences are checked before the first and after every operator. Runs with a number that is not finite are dropped and
named in `dropped_by`, so that one bad run does not fail the batch. If an operator returns anything but valid
experiences (`Experience.validate`), or no finite ones, the pipeline fails with an error that names the operator.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from trinity_es.actors.coordinator.delivery.group_metrics import GroupMetrics
from trinity_es.actors.coordinator.delivery.operators import OPERATORS, Operated, Operator
from trinity_es.actors.plugin_lookup import build, label_of
from trinity_es.events.errors import ConfigError, DataError, NotFinite, PipelineError
from trinity_es.events.experience import Experience

__all__ = ["Pipeline", "PipelineResult", "ProcessedPart", "StalenessLimit"]

_PREFIX: Final = "experience_pipeline"
UNUSABLE: Final = "unusable"
"""Cause in `dropped_by` for runs with a number that was not finite before the first operator."""
TOO_OLD: Final = "max_staleness"
"""Cause in `dropped_by` for experiences older than the `StalenessLimit`."""


@dataclass(frozen=True, slots=True)
class StalenessLimit:
    """Maximum age of an experience's oldest token, in versions, and the current versions."""

    maximum: int
    weights_version: int
    adapter_versions: Mapping[str, int]
    """Current version of each LoRA adapter."""

    def allows(self, experience: Experience) -> bool:
        """Return True if no token is too old. Tokens of unknown versions are allowed."""
        oldest, _ = experience.model_versions
        ages = [self.weights_version - oldest] if isinstance(oldest, int) else []
        ages += [self.adapter_versions.get(name, version) - version for name, version, _, _ in experience.adapter_spans]
        return max(ages, default=0) <= self.maximum


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """Result of a run of the pipeline."""

    experiences: list[Experience]
    metrics: dict[str, float]
    """Names start with `experience_pipeline/`; times in seconds."""
    dropped: int = 0
    """Number of experiences that went in and did not come out."""
    dropped_by: dict[str, list[str]] = field(default_factory=dict)
    """Cause (an operator's name, UNUSABLE or TOO_OLD) -> `eid.uid` of the experiences that it dropped."""


@dataclass(slots=True)
class ProcessedPart:
    """Result of the operators for a part of a batch, or for all of it."""

    experiences: list[Experience]
    dropped_by: dict[str, list[str]]
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each operator."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each operator."""
    total_seconds: float = 0.0
    selected: int = 0
    """Number of experiences that came out."""
    dropped: int = 0


class Pipeline:
    """The operators of a config, built and ready to process the experiences of a batch."""

    def __init__(
        self, operators: Iterable[Mapping[str, Any]] = (), models: Callable[[], Mapping[str, list[Any]]] = dict
    ) -> None:
        """Build the operators, each `{"name": one of OPERATORS or "module:Class", "args": {..}}`.

        `models` returns the clients of the auxiliary models, for operators with `set_auxiliary_model`. Raises
        ConfigError for a name that is not found, arguments that the operator does not take, and a class that is no
        operator.
        """
        self._operators: list[tuple[str, Operator]] = []
        for entry in operators:
            name, operator = _build_operator(entry)
            # Without a ":", which would select an aggregation in a metric's name.
            self._operators.append((label_of(name, [label for label, _ in self._operators]), operator))
        self._models = models
        self._passed_models: dict[str, Mapping[str, list[Any]]] = {}
        self._prepared: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(
        self, experiences: list[Experience], clock: Callable[[], float], limit: StalenessLimit | None = None
    ) -> PipelineResult:
        """Run all operators on the experiences of a batch that `limit` allows. `clock` returns seconds.

        Metrics: each operator's own, `<operator>/time`, `<operator>/dropped_count` if it dropped some, `time/total`,
        `experience_count` (delivered) and `dropped_count`, all under `experience_pipeline/`; none without experiences.
        If two operators have a metric of the same name, that of the later operator is recorded as `<operator>/<name>`.
        A second operator of the same name is called `<operator>_2`. If an operator `needs` a field, runs in which it is
        None are dropped before that operator.

        Raises PipelineError, which names the operator, if an operator raises, or if it returns anything but experiences
        and finite metrics, experiences of wrong shapes, or only experiences with NaN or infinities.
        """
        if not experiences:
            return PipelineResult([], {})
        passed = self.process(experiences, clock, limit)
        return self.join_parts([passed], passed.experiences)

    @property
    def by_task(self) -> bool:
        """True if every operator looks at one task at a time, so that a batch can be processed in parts."""
        return all(getattr(operator, "by_task", False) for _, operator in self._operators)

    def process(
        self, experiences: list[Experience], clock: Callable[[], float], limit: StalenessLimit | None = None, *,
        is_part: bool = False,
    ) -> ProcessedPart:
        """Run all operators on the experiences of a batch, or with `is_part` on those of some of its tasks.

        Works like `run`. A part also fails if none of its runs has a field that an operator `needs`, since runs of
        other parts may have it.
        """
        incoming = remaining = Counter(e.eid.uid for e in experiences)
        part = ProcessedPart([], {})
        experiences, _ = _without_bad_runs(experiences, Experience.require_finite)
        if lost := remaining - Counter(e.eid.uid for e in experiences):
            part.dropped_by[UNUSABLE] = list(lost.elements())
            remaining = remaining - lost
        if limit is not None and (old := [e.eid.uid for e in experiences if not limit.allows(e)]):
            experiences = [e for e in experiences if limit.allows(e)]
            part.dropped_by[TOO_OLD] = old
            remaining = remaining - Counter(old)
        began = clock()
        for label, operator in self._operators:
            start = clock()
            experiences, operator_metrics = self._run_operator(label, operator, experiences, is_part)
            part.metrics.append(operator_metrics)
            after = Counter(e.eid.uid for e in experiences)
            if lost := remaining - after:
                part.dropped_by[label] = list(lost.elements())
            remaining = after
            part.seconds.append(clock() - start)
        part.dropped = (incoming - remaining).total()
        part.total_seconds = clock() - began
        part.experiences, part.selected = experiences, len(experiences)
        return part

    def _run_operator(self, label: str, operator: Operator, experiences: list[Experience], is_part: bool) -> Operated:
        """Run one operator, and return its experiences and metrics. Raises PipelineError."""
        eligible, error = _without_bad_runs(experiences, partial(_require_fields, getattr(operator, "needs", ())))
        try:
            if is_part and error is not None and not eligible:
                raise error
            self._prepare(label, operator)
            # If all runs lack what it needs, the operator raises its own error.
            returned = self._await_result(operator.process(eligible or experiences))
        except Exception as e:  # operators are users' code
            raise PipelineError(
                f"operator {label} of the experience pipeline failed: {type(e).__name__}: {e}",
                operator=label, cause=type(e).__name__,
            ) from e
        return _check_result(label, returned)

    def join_parts(self, parts: Sequence[ProcessedPart], experiences: list[Experience]) -> PipelineResult:
        """Return the result of a batch that was processed in these parts. `experiences` are all that it delivers."""
        metrics: dict[str, float] = {}
        counts_and_times: dict[str, float] = {}
        dropped_by = {}
        for cause in (UNUSABLE, TOO_OLD, *(label for label, _ in self._operators)):
            if lost := [uid for part in parts for uid in part.dropped_by.get(cause, ())]:
                dropped_by[cause] = lost
        if TOO_OLD in dropped_by:
            counts_and_times[f"{_PREFIX}/{TOO_OLD}/dropped_count"] = float(len(dropped_by[TOO_OLD]))
        for number, (label, _) in enumerate(self._operators):
            for key, value in _joined_metrics(label, [part.metrics[number] for part in parts]).items():
                name_is_taken = f"{_PREFIX}/{key}" in metrics
                metrics[f"{_PREFIX}/{label}/{key}" if name_is_taken else f"{_PREFIX}/{key}"] = value
            if label in dropped_by:
                counts_and_times[f"{_PREFIX}/{label}/dropped_count"] = float(len(dropped_by[label]))
            counts_and_times[f"{_PREFIX}/{label}/time"] = sum(part.seconds[number] for part in parts)
        dropped = sum(part.dropped for part in parts)
        metrics |= counts_and_times
        metrics[f"{_PREFIX}/time/total"] = sum(part.total_seconds for part in parts)
        metrics[f"{_PREFIX}/experience_count"] = float(sum(part.selected for part in parts))
        metrics[f"{_PREFIX}/dropped_count"] = float(dropped)
        return PipelineResult(experiences, metrics, dropped, dropped_by)

    @property
    def has_open_operators(self) -> bool:
        """True if a prepared operator has something to close."""
        return any(label in self._prepared and hasattr(operator, "close") for label, operator in self._operators)

    def close(self) -> list[str]:
        """Close the prepared operators, and return an error text for each that failed. Call it in `run`'s thread."""
        problems = []
        for label, operator in self._operators:
            close = getattr(operator, "close", None)
            if label not in self._prepared or not callable(close):
                continue
            try:
                self._await_result(close())
            except Exception as e:  # operators are users' code
                problems.append(f"operator {label} could not be closed: {type(e).__name__}: {e}")
        self._prepared.clear()
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        return problems

    def _prepare(self, label: str, operator: Operator) -> None:
        """Pass the clients of the auxiliary models to an operator if they changed, and call its `prepare` once."""
        set_models = getattr(operator, "set_auxiliary_model", None)
        if callable(set_models):
            models = self._models()
            if self._passed_models.get(label) != models:
                set_models(models)
                self._passed_models[label] = models
        if label not in self._prepared:
            prepare = getattr(operator, "prepare", None)
            if callable(prepare):
                self._await_result(prepare())
            self._prepared.add(label)

    def _await_result(self, returned: Any) -> Any:
        """Return what an operator's method returned. If that is awaitable, await it first."""
        if not inspect.isawaitable(returned):
            return returned
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def wait() -> Any:
            return await returned

        return self._loop.run_until_complete(wait())


def _joined_metrics(label: str, parts: list[dict[str, float]]) -> dict[str, float]:
    """Return an operator's metrics over all parts of a batch. Raises PipelineError if they can't be joined."""
    if len(parts) == 1:
        return parts[0]
    joinable = [part for part in parts if isinstance(part, GroupMetrics)]
    if len(joinable) < len(parts):
        raise PipelineError(f"operator {label} of the experience pipeline has by_task, but returned no GroupMetrics: "
                            "return them, or remove by_task", operator=label)
    return GroupMetrics.join(joinable)


def _require_fields(names: Iterable[str], experience: Experience) -> None:
    """Raise DataError if one of these fields of an experience is None."""
    for name in names:
        if getattr(experience, name) is None:
            raise DataError(f"experience {experience.eid} has no {name}")


def _without_bad_runs(
    experiences: list[Experience], check: Callable[[Experience], Any], error: type[DataError] = DataError
) -> tuple[list[Experience], DataError | None]:
    """Return the experiences without the runs for which `check` raises `error`, and the first such error, if any."""
    first_error: DataError | None = None
    bad_run_ids: set[str] = set()
    for experience in experiences:
        try:
            check(experience)
        except error as e:
            first_error = first_error or e
            bad_run_ids.add(experience.eid.rid)
    if not bad_run_ids:
        return experiences, None
    return [e for e in experiences if e.eid.rid not in bad_run_ids], first_error


# --- building and checking ------------------------------------------------------------------------------------------
def _build_operator(entry: Mapping[str, Any]) -> tuple[str, Operator]:
    """Return the name in an operator's config, and the operator. Raises ConfigError."""
    name = entry.get("name")
    if entry.keys() - {"name", "args"} or not isinstance(name, str):
        raise ConfigError(f"an entry of operators must be {{name, args}}, not {dict(entry)!r}")
    operator: Operator = build(
        "operator", name, entry.get("args") or {}, OPERATORS,
        "a class with process(experiences) -> (experiences, metrics)", ["process"],
    )
    return name, operator


def _check_result(label: str, returned: Any) -> Operated:
    """Return an operator's finite experiences and its metrics. Raises PipelineError if it returned anything else."""

    def operator_error(problem: str, **details: Any) -> PipelineError:
        return PipelineError(f"operator {label} of the experience pipeline {problem}", operator=label, **details)

    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise operator_error(f"returned a {type(returned).__name__}, expected (experiences, metrics)")
    experiences, operator_metrics = returned
    if not isinstance(experiences, list) or not isinstance(operator_metrics, dict):
        raise operator_error(
            f"returned ({type(experiences).__name__}, {type(operator_metrics).__name__}), expected a list of "
            "experiences and a dict of metrics"
        )
    for experience in experiences:
        if not isinstance(experience, Experience):
            raise operator_error(f"returned a {type(experience).__name__} among its experiences")
    try:
        usable, error = _without_bad_runs(experiences, Experience.validate, NotFinite)
        if error is not None and not usable:
            raise error
    except DataError as e:
        raise operator_error(f"returned an experience that can't be used: {e}", **e.details) from e
    metrics = {}
    for key, value in operator_metrics.items():
        if not isinstance(key, str):
            raise operator_error(f"returned a metric named {key!r}, expected text")
        if not isinstance(value, int | float | np.number | np.bool_):
            raise operator_error(f"returned metric {key} of type {type(value).__name__}, expected a number")
        metrics[key] = float(value)
        if not math.isfinite(metrics[key]):
            raise operator_error(f"returned metric {key} = {metrics[key]}: only finite numbers can be recorded")
    return usable, operator_metrics if isinstance(operator_metrics, GroupMetrics) else metrics

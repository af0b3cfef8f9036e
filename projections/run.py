"""A run as a whole: the fold of every stream into what a progress view or a summary shows.

Pure: times are those that the log recorded. It keeps one small row a batch, nothing a task.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId, BatchLifecycleState, batch_stream
from trinity_es.projections.batch import metric_prefix

_EVAL_REWARD = re.compile(r"/reward/mean@(\d+)(?:/mean)?\Z")  # the second form where monitor.detailed_stats is on

__all__ = ["BatchProgress", "RunState", "evolve_run", "fold_run", "mean_reward", "missing_runs"]


@dataclass(slots=True, kw_only=True)
class BatchProgress:
    """One batch in the course of a run."""

    batch_id: BatchId
    batch_type: str
    tasks: int
    state: str = BatchLifecycleState.RUNNING.value
    finished: int = 0
    failed_attempts: int = 0
    failed_by_kind: dict[str, int] = field(default_factory=dict)
    """Of the failed attempts."""
    last_failure: str = ""
    """What the last of them said."""
    response_tokens: int = 0
    reward: float | None = None
    """Mean reward (train: over tasks; eval: the mean of mean@n)."""
    missing: int = 0
    """Runs that the mean reward is not over: those that failed, and completed ones without a reward."""
    dropped: int = 0
    """Experiences that the mean reward is over, and that the pipeline's filters took out."""
    model_version: int | None = None
    """The newest weights that made any of its tokens."""
    submitted_at: float = 0.0
    ended_at: float | None = None
    away_seconds: float = 0.0
    """For which there was no coordinator meanwhile: until its next one, from the last event of the one before."""
    trained_step: int | None = None


@dataclass(slots=True, kw_only=True)
class RunState:
    """Everything so far."""

    position: int = 0
    started_at: float | None = None
    """Unix seconds of the first event."""
    last_at: float | None = None
    batches: dict[str, BatchProgress] = field(default_factory=dict)
    """By stream, in the order of submission."""
    runners: dict[str, str] = field(default_factory=dict)
    """State by name: started, ready, failed, lost, quarantined, retired."""
    serving: dict[str, int] = field(default_factory=dict)
    """The weights of each runner of the rollout model that serves."""
    model_version: int = 0
    """The newest that all of them have, or had when the last one ended; 0: the model as it was given."""
    published_version: int = 0
    versions: set[int] = field(default_factory=set)
    """Those that were published, however often."""
    open: set[str] = field(default_factory=set)
    """Streams of the batches that have not ended."""
    busy_seconds: float = 0.0
    """In which there were such, a runner of the rollout model that served, and a coordinator."""
    response_tokens: int = 0
    prompt_tokens: int = 0
    failed_attempts: int = 0
    runner_deaths: int = 0
    coordinator_starts: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    auxiliary: set[str] = field(default_factory=set)
    """Runners of other models."""

    def train(self) -> list[BatchProgress]:
        return [b for b in self.batches.values() if b.batch_type == "train"]

    def evals(self) -> list[BatchProgress]:
        return [b for b in self.batches.values() if b.batch_type == "eval"]


_BEGIN_ANEW = ev.RewindAccepted, ev.SystemConfigured, ev.CoordinatorStarted
"""What is recorded first when a coordinator starts, or while none leads: nobody worked before it."""


def fold_run(recorded: Iterable[Recorded]) -> RunState:
    """Return the state after these events."""
    state = RunState()
    for item in recorded:
        evolve_run(state, item)
    return state


def evolve_run(state: RunState, item: Recorded) -> RunState:
    """Return the state after one more event; the state is taken over and changed."""
    if isinstance(item.event, ev.ClockStepped) and state.last_at is not None:
        state.last_at += item.event.seconds  # what passed is counted at the next event, by the clock as it is now
        for stream in state.open:
            state.batches[stream].away_seconds += item.event.seconds
        state.position = item.position
        return state
    passed = item.recorded_at - (item.recorded_at if state.last_at is None else state.last_at)
    if isinstance(item.event, _BEGIN_ANEW):
        for stream in state.open:
            state.batches[stream].away_seconds += passed
    elif state.open and state.serving:
        state.busy_seconds += passed
    state.position, state.last_at = item.position, item.recorded_at
    if state.started_at is None:
        state.started_at = item.recorded_at
    event = item.event
    batch = state.batches.get(item.stream)
    match event:
        case ev.SystemConfigured():
            state.config = event.config
        case ev.CoordinatorStarted():
            state.coordinator_starts += 1
        case ev.RunnerStarted():
            state.runners[event.runner] = "started"
            state.serving.pop(event.runner, None)
            (state.auxiliary.discard if event.model == "rollout" else state.auxiliary.add)(event.runner)
        case ev.RunnerReady():
            state.runners[event.runner] = "ready"
            _serves(state, event.runner, event.model_version)
        case ev.RunnerFailed():
            state.runners[event.runner] = "failed"
            _serves(state, event.runner, None)
        case ev.RunnerLost():
            state.runners[event.runner] = "lost"
            state.runner_deaths += 1
            _serves(state, event.runner, None)
        case ev.RunnerQuarantined():
            state.runners[event.runner] = "quarantined"
            _serves(state, event.runner, None)
        case ev.RunnerRetired():
            state.runners[event.runner] = "retired"
            _serves(state, event.runner, None)
        case ev.WeightsPublished():
            state.versions.add(event.version)
            state.published_version = event.version
        case ev.WeightsLoaded():
            _serves(state, event.runner, event.version)
        case ev.BatchSubmitted():
            state.open.add(item.stream)
            state.batches[batch_stream(event.batch_id)] = BatchProgress(
                batch_id=event.batch_id,
                batch_type=event.batch_type,
                tasks=len(event.repeat_times),
                submitted_at=item.recorded_at,
            )
        case _ if batch is not None:
            _evolve_batch(state, batch, item, event)
    return state


def _serves(state: RunState, runner: str, version: int | None) -> None:
    """Note that this runner has these weights now; None: it is gone."""
    if version is None or runner in state.auxiliary:
        state.serving.pop(runner, None)
    else:
        state.serving[runner] = version
    state.model_version = min(state.serving.values(), default=state.model_version)


def _evolve_batch(state: RunState, batch: BatchProgress, item: Recorded, event: ev.Event) -> None:
    match event:
        case ev.RunsFinished():
            batch.response_tokens += event.response_tokens
            state.response_tokens += event.response_tokens
            state.prompt_tokens += event.prompt_tokens
            batch.model_version = max(event.model_version_end, batch.model_version or 0)
            batch.finished += isinstance(event, ev.TaskFinished)
        case ev.TaskReopened():
            batch.finished -= event.finished
        case ev.TasksAdded():
            batch.tasks += len(event.repeat_times)
        case ev.AttemptFailed():
            batch.failed_attempts += 1
            batch.failed_by_kind[event.kind] = batch.failed_by_kind.get(event.kind, 0) + 1
            batch.last_failure = event.message
            state.failed_attempts += 1
        case ev.BatchFinalizing():
            batch.state = BatchLifecycleState.FINALIZING.value
        case ev.FinalizeFailed():
            batch.state = BatchLifecycleState.RUNNING.value
        case ev.BatchFinalized():
            batch.state, batch.ended_at = BatchLifecycleState.FINALIZED.value, item.recorded_at
            state.open.discard(item.stream)
            batch.reward = mean_reward(event.result)
            batch.missing = missing_runs(batch.batch_id, batch.batch_type, event.result["metrics"])
            batch.dropped = event.dropped
        case ev.BatchAborted():
            batch.state, batch.ended_at = BatchLifecycleState.ABORTED.value, item.recorded_at
            state.open.discard(item.stream)
        case ev.BatchTrained():
            batch.trained_step = event.step


def missing_runs(batch_id: BatchId, batch_type: str, metrics: Mapping[str, float]) -> int:
    """Return how many runs a batch's mean reward is not over: those that failed, and those without a reward."""
    prefix = metric_prefix(batch_id, batch_type)
    return int(sum(metrics.get(f"{prefix}/{name}missing_run_count", 0) for name in ("", "reward/")))


def mean_reward(result: dict[str, Any]) -> float | None:
    """Return the mean reward in a final result: `rollout/reward/mean`, or for an eval the mean of its `reward/mean@n`.

    In a log of before 2026-11 an eval of which tasks lost runs has several n: that of the largest is taken.
    """
    metrics = result["metrics"]
    if "rollout/reward/mean" in metrics:
        return float(metrics["rollout/reward/mean"])
    found = {int(m.group(1)): float(v) for k, v in metrics.items() if (m := _EVAL_REWARD.search(k))}
    return found[max(found)] if found else None

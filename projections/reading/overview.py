"""Summary of a run for `watch` and the first page of the dashboard.

It is made from a row per batch and from rare events, which have an index. Distributions also read events of batches.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from trinity_es.events import vocabulary as ev
from trinity_es.events.store.records.event_queries import RARE
from trinity_es.events.store.records.log_values import Recorded
from trinity_es.events.values import BatchId, BatchLifecycleState, batch_stream
from trinity_es.projections.reading.log_events import LogEvents

if TYPE_CHECKING:
    from trinity_es.projections.tables.batch_queries import BatchRow
    from trinity_es.projections.tables.runner_history import RunnerIncarnation

__all__ = ["NOTABLE", "Distributions", "Overview", "Point", "Throughput", "distributions", "summarize", "throughput"]

NOTABLE = tuple(name for name in RARE if ev.EVENTS[name].stream != ev.LeaseTaken.stream)
"""Types of rare events without those of leases, which are many if runs use sandboxes."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Value of one batch in a curve over the run."""

    batch_id: BatchId
    step: int | None
    """Train batch: the step that trained it, or else its id if that is a number. Eval: the number before the `/` of its
    id."""
    name: str
    """`train`, `collect`, or the name of an eval (`letters` for `12/letters`)."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Throughput in one slice of time, if each batch's work is spread evenly from its submission to its end."""

    at: float
    """End of the slice, unix seconds."""
    seconds: float
    tokens: float
    """Response tokens per second."""
    tasks: float
    """Finished tasks per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    head: int
    """Last position of the log that the summary covers."""
    first_at: float | None
    """Unix seconds of the first event; None if the log is empty."""
    last_at: float | None
    config: dict[str, Any]
    """Config of the system's last start, with secrets masked; {} if none is recorded."""
    states: dict[str, int]
    tasks: int
    finished: int
    failed: int
    dropped: int
    failed_attempts: int
    experiences: int
    prompt_tokens: int
    response_tokens: int
    trained_steps: int
    """Highest trained step; 0 if none was trained."""
    model_version: int
    runners: dict[str, int]
    """Number of runners by the state of their last life."""
    runner_deaths: int
    coordinator_starts: int
    rewards: list[Point]
    """Mean rewards of train and collect batches. This and the next two lists are in the order of the batches' ends."""
    evals: list[Point]
    staleness: list[Point]
    """Number of weights versions that delivered experiences lag behind."""
    throughput: list[Throughput]
    stalls: list[Recorded]
    recent: list[Recorded]
    """Last rare events, newest first."""
    attempts_failed: dict[str, int]
    tasks_dropped: dict[str, int]
    """Reason, with numbers replaced by N -> number of dropped tasks."""
    experiences_dropped: dict[str, int]
    """Pipeline operator -> number of dropped experiences. "" stands for operators that don't report ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """Durations, rewards, response lengths and failures in some batches. Each list is in log order."""

    batch_ids: list[BatchId]
    attempt_seconds: list[float] = field(default_factory=list)
    """Durations of attempts that finished some runs, as measured by the runner."""
    failed_seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Reward of each run that has one."""
    response_tokens: list[int] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


def distributions(log: LogEvents, starts: Mapping[BatchId, int]) -> Distributions:
    """Collect the distributions of batches, given with their first positions, from the events of their attempts.

    The JSON is read directly, because making event objects would take most of the time.
    """
    collected = Distributions(batch_ids=list(starts))
    types = ["RunsFinished", "TaskFinished", "AttemptFailed"]
    for item in (r for b, start in starts.items() for r in log.read(stream=batch_stream(b), types=types, after=start)):
        event = orjson.loads(item.data)
        if item.type == "AttemptFailed":
            collected.failures[event["kind"]] += 1
            if event.get("seconds"):
                collected.failed_seconds.append(event["seconds"])
            continue
        collected.attempt_seconds.append(event["seconds"])
        for run in event["runs"]:
            collected.response_tokens.append(run.get("response_tokens", 0))
            if "reward" in run["metrics"]:
                collected.rewards.append(run["metrics"]["reward"])
    return collected


def throughput(rows: Iterable[BatchRow], until: float, slices: int = 120) -> list[Throughput]:
    """Return the throughput in each of `slices` equal parts of the time from the first submission to `until`.

    The present tokens and tasks of an open batch are spread from its submission to `until`.
    """
    rows = [row for row in rows if row.finished or row.response_tokens]
    if not rows:
        return []
    start = min(row.submitted_at for row in rows)
    slice_seconds = max((until - start) / slices, 1e-6)
    sums = [[0.0, 0.0] for _ in range(slices)]
    for row in rows:
        end = until if row.ended_at is None else row.ended_at
        first_slice = min(int((row.submitted_at - start) / slice_seconds), slices - 1)
        last_slice = min(max(int((end - start) / slice_seconds), first_slice), slices - 1)
        amounts = (row.response_tokens, row.finished)
        is_spread = first_slice != last_slice and end > row.submitted_at
        for i in range(first_slice, last_slice + 1):
            slice_start, slice_end = start + i * slice_seconds, start + (i + 1) * slice_seconds
            seconds_inside = min(end, slice_end) - max(row.submitted_at, slice_start)
            share = seconds_inside / (end - row.submitted_at) if is_spread else 1.0
            for k, amount in enumerate(amounts):
                sums[i][k] += amount * share
    return [
        Throughput(
            at=start + (i + 1) * slice_seconds, seconds=slice_seconds, tokens=tokens / slice_seconds,
            tasks=tasks / slice_seconds,
        )
        for i, (tokens, tasks) in enumerate(sums)
    ]


def _curve_point(row: BatchRow, value: float) -> Point:
    name, step = row.batch_type, row.trained_step
    if row.batch_type == "eval":
        number, _, rest = str(row.batch_id).partition("/")
        name = rest or str(row.batch_id)
        step = int(number) if number.isdecimal() and number.isascii() else None
    elif step is None and isinstance(row.batch_id, int):
        step = row.batch_id
    return Point(batch_id=row.batch_id, step=step, name=name, value=value)


def summarize(
    log: LogEvents, head: int, recent: int, rows: Sequence[BatchRow], lives: Sequence[RunnerIncarnation],
    model_version: int, losses: Mapping[tuple[str, str], int],
) -> Overview:
    first, last = log.at(min(head, 1)), log.at(head)
    last_at = None if last is None else last.recorded_at
    finalized_rows = [r for r in rows if r.state == BatchLifecycleState.FINALIZED.value and r.ended_at is not None]
    finalized_rows.sort(key=lambda r: (r.ended_at or 0.0, r.last_position))
    rewards = [(r, _curve_point(r, r.reward)) for r in finalized_rows if r.reward is not None]
    loss_counts: dict[str, Counter[str]] = defaultdict(Counter)
    for (kind, reason), count in losses.items():
        loss_counts[kind][_NUMBER.sub("N", reason) if kind == "task" else reason] += count
    sums = {name: sum(getattr(row, name) for row in rows) for name in (
        "tasks", "finished", "failed", "dropped", "failed_attempts", "experiences", "prompt_tokens", "response_tokens")}
    return Overview(
        head=head, first_at=None if first is None else first.recorded_at, last_at=last_at, config=log.config()[1],
        states=dict(Counter(row.state for row in rows)), **sums,
        trained_steps=max((r.trained_step or 0 for r in rows), default=0), model_version=model_version,
        runners=dict(Counter({life.runner: life.how for life in lives}.values())),
        runner_deaths=sum(life.died for life in lives),
        coordinator_starts=sum(1 for _ in log.read_rare(["CoordinatorStarted"])),
        rewards=[p for r, p in rewards if r.batch_type != "eval"],
        evals=[p for r, p in rewards if r.batch_type == "eval"],
        staleness=[_curve_point(r, r.staleness) for r in finalized_rows if r.staleness is not None],
        throughput=throughput(rows, last_at or 0.0),
        recent=list(log.read_rare(NOTABLE, limit=recent, descending=True)),
        stalls=list(log.read_rare(["StallDetected"], limit=recent, descending=True)),
        attempts_failed=loss_counts["attempt"], tasks_dropped=loss_counts["task"],
        experiences_dropped=loss_counts["experience"],
    )

"""A run at a glance, from its read models and its rare events: for the first page of a dashboard, and `watch`.

What costs the same on a log of a million events as on one of a thousand: rows of batches (one each), rare events found
through their index, and for distributions the events of some batches. Nothing here reads the whole log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from trinity_es.events.store.records.recorded import Recorded
from trinity_es.events.values import BatchId, BatchLifecycleState

if TYPE_CHECKING:
    from trinity_es.projections.tables.batch_list import BatchRow
    from trinity_es.projections.tables.runner_history import RunnerIncarnation

__all__ = ["Distributions", "Overview", "Point", "Throughput", "distributions", "summarize", "throughput"]

SLICES = 120
"""Points of a throughput curve."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One batch's value in a curve over the run."""

    batch_id: BatchId
    step: int | None
    """Of a train batch: the step that it was trained in, else its own id where that is a number. Of an eval: the number
    that its id begins with."""
    name: str
    """`train`, `collect`, or what an eval is called: `letters` of `12/letters`."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What was generated in one slice of the run. Batches count evenly from their submission to their end."""

    at: float
    """Unix seconds: the end of the slice."""
    seconds: float
    tokens: float
    """Response tokens a second."""
    tasks: float
    """Finished, a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything that the first look at a run needs."""

    head: int
    """The log's last position: what this is as of."""
    first_at: float | None
    """Unix seconds of the first event; None of an empty log."""
    last_at: float | None
    config: dict[str, Any]
    """As the system was last started with it, passwords masked; {} where it never said."""
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
    """The highest step that was trained; 0: none."""
    model_version: int
    runners: dict[str, int]
    """Runners (their last life) by state."""
    runner_deaths: int
    coordinator_starts: int
    rewards: list[Point]
    """Mean rewards of train and collect batches, in the order of their end, as are the next two."""
    evals: list[Point]
    staleness: list[Point]
    """Weights versions that what was delivered is behind."""
    throughput: list[Throughput]
    stalls: list[Recorded]
    """The last ones, newest first."""
    recent: list[Recorded]
    """The last events that are not bulk, newest first."""
    attempts_failed: dict[str, int]
    tasks_dropped: dict[str, int]
    """By reason; numbers in it are shown as N."""
    experiences_dropped: dict[str, int]
    """By operator of the pipeline; "": one that does not say which it took out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """Values of some batches, each in the order of the log."""

    batch_ids: list[BatchId]
    attempt_seconds: list[float] = field(default_factory=list)
    """Of attempts that finished some runs, as their runner measured it."""
    failed_seconds: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """One a run, as the next."""
    response_tokens: list[int] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    """Failed attempts by kind."""


def distributions(batch_ids: Sequence[BatchId], events: Iterable[tuple[str, bytes]]) -> Distributions:
    """Return the fold of these batches' RunsFinished, TaskFinished and AttemptFailed, as (type, data).

    From the stored JSON: building the events would be most of the work, and only a few of their numbers are asked for.
    """
    found = Distributions(batch_ids=list(batch_ids))
    for type_name, data in events:
        event = orjson.loads(data)
        if type_name == "AttemptFailed":
            found.failures[event["kind"]] = found.failures.get(event["kind"], 0) + 1
            if event.get("seconds"):
                found.failed_seconds.append(event["seconds"])
            continue
        found.attempt_seconds.append(event["seconds"])
        for run in event["runs"]:
            found.response_tokens.append(run.get("response_tokens", 0))
            if "reward" in run["metrics"]:
                found.rewards.append(run["metrics"]["reward"])
    return found


def throughput(rows: Iterable[BatchRow], until: float, slices: int = SLICES) -> list[Throughput]:
    """Return what was generated in each of `slices` equal parts of the time from the first submission to `until`.

    A batch that has not ended counts up to `until` with what it has.
    """
    rows = [row for row in rows if row.finished or row.response_tokens]
    if not rows:
        return []
    start = min(row.submitted_at for row in rows)
    width = max((until - start) / slices, 1e-6)
    sums = [[0.0, 0.0] for _ in range(slices)]
    for row in rows:
        end = until if row.ended_at is None else row.ended_at
        first = min(int((row.submitted_at - start) / width), slices - 1)
        last = min(max(int((end - start) / width), first), slices - 1)
        amounts = (row.response_tokens, row.finished)
        for i in range(first, last + 1):
            inside = min(end, start + (i + 1) * width) - max(row.submitted_at, start + i * width)
            share = inside / (end - row.submitted_at) if first != last and end > row.submitted_at else 1.0
            for k, amount in enumerate(amounts):
                sums[i][k] += amount * share
    return [
        Throughput(at=start + (i + 1) * width, seconds=width, tokens=tokens / width, tasks=tasks / width)
        for i, (tokens, tasks) in enumerate(sums)
    ]


def _point(row: BatchRow, value: float) -> Point:
    name, step = row.batch_type, row.trained_step
    if row.batch_type == "eval":
        number, _, rest = str(row.batch_id).partition("/")
        name, step = rest or str(row.batch_id), int(number) if number.isdecimal() and number.isascii() else None
    elif step is None and isinstance(row.batch_id, int):
        step = row.batch_id
    return Point(batch_id=row.batch_id, step=step, name=name, value=value)


def summarize(
    *, head: int, first_at: float | None, last_at: float | None, rows: Sequence[BatchRow], config: dict[str, Any],
    lives: Sequence[RunnerIncarnation], coordinator_starts: int, model_version: int,
    losses: Mapping[tuple[str, str], int], stalls: list[Recorded], recent: list[Recorded],
) -> Overview:
    finalized = [r for r in rows if r.state == BatchLifecycleState.FINALIZED.value and r.ended_at is not None]
    finalized.sort(key=lambda r: (r.ended_at or 0.0, r.last_position))
    rewards = [(r, _point(r, r.reward)) for r in finalized if r.reward is not None]
    lost: dict[str, dict[str, int]] = {"attempt": {}, "task": {}, "experience": {}}
    for (what, why), count in losses.items():
        why = _NUMBER.sub("N", why) if what == "task" else why
        lost[what][why] = lost[what].get(why, 0) + count
    return Overview(
        head=head, first_at=first_at, last_at=last_at, config=config,
        states=dict(Counter(row.state for row in rows)),
        tasks=sum(r.tasks for r in rows), finished=sum(r.finished for r in rows), failed=sum(r.failed for r in rows),
        dropped=sum(r.dropped for r in rows), failed_attempts=sum(r.failed_attempts for r in rows),
        experiences=sum(r.experiences for r in rows), prompt_tokens=sum(r.prompt_tokens for r in rows),
        response_tokens=sum(r.response_tokens for r in rows),
        trained_steps=max((r.trained_step or 0 for r in rows), default=0), model_version=model_version,
        runners=dict(Counter({life.runner: life.how for life in lives}.values())),
        runner_deaths=sum(life.died for life in lives), coordinator_starts=coordinator_starts,
        rewards=[p for r, p in rewards if r.batch_type != "eval"],
        evals=[p for r, p in rewards if r.batch_type == "eval"],
        staleness=[_point(r, r.staleness) for r in finalized if r.staleness is not None],
        throughput=throughput(rows, last_at or 0.0), recent=recent, stalls=stalls,
        attempts_failed=lost["attempt"], tasks_dropped=lost["task"], experiences_dropped=lost["experience"],
    )

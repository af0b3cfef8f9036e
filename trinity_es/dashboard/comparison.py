"""Two replays side by side: two batches, or one batch at two moments, of one log or of two.

Pure but for reading the log: what each side was, and where they differ, as plain values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

from trinity_es.events.errors import BatchNotFound
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId
from trinity_es.projections.history.attempts import BatchTimeline, TaskTimeline, tell
from trinity_es.projections.reading.log_reader import Log

__all__ = ["Comparison", "Fact", "Side", "TaskPair", "compare", "side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two."""

    log: str
    """Its URL, without a password."""
    batch_id: BatchId
    at: int | None
    """Up to this position; None: all that there is."""
    story: BatchTimeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that can be said of both. Values are None where a side has none."""

    name: str
    a: Any
    b: Any

    @property
    def same(self) -> bool:
        return type(self.a) is type(self.b) and bool(self.a == self.b)

    @property
    def delta(self) -> float | None:
        """b - a, of numbers."""
        numbers = [v for v in (self.a, self.b) if isinstance(v, int | float) and not isinstance(v, bool)]
        return numbers[1] - numbers[0] if len(numbers) == 2 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPair:
    """One task on both sides."""

    task: int
    a: TaskTimeline | None
    b: TaskTimeline | None
    differs: list[str] = field(default_factory=list)
    """In what: `state`, `reward`, `attempts`, `runner`, `tokens`, `version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    a: Side
    b: Side
    facts: list[Fact]
    metrics: list[Fact]
    tasks: list[TaskPair]

    @property
    def differing(self) -> list[str]:
        """Names of the facts and metrics that differ, but for times."""
        timed = ("time", "seconds", "positions")
        return [f.name for f in (*self.facts, *self.metrics) if not f.same and not any(t in f.name for t in timed)]

    @property
    def tasks_differing(self) -> list[int]:
        """Numbers of the tasks that differ."""
        return [p.task for p in self.tasks if p.differs]

    @property
    def equal(self) -> bool:
        """No fact, metric or task differs, but for times."""
        return not self.differing and not self.tasks_differing


def side(log: Log, batch_id: BatchId, at: int | datetime | None = None) -> Side:
    """Return a batch as it is, or was at a position or a time. Raises BatchNotFound, also where it was not there yet.
    """

    def until() -> Iterator[Recorded]:
        for recorded in log.events(batch_id):
            if (isinstance(at, int) and recorded.position > at) or (
                isinstance(at, datetime) and recorded.recorded_at > at.timestamp()
            ):
                return
            yield recorded

    try:
        story = tell(until())
    except BatchNotFound:
        log.events(batch_id)  # tells if there is no such batch at all
        raise BatchNotFound(f"batch {batch_id!r} was not submitted yet at {at}") from None
    position = at if at is None or isinstance(at, int) else story.last_position
    return Side(log=log.url, batch_id=batch_id, at=position, story=story)


def compare(a: Side, b: Side) -> Comparison:
    """Return where they differ."""
    metrics = [_metrics(a.story), _metrics(b.story)]
    tasks = {t.task: t for t in a.story.tasks}, {t.task: t for t in b.story.tasks}
    return Comparison(
        a=a, b=b,
        facts=[Fact(name=name, a=of_a, b=of_b)
               for (name, of_a), (_, of_b) in zip(_facts(a.story), _facts(b.story), strict=True)],
        metrics=[Fact(name=name, a=metrics[0].get(name), b=metrics[1].get(name))
                 for name in sorted(metrics[0].keys() | metrics[1].keys())],
        tasks=[_pair(task, tasks[0].get(task), tasks[1].get(task))
               for task in sorted(tasks[0].keys() | tasks[1].keys())],
    )


def _facts(story: BatchTimeline) -> list[tuple[str, Any]]:
    state = story.state
    counts = {name: sum(t.state == name for t in story.tasks)
              for name in ("finished", "failed", "dropped", "running", "pending")}
    return [
        ("type", state.batch_type), ("state", state.state.value), ("tasks", state.expected_task_count),
        *((f"tasks {name}", n) for name, n in counts.items()),
        ("tasks wanted at least", state.min_wait_num), ("attempts a unit gets", state.max_attempts),
        ("failed attempts", state.failed_attempts),
        ("experiences delivered", sum(ref.count for ref in state.experiences)),
        ("response tokens", sum(t.response_tokens for t in story.tasks)),
        ("weights versions", ", ".join(str(v) for v in sorted(story.versions))),
        ("trained in step", state.trained_step),
        ("seconds", (story.ended_at or story.last_at) - story.submitted_at),
    ]


def _metrics(story: BatchTimeline) -> dict[str, Any]:
    return dict((story.state.final_result or {}).get("metrics", {}))


def _pair(task: int, a: TaskTimeline | None, b: TaskTimeline | None) -> TaskPair:
    if a is None or b is None:
        return TaskPair(task=task, a=a, b=b, differs=["only on one side"])
    differs = [name for name, of_a, of_b in zip(_SAID, _said(a), _said(b), strict=True) if of_a != of_b]
    return TaskPair(task=task, a=a, b=b, differs=differs)


_SAID = ("state", "runs", "reward", "attempts", "runner", "tokens", "version")


def _said(task: TaskTimeline) -> tuple[Any, ...]:
    return (
        task.state, task.runs, sorted(task.rewards), [a.outcome for a in task.attempts],
        [a.runner for a in islice(reversed(task.attempts), 1)], task.response_tokens,
        [a.model_version for a in islice(reversed(task.attempts), 1)],
    )

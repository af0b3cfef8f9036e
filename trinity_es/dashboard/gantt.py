"""Layout of a batch's Gantt chart: bars for attempts, cells for runs. Positions are percent of the time shown.

templates/drawing.html draws it as inline SVG, which needs no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_es.projections.batch import BatchState, TaskState
from trinity_es.projections.event_texts import kept_text
from trinity_es.projections.history.attempts import Attempt, BatchTimeline, TaskTimeline
from trinity_es.projections.why.answer import span

__all__ = [
    "Bar", "Cell", "Lane", "Window", "attempts_by_runner", "bar_kind", "cells", "drawing", "lane", "reward_range_of",
    "ticks",
]

SHADES = 6
"""Number of colour shades for rewards, from the batch's lowest to its highest."""
MAX_TICKS = 6
MAX_ROWS = 40
"""Maximum number of rows in one lane; further overlapping bars share the last row."""


@dataclass(frozen=True, slots=True)
class Window:
    """Period that is shown, in unix seconds."""

    start: float
    end: float

    def x(self, at: float) -> float:
        """Convert a time to percent of the period, limited to 0 to 100."""
        seconds = self.end - self.start
        return 0.0 if seconds <= 0 else min(100.0, max(0.0, 100 * (at - self.start) / seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Bar of one attempt."""

    x: float
    """Left end, in percent of the window, as is `width`."""
    width: float
    row: int
    kind: str
    """`finished`, `running`, `failed` or `dropped`; determines the colour."""
    attempt: int
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Bars of one task or one runner. Attempts that overlap in time are in different rows."""

    bars: list[Bar]
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Cell of one run."""

    run: int
    kind: str
    """`q0` to `q5` by reward, `done` (no reward), `failed`, `running`, `pending` or `dropped`."""
    title: str


def bar_kind(attempt: Attempt) -> str:
    """Return `failed` for every kind of failure, else `finished`, `running` or `dropped`."""
    return attempt.outcome if attempt.outcome in ("finished", "running", "dropped") else "failed"


def lane(attempts: Iterable[tuple[int, Attempt]], window: Window) -> Lane:
    """Arrange (task, attempt) pairs as bars. Attempts that overlap in time get different rows."""
    bars: list[Bar] = []
    row_free_at: list[float] = []
    for task, attempt in sorted(attempts, key=lambda pair: pair[1].dispatched_at):
        began_at, ended_at = attempt.dispatched_at, window.end if attempt.ended_at is None else attempt.ended_at
        row = next((i for i, free_at in enumerate(row_free_at) if free_at <= began_at), None)
        if row is None:
            row = min(len(row_free_at), MAX_ROWS - 1)
            if row == len(row_free_at):
                row_free_at.append(0.0)
        row_free_at[row] = ended_at
        x = window.x(began_at)
        bars.append(Bar(
            x=x, width=max(window.x(ended_at) - x, 0.25), row=row, kind=bar_kind(attempt), attempt=attempt.attempt,
            title=_title(task, attempt, ended_at - began_at),
        ))
    return Lane(bars=bars, rows=max(1, len(row_free_at)))


def _title(task: int, attempt: Attempt, seconds: float) -> str:
    runs = f"run {attempt.run_id_base}" if attempt.runs == 1 else (
        f"runs {attempt.run_id_base} to {attempt.run_id_base + attempt.runs - 1}")
    message = f"\n{attempt.message[:300]}" if attempt.message else ""
    kept = f"\ngoes on from {kept_text(attempt.kept)}" if attempt.kept is not None else ""
    return (
        f"task {task}, {runs}, attempt {attempt.attempt}: {attempt.outcome} after {span(seconds)}\n"
        f"{attempt.runner} #{attempt.incarnation}, weights {attempt.model_version}{kept}{message}"
    )


def ticks(window: Window) -> list[tuple[float, str]]:
    """Return the ticks of the time axis as (percent, label), at round times since the window's start."""
    seconds = window.end - window.start
    if seconds <= 0:
        return [(0.0, "0")]
    steps = [m * 10.0**k for k in range(-3, 2) for m in (1, 2, 5)]
    steps += [60.0 * m for m in (1, 2, 5, 10, 15, 30)] + [3600.0 * m for m in (1, 2, 3, 6, 12, 24, 48, 96, 240, 720)]
    steps = sorted(s for s in steps if s != 50.0)
    step = next((s for s in steps if seconds / s <= MAX_TICKS), steps[-1])
    labels = []
    i = 0
    while i * step <= seconds and i <= 40:
        labels.append((100 * i * step / seconds, _tick_label(i * step)))
        i += 1
    return labels


def _tick_label(seconds: float) -> str:
    """Format seconds as a label, such as 0.5 s, 1 min 30 s or 2 h."""
    if seconds == 0:
        return "0"
    if seconds < 60:
        return f"{seconds:g} s"
    if seconds < 3600:
        minutes, rest = divmod(seconds, 60)
        return f"{minutes:.0f} min" + (f" {rest:.0f} s" if rest else "")
    hours, rest = divmod(seconds, 3600)
    return f"{hours:.0f} h" + (f" {rest / 60:.0f} min" if rest >= 60 else "")


def drawing(timeline: BatchTimeline, window: Window, tasks: Sequence[TaskTimeline]) -> dict[str, Any]:
    """Return the chart of these tasks of a batch as values for templates, with the batch's time axis and counts."""
    grid = cells(timeline.state, [t.task for t in tasks], reward_range_of(timeline.state))
    return {
        "timeline": timeline, "state": timeline.state, "window": window, "ticks": ticks(window),
        "counts": timeline.counts,
        "moments": [(window.x(at), what) for at, what in timeline.turns],
        "tasks": [(t, grid[t.task], lane([(t.task, a) for a in t.attempts], window)) for t in tasks],
        "most_runs": max((len(c) for c in grid.values()), default=1),
    }


def reward_range_of(state: BatchState) -> tuple[float, float]:
    """Return the lowest and the highest reward of the batch's runs; (0, 0) if there is no reward."""
    rewards = [r.metrics["reward"] for t in state.tasks for r in t.done.values() if "reward" in r.metrics]
    return (min(rewards), max(rewards)) if rewards else (0.0, 0.0)


def cells(state: BatchState, tasks: Sequence[int], reward_range: tuple[float, float]) -> Mapping[int, list[Cell]]:
    """Return the cells of the runs of these tasks, by task.

    `reward_range`: lowest and highest reward; the shades between them are equally spaced.
    """
    chosen = set(tasks)
    runner_by_run = {
        (task, run): flight.runner
        for (task, _), flight in state.flights.items() if task in chosen
        for run in range(flight.unit.run_id_base, flight.unit.run_id_base + flight.unit.runs)
    }
    return {task: [_cell(state, task, state.tasks[task], run, runner_by_run.get((task, run)), reward_range)
                   for run in range(state.tasks[task].total_runs)] for task in tasks}


def _cell(
    state: BatchState, number: int, task: TaskState, run: int, runner: str | None, reward_range: tuple[float, float]
) -> Cell:
    """Return the cell of one run of a task. `runner`: the runner that has the run now, None if none has it."""
    head = f"task {number}, run {run}: "
    if run in task.done:
        reward = task.done[run].metrics.get("reward")
        if reward is None:
            return Cell(run=run, kind="done", title=head + "done")
        low, high = reward_range
        shade = SHADES - 1 if high <= low else int((reward - low) / (high - low) * (SHADES - 1) + 0.5)
        return Cell(run=run, kind=f"q{min(SHADES - 1, max(0, shade))}", title=f"{head}reward {reward:.4g}")
    if run in task.failed:
        return Cell(run=run, kind="failed", title=f"{head}failed: {task.failed[run][:300]}")
    if number in state.dropped:
        return Cell(run=run, kind="dropped", title=f"{head}dropped: {state.dropped[number][:300]}")
    if runner is not None:
        return Cell(run=run, kind="running", title=f"{head}on {runner}")
    return Cell(run=run, kind="pending", title=f"{head}waits for a runner")


def attempts_by_runner(timeline: BatchTimeline) -> dict[str, list[tuple[int, Attempt]]]:
    """Return the batch's attempts as (task, attempt), by runner."""
    by_runner: dict[str, list[tuple[int, Attempt]]] = {}
    for task in timeline.tasks:
        for attempt in task.attempts:
            by_runner.setdefault(attempt.runner, []).append((task.task, attempt))
    return by_runner

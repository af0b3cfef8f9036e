"""Tables for a terminal, and the output of `batches`, `show` and `replay`.

Every text that may come from a rollout, a user or a runner's error goes through `plain` (no control characters, no line
breaks) and into `rich` as `Text`, never as markup, so a model's answer can't colour, move or rewrite a terminal.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trinity_es.projections.batch import BatchState
from trinity_es.projections.event_texts import kept_text
from trinity_es.projections.history.attempts import BatchTimeline, TaskTimeline
from trinity_es.projections.history.critical_path import Segment, seen_until, segments
from trinity_es.projections.tables.batch_queries import BatchRow
from trinity_es.safe_text import clock, error_line, name_of, plain

__all__ = [
    "columns", "console", "counted_text", "metrics_table", "number", "print_batches", "print_fitted", "print_left_out",
    "print_state", "print_timeline", "reward_text", "state_json", "state_text", "when",
]

_BAR_WIDTH = 24
_MAX_COLOURED_ROWS = 200
"""Maximum number of rows of a coloured table. Longer tables are plain text, as rich takes seconds for thousands."""
_MAX_TURNS = 40
_PIPE_WIDTH = 100_000
"""Width of the output in a pipe or a file, so that no line is cut there."""
_TEXT_WIDTH = 24
"""Minimum width of a text column with line breaks."""
_STATE_COLOURS = {
    "finalized": "green", "finished": "green", "ready": "green", "running": "cyan", "finalizing": "cyan",
    "started": "cyan", "aborted": "yellow", "dropped": "yellow", "failed": "red", "lost": "red",
    "joined": "green", "leads": "green", "draining": "yellow", "gone": "red",
}


def console(stderr: bool = False) -> Console:
    """Return a console that is as wide as the terminal, or wide enough for any table in a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=False)


def print_fitted(out: Console, table: Table, spare: Sequence[str]) -> None:
    """Print a table without cutting a number. A table of more than `_MAX_COLOURED_ROWS` rows is plain text.

    If the terminal is too narrow, columns in `spare` are dropped, beginning with the first, and their names printed.
    """
    if table.row_count > _MAX_COLOURED_ROWS:
        _print_plain(out, table)
        return
    columns, wide_options = list(table.columns), out.options.update_width(_PIPE_WIDTH)
    full_widths, least_widths = [], []
    for column in columns:
        head = Measurement.get(out, wide_options, column.header)
        widest = max((Measurement.get(out, wide_options, cell).maximum for cell in column.cells), default=0)
        may_break = column.justify == "left" and not column.no_wrap
        full_widths.append(max(widest, head.maximum))
        least_widths.append(max(min(widest, _TEXT_WIDTH) if may_break else widest, head.minimum))
    dropped_names = []
    for name in spare:
        if sum(least_widths) + 2 * len(least_widths) <= out.width:
            break
        i = next(i for i, column in enumerate(columns) if column.header == name)
        for items in (columns, full_widths, least_widths):
            del items[i]
        dropped_names.append(name)
    free_width = out.width - sum(least_widths) - 2 * len(least_widths)
    fitting_table = Table(box=None, pad_edge=False, header_style="bold")
    for column, full_width, least_width in zip(columns, full_widths, least_widths, strict=True):
        extra = max(0, min(full_width - least_width, free_width))
        free_width -= extra
        fitting_table.add_column(column.header, justify=column.justify, overflow=column.overflow,
                                 width=least_width + extra)
    for row in zip(*(column.cells for column in columns), strict=True):
        fitting_table.add_row(*row)
    out.print(fitting_table)
    if dropped_names:
        out.print(Text(f"too narrow here for {', '.join(dropped_names)}: a pipe and --json have all", style="dim"))


def _print_plain(out: Console, table: Table) -> None:
    cells = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(map(len, column)) for column in cells]
    for line in zip(*cells, strict=True):
        aligned = (cell.ljust(width) if column.justify == "left" else cell.rjust(width)
                   for cell, width, column in zip(line, widths, table.columns, strict=True))
        out.file.write("  ".join(aligned).rstrip() + "\n")


def columns(*names: str, right: Sequence[str] = (), whole: Sequence[str] | None = None) -> Table:
    """Return an empty table with these columns.

    `right`: columns that are aligned on the right, as numbers. `whole`: columns without line breaks (None: all).
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=whole is None or name in whole,
                         overflow="ellipsis" if whole is None else "fold")
    return table


def state_text(name: str) -> Text:
    return Text(name, style=_STATE_COLOURS.get(name, ""))


def counted_text(count: int, style: str = "red") -> Text:
    """Return a number of failures or losses as text, in this colour unless it is 0."""
    return Text(str(count), style=style if count else "dim")


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:z.{digits}f}"


def when(at: float | None) -> str:
    return "" if at is None else clock(at, date=True)


def print_left_out(out: Console, count: int, shown_count: int, what: str = "before them") -> None:
    """If fewer than `count` lines were printed, print how many are left out."""
    if count > shown_count:
        out.print(Text(f"{count - shown_count:,} {what}: --json has all", style="dim"))


_NUMBERS = ("tasks", "finished", "failed attempts", "experiences", "reward", "tokens", "version", "dropped", "step",
            "submitted", "seconds")
_SPARE = ("experiences", "version", "dropped", "submitted", "tokens", "step", "finished", "type")
"""Columns that a narrow terminal drops, in this order."""


def print_batches(
    out: Console, rows: Sequence[BatchRow], causes: Sequence[dict[str, Any] | None] | None = None
) -> None:
    """Print a line per batch.

    `causes` adds a column with the reason why each batch took long: a dict with `seconds` and `what`, None if unknown.
    """
    table = columns("id", "type", "state", *_NUMBERS, *(["held up by"] if causes is not None else []),
                    right=_NUMBERS, whole=("type", "state", *_NUMBERS))
    # The cell of the last column for each row, as a list.
    cause_cells = [["" if c is None else f"{c['seconds']:.2f} s: {error_line(c['what'], 110)}"] for c in causes or ()]
    for row, cells in zip(rows, cause_cells or [[]] * len(rows), strict=True):
        seconds = None if row.ended_at is None else row.ended_at - row.submitted_at
        table.add_row(
            Text(name_of(row.batch_id)), row.batch_type, state_text(row.state), str(row.tasks), str(row.finished),
            counted_text(row.failed_attempts), str(row.experiences), reward_text(row), f"{row.response_tokens:,}",
            "" if row.model_version is None else str(row.model_version), counted_text(row.dropped, "yellow"),
            "" if row.trained_step is None else str(row.trained_step), when(row.submitted_at), number(seconds, 2),
            *map(Text, cells),
        )
    print_fitted(out, table, _SPARE)


def reward_text(row: BatchRow) -> str:
    """Return a batch's mean reward, with the number of its tasks that lack runs."""
    return number(row.reward) + (f" ({row.failed} short)" if row.failed and row.reward is not None else "")


# --- one batch ------------------------------------------------------------------------------------------------------
def print_timeline(
    out: Console, timeline: BatchTimeline, rows: Sequence[str], limit: int | None,
    gaps: Sequence[tuple[float, float]] = (),
) -> None:
    """Print a batch's state, its longest phases, its result, and a line for each of at most `limit` tasks.

    `rows`: each task's row in its taskset, "" if unknown. `gaps`: times without a coordinator.
    """
    state = timeline.state
    head = Text(f"batch {name_of(state.batch_id)}  {state.batch_type}  ", style="bold") + state_text(state.state.value)
    out.print(head)
    seconds = (timeline.ended_at or timeline.last_at) - timeline.submitted_at
    versions = ", ".join(f"{v} ({n} tasks)" for v, n in sorted(timeline.versions.items())) or "none yet"
    needed = "" if state.min_wait_num is None else f" (at least {state.min_wait_num} needed)"
    counts = ", ".join(f"{n} {name}" for name, n in timeline.counts.items() if n) or "none"
    out.print(Text(
        f"tasks       {state.expected_task_count}: {counts}{needed}; {state.failed_attempts} failed attempts\n"
        f"submitted   {clock(timeline.submitted_at, date=True)}, "
        f"{'ended after' if timeline.ended_at else 'so far'} {seconds:.2f} s\n"
        f"positions   {timeline.first_position} to {timeline.last_position}\n"
        f"weights     version {versions}"
    ))
    for at, what in timeline.turns[:_MAX_TURNS]:
        out.print(Text(f"  +{at - timeline.submitted_at:8.2f} s  {error_line(what, 140)}"))
    if len(timeline.turns) > _MAX_TURNS:
        out.print(Text(f"  and {len(timeline.turns) - _MAX_TURNS} more turns: --json has all", style="dim"))
    for i, segment in enumerate(_longest_segments(timeline, gaps)):
        out.print(Text(f"{'' if i else 'time spent':<12}{segment.seconds:.2f} s {error_line(segment.what, 140)}"))
    if state.final_result is not None:
        out.print(metrics_table(state.final_result["metrics"]))
    if timeline.tasks:
        seconds = max(seconds, 1e-9)  # of a batch with one event
        row_column = ["row"] if any(rows) else []
        spare = ("version", "runs", *row_column, "tokens", "reward", f"0 to {seconds:.2f} s")
        print_fitted(out, _tasks_table(timeline, timeline.tasks[:limit], rows, seconds, gaps), spare)
    if limit is not None and len(timeline.tasks) > limit:
        out.print(Text(f"{len(timeline.tasks) - limit} more tasks: --all shows them", style="dim"))


def _longest_segments(timeline: BatchTimeline, gaps: Sequence[tuple[float, float]]) -> list[Segment]:
    """Return the five longest phases of a batch in order of time, without phases below 1 % of its time."""
    all_segments = segments(timeline, gaps)
    total_seconds = sum(s.seconds for s in all_segments)
    longest = sorted(all_segments, key=lambda s: -s.seconds)[:5]
    return [s for s in all_segments if s in longest and s.seconds > total_seconds / 100]


def metrics_table(metrics: dict[str, float]) -> Table:
    """Return a table of metrics by name. A remark says that the count of finished tasks includes failed tasks."""
    table = Table(box=None, pad_edge=True, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name in sorted(metrics):
        remark = " (failed ones too)" if name.endswith("/finished_task_count") else ""
        table.add_row(Text(plain(name)) + Text(remark, style="dim"), f"{metrics[name]:.6g}")
    return table


def _tasks_table(
    timeline: BatchTimeline, tasks: Sequence[TaskTimeline], rows: Sequence[str], seconds: float,
    gaps: Sequence[tuple[float, float]],
) -> Table:
    """Return a table with a line per task. `seconds`: the time that the bars cover."""
    numbers = ("task", "runs", "last attempt", "reward", "tokens", "version")
    with_rows = any(rows)
    names = ("task", *(["row"] if with_rows else []), "state", f"0 to {seconds:.2f} s", *numbers[1:])
    table = columns(*names, right=numbers)
    table.add_column("attempts")
    for task in tasks:
        attempt = task.attempts[-1] if task.attempts else None
        took = "" if attempt is None or attempt.seconds is None else f"{attempt.seconds:.2f} s"
        table.add_row(
            str(task.task), *([plain(rows[task.task], 40)] if with_rows else []), state_text(task.state),
            Text(_bar(timeline, task, seconds, gaps), style=_STATE_COLOURS.get(task.state, "")),
            str(task.runs), took, number(task.reward), f"{task.response_tokens:,}",
            "" if attempt is None else str(attempt.model_version), Text(_attempts_text(timeline, task)),
        )
    return table


def _bar(timeline: BatchTimeline, task: TaskTimeline, seconds: float, gaps: Sequence[tuple[float, float]]) -> str:
    """Return a task's bar over the batch's time: · it waits, ━ a runner has it, x an attempt failed."""
    cells = ["·"] * _BAR_WIDTH
    for attempt in task.attempts:
        end_at = seen_until(attempt, timeline.ended_at or timeline.last_at, gaps)
        first = min(_BAR_WIDTH - 1, int((attempt.dispatched_at - timeline.submitted_at) / seconds * _BAR_WIDTH))
        last = max(first, min(_BAR_WIDTH - 1, int((end_at - timeline.submitted_at) / seconds * _BAR_WIDTH)))
        cells[first : last + 1] = ["━"] * (last + 1 - first)
        if attempt.outcome not in ("running", "finished", "dropped"):
            cells[last] = "x"
    ended_at = task.ended_at or timeline.ended_at
    if ended_at is not None:
        last = min(_BAR_WIDTH - 1, int((ended_at - timeline.submitted_at) / seconds * _BAR_WIDTH))
        cells[last + 1 :] = [" "] * (_BAR_WIDTH - 1 - last)
    return "".join(cells)


def _attempts_text(timeline: BatchTimeline, task: TaskTimeline) -> str:
    parts, last_error = [], ""
    for attempt in task.attempts:
        first_run, last_run = attempt.run_id_base, attempt.run_id_base + attempt.runs - 1
        runs = f" runs {first_run}-{last_run}" if attempt.runs < task.runs else ""
        part = f"+{attempt.dispatched_at - timeline.submitted_at:.2f} {plain(attempt.runner)}{runs}"
        part += f" goes on from {plain(kept_text(attempt.kept), 300)}" if attempt.kept is not None else ""
        if attempt.outcome == "finished":
            ended_at = attempt.dispatched_at if attempt.ended_at is None else attempt.ended_at
            part += f" → +{ended_at - timeline.submitted_at:.2f}"
        elif attempt.outcome != "running":
            error = error_line(attempt.message, 80)
            part += f" attempt {attempt.attempt} {attempt.outcome}: {'the same' if error == last_error else error}"
            last_error = error
        else:
            part += " …"
        parts.append(part)
    return "; ".join(parts)


def print_state(out: Console, state: BatchState) -> None:
    head = Text(f"batch {name_of(state.batch_id)}  {state.batch_type}  ", style="bold")
    out.print(head + state_text(state.state.value))
    units_by_runner = Counter(flight.runner for flight in state.flights.values())
    running = ", ".join(f"{n} on {plain(name)}" for name, n in sorted(units_by_runner.items())) or "none"
    untrained = "none: it is an eval" if state.batch_type == "eval" else "not trained"
    lines = [
        f"tasks settled     {state.completed_task_count} of {state.expected_task_count}"
        + ("" if state.min_wait_num is None else f", at least {state.min_wait_num} needed"),
        f"units running     {running}",
        f"units waiting     {len(state.pending)}",
        f"failed attempts   {state.failed_attempts}",
        f"tasks dropped     {len(state.dropped)}",
        f"delivered         {sum(ref.count for ref in state.experiences)} experiences",
        f"trained in step   {untrained if state.trained_step is None else state.trained_step}",
        f"stream version    {state.version}",
    ]
    out.print(Text("\n".join(lines)))
    for number, status in sorted(state.statuses.items()):
        if not status.ok:
            out.print(Text(f"  task {number}: {error_line(status.message, 150)}", style="red"))
    if state.final_result is not None:
        out.print(metrics_table(state.final_result["metrics"]))


def state_json(state: BatchState) -> dict[str, Any]:
    """Return a batch's state as `replay --json` prints it."""
    return {
        "batch_id": state.batch_id, "batch_type": state.batch_type, "state": state.state.value,
        "expected_task_count": state.expected_task_count, "completed_task_count": state.completed_task_count,
        "min_wait_num": state.min_wait_num, "failed_attempts": state.failed_attempts, "version": state.version,
        "max_attempts": state.max_attempts, "trained_step": state.trained_step,
        "statuses": {str(k): asdict(v) for k, v in sorted(state.statuses.items())},
        "dropped": {str(k): v for k, v in sorted(state.dropped.items())},
        "pending": [asdict(u) for _, u in sorted(state.pending.items())],
        "running": [asdict(f) for _, f in sorted(state.flights.items())],
        "experiences": [asdict(ref) for ref in state.experiences], "final_result": state.final_result,
    }

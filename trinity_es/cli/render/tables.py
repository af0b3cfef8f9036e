"""What the commands show: tables, a batch task by task, an event on one line.

Every text that may come from a rollout, a user or a runner's error goes through `plain` (no control characters, no line
breaks) and into `rich` as `Text`, never as markup: a model's answer can't colour, move or rewrite a terminal.
The live view of a run is in `trinity_es.cli.render.progress`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trinity_es.projections.batch import BatchState
from trinity_es.projections.history.attempts import BatchTimeline, TaskTimeline
from trinity_es.projections.history.critical_path import Segment, segments
from trinity_es.projections.tables.batch_list import BatchRow
from trinity_es.text import clock, error_line, name_of, plain

__all__ = [
    "columns", "console", "counted_text", "fitted", "left_out", "metrics_table", "number", "print_batches",
    "print_state", "print_story", "rewarded", "state_json", "state_text", "when",
]

_BAR = 24
_FAST = 200
"""Rows above which a table is plain text: a table with colours takes seconds for thousands."""
_TURNS = 40
"""Turns of a batch as a whole that are shown."""
_PIPE = 100_000
"""Characters of a line in a pipe or a file: nothing is cut off there."""
_WORDY = 24
"""Characters that a column of text, which may break, is not squeezed under."""
_STATES = {
    "finalized": "green", "finished": "green", "ready": "green", "running": "cyan", "finalizing": "cyan",
    "started": "cyan", "aborted": "yellow", "dropped": "yellow", "failed": "red", "lost": "red",
    "joined": "green", "leads": "green", "draining": "yellow", "gone": "red",
}


def console(stderr: bool = False) -> Console:
    """Return a console; without an end to its lines where there is no terminal, so that a table loses nothing there."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE, highlight=False, soft_wrap=False)


def fitted(out: Console, table: Table, spare: Sequence[str]) -> None:
    """Print a table. If the terminal is too narrow for it, columns of `spare` are left out, the first one first, and
    named: a number that is there is there whole. A table of many rows is plain text.
    """
    if table.row_count > _FAST:
        _print_plain(out, table)
        return
    columns, wide, wanted, rooms = list(table.columns), out.options.update_width(_PIPE), [], []
    for column in columns:
        head = Measurement.get(out, wide, column.header)
        widest = max((Measurement.get(out, wide, cell).maximum for cell in column.cells), default=0)
        breaks = column.justify == "left" and not column.no_wrap
        wanted.append(max(widest, head.maximum))
        rooms.append(max(min(widest, _WORDY) if breaks else widest, head.minimum))
    left_out = []
    for name in spare:
        if sum(rooms) + 2 * len(rooms) <= out.width:
            break
        at = next(i for i, column in enumerate(columns) if column.header == name)
        for of_columns in (columns, wanted, rooms):
            del of_columns[at]
        left_out.append(name)
    left = out.width - sum(rooms) - 2 * len(rooms)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column, want, room in zip(columns, wanted, rooms, strict=True):
        more = max(0, min(want - room, left))
        left -= more
        shown.add_column(column.header, justify=column.justify, overflow=column.overflow, width=room + more)
    for row in zip(*(column.cells for column in columns), strict=True):
        shown.add_row(*row)
    out.print(shown)
    if left_out:
        out.print(Text(f"too narrow here for {', '.join(left_out)}: a pipe and --json have all", style="dim"))


def _print_plain(out: Console, table: Table) -> None:
    cells = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(map(len, column)) for column in cells]
    for line in zip(*cells, strict=True):
        aligned = (cell.ljust(width) if column.justify == "left" else cell.rjust(width)
                   for cell, width, column in zip(line, widths, table.columns, strict=True))
        out.file.write("  ".join(aligned).rstrip() + "\n")


def columns(*names: str, right: Sequence[str] = (), whole: Sequence[str] | None = None) -> Table:
    """Return a table with these columns: those in `whole` (None: all) never break, those in `right` are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=whole is None or name in whole,
                         overflow="ellipsis" if whole is None else "fold")
    return table


def state_text(name: str) -> Text:
    return Text(name, style=_STATES.get(name, ""))


def counted_text(count: int, style: str = "red") -> Text:
    """Return a number of things that should be none: in this colour, if it is not 0."""
    return Text(str(count), style=style if count else "dim")


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:z.{digits}f}"


def when(at: float | None) -> str:
    return "" if at is None else clock(at, date=True)


def left_out(out: Console, count: int, most: int, where: str = "before them") -> None:
    if count > most:
        out.print(Text(f"{count - most:,} {where}: --json has all", style="dim"))


_NUMBERS = ("tasks", "finished", "failed attempts", "experiences", "reward", "tokens", "version", "dropped", "step",
            "submitted", "seconds")
_SPARE = ("experiences", "version", "dropped", "submitted", "tokens", "step", "finished", "type")
"""Columns that a narrow terminal does without, the first one first."""


def print_batches(
    out: Console, rows: Sequence[BatchRow], causes: Sequence[dict[str, Any] | None] | None = None
) -> None:
    """`trinity-es batches`; `causes`: what held each up (`seconds, what`), where that is known."""
    told = [["" if c is None else f"{c['seconds']:.2f} s: {error_line(c['what'], 110)}"] for c in causes or ()]
    table = columns("id", "type", "state", *_NUMBERS, *(["held up by"] if causes is not None else []),
                    right=_NUMBERS, whole=("type", "state", *_NUMBERS))
    for row, cause in zip(rows, told or [[]] * len(rows), strict=True):
        seconds = None if row.ended_at is None else row.ended_at - row.submitted_at
        table.add_row(
            Text(name_of(row.batch_id)), row.batch_type, state_text(row.state), str(row.tasks), str(row.finished),
            counted_text(row.failed_attempts), str(row.experiences), rewarded(row), f"{row.response_tokens:,}",
            "" if row.model_version is None else str(row.model_version), counted_text(row.dropped, "yellow"),
            "" if row.trained_step is None else str(row.trained_step), when(row.submitted_at), number(seconds, 2),
            *map(Text, cause),
        )
    fitted(out, table, _SPARE)


def rewarded(row: BatchRow) -> str:
    """Return a batch's mean reward, and of how many of its tasks runs are missing in it."""
    return number(row.reward) + (f" ({row.failed} short)" if row.failed and row.reward is not None else "")


# --- one batch ------------------------------------------------------------------------------------------------------
def print_story(
    out: Console, story: BatchTimeline, rows: Sequence[str], limit: int | None, away: Sequence[tuple[float, float]] = ()
) -> None:
    """`trinity-es show`: a head, the result, and a line a task; `rows`: of tasksets, by task, where they are known.

    `away`: when no coordinator led.
    """
    state = story.state
    head = Text(f"batch {name_of(state.batch_id)}  {state.batch_type}  ", style="bold") + state_text(state.state.value)
    out.print(head)
    span = (story.ended_at or story.last_at) - story.submitted_at
    versions = ", ".join(f"{v} ({n} tasks)" for v, n in sorted(story.versions.items())) or "none yet"
    needed = "" if state.min_wait_num is None else f" (at least {state.min_wait_num} wanted)"
    told = ", ".join(f"{n} {name}" for name, n in story.counts.items() if n) or "none"
    out.print(Text(
        f"tasks       {state.expected_task_count}: {told}{needed}; {state.failed_attempts} failed attempts\n"
        f"submitted   {clock(story.submitted_at, date=True)}, "
        f"{'ended after' if story.ended_at else 'so far'} {span:.2f} s\n"
        f"positions   {story.first_position} to {story.last_position}\n"
        f"weights     version {versions}"
    ))
    for at, what in story.turns[:_TURNS]:
        out.print(Text(f"  +{at - story.submitted_at:8.2f} s  {error_line(what, 140)}"))
    if len(story.turns) > _TURNS:
        out.print(Text(f"  and {len(story.turns) - _TURNS} more turns: --json has all", style="dim"))
    for i, piece in enumerate(_longest(story, away)):
        out.print(Text(f"{'' if i else 'its time':<12}{piece.seconds:.2f} s {error_line(piece.what, 140)}"))
    if state.final_result is not None:
        out.print(metrics_table(state.final_result["metrics"]))
    if story.tasks:
        known = ["row"] if any(rows) else []
        spare = ("version", "runs", *known, "tokens", "reward", f"0 to {max(span, 1e-9):.2f} s")
        fitted(out, _tasks_table(story, story.tasks[:limit], rows, max(span, 1e-9)), spare)
    if limit is not None and len(story.tasks) > limit:
        out.print(Text(f"{len(story.tasks) - limit} more tasks: --all shows them", style="dim"))


def _longest(story: BatchTimeline, away: Sequence[tuple[float, float]]) -> list[Segment]:
    """Return the pieces of the batch's time that explain it, in order: the five longest."""
    found = segments(story, away)
    whole = sum(p.seconds for p in found)
    longest = sorted(found, key=lambda p: -p.seconds)[:5]
    return [p for p in found if p in longest and p.seconds > whole / 100]


def metrics_table(metrics: dict[str, float]) -> Table:
    """Return a table of metrics by name, with what is counted where a name alone says something else."""
    table = Table(box=None, pad_edge=True, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name in sorted(metrics):
        counts = " (failed ones too)" if name.endswith("/finished_task_count") else ""
        table.add_row(Text(plain(name)) + Text(counts, style="dim"), f"{metrics[name]:.6g}")
    return table


def _tasks_table(story: BatchTimeline, tasks: Sequence[TaskTimeline], rows: Sequence[str], span: float) -> Table:
    numbers = ("task", "runs", "last attempt", "reward", "tokens", "version")
    named = any(rows)
    table = columns("task", *(["row"] if named else []), "state", f"0 to {span:.2f} s", *numbers[1:], right=numbers)
    table.add_column("course")
    for task in tasks:
        last = task.attempts[-1] if task.attempts else None
        took = "" if last is None or last.seconds is None else f"{last.seconds:.2f} s"
        table.add_row(
            str(task.task), *([plain(rows[task.task], 40)] if named else []), state_text(task.state),
            Text(_bar(story, task, span), style=_STATES.get(task.state, "")),
            str(task.runs), took, number(task.reward),
            f"{task.response_tokens:,}", "" if last is None else str(last.model_version), Text(_course(story, task)),
        )
    return table


def _bar(story: BatchTimeline, task: TaskTimeline, span: float) -> str:
    """Return when in the batch's time the task waited (·), was with a runner (━), and where an attempt failed (x)."""
    cells = ["·"] * _BAR
    for attempt in task.attempts:
        end_at = attempt.ended_at or story.ended_at or story.last_at
        first = min(_BAR - 1, int((attempt.dispatched_at - story.submitted_at) / span * _BAR))
        last = max(first, min(_BAR - 1, int((end_at - story.submitted_at) / span * _BAR)))
        cells[first : last + 1] = ["━"] * (last + 1 - first)
        if attempt.outcome not in ("running", "finished", "dropped"):
            cells[last] = "x"
    ended = task.ended_at or story.ended_at
    if ended is not None:
        last = min(_BAR - 1, int((ended - story.submitted_at) / span * _BAR))
        cells[last + 1 :] = [" "] * (_BAR - 1 - last)
    return "".join(cells)


def _course(story: BatchTimeline, task: TaskTimeline) -> str:
    segments, told = [], ""
    for a in task.attempts:
        part = f" runs {a.run_id_base}-{a.run_id_base + a.runs - 1}" if a.runs < task.runs else ""
        piece = f"+{a.dispatched_at - story.submitted_at:.2f} {plain(a.runner)}{part}"
        if a.outcome == "finished":
            end = a.dispatched_at if a.ended_at is None else a.ended_at
            piece += f" → +{end - story.submitted_at:.2f}"
        elif a.outcome != "running":
            error = error_line(a.message, 80)
            piece += f" attempt {a.attempt} {a.outcome}: {'the same' if error == told else error}"
            told = error
        else:
            piece += " …"
        segments.append(piece)
    return "; ".join(segments)


def print_state(out: Console, state: BatchState) -> None:
    head = Text(f"batch {name_of(state.batch_id)}  {state.batch_type}  ", style="bold")
    out.print(head + state_text(state.state.value))
    flying: dict[str, int] = {}
    for flight in state.flights.values():
        flying[flight.runner] = flying.get(flight.runner, 0) + 1
    where = ", ".join(f"{n} on {plain(name)}" for name, n in sorted(flying.items())) or "none"
    lines = [
        f"tasks settled     {state.completed_task_count} of {state.expected_task_count}"
        + ("" if state.min_wait_num is None else f", at least {state.min_wait_num} wanted"),
        f"units running     {where}",
        f"units waiting     {len(state.pending)}",
        f"failed attempts   {state.failed_attempts}",
        f"tasks dropped     {len(state.dropped)}",
        f"delivered         {sum(ref.count for ref in state.experiences)} experiences",
        f"trained in step   {'' if state.trained_step is None else state.trained_step}",
        f"stream version    {state.version}",
    ]
    out.print(Text("\n".join(lines)))
    for number, status in sorted(state.statuses.items()):
        if not status.ok:
            out.print(Text(f"  task {number}: {error_line(status.message, 150)}", style="red"))
    if state.final_result is not None:
        out.print(metrics_table(state.final_result["metrics"]))


def state_json(state: BatchState) -> dict[str, Any]:
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

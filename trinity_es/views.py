"""What the commands show: tables, a batch task by task, an event on one line.

Every text that may come from a rollout, a user or a runner's error goes through `plain` (no control characters, no line
breaks) and into `rich` as `Text`, never as markup: a model's answer can't colour, move or rewrite a terminal.
The live view of a run is in `trinity_es.cli.progress`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trinity_es.events import vocabulary as ev
from trinity_es.events.values import BatchId, batch_stream
from trinity_es.projections.batch import BatchState
from trinity_es.projections.history.critical_path import Piece, pieces

if TYPE_CHECKING:
    from trinity_es.events.store.log import Recorded
    from trinity_es.projections.history.timeline import Story, TaskStory
    from trinity_es.projections.tables.batch_list import BatchRow

__all__ = [
    "clock",
    "console",
    "differences",
    "event_line",
    "fitted",
    "harmless_json",
    "metrics_table",
    "name_of",
    "plain",
    "print_batches",
    "print_state",
    "print_story",
    "sparkline",
    "state_json",
    "state_text",
    "summary",
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
_OBEYED = re.compile("[\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
_STATES = {
    "finalized": "green", "finished": "green", "ready": "green", "running": "cyan", "finalizing": "cyan",
    "started": "cyan", "aborted": "yellow", "dropped": "yellow", "failed": "red", "lost": "red",
}


def console(stderr: bool = False) -> Console:
    """Return a console; without an end to its lines where there is no terminal, so that a table loses nothing there."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE, highlight=False, soft_wrap=False)


def fitted(out: Console, table: Table, spare: Sequence[str]) -> None:
    """Print a table. Where the terminal is too narrow for it, columns of `spare` are left out, the first one first,
    and named: a number that is there is there whole.
    """
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


class _Shown(dict[int, str]):
    """What is shown for a character: itself, or a name for one that can't be printed."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        shown = character if character.isprintable() else "⏎" if character == "\n" else repr(character)[1:-1]
        self[code] = shown
        return shown


_SHOWN = _Shown()


def plain(text: object, width: int | None = None) -> str:
    """Return one line of printable characters, at most `width` long. A cut one costs no more than it shows."""
    whole = str(text)
    line = whole[:width].translate(_SHOWN)
    if width is None or max(len(line), len(whole)) <= width:
        return line
    return line[: width - 1] + "…"


def harmless_json(document: bytes) -> bytes:
    """Return the same JSON, with escapes for what a terminal may obey or hide: DEL, C1 controls, marks of direction."""
    if document.isascii():
        return document.replace(b"\x7f", b"\\u007f")
    return _OBEYED.sub(lambda m: f"\\u{ord(m[0]):04x}", document.decode(errors="replace")).encode()


def name_of(batch_id: BatchId) -> str:
    """Return a batch as a command line names it: 12, or '12' in quotes for the text."""
    return plain(batch_stream(batch_id).removeprefix("batch/"))


def clock(seconds: float, *, date: bool = False) -> str:
    """Return a moment in local time."""
    moment = datetime.fromtimestamp(seconds)
    return moment.strftime("%Y-%m-%d %H:%M:%S") if date else moment.strftime("%H:%M:%S.%f")[:-3]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return a curve in one line of text: values from 0 to 1, in groups where there are more than `width`."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(g) / len(g) for g in (values[i : i + size] for i in range(0, len(values), size))]
    return "".join("▁▂▃▄▅▆▇█"[min(7, max(0, int(v * 8)))] for v in means)


def state_text(name: str) -> Text:
    """Return the name of a state, in its colour."""
    return Text(name, style=_STATES.get(name, ""))


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_COLUMNS = ("id", "type", "state", "tasks", "finished", "failed attempts", "experiences", "reward", "tokens", "version",
            "dropped", "step", "submitted", "seconds")
_WORDS = 3
"""The number of them that hold words, and are aligned left."""
_SPARE = ("experiences", "version", "dropped", "submitted", "tokens", "step", "finished", "type")
"""Those that a narrow terminal does without, the first one first."""


def print_batches(
    out: Console, rows: Sequence[BatchRow], causes: Sequence[dict[str, Any] | None] | None = None
) -> None:
    """`trinity-es batches`; `causes`: what held each up (`seconds, what`), where that is known."""
    cells = [_batch_cells(row) for row in rows]
    if causes is not None:
        told = ["" if c is None else f"{c['seconds']:.2f} s: {plain(c['what'], 110)}" for c in causes]
        cells = [[*line, what] for line, what in zip(cells, told, strict=True)]
    names = [*_COLUMNS, *(["held up by"] if causes is not None else [])]
    if len(rows) > _FAST:
        widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
        for line in [names, *cells]:
            aligned = (c.ljust(w) if i < _WORDS or i >= len(_COLUMNS) else c.rjust(w)
                       for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            out.file.write("  ".join(aligned).rstrip() + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(names):
        words = i < _WORDS or i >= len(_COLUMNS)
        table.add_column(name, justify="left" if words else "right", no_wrap=0 < i < _WORDS or not words,
                         overflow="fold" if words else "ellipsis")
    styles = {2: _STATES, 5: {"0": "dim"}, 10: {"0": "dim"}}
    for line in cells:
        table.add_row(*(Text(cell, style=styles.get(i, {}).get(cell, {5: "red", 10: "yellow"}.get(i, "")))
                        for i, cell in enumerate(line)))
    fitted(out, table, _SPARE)


def _batch_cells(row: BatchRow) -> list[str]:
    seconds = None if row.ended_at is None else row.ended_at - row.submitted_at
    return [
        name_of(row.batch_id), row.batch_type, row.state, str(row.tasks), str(row.finished), str(row.failed_attempts),
        str(row.experiences), _number(row.reward), f"{row.response_tokens:,}",
        "" if row.model_version is None else str(row.model_version), str(row.dropped),
        "" if row.trained_step is None else str(row.trained_step), clock(row.submitted_at, date=True),
        _number(seconds, 2),
    ]


# --- one batch ------------------------------------------------------------------------------------------------------
def print_story(out: Console, story: Story, limit: int | None) -> None:
    """`trinity-es show`: a head, the result, and a line a task."""
    state = story.state
    head = Text(f"batch {name_of(state.batch_id)}  {state.batch_type}  ", style="bold") + state_text(state.state.value)
    out.print(head)
    span = (story.ended_at or story.last_at) - story.submitted_at
    versions = ", ".join(f"{v} ({n} tasks)" for v, n in sorted(story.versions.items())) or "none yet"
    needed = "" if state.min_wait_num is None else f" (at least {state.min_wait_num} wanted)"
    counts = {name: sum(t.state == name for t in story.tasks)
              for name in ("finished", "failed", "dropped", "running", "pending")}
    told = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "none"
    out.print(Text(
        f"tasks       {state.expected_task_count}: {told}{needed}; {state.failed_attempts} failed attempts\n"
        f"submitted   {clock(story.submitted_at, date=True)}, "
        f"{'ended after' if story.ended_at else 'so far'} {span:.2f} s\n"
        f"positions   {story.first_position} to {story.last_position}\n"
        f"weights     version {versions}"
    ))
    for at, what in story.turns[:_TURNS]:
        out.print(Text(f"  +{at - story.submitted_at:8.2f} s  {plain(what, 140)}"))
    if len(story.turns) > _TURNS:
        out.print(Text(f"  and {len(story.turns) - _TURNS} more turns: --json has all", style="dim"))
    for i, piece in enumerate(_longest(story)):
        out.print(Text(f"{'' if i else 'its time':<12}{piece.seconds:.2f} s {plain(piece.what, 140)}"))
    if state.final_result is not None:
        out.print(metrics_table(state.final_result["metrics"]))
    if story.tasks:
        spare = ("version", "runs", "tokens", "reward", f"0 to {max(span, 1e-9):.2f} s")
        fitted(out, _tasks_table(story, story.tasks[:limit], max(span, 1e-9)), spare)
    if limit is not None and len(story.tasks) > limit:
        out.print(Text(f"{len(story.tasks) - limit} more tasks: --all shows them", style="dim"))


def _longest(story: Story) -> list[Piece]:
    """Return the pieces of the batch's time that explain it, in order: the five longest."""
    found = pieces(story)
    whole = sum(p.seconds for p in found)
    longest = sorted(found, key=lambda p: -p.seconds)[:5]
    return [p for p in found if p in longest and p.seconds > whole / 100]


def metrics_table(metrics: dict[str, float]) -> Table:
    """Metrics by name."""
    table = Table(box=None, pad_edge=True, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name in sorted(metrics):
        table.add_row(Text(plain(name)), f"{metrics[name]:.6g}")
    return table


def _tasks_table(story: Story, tasks: Sequence[TaskStory], span: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column(f"0 to {span:.2f} s", no_wrap=True)
    for name in ("runs", "seconds", "reward", "tokens", "version"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("course")
    for task in tasks:
        last = task.attempts[-1] if task.attempts else None
        table.add_row(
            str(task.task), state_text(task.state), Text(_bar(story, task, span), style=_STATES.get(task.state, "")),
            str(task.runs), _number(last.seconds if last else None, 2), _number(task.reward),
            f"{task.response_tokens:,}", "" if last is None else str(last.model_version), Text(_course(story, task)),
        )
    return table


def _bar(story: Story, task: TaskStory, span: float) -> str:
    """Return where in the batch's time the task was waiting (·) and with a runner (━), and where an attempt failed (x).
    """
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


def _course(story: Story, task: TaskStory) -> str:
    pieces = []
    for a in task.attempts:
        part = f" runs {a.run_id_base}-{a.run_id_base + a.runs - 1}" if a.runs < task.runs else ""
        piece = f"+{a.dispatched_at - story.submitted_at:.2f} {plain(a.runner)}{part}"
        if a.outcome == "finished":
            end = a.dispatched_at if a.ended_at is None else a.ended_at
            piece += f" → +{end - story.submitted_at:.2f}"
        elif a.outcome != "running":
            piece += f" attempt {a.attempt} {a.outcome}: {plain(a.message, 80)}"
        else:
            piece += " …"
        pieces.append(piece)
    return "; ".join(pieces)


def print_state(out: Console, state: BatchState) -> None:
    """`trinity-es replay`: the state as it was."""
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
            out.print(Text(f"  task {number}: {plain(status.message, 150)}", style="red"))
    if state.final_result is not None:
        out.print(metrics_table(state.final_result["metrics"]))


def state_json(state: BatchState) -> dict[str, Any]:
    """Return a batch's state as plain JSON."""
    from dataclasses import asdict

    return {
        "batch_id": state.batch_id, "batch_type": state.batch_type, "state": state.state.value,
        "expected_task_count": state.expected_task_count, "completed_task_count": state.completed_task_count,
        "min_wait_num": state.min_wait_num, "failed_attempts": state.failed_attempts, "version": state.version,
        "max_attempts": state.max_attempts, "trained_step": state.trained_step,
        "statuses": {str(k): asdict(v) for k, v in sorted(state.statuses.items())},
        "dropped": {str(k): v for k, v in sorted(state.dropped.items())},
        "pending": [asdict(u) for _, u in sorted(state.pending.items())],
        "running": [asdict(f) for _, f in sorted(state.flights.items())],
        "experiences": [asdict(ref) for ref in state.experiences],
        "final_result": state.final_result,
    }


def differences(stored: Any, again: Any, path: str = "result") -> list[str]:
    """Return where two JSON values differ, a line each."""
    if isinstance(stored, dict) and isinstance(again, dict):
        out: list[str] = []
        for key in sorted({*stored, *again}):
            here = f"{path}.{key}"
            if key not in stored or key not in again:
                out.append(f"{here}: only in the {'stored' if key in stored else 'recomputed'} one")
            else:
                out += differences(stored[key], again[key], here)
        return out
    same = type(stored) is type(again) and stored == again
    return [] if same else [f"{path}: stored {stored!r}, computed {again!r}"]


# --- events ---------------------------------------------------------------------------------------------------------
def event_line(recorded: Recorded) -> str:
    """Return one event on one line."""
    return (
        f"{recorded.position:>7}  {clock(recorded.recorded_at)}  {plain(recorded.stream, 20):<20}  "
        f"{recorded.type:<19}  {plain(summary(recorded.event), 150)}"
    ).rstrip()


def summary(event: ev.Event) -> str:
    """Return what an event says, in a few words."""
    match event:
        case ev.SystemConfigured():
            return f"project {event.config.get('project')}, name {event.config.get('name')}"
        case ev.CoordinatorStarted():
            opened = f", took over {len(event.open_batches)} open batches" if event.open_batches else ""
            return f"epoch {event.epoch}, pid {event.pid} on {event.host}{opened}"
        case ev.WritingResumed():
            return f"the log could not be written for {event.seconds:.1f} s: {event.error}"
        case ev.RewindAccepted():
            why = f": {event.reason}" if event.reason else ""
            return (f"positions {event.first} to {event.last} are given up, the log goes on after {event.kept}; by "
                    f"{event.by}{why}")
        case ev.RunnerStarted():
            return f"{event.runner} #{event.incarnation}, pid {event.pid} on {event.host}, loads {event.engine}"
        case ev.RunnerReady():
            return (f"{event.runner} #{event.incarnation} serves version {event.model_version}, {event.places} places, "
                    f"loaded in {event.load_seconds:.1f} s")
        case ev.RunnerFailed() | ev.RunnerLost():
            return f"{event.runner} #{event.incarnation}: {event.reason}"
        case ev.RunnerQuarantined():
            return (f"{event.runner} #{event.incarnation} ended {event.deaths} times in {event.period_seconds:.0f} s: "
                    f"{event.reason}")
        case ev.RunnerRetired():
            return f"{event.runner} #{event.incarnation}"
        case ev.WeightsPublished():
            return f"version {event.version} at {event.path}"
        case ev.WeightsLoaded():
            return f"{event.runner} serves version {event.version} after {event.seconds:.2f} s"
        case ev.WeightsFailed():
            return f"{event.runner} did not load version {event.version}: {event.error}"
        case ev.TasksetAdvanced():
            return f"{event.taskset} read to {event.offset} of epoch {event.epoch} for batch {event.batch_id}"
        case ev.BatchSubmitted():
            return f"{event.batch_type} batch of {len(event.repeat_times)} tasks, {sum(event.repeat_times)} runs"
        case ev.TasksAdded():
            return f"{len(event.repeat_times)} tasks more, {sum(event.repeat_times)} runs"
        case ev.ResultsTaken():
            return f"of {len(event.tasks)} tasks"
        case ev.BatchPaused():
            return event.reason
        case ev.PaceMeasured():
            limit = f"attempts may take {event.timeout:.2f} s" if event.timeout else "max_timeout holds"
            mean = event.seconds / event.attempts
            return f"after {event.steps} steps {mean:.2f} s an attempt ({event.attempts}), {limit}"
        case ev.TasksDispatched():
            units = "1 unit" if len(event.units) == 1 else f"{len(event.units)} units"
            return f"{units} to {event.runner} #{event.incarnation}, version {event.model_version}"
        case ev.RunsFinished():
            rewards = [r.metrics["reward"] for r in event.runs if "reward" in r.metrics]
            reward = f", reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
            return (f"task {event.task}: {len(event.runs)} runs on {event.runner} in {event.seconds:.2f} s"
                    f"{reward}, version {event.model_version_end}")
        case ev.AttemptFailed():
            way = "again" if event.retry else "given up"
            return (f"task {event.task} attempt {event.attempt} on {event.runner}, {event.kind}, {way}: "
                    f"{event.message}")
        case ev.RecoveryDecided():
            units = f" {len(event.units)} units" if event.units else ""
            return f"{event.decision}{units}: {event.reason}"
        case ev.StallDetected():
            return f"waiting on {event.waiting_on}, nothing moved since {clock(event.since)}"
        case ev.TaskDropped():
            return f"{len(event.tasks)} tasks: {event.reason}"
        case ev.TaskReopened():
            return f"task {event.task} is run again: {event.reason}"
        case ev.FinalizeFailed():
            return event.error
        case ev.BatchFinalized():
            return f"{event.selected} experiences delivered, {event.dropped} filtered out"
        case ev.ExperiencesProcessed():
            return f"{event.selected} experiences, {event.dropped} filtered out"
        case ev.AnswersRecorded():
            tokens = sum(a.response_tokens for a in event.answers)
            return f"{len(event.answers)} answers, {tokens} tokens"
        case ev.AnswersRewarded():
            task = f" of task {event.task}" if event.task is not None else ""
            return f"{len(event.messages)} answers{task}, reward {event.reward:.4g}"
        case ev.AnswersDelivered():
            return f"{len(event.messages)} answers to the pipeline"
        case ev.ExperiencesRedelivered():
            return f"{len(event.batches)} batches again, to a trainer back at step {event.step}"
        case ev.PayloadsFreed():
            return f"{event.payloads} payloads of {len(event.batches)} batches, {event.bytes} bytes"
        case ev.BatchAborted():
            return event.reason
        case ev.BatchTrained():
            told = ", ".join(f"{k} {v:.4g}" for k, v in sorted(event.metrics.items()))
            return f"step {event.step}" + (f": {told}" if told else "")
    return ""

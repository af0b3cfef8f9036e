"""Output of `diff`: a batch at two moments, the first difference of two logs, or two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trinity_es.cli.render.batch_tables import columns, print_left_out
from trinity_es.events.store.log import Recorded
from trinity_es.events.values import BatchId
from trinity_es.projections.reading.diff import MISSING, Change, Fork, RunsCompared
from trinity_es.safe_text import clock, event_line, plain

__all__ = ["print_batch_changes", "print_fork", "print_runs"]

_VALUE_CHARACTERS = 70
_MAX_ROWS = 20


def print_batch_changes(
    out: Console, batch_id: BatchId, positions: tuple[int, int], changes: Sequence[Change], events: Sequence[Recorded]
) -> None:
    """Print how a batch changed between two positions of the log, and the first of its events between them."""
    first, second = positions
    out.print(Text(f"batch {plain(batch_id)} between positions {first} and {second}: {len(events)} events",
                   style="bold"))
    out.print(_changes_table(changes, f"at {first}", f"at {second}") if changes else Text("nothing changed"))
    for recorded in events[:_MAX_ROWS]:
        print_line(out, event_line(recorded))
    print_left_out(out, len(events), _MAX_ROWS, "more events")


def print_fork(out: Console, names: tuple[str, str], fork: Fork) -> None:
    """Print the first difference of two logs (marked `>`) and the events around it."""
    first_name, second_name = (plain(name) for name in names)
    first_count, second_count = (head - fork.common for head in fork.heads)
    if (first_count, second_count) == (0, 0):
        out.print(Text(f"the same log: {fork.common:,} events, hash for hash"))
        return
    out.print(Text(f"the same up to position {fork.common:,}; after it {first_count:,} events in {first_name}, "
                   f"{second_count:,} in {second_name}", style="bold"), soft_wrap=True)
    for recorded in fork.before:
        print_line(out, f"  {event_line(recorded)}")
    for name, events in zip((first_name, second_name), fork.after, strict=True):
        out.print(Text(f"{name}:" if events else f"{name}: ends here", style="cyan"), soft_wrap=True)
        for i, recorded in enumerate(events):
            print_line(out, f"{'>' if i == 0 else ' '} {event_line(recorded)}")


def print_runs(out: Console, names: tuple[str, str], runs: RunsCompared) -> None:
    """Print the differences of two runs. `>` marks the first batch that differs."""
    numbers = ("1", "2")
    for number, name, batch_count in zip(numbers, names, runs.batches, strict=True):
        out.print(Text(f"{number}: {plain(name)}, {batch_count} batches", style="bold"), soft_wrap=True)
    if runs.settings:
        out.print(Text(f"settings: {len(runs.settings)} differ", style="bold"))
        out.print(_changes_table(runs.settings, *numbers))
    else:
        out.print(Text("settings: the same"))
    if runs.first is None:
        out.print(Text(f"all {len(runs.same)} batches are the same in tasks, weights, rewards and results"))
        return
    out.print(Text(f"batches: the first {len(runs.same)} are the same", style="bold"))
    for row in runs.same[-3:]:
        reward = "" if row.reward is None else f", reward {row.reward:.6g}"
        out.print(Text(f"  batch {plain(row.batch_id)}: {row.tasks} tasks{reward}, weights {row.model_version}"))
    # Submission times are not compared, but help to find the batch.
    times = "  ".join(
        f"{'; submitted' if i == 0 else ' |'} {clock(row.submitted_at, date=True)} (position {row.first_position})"
        for i, row in enumerate(runs.first.rows) if row is not None)
    out.print(Text(f"> batch {plain(runs.first.batch_id)} is the first that differs{times}", style="bold red"))
    out.print(_changes_table(runs.first.changes, *numbers))
    if runs.later:
        out.print(Text(f"after it {len(runs.later)} more differ", style="bold"))
        table = columns("batch", "differs in", whole=())
        for difference in runs.later[:_MAX_ROWS]:
            changes = ", ".join(f"{c.path} {_value(c.before)} | {_value(c.after)}" for c in difference.changes)
            table.add_row(Text(plain(difference.batch_id)), Text(plain(changes, 140)))
        out.print(table)
        print_left_out(out, len(runs.later), _MAX_ROWS, "more batches")


def _changes_table(changes: Sequence[Change], before_title: str, after_title: str) -> Table:
    table = columns("what", before_title, after_title, whole=())
    table.pad_edge = True
    for change in changes[:_MAX_ROWS]:
        table.add_row(Text(plain(change.path, 60)), Text(_value(change.before)), Text(_value(change.after)))
    if len(changes) > _MAX_ROWS:
        table.add_row(Text(f"and {len(changes) - _MAX_ROWS} more: --json has all", style="dim"), "", "")
    return table


def _value(value: Any) -> str:
    """Return a changed value as one line of text; floats have all digits."""
    if value == MISSING or isinstance(value, str):
        return plain(value, _VALUE_CHARACTERS)
    if isinstance(value, float):
        return repr(value)
    return plain(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode(), _VALUE_CHARACTERS)


def print_line(out: Console, line: str) -> None:
    out.print(Text(line), soft_wrap=True)

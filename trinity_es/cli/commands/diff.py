"""The command `diff`, which compares a batch at two times, two logs with a common beginning, or two runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, find_batch, open_chosen, parse_at, print_json
from trinity_es.cli.render import batch_tables
from trinity_es.cli.render import diff as views_diff
from trinity_es.events.errors import BatchNotFound, LogNotFound
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState
from trinity_es.projections.reading import diff as differences
from trinity_es.projections.reading.diff import BatchDifference, RunsCompared
from trinity_es.projections.reading.log_reader import Log, open_log
from trinity_es.safe_text import place_of

__all__ = ["diff"]


def diff(
    batch_or_log: Annotated[str, typer.Argument(metavar="BATCH | LOG1", help="A batch with --at, or a log.",
                                                show_default=False)],
    other: Annotated[str | None, typer.Argument(metavar="[LOG2]", help="The log to compare with.",
                                                show_default=False)] = None,
    at: Annotated[list[str] | None, typer.Option(
        "--at", metavar="POSITION_OR_TIME", help="Given twice: from, to. Given once: from then until now.")] = None,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Show how a batch differs between two times, or how two logs differ. Exits 1 if there is a difference.

    Two logs with a common beginning (a copy, a fork) are compared by their hash chain, event by event. Two separate
    runs are compared by settings, then batch by batch by tasks, weights, rewards and results.

    \b
    Examples:
      trinity-es diff 3 --at 120 --at 180
      trinity-es diff 3 --at 14:02:11
      trinity-es diff runs/p/one/log.sqlite runs/p/two/log.sqlite
    """
    if other is None:
        is_different = _show_batch_changes(batch_or_log, at or [], open_chosen(log, config), as_json)
    elif at:
        raise typer.BadParameter("two logs are compared as a whole: leave out --at, which is for one batch",
                                 param_hint="--at")
    else:
        is_different = _show_logs(batch_or_log, other, as_json)
    if is_different:
        raise typer.Exit(1)


def _show_batch_changes(batch: str, at: list[str], log: Log, as_json: bool) -> bool:
    """Print how a batch differs between two times, or between one time and now. Returns True if it differs."""
    if not 1 <= len(at) <= 2:
        raise typer.BadParameter("give one or two positions or times, as in `trinity-es diff 3 --at 120 --at 180`; to "
                                 "compare two logs, name both", param_hint="--at")
    with log:
        batch_id = find_batch(log, batch)
        head = log.head().position
        positions = sorted(log.position_of(parse_at(text, log, batch_id)) or 0 for text in at)
        first, second = positions if len(positions) == 2 else (positions[0], head)
        before, after = (differences.readable_state(_state_at(log, batch_id, position)) for position in (first, second))
        changes = list(differences.changes(before, after))
        events = [r for r in log.events(batch_id, first) if r.position <= second]
    if as_json:
        print_json({"batch_id": batch_id, "from": first, "to": second, "events": len(events),
                    "changes": [asdict(c) for c in changes]})
    else:
        views_diff.print_batch_changes(batch_tables.console(), batch_id, (first, second), changes, events)
    return bool(changes)


def _state_at(log: Log, batch_id: BatchId, position: int) -> BatchState | None:
    """Return a batch's state at a position of the log; None if it was submitted later."""
    try:
        return log.replay(batch_id, position)
    except BatchNotFound:
        return None


def _show_logs(first: str, second: str, as_json: bool) -> bool:
    """Print how two logs differ: by events if they begin with the same event, else as runs. Returns True if they do."""
    for name in (first, second):
        if name.isdecimal() and not Path(name).exists():
            raise LogNotFound(f"there is no log {name}: `diff LOG1 LOG2` takes two logs. To compare two batches of one "
                              f"log, open /compare?id={first}&id2={second} in `trinity-es dashboard`")
    with open_log(first) as first_log, open_log(second) as second_log:
        fork = differences.find_fork(first_log, second_log)
        runs = None if fork.common else differences.compare_runs(first_log, second_log)
        names = first_log.url, second_log.url
        if as_json:
            events = {"before": list(map(place_of, fork.before)),
                      "after": [list(map(place_of, after)) for after in fork.after]}
            print_json({"logs": names, "heads": fork.heads, "common": fork.common} |
                       (events if runs is None else _runs_json(runs)))
        elif runs is None:
            views_diff.print_fork(batch_tables.console(), names, fork)
        else:
            views_diff.print_runs(batch_tables.console(), names, runs)
    return fork.heads != (fork.common, fork.common) if runs is None else not runs.equal


def _runs_json(runs: RunsCompared) -> dict[str, Any]:
    def as_json(difference: BatchDifference) -> dict[str, Any]:
        return {"batch_id": difference.batch_id, "changes": [asdict(c) for c in difference.changes]}

    return {
        "equal": runs.equal, "settings": [asdict(c) for c in runs.settings], "batches": runs.batches,
        "same": [row.batch_id for row in runs.same], "first": runs.first and as_json(runs.first),
        "later": [as_json(d) for d in runs.later],
    }

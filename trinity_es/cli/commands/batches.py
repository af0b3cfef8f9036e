"""The commands that read a log: `batches, show, replay, verify`, and `rebuild`, which makes its tables again.

They need no actor system, GPU, torch, vllm or thespian, and work beside a live run as on a dead one's file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from trinity_es.cli import common
from trinity_es.cli.render import tables
from trinity_es.events.errors import BatchNotFound, CorruptPayload, LogNotFound, PayloadNotFound
from trinity_es.events.store.log import EventLog
from trinity_es.events.values import BatchId, BatchLifecycleState, BatchType
from trinity_es.projections.history import attempts, critical_path
from trinity_es.projections.history.critical_path import segments
from trinity_es.projections.reading.diff import changes
from trinity_es.projections.reading.log_reader import Log, canonical
from trinity_es.projections.tables import read_models
from trinity_es.projections.tables.batch_list import SORTS, BatchRow
from trinity_es.projections.verify.log import verify_log
from trinity_es.text import plain

__all__ = ["batches", "rebuild", "replay", "show", "verify"]

BatchArgument = Annotated[
    str, typer.Argument(metavar="BATCH", help="Id of the batch, as `trinity-es batches` shows it: 3, or 0/letters.")
]
SHOWN = 50


def batches(
    state: Annotated[str | None, typer.Option(
        "--state", metavar="STATE", help=f"Only these: {', '.join(BatchLifecycleState)}.")] = None,
    batch_type: Annotated[str | None, typer.Option(
        "--type", metavar="TYPE", help=f"Only these: {', '.join(get_args(BatchType))}.")] = None,
    since: Annotated[str | None, typer.Option(
        "--since", metavar="POSITION_OR_TIME", help="Only those submitted since then.")] = None,
    sort: Annotated[str, typer.Option(
        "--sort", metavar="COLUMN", help="By what: seconds, reward, step, ...")] = "position",
    descending: Annotated[bool, typer.Option("--descending", "-d", help="The largest first.")] = False,
    limit: Annotated[int | None, typer.Option(
        "--limit", "-n", min=1, max=common.MOST, help="Show at most N batches.")] = None,
    slowest: Annotated[int | None, typer.Option(
        "--slowest", metavar="N", min=1, help="The N slowest, and what held each up.")] = None,
    every: Annotated[bool, typer.Option("--all", help=f"Every one, not the last {SHOWN}.")] = False,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """List batches: their state, what came of them, what they cost.

    \b
    Examples:
      trinity-es batches --log runs/letters/first/log.sqlite
      trinity-es batches --type train --state aborted --since 2026-03-01T12:30:00
      trinity-es batches --sort reward --descending --limit 5
      trinity-es batches --slowest 3
    """
    if slowest is not None:
        sort, descending, limit = "seconds", True, slowest
    _require_one_of("--state", state, list(BatchLifecycleState))
    _require_one_of("--type", batch_type, list(get_args(BatchType)))
    with common.open_chosen(log, config) as opened:
        _require_one_of("--sort", sort, sorted(SORTS))
        after = 0 if since is None else _since(opened, since)
        left = 0
        if limit is None and not (every or as_json or after):
            left = max(0, opened.count_batches(state=state, batch_type=batch_type) - SHOWN)
            if left and (descending or sort != "position"):  # who sorts wants the first of them
                limit, left = SHOWN, 0
        rows = opened.batches(state=state, batch_type=batch_type, sort=sort, descending=descending,
                              limit=None if after else limit, offset=left)
        rows = [row for row in rows if row.first_position > after][:limit]
        causes = None if slowest is None else [_held_up(opened, row) for row in rows]
    if as_json:
        names = [f.name for f in fields(rows[0])] if rows else []
        found = [{name: getattr(row, name) for name in names}
                 | {"seconds": row.ended_at and row.ended_at - row.submitted_at} for row in rows]
        if causes is not None:
            found = [r | {"held_up_by": c} for r, c in zip(found, causes, strict=True)]
        common.print_json(found)
        return
    if not rows:
        common.note("no batch in this log yet" if not since and not state and not batch_type else "no batch matches")
    tables.print_batches(tables.console(), rows, causes)
    if left:
        print(f"{left} before them: --all shows them, --limit and --since choose")


def _require_one_of(option: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(known)}", param_hint=option)


def _since(log: Log, text: str) -> int:
    """Return the position after which a batch counts as submitted since then."""
    at = common.parse_at(text, log, option="--since")
    return (log.position_of(at) or 0) if not isinstance(at, int) else at - 1


def _held_up(log: Log, row: BatchRow) -> dict[str, Any] | None:
    story = attempts.tell(log.events(row.batch_id, row.first_position - 1))
    piece = critical_path.held_up(story, log.without_coordinator(row.first_position))
    return None if piece is None else {"seconds": piece.seconds, "what": piece.what, "fault": piece.fault}


def show(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch: 3, or 0/letters. Or the id of an "
                                         "experience: 3/7/1/0/ab12cd.")],
    words: Annotated[list[int] | None, typer.Argument(
        metavar="TASK [RUN]", min=0, help="The same as --task and --run.", show_default=False)] = None,
    task: Annotated[int | None, typer.Option(
        "--task", min=0, help="This task alone: its course, and its runs.")] = None,
    run: Annotated[int | None, typer.Option(
        "--run", min=0, help="This run of the task: its text, and the weights that made it.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task, not the first 40; texts in full.")] = False,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Show one batch, one task of it, or one rollout: who, when, with what weights, what came of it.

    \b
    Examples:
      trinity-es show 3 --all
      trinity-es show 3 --task 7
      trinity-es show 3 --task 7 --run 1    # or: show 3 7 1
      trinity-es show 3/7/1/0/ab12cd
    """
    if words:
        if len(words) > 2 or task is not None or run is not None:
            raise typer.BadParameter("say a task and a run once, as in `show 3 7 1` or `show 3 --task 7 --run 1`; an "
                                     "experience by its id, as in `show 3/7/1/0/ab12cd`", param_hint="[TASK [RUN]]")
        task, run = words[0], words[1] if len(words) > 1 else None
    limit = None if every or as_json else 40
    with common.open_chosen(log, config) as opened:
        batch_id, named = _named(opened, batch)
        task = named[0] if task is None and named else task
        run = named[1] if run is None and named else run
        if run is not None and task is None:
            raise typer.BadParameter("say of which task, as in --task 7 --run 1", param_hint="--run")
        if task is not None:
            from trinity_es.cli.commands.show_task import show_task

            show_task(opened, batch_id, task, run, batch if named else None, every=every, as_json=as_json)
            return
        story, rows = attempts.tell(opened.events(batch_id)), _rows(opened, batch_id, limit)
        away = opened.without_coordinator(story.first_position)
    if as_json:
        told = attempts.as_json(story)
        for one, row in zip(told["tasks"], rows, strict=False):
            one["row"] = row
        common.print_json(told | {"pieces": [asdict(p) for p in segments(story, away)]})
        return
    tables.print_story(tables.console(), story, rows, limit, away)


def _rows(log: Log, batch_id: BatchId, limit: int | None) -> list[str]:
    """Return the row of a taskset that each task is, as `letters 12`; "" for a task of no taskset, [] where the tasks
    can't be read any more. `limit`: what was handed in after so many is not read.
    """
    handed: list[dict[str, Any]] = []
    try:
        for event in log.handed_in(batch_id):
            if limit is None or len(handed) < limit:
                handed += [task.get("index") or {} for task in log.tasks_of(event)]
    except (LogNotFound, PayloadNotFound, CorruptPayload):
        return []
    return [f"{index['taskset']} {index.get('index', '')}".rstrip() if "taskset" in index else "" for index in handed]


def _named(log: Log, text: str) -> tuple[BatchId, tuple[int, int] | None]:
    """Return the batch that is meant, and for the id of an experience its task and run. Raises BatchNotFound."""
    parts = text.rsplit("/", 4)
    try:
        return common.find_batch(log, text), None
    except BatchNotFound:
        if len(parts) != 5 or not all(p.isdecimal() and p.isascii() for p in parts[1:4]):
            raise
        return common.find_batch(log, parts[0]), (int(parts[1]), int(parts[2]))


def replay(
    batch: BatchArgument,
    at: Annotated[str | None, typer.Option(
        "--at", metavar="POSITION_OR_TIME", help="As it was then: a position of the log, or an ISO time.")] = None,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Compute a batch's state from its events, now or at any moment, and check its final result.

    Exits 1 when the result that the trainer was told differs from the one computed again from the log, to the last bit.

    \b
    Examples:
      trinity-es replay 3
      trinity-es replay 3 --at 120
      trinity-es replay 3 --at 2026-03-01T12:30:00
      trinity-es replay 3 --at 12:30:00       # on the batch's day
    """
    with common.open_chosen(log, config) as opened:
        batch_id = common.find_batch(opened, batch)
        state = opened.replay(batch_id, common.parse_at(at, opened, batch_id))
        stored, again = opened.check_result(batch_id)
    equal = None if stored is None else canonical(stored) == canonical(again)
    if as_json:
        common.print_json({
            "state": tables.state_json(state), "at": at, "result_equal": equal, "stored_result": stored,
            "recomputed_result": again,
        })
    else:
        tables.print_state(tables.console(), state)
        if equal is None:
            print("the batch has not ended: there is no result to compare")
        elif equal:
            print("its final result, as stored, equals the one computed from the log, bit for bit")
        else:
            print("ITS FINAL RESULT, AS STORED, DIFFERS from the one computed from the log:")
            for change in sorted(changes(stored, again, "result"), key=lambda change: change.path):
                print(f"  {change.path}: stored {change.before!r}, computed {change.after!r}")
    if equal is False:
        raise typer.Exit(1)


def verify(
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False
) -> None:
    """Check a whole log: order, hash chain, results and read models made again, payloads whole, the file itself.

    Also that it has all that this host knows was acknowledged.
    Exits 1 when something is wrong, and for a log without events. A live run may go on meanwhile; what it can't see is
    in docs/OBSERVABILITY.md.

    \b
    Example:
      trinity-es verify && echo sound
    """
    started = time.monotonic()
    url, memory = common.choose_log(log, config), _memory_of(config, log)
    found = verify_log(url, common.counter("checked"), common.counter("read", "payloads"), memory)
    seconds = time.monotonic() - started
    if as_json:
        told = asdict(found)
        common.print_json({"log": told.pop("url"), **told, "seconds": seconds})
    else:
        for problem in found.problems:
            print(plain(problem))
        for remark in found.notes:
            print(f"note: {plain(remark)}")
        count = len(found.problems)
        verdict = f"{count} problem{'s' * (count > 1)}" if found.problems else "sound" if found.events else "empty"
        print(f"{verdict}: {found.events:,} events, {found.batches} batches and {found.payloads} payloads checked in "
              f"{seconds:.1f} s ({found.events / max(seconds, 1e-6):,.0f} events/s)")
        if not (found.events or found.problems):
            print("a SQLite log is its file and the `-wal` beside it: copy both, or by `sqlite3 FILE \".backup COPY\"`")
    if found.problems or not found.events:
        raise typer.Exit(1)


def _memory_of(config: Path | None, log: str | None) -> str:
    """Return the folder in which this host remembers the log of this config; empty where none was named."""
    if config is None or log is not None:
        return ""
    from trinity_es.system import remembered_log_end  # takes a while, as every config does

    return remembered_log_end.folder(common.read_config(config))


def rebuild(
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False
) -> None:
    """Make the tables of batches and runners again from the log. A live run waits meanwhile.

    \b
    Example:
      trinity-es rebuild --log runs/letters/first/log.sqlite
    """
    url = common.choose_log(log, config)
    started = time.monotonic()
    with EventLog.open(url, projectors=read_models.projectors()) as opened:
        opened.rebuild(common.counter("read"))
        position, shown = opened.head().position, opened.url
    answer: dict[str, Any] = {"log": shown, "events": position, "seconds": time.monotonic() - started}
    if as_json:
        common.print_json(answer)
    else:
        rate = position / max(answer["seconds"], 1e-6)
        print(f"the tables were made again from {position:,} events in {answer['seconds']:.1f} s "
              f"({rate:,.0f} events/s)")

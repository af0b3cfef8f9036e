"""The commands `batches`, `show`, `replay`, `verify` and `rebuild`, on the log of a live or a dead run.

They need no actor system, GPU, torch, vllm or thespian.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, get_args

import typer

from trinity_es.cli import common
from trinity_es.cli.render import batch_tables
from trinity_es.events.errors import BatchNotFound, CorruptPayload, LogNotFound, PayloadNotFound
from trinity_es.events.store.log import EventLog
from trinity_es.events.values import BatchId, BatchLifecycleState, BatchType
from trinity_es.projections.event_texts import counted
from trinity_es.projections.history import attempts, critical_path
from trinity_es.projections.history.critical_path import segments
from trinity_es.projections.reading.diff import changes
from trinity_es.projections.reading.log_reader import Log, canonical
from trinity_es.projections.tables import read_models
from trinity_es.projections.tables.batch_queries import SORTS, BatchRow
from trinity_es.projections.verify.log import verify_log
from trinity_es.safe_text import plain

__all__ = ["batches", "rebuild", "replay", "show", "verify"]

BatchArgument = Annotated[
    str, typer.Argument(metavar="BATCH", help="Id of the batch, as `trinity-es batches` shows it: 3, or 0/letters.")
]
MAX_ROWS = 50
MAX_TASKS = 40


def batches(
    state: Annotated[str | None, typer.Option(
        "--state", metavar="STATE", help=f"Only batches in this state: {', '.join(BatchLifecycleState)}.")] = None,
    batch_type: Annotated[str | None, typer.Option(
        "--type", metavar="TYPE", help=f"Only batches of this type: {', '.join(get_args(BatchType))}.")] = None,
    since: Annotated[str | None, typer.Option(
        "--since", metavar="POSITION_OR_TIME", help="Only batches submitted since then.")] = None,
    sort: Annotated[str, typer.Option(
        "--sort", metavar="COLUMN", help="Sort by seconds, reward, step, ...")] = "position",
    descending: Annotated[bool, typer.Option("--descending", "-d", help="The largest first.")] = False,
    limit: Annotated[int | None, typer.Option(
        "--limit", "-n", min=1, max=common.MAX_INTEGER, help="Show at most N batches.")] = None,
    slowest: Annotated[int | None, typer.Option(
        "--slowest", metavar="N", min=1, help="The N slowest, with the main reason for each.")] = None,
    every: Annotated[bool, typer.Option("--all", help=f"All batches, not only the last {MAX_ROWS}.")] = False,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """List batches with their state, rewards, tokens and failed attempts.

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
        after = 0 if since is None else common.position_before(opened, common.parse_at(since, opened, option="--since"))
        skipped_count = 0
        if limit is None and not (every or as_json or after):
            skipped_count = max(0, opened.count_batches(state=state, batch_type=batch_type) - MAX_ROWS)
            if skipped_count and (descending or sort != "position"):  # sorted: show the first rows
                limit, skipped_count = MAX_ROWS, 0
        rows = opened.batches(state=state, batch_type=batch_type, sort=sort, descending=descending,
                              limit=None if after else limit, offset=skipped_count)
        rows = [row for row in rows if row.first_position > after][:limit]
        causes = None if slowest is None else [_longest_delay(opened, row) for row in rows]
    if as_json:
        field_names = [f.name for f in fields(rows[0])] if rows else []
        documents = [{name: getattr(row, name) for name in field_names}
                     | {"seconds": row.ended_at and row.ended_at - row.submitted_at} for row in rows]
        if causes is not None:
            documents = [d | {"held_up_by": c} for d, c in zip(documents, causes, strict=True)]
        common.print_json(documents)
        return
    if not rows:
        common.note("no batch in this log yet" if not since and not state and not batch_type else "no batch matches")
    batch_tables.print_batches(batch_tables.console(), rows, causes)
    if skipped_count:
        print(f"{skipped_count} earlier batches: --all shows them, --limit and --since choose")


def _require_one_of(option: str, value: str | None, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        raise typer.BadParameter(f"{value!r} is not a valid value: give one of {', '.join(choices)}", param_hint=option)


def _longest_delay(log: Log, row: BatchRow) -> dict[str, Any] | None:
    """Return the longest phase of a batch, with its seconds and its text; None without phases."""
    timeline = attempts.fold_timeline(log.events(row.batch_id, row.first_position - 1))
    segment = critical_path.longest_segment(timeline, log.without_coordinator(row.first_position))
    return None if segment is None else {"seconds": segment.seconds, "what": segment.what, "fault": segment.fault}


def show(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch: 3, or 0/letters. Or the id of an "
                                         "experience: 3/7/1/0/ab12cd.")],
    numbers: Annotated[list[int] | None, typer.Argument(
        metavar="TASK [RUN]", min=0, help="The same as --task and --run.", show_default=False)] = None,
    task: Annotated[int | None, typer.Option(
        "--task", min=0, help="One task: its attempts and its runs.")] = None,
    run: Annotated[int | None, typer.Option(
        "--run", min=0, help="One run of the task: its text and the weights that made it.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All tasks, not only the first 40; texts in full.")] = False,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Show one batch, one of its tasks, or one run of a task: attempts, runners, weights and rewards.

    \b
    Examples:
      trinity-es show 3 --all
      trinity-es show 3 --task 7
      trinity-es show 3 --task 7 --run 1    # or: show 3 7 1
      trinity-es show 3/7/1/0/ab12cd
    """
    if numbers:
        if len(numbers) > 2 or task is not None or run is not None:
            raise typer.BadParameter("give the task and the run only once, as in `show 3 7 1` or `show 3 --task 7 "
                                     "--run 1`, or an experience by its id, as in `show "
                                     "3/7/1/0/ab12cd`", param_hint="[TASK [RUN]]")
        task, run = numbers[0], numbers[1] if len(numbers) > 1 else None
    limit = None if every or as_json else MAX_TASKS
    with common.open_chosen(log, config) as opened:
        batch_id, task_and_run = _batch_of_id(opened, batch)
        if task_and_run is not None:  # the id of an experience
            task = task_and_run[0] if task is None else task
            run = task_and_run[1] if run is None else run
        if run is not None and task is None:
            raise typer.BadParameter("name the task too, as in --task 7 --run 1", param_hint="--run")
        if task is not None:
            from trinity_es.cli.commands.show_task import show_task

            eid = batch if task_and_run else None
            show_task(opened, batch_id, task, run, eid, every=every, as_json=as_json)
            return
        timeline = attempts.fold_timeline(opened.events(batch_id))
        rows = _taskset_rows(opened, batch_id, limit)
        gaps = opened.without_coordinator(timeline.first_position)
    if as_json:
        document = attempts.as_json(timeline)
        for entry, row in zip(document["tasks"], rows, strict=False):
            entry["row"] = row
        common.print_json(document | {"pieces": [asdict(p) for p in segments(timeline, gaps)]})
        return
    batch_tables.print_timeline(batch_tables.console(), timeline, rows, limit, gaps)


def _taskset_rows(log: Log, batch_id: BatchId, limit: int | None) -> list[str]:
    """Return the taskset and row of each task, such as `letters 12`; "" for a task without a taskset.

    Returns [] if the tasks can't be read. Stops to read when it has `limit` tasks.
    """
    indexes: list[dict[str, Any]] = []
    try:
        for event in log.submission_events(batch_id):
            if limit is None or len(indexes) < limit:
                indexes += [task.get("index") or {} for task in log.tasks_of(event)]
    except (LogNotFound, PayloadNotFound, CorruptPayload):
        return []
    return [f"{index['taskset']} {index.get('index', '')}".rstrip() if "taskset" in index else "" for index in indexes]


def _batch_of_id(log: Log, text: str) -> tuple[BatchId, tuple[int, int] | None]:
    """Read `text`, the id of a batch or of an experience. Return the batch's id, and an experience's (task, run), else
    None. Raises BatchNotFound."""
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
        "--at", metavar="POSITION_OR_TIME", help="A position of the log, or an ISO time. Default: now.",
    )] = None,
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False,
) -> None:
    """Compute a batch's state from its events, now or at any earlier time, and check its final result.

    Exits 1 if the result that the trainer got differs in any bit from the result computed from the log.

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
        stored, recomputed = opened.check_result(batch_id)
    is_equal = None if stored is None else canonical(stored) == canonical(recomputed)
    if as_json:
        common.print_json({
            "state": batch_tables.state_json(state), "at": at, "result_equal": is_equal, "stored_result": stored,
            "recomputed_result": recomputed,
        })
    else:
        batch_tables.print_state(batch_tables.console(), state)
        if is_equal is None:
            print("the batch has not ended: there is no result to compare")
        elif is_equal:
            print("the stored final result equals the one computed from the log, bit for bit")
        else:
            print("THE STORED FINAL RESULT DIFFERS from the one computed from the log:")
            for change in sorted(changes(stored, recomputed, "result"), key=lambda change: change.path):
                print(f"  {change.path}: stored {change.before!r}, computed {change.after!r}")
    if is_equal is False:
        raise typer.Exit(1)


def verify(
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False
) -> None:
    """Check a whole log: order of events, hash chain, payloads, database file, and recomputed results and tables.

    It also checks that the log has every event that was acknowledged to this host. Exits 1 if something is wrong or the
    log is empty. A live run may continue meanwhile. docs/OBSERVABILITY.md says what this cannot detect.

    \b
    Example:
      trinity-es verify && echo sound
    """
    started_at = time.monotonic()
    url, memory_folder = common.choose_log(log, config), ""
    if config is not None and log is None:
        from trinity_es.system import remembered_log_end  # slow to import

        memory_folder = remembered_log_end.folder(common.read_config(config))
    report = verify_log(url, common.progress_counter("checked"), common.progress_counter("read", "payloads"),
                        memory_folder)
    seconds = time.monotonic() - started_at
    if as_json:
        document = asdict(report)
        common.print_json({"log": document.pop("url"), **document, "seconds": seconds})
    else:
        for problem in report.problems:
            print(plain(problem))
        for remark in report.notes:
            print(f"note: {plain(remark)}")
        verdict = counted(len(report.problems), "problem") if report.problems else "sound" if report.events else "empty"
        print(f"{verdict}: {counted(report.events, 'event')}, {counted(report.batches, 'batch')} and "
              f"{counted(report.payloads, 'payload')} checked in {seconds:.1f} s "
              f"({report.events / max(seconds, 1e-6):,.0f} events/s)")
        if not (report.events or report.problems):
            print("a SQLite log has two files, FILE and FILE-wal: copy both, or use `sqlite3 FILE \".backup COPY\"`")
    if report.problems or not report.events:
        raise typer.Exit(1)


def rebuild(
    log: common.LogOption = None, config: common.ConfigOption = None, as_json: common.JsonOption = False
) -> None:
    """Rebuild the tables of batches and runners from the log's events. A live run waits meanwhile.

    \b
    Example:
      trinity-es rebuild --log runs/letters/first/log.sqlite
    """
    url = common.choose_log(log, config)
    started_at = time.monotonic()
    with EventLog.open(url, projectors=read_models.projectors()) as opened:
        opened.rebuild(common.progress_counter("read"))
        position, masked_url = opened.head().position, opened.url
    answer: dict[str, Any] = {"log": masked_url, "events": position, "seconds": time.monotonic() - started_at}
    if as_json:
        common.print_json(answer)
    else:
        rate = position / max(answer["seconds"], 1e-6)
        print(f"the tables were rebuilt from {position:,} events in {answer['seconds']:.1f} s ({rate:,.0f} events/s)")

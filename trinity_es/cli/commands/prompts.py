"""The command `prompts`, which lists the prompts that were never tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trinity_es.actors.config.data_sections import TasksetConfig
from trinity_es.audit.rollout_reader import submitted_task
from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, open_chosen, print_json
from trinity_es.cli.render import batch_tables, runners_weights_usage
from trinity_es.events.errors import TasksetError, TrinityError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.projections.history.task_history import prompt_of
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.reading.resume_point import sources_of
from trinity_es.projections.reading.untried_prompts import prompts_tried
from trinity_es.tasksets.taskset import Cursor, Taskset

__all__ = ["prompts"]


def prompts(
    never: Annotated[bool, typer.Option(
        "--never", help="List every prompt that was never tried, not only the first ten.")] = False,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Show how many prompts were tried, and which prompts were never sent to a runner.

    A row of a taskset counts as tried if any batch sent it to a runner. Rows that no batch ever had are listed too, if
    the taskset can be read from here.

    \b
    Examples:
      trinity-es prompts
      trinity-es prompts --never --json
    """
    with open_chosen(log, config) as opened:
        tried = prompts_tried(opened)
        unread = _unread_rows(opened, tried.read)
        texts = {(u.batch_id, u.task): prompt_of(submitted_task(opened, u.batch_id, u.task))
                 for u in (tried.never if never else tried.never[:10])}
    if as_json:
        print_json({
            "tasks": tried.tasks, "sent": tried.sent, "unread": unread,
            "never": [asdict(u) | {"prompt": texts.get((u.batch_id, u.task))} for u in tried.never],
            "read": {name: {"epoch": epoch, "offset": offset} for name, (epoch, offset) in tried.read.items()},
        })
    else:
        runners_weights_usage.print_prompts(batch_tables.console(), tried, unread, texts)


class _EmptyRows:
    """Source of `count` empty rows, which is enough to compute the order of rows."""

    revision = ""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{} for _ in rows]


def _taskset(config: TasksetConfig, sources: Mapping[tuple[str, bool], TasksetSource]) -> Taskset:
    """Return a taskset. If the log has its number of rows, the source is not opened. Raises TasksetError."""
    source = sources.get((config.name, False))
    if config.kind == "file" and (source is None or config.data_selector is not None):
        return Taskset(config, recorded=source)
    if source is None:
        raise TasksetError(f"the rows of taskset {config.name} are unknown: the log has no record of {config.path}")
    return Taskset(config, rows=_EmptyRows(source.rows))


def _unread_rows(log: Log, read: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    """Return the rows of each taskset that its first epoch has not read yet. Unreadable tasksets are left out.

    `read`: each taskset's (epoch, offset).
    """
    config = log.config()[1]
    rows_by_taskset: dict[str, list[int]] = {}
    if not read or not config:
        return rows_by_taskset
    sources = sources_of(log)
    entries = config.get("buffer", {}).get("explorer_input", {}).get("tasksets", [])
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") in read:
            epoch, offset = read[entry["name"]]
            try:  # fails if the file is gone or has changed, or the config is of another release
                taskset = _taskset(TasksetConfig.model_validate(entry), sources)
                # After the first epoch (0) no row is unread.
                tasks, _ = taskset.read(Cursor(0, offset), len(taskset) - offset) if epoch == 0 else ([], None)
            except (TrinityError, ValueError, OSError):
                continue
            rows_by_taskset[entry["name"]] = sorted(task.index["index"] for task in tasks)
    return rows_by_taskset

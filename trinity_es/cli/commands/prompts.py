"""`prompts`: which prompts were tried, which never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trinity_es.actors.config.buffer import TasksetConfig
from trinity_es.audit.rollouts import task_asked
from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, open_chosen, print_json
from trinity_es.cli.render import runners_weights_usage, tables
from trinity_es.events.errors import TasksetError, TrinityError
from trinity_es.events.vocabulary import TasksetSource
from trinity_es.projections.history.task_history import prompt_of
from trinity_es.projections.reading.log_reader import Log
from trinity_es.projections.reading.resume_point import sources_of
from trinity_es.projections.reading.untried_prompts import Untried, prompts_tried
from trinity_es.tasksets.taskset import Cursor, Taskset

__all__ = ["prompts"]


def prompts(
    never: Annotated[bool, typer.Option(
        "--never", help="Each prompt that was never tried, not the first ten.")] = False,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Tell which prompts were tried, and which never were: no runner ever got one of their runs.

    A row of a taskset that one batch dropped and another played was tried. What no batch ever held is told where the
    taskset's file can be read from here, by how far the log says that it was read.

    \b
    Examples:
      trinity-es prompts
      trinity-es prompts --never --json
    """
    with open_chosen(log, config) as opened:
        found = prompts_tried(opened)
        unread = _unread(opened, found.read)
        asked = {(u.batch_id, u.task): _prompt(opened, u) for u in (found.never if never else found.never[:10])}
    if as_json:
        print_json({
            "tasks": found.tasks, "sent": found.sent, "unread": unread,
            "never": [asdict(u) | {"prompt": asked.get((u.batch_id, u.task))} for u in found.never],
            "read": {name: {"epoch": e, "offset": offset} for name, (e, offset) in found.read.items()},
        })
    else:
        runners_weights_usage.print_prompts(tables.console(), found, unread, asked)


def _prompt(log: Log, untried: Untried) -> str | None:
    return prompt_of(task_asked(log, untried.batch_id, untried.task))


class _Numbers:
    """Rows of which only the number is known: enough to tell which come next."""

    revision = ""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [{} for _ in rows]


def _numbered(config: TasksetConfig, sources: Mapping[tuple[str, bool], TasksetSource]) -> Taskset:
    """Return the taskset, without opening one whose rows the log has the number of. Raises TasksetError."""
    source = sources.get((config.name, False))
    if config.kind == "file" and (source is None or config.data_selector is not None):
        return Taskset(config, recorded=source)
    if source is None:
        raise TasksetError(f"taskset {config.name}: the log does not say what {config.path} was")
    return Taskset(config, rows=_Numbers(source.rows))


def _unread(log: Log, read: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    """Return the rows that were never read, by taskset whose file is there: those its first pass has yet to read."""
    config = log.config()[1]
    out: dict[str, list[int]] = {}
    if not read or not config:
        return out
    sources = sources_of(log)
    entries = config.get("buffer", {}).get("explorer_input", {}).get("tasksets", [])
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") in read:
            epoch, offset = read[entry["name"]]
            try:  # a file that is gone or has changed, a config of another release: then it is not told
                taskset = _numbered(TasksetConfig.model_validate(entry), sources)
                left, _ = taskset.read(Cursor(0, offset), len(taskset) - offset) if epoch == 0 else ([], None)
            except (TrinityError, ValueError, OSError):
                continue
            out[entry["name"]] = sorted(task.index["index"] for task in left)
    return out

"""The commands that an auditor asks a whole run with: `runners`, `weights`, `usage`, `prompts`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, open_chosen, print_json

if TYPE_CHECKING:
    from trinity_es.projections.reading.log_reader import Log
    from trinity_es.projections.reading.untried_prompts import Untried

__all__ = ["prompts", "runners", "usage", "weights"]


def runners(
    runner: Annotated[
        str | None, typer.Argument(metavar="[RUNNER]", help="Only this one, life by life.", show_default=False)
    ] = None,
    log: LogOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell of each runner how often it died, of what, and what that cost; of one, life by life.

    A death costs the attempts that were with the runner, and the seconds that they had run.

    \b
    Examples:
      trinity-es runners
      trinity-es runners runner-1
    """
    from trinity_es.cli.render import audit, tables
    from trinity_es.projections.tables.runner_history import natural

    with open_chosen(log, config) as opened:
        lives = [life for life in opened.runner_lives() if runner in (None, life.runner)]
        if runner is not None and not lives:
            known = sorted({life.runner for life in opened.runner_lives()}, key=natural)
            raise typer.BadParameter(f"no runner {runner!r}: there are {', '.join(known) or 'none'}",
                                     param_hint="RUNNER")
        up = opened.processes()["up"]
    if as_json:
        print_json([asdict(life) for life in lives])
    elif runner is None:
        audit.print_runners(tables.console(), lives, up)
    else:
        audit.print_lives(tables.console(), lives, up)


def weights(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the versions of the weights: when each was published, when which runner had it, what came of it.

    \b
    Example:
      trinity-es weights
    """
    from trinity_es.cli.render import audit, tables

    with open_chosen(log, config) as opened:
        made, total = opened.made(), opened.count_weights()
        versions = opened.weights(limit=None if as_json else audit.MOST)
    if as_json:
        print_json([{**asdict(version), "delivered": made.get(version.version, 0)} for version in versions])
    else:
        audit.print_weights(tables.console(), versions, made, total - len(versions))


def usage(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Tell how often experiences were used: never, once, more than once. Exits 1 when one was used more than once.

    A use is a step of the trainer that was acknowledged, or a take from the queue. What a trainer used again after it
    came back from an older checkpoint is no second use: what it had made of the first is gone.

    \b
    Example:
      trinity-es usage
    """
    from trinity_es.cli.render import audit, tables

    with open_chosen(log, config) as opened:
        found = opened.usage()
    if as_json:
        print_json(asdict(found) | {"more": found.more})
    else:
        audit.print_usage(tables.console(), found)
    if found.twice:
        raise typer.Exit(1)


def prompts(
    never: Annotated[
        bool, typer.Option("--never", help="Each prompt that was never tried, not the first ten.")
    ] = False,
    log: LogOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell which prompts were tried, and which never were: no runner ever got one of their runs.

    A row of a taskset that one batch dropped and another played was tried. What no batch ever held is told where the
    taskset's file can be read from here, by how far the log says that it was read.

    \b
    Examples:
      trinity-es prompts
      trinity-es prompts --never --json
    """
    from trinity_es.cli.render import audit, tables
    from trinity_es.projections.reading.untried_prompts import prompts_tried

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
        audit.print_prompts(tables.console(), found, unread, asked)


def _prompt(log: Log, untried: Untried) -> str | None:
    from trinity_es.audit.rollouts import task_asked
    from trinity_es.projections.history.task_history import prompt_of

    return prompt_of(task_asked(log, untried.batch_id, untried.task))


def _unread(log: Log, read: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
    """Return the rows that were never read, by taskset whose file is there: those its first pass has yet to read."""
    from trinity_es.events.errors import TrinityError

    config = log.config()[1]
    out: dict[str, list[int]] = {}
    if not read or not config:
        return out
    from trinity_es.config.buffer import TasksetConfig
    from trinity_es.tasksets.taskset import Cursor, Taskset

    entries = config.get("buffer", {}).get("explorer_input", {}).get("tasksets", [])
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") in read:
            epoch, offset = read[entry["name"]]
            try:  # a file that is gone or has changed, a config of another release: then it is not told
                taskset = Taskset(TasksetConfig.model_validate(entry))
                left, _ = taskset.read(Cursor(0, offset), len(taskset) - offset) if epoch == 0 else ([], None)
            except (TrinityError, ValueError, OSError):
                continue
            out[entry["name"]] = sorted(task.index["index"] for task in left)
    return out

"""The command `payloads move`, which moves a log's payloads to another store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from trinity_es.cli.common import JsonOption, LogOption, note, print_json, progress_counter
from trinity_es.cli.which_config import config_from_options
from trinity_es.events.errors import AlreadyRunning
from trinity_es.events.store.database.urls import masked
from trinity_es.events.store.log import EventLog
from trinity_es.events.store.payloads.move import move_payloads
from trinity_es.events.store.payloads.payload_place import require_place_url
from trinity_es.projections.event_texts import counted
from trinity_es.safe_text import plain
from trinity_es.system import running_system

__all__ = ["payloads"]

HELP = """Move the payloads of a log to a bucket, a shared folder, or back.

\b
Examples:
  trinity-es payloads move --log runs/letters/first/log.sqlite s3://rollouts/letters
  trinity-es payloads move --log postgresql://me@db/runs file:///shared/payloads --json
"""
payloads = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)


@payloads.callback()
def _group() -> None:
    """Make `payloads` a group of commands, although it has only one."""


@payloads.command()
def move(
    to: Annotated[str, typer.Argument(
        metavar="TO", show_default=False,
        help="s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder; or `log`: beside a SQLite "
             "log, in PostgreSQL's table.")],
    log: LogOption = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the old copies after the move.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Move a log's payloads to another store, and record that in the log. No system may run on the log.

    Payloads that are there already are not copied again, so an interrupted move can be repeated. Every copy is read
    back before the log records the new store. Corrupt payloads are not moved; they are named, and the exit code is 1.

    \b
    Example:
      trinity-es payloads move --log runs/letters/first/log.sqlite s3://rollouts/letters
    """
    place = "" if to == "log" else require_place_url(to)
    settings = config_from_options(None, log)
    url = settings.store.url
    if running_system.find_head(settings) is not None or running_system.led_elsewhere(settings):
        raise AlreadyRunning(f"a system runs on {masked(url)}: end it with `trinity-es down`, then move the payloads")
    EventLog.open(url, read_only=True).close()  # raises if it is not a log
    moved = move_payloads(url, place, delete=delete, progress=progress_counter("copied", "payloads"), say=note)
    if as_json:
        print_json({"log": masked(url), **asdict(moved)})
    else:
        for problem in moved.problems:
            print(plain(problem))
        print(f"{masked(url)} has its payloads in {moved.place or 'its own store'}; moved: "
              f"{counted(moved.payloads, 'payload')} of {moved.bytes:,} bytes, {moved.copied:,} of them copied now")
    if moved.problems:
        raise typer.Exit(1)

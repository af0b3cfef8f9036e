"""The commands `status` and `why`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, find_batch, print_json
from trinity_es.cli.render.batch_tables import console
from trinity_es.cli.render.status import print_status, verdict
from trinity_es.cli.which_config import config_from_options, is_config_file, one_of
from trinity_es.client import health
from trinity_es.safe_text import plain

__all__ = ["status", "why"]


def status(
    config_or_log: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|LOG]", help="Config file of the run, or its log: as with --config and --log.",
                       show_default=False),
    ] = None,
    config: ConfigOption = None, log: LogOption = None, as_json: JsonOption = False,
) -> None:
    """Show the state of a system: its coordinator, its runners, its open batches and what they wait for.

    Exits 1 if something is wrong: batches are open and no system runs, there is no coordinator, a runner failed, was
    lost or quarantined, or a batch is stalled. Each problem is one line that says what to do. For a dead system, the
    state comes from the log alone.

    \b
    Examples:
      trinity-es status --config config.yaml
      trinity-es status runs/second/log.sqlite
    """
    if config_or_log is not None and is_config_file(config_or_log):
        one_of(config_or_log, None if config is None else str(config))
        settings = config_from_options(Path(config_or_log), log)
    else:
        settings = config_from_options(config, one_of(config_or_log, log))
    state = health.read_health(settings)
    if as_json:
        print_json(state)
    else:
        print_status(console(), state)
    if state["problems"]:
        raise typer.Exit(1)


def why(
    batch: Annotated[str | None, typer.Argument(
        metavar="[BATCH]", help="Id of the batch. Default: every open one, a line each.", show_default=False)] = None,
    config: ConfigOption = None, log: LogOption = None, as_json: JsonOption = False,
) -> None:
    """Show what a batch waits for, since when, on which runner and attempt, and what to do about it.

    The answer comes from the running system and the log, for a dead system from the log alone. It distinguishes slow
    from hung. Exits 1 if a batch is stalled: it can't go on by itself, or it got no result for longer than
    explorer.stall_after.

    \b
    Examples:
      trinity-es why 3 --config config.yaml
      trinity-es why
    """
    settings = config_from_options(config, log)
    answers = health.explain(settings, batch, find_batch)
    if as_json:
        documents = [answer.as_dict() for answer in answers]
        print_json(documents if batch is None else documents[0])
    else:
        if batch is not None:
            lines = answers[0].sentences()
        elif answers:
            # Each way out once, in order.
            ways_out = dict.fromkeys(answer.waiting[0].way_out for answer in answers if answer.stalled)
            lines = [answer.line for answer in answers] + [f"what to do: {text}" for text in ways_out if text]
        else:  # say why no batch is open
            state = health.read_health(settings)
            lines = state["problems"] or [verdict(state)]
        for line in lines:
            print(plain(line))
    if any(answer.stalled for answer in answers):
        raise typer.Exit(1)

"""The commands `status` and `why`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, find_batch, print_json
from trinity_es.cli.render.batch_tables import console
from trinity_es.cli.render.status import show, verdict
from trinity_es.cli.which_config import named_once, names_config, settings_of
from trinity_es.client import health
from trinity_es.projections.why.answer import Why
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

    Exits 1 if something is wrong: batches are open and nothing runs, there is no coordinator, a runner failed, was
    lost or quarantined, or a batch is stalled. Each problem is one line that says what to do. If the system is dead,
    the log alone answers.

    \b
    Examples:
      trinity-es status --config config.yaml
      trinity-es status runs/second/log.sqlite
    """
    if config_or_log is not None and names_config(config_or_log):
        named_once(config_or_log, None if config is None else str(config))
        settings = settings_of(Path(config_or_log), log)
    else:
        settings = settings_of(config, named_once(config_or_log, log))
    state = health.look(settings)
    if as_json:
        print_json(state)
    else:
        show(console(), state)
    if state["problems"]:
        raise typer.Exit(1)


def why(
    batch: Annotated[str | None, typer.Argument(
        metavar="[BATCH]", help="Id of the batch. Default: every open one, a line each.", show_default=False)] = None,
    config: ConfigOption = None, log: LogOption = None, as_json: JsonOption = False,
) -> None:
    """Show what a batch waits for, since when, on which runner and attempt, and what to do about it.

    It asks the running system and the log, or for a dead system the log alone, and tells slow from hung. Exits 1 if a
    batch is stalled: it needs a person to go on, or nothing has come for longer than explorer.stall_after.

    \b
    Examples:
      trinity-es why 3 --config config.yaml
      trinity-es why
    """
    settings = settings_of(config, log)
    answers = health.explain(settings, batch, find_batch)
    if as_json:
        documents = [answer.as_dict() for answer in answers]
        print_json(documents if batch is None else documents[0])
    else:
        if batch is not None:
            lines = answers[0].sentences()
        elif answers:
            lines = _overview_lines(answers)
        else:  # then what a person wants to know is why none is open
            state = health.look(settings)
            lines = state["problems"] or [verdict(state)]
        for line in lines:
            print(plain(line))
    if any(answer.stalled for answer in answers):
        raise typer.Exit(1)


def _overview_lines(answers: list[Why]) -> list[str]:
    """Return a line for each open batch, then what to do about the stalled ones."""
    ways_out = dict.fromkeys(answer.waiting[0].way_out for answer in answers if answer.stalled)  # each once, in order
    return [*(answer.line for answer in answers), *(f"what to do: {way_out}" for way_out in ways_out if way_out)]

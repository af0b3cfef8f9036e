"""The commands that ask how a system is: `status, why`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, find_batch, print_json
from trinity_es.cli.render.health import show
from trinity_es.cli.render.tables import console
from trinity_es.cli.which_config import named_once, names_config, settings_of
from trinity_es.client import health
from trinity_es.projections.why.answer import Why
from trinity_es.text import plain

__all__ = ["status", "why"]


def status(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|LOG]", help="Config file of the run, or its log: as with --config and --log.",
                       show_default=False),
    ] = None,
    config: ConfigOption = None, log: LogOption = None, as_json: JsonOption = False,
) -> None:
    """Tell how a system is: its coordinator, its runners, its open batches and what they wait for.

    Exits 1 when something is wrong: batches are open and nothing runs, there is no coordinator, a runner failed, was
    lost or quarantined, a batch is stalled. Each is one line with the way out. Of a dead system it tells what the log
    knows.

    \b
    Examples:
      trinity-es status --config config.yaml
      trinity-es status runs/second/log.sqlite
    """
    if what is not None and names_config(what):
        named_once(what, None if config is None else str(config))
        settings = settings_of(Path(what), log)
    else:
        settings = settings_of(config, named_once(what, log))
    found = health.look(settings)
    if as_json:
        print_json(found)
    else:
        show(console(), found)
    if found["problems"]:
        raise typer.Exit(1)


def why(
    batch: Annotated[str | None, typer.Argument(
        metavar="[BATCH]", help="Id of the batch; without it every open one.", show_default=False)] = None,
    config: ConfigOption = None, log: LogOption = None, as_json: JsonOption = False,
) -> None:
    """Tell what a batch waits for, since when, on which runner and attempt, and what to do about it.

    From the running system and the log; of a dead system, from the log alone. Slow and hung are told apart. Without a
    batch: every open one, a line each. Exits 1 when one is stalled: nothing will come of it without a person, or
    nothing has come for longer than explorer.stall_after.

    \b
    Examples:
      trinity-es why 3 --config config.yaml
      trinity-es why
    """
    found = health.explain(settings_of(config, log), batch, find_batch)
    if as_json:
        told = [w.as_dict() for w in found]
        print_json(told if batch is None else told[0])
    else:
        for line in found[0].sentences() if batch is not None else _lines(found):
            print(plain(line))
    if any(w.stalled for w in found):
        raise typer.Exit(1)


def _lines(found: list[Why]) -> list[str]:
    """Return a line for each open batch, and what to do about those that are stalled."""
    ways = dict.fromkeys(w.waiting[0].way_out for w in found if w.stalled)
    return [*(w.line for w in found), *(f"what to do: {way}" for way in ways if way)] or [
        "no batch is open: `trinity-es status` tells how the system is"]

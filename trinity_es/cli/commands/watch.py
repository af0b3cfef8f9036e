"""`watch`: a run at a glance, as it goes."""

from __future__ import annotations

from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, open_chosen, print_json
from trinity_es.cli.render.watch import look, show_live

__all__ = ["watch"]


def watch(
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="How often to look.")] = 1.0,
    log: LogOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run at a glance, as it goes: batches, runners, throughput, stalls, the last events. q or Ctrl-C ends it.

    Reads the log beside its writer, so it shows a dead run's last moment too. In a pipe each picture that is new is
    printed as text; --json is one picture.

    \b
    Examples:
      trinity-es watch
      trinity-es watch --once --json
      trinity-es watch --log postgresql://me@db/runs --every 5
    """
    with open_chosen(log, config) as opened:
        if as_json:
            print_json(look(opened).as_json())
        else:
            show_live(opened, once=once, every=every)

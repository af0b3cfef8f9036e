"""The command that does something to a runner: `restart-runner`."""

from __future__ import annotations

from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, print_json

__all__ = ["restart_runner"]


def restart_runner(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Runner, as `trinity-es status` names it.")],
    config: ConfigOption = None,
    log: LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Why: recorded with who asked.")] = "",
    as_json: JsonOption = False,
) -> None:
    """End a runner's process and start another: one that hangs, failed or was given up, say.

    What it had is attempted again, elsewhere where another runner serves, and is blamed for nothing. Returns when the
    new process lives; its engine then loads.

    \b
    Example:
      trinity-es restart-runner runner-3 --config config.yaml --reason "its GPU was reset"
    """
    from trinity_es.cli.run import settings_of
    from trinity_es.client import connect

    with connect(settings_of(config, log)) as client:
        done = client.restart_runner(name, reason=reason)
    if as_json:
        print_json(done)
    else:
        print(f"{done['runner']} was ended and lives again, as #{done['incarnation']}; its engine is loading")

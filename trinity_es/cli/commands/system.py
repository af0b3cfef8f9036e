"""The commands that do something to what runs: `restart-runner`, `redo`."""

from __future__ import annotations

from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, print_json

__all__ = ["redo", "restart_runner"]


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
    from trinity_es.cli.commands.run import settings_of
    from trinity_es.client.rollout_client import connect

    with connect(settings_of(config, log)) as client:
        done = client.restart_runner(name, reason=reason)
    if as_json:
        print_json(done)
    else:
        print(f"{done['runner']} was ended and lives again, as #{done['incarnation']}; its engine is loading")


def redo(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="Id of an open batch: 3, or 0/letters.")],
    tasks: Annotated[list[int], typer.Argument(metavar="TASK...", min=0, help="Tasks of it that have ended.")],
    config: ConfigOption = None,
    log: LogOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Why: recorded with who asked.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Let tasks that have ended run again: one whose payload was lost, say, or that failed for what was mended since.

    All runs of each are run again, and what it had is set aside. A batch that was finalized or aborted stays as it is:
    its result was given out. `verify` names the tasks whose payloads are lost.

    \b
    Example:
      trinity-es redo 3 7 8 --config config.yaml --reason "the disk lost their payload"
    """
    from trinity_es.cli.commands.run import settings_of
    from trinity_es.cli.common import find_batch, open_chosen
    from trinity_es.client.rollout_client import connect

    settings = settings_of(config, log)
    with open_chosen(settings.store.url, None) as opened:
        batch_id = find_batch(opened, batch)
    with connect(settings) as client:
        client.redo(batch_id, tasks, reason=reason)
    if as_json:
        print_json({"batch_id": batch_id, "tasks": tasks})
    else:
        one = len(tasks) == 1
        print(f"{'task' if one else 'tasks'} {', '.join(map(str, tasks))} of batch {batch_id} "
              f"{'is' if one else 'are'} run again")

"""The commands that an auditor asks a whole run with: `runners`, `weights`, `usage`, `leases`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, open_chosen, print_json, require_runner
from trinity_es.cli.render import runners_weights_usage, tables
from trinity_es.projections.adapter_versions import ADAPTER_EVENTS, adapter_history
from trinity_es.projections.tables.runner_history import seen

__all__ = ["leases", "runners", "usage", "weights"]


def runners(
    runner: Annotated[str | None, typer.Argument(
        metavar="[RUNNER]", help="Only this one, life by life.", show_default=False)] = None,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Tell of each runner how often it died, of what, and what that cost; of one, life by life.

    A death costs the attempts that were with the runner, and the seconds that they had run. So does the end of the
    whole system, which is nobody's death: such a life is `gone`, and `replaced` when the next one has begun. Of a run
    over several hosts: by host, with those deaths apart that came because the host was lost.

    \b
    Examples:
      trinity-es runners
      trinity-es runners runner-1
    """
    with open_chosen(log, config) as opened:
        lives = [life for life in opened.runner_lives() if runner in (None, life.runner)]
        if runner is not None and not lives:
            require_runner(opened, runner, "RUNNER")
        up = opened.processes()["up"]
    if as_json:
        print_json([asdict(life) | {"how": seen(life, up)} for life in lives])
    elif runner is None:
        runners_weights_usage.print_runners(tables.console(), lives, up)
    else:
        runners_weights_usage.print_lives(tables.console(), lives, up)


def weights(
    adapters: Annotated[bool, typer.Option("--adapters", help="Only the LoRA adapters.")] = False,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """List the versions of the weights: when each was published, when which runner had it, what came of it.

    LoRA adapters follow them; --json has either.

    \b
    Examples:
      trinity-es weights
      trinity-es weights --adapters --json
    """
    with open_chosen(log, config) as opened:
        found = [] if as_json and not adapters else adapter_history(opened.rare(ADAPTER_EVENTS))
        if adapters:
            if as_json:
                print_json([asdict(adapter) for adapter in found])
            else:
                runners_weights_usage.print_adapters(tables.console(), found)
            return
        made, total = opened.made(), opened.count_weights()
        versions = opened.weights(limit=None if as_json else runners_weights_usage.MOST)
    if as_json:
        print_json([{**asdict(version), "delivered": made.get(version.version, 0)} for version in versions])
    else:
        runners_weights_usage.print_weights(tables.console(), versions, made, total - len(versions))
        if found:
            runners_weights_usage.print_adapters(tables.console(), found)


def usage(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Tell how often experiences were used: never, once, more than once. Exits 1 when one was used more than once.

    A use is a step of the trainer that was acknowledged, or a take from the queue. What a trainer used again after it
    came back from an older checkpoint is no second use: what it had made of the first is gone.

    \b
    Example:
      trinity-es usage
    """
    with open_chosen(log, config) as opened:
        found = opened.usage()
    if as_json:
        print_json(asdict(found) | {"more": found.more})
    else:
        runners_weights_usage.print_usage(tables.console(), found)
    if found.twice:
        raise typer.Exit(1)


def leases(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the sandboxes and sessions that runs took and that are not released: whose they are, since when.

    `orphaned` are those whose run is over: the coordinator has them released, again and again until their provider
    does. Those that were released are events: `trinity-es events --type LeaseReleased`.

    \b
    Example:
      trinity-es leases
    """
    with open_chosen(log, config) as opened:
        found = opened.leases()
    if as_json:
        print_json([lease.as_dict() for lease in found])
    else:
        runners_weights_usage.print_leases(tables.console(), found, time.time())

"""The commands `runners`, `weights`, `usage` and `leases`, each about a whole run."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, open_chosen, print_json, require_runner
from trinity_es.cli.render import batch_tables, runners_weights_usage
from trinity_es.projections.adapter_versions import ADAPTER_EVENTS, adapter_history
from trinity_es.projections.tables.runner_history import visible_state

__all__ = ["leases", "runners", "usage", "weights"]


def runners(
    runner: Annotated[str | None, typer.Argument(
        metavar="[RUNNER]", help="One runner, a line per process.", show_default=False)] = None,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """Show how often each runner died, why, and what that cost; for one runner, each of its processes.

    A death costs the attempts that the runner had, and the seconds that they had run. The end of the whole system costs
    them too but does not count as a death: such a process is `gone`, or `replaced` once the next one has started. For a
    run on several hosts runners are listed by host, and deaths by the loss of a host are counted separately.

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
        print_json([asdict(life) | {"how": visible_state(life, up)} for life in lives])
    elif runner is None:
        runners_weights_usage.print_runners(batch_tables.console(), lives, up)
    else:
        runners_weights_usage.print_lives(batch_tables.console(), lives, up)


def weights(
    adapters: Annotated[bool, typer.Option("--adapters", help="Only the LoRA adapters.")] = False,
    log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False,
) -> None:
    """List the versions of the weights: when each was published and loaded, and how many experiences it made.

    A table of the LoRA adapters follows. --json has only the weights, or with --adapters only the adapters.

    \b
    Examples:
      trinity-es weights
      trinity-es weights --adapters --json
    """
    with open_chosen(log, config) as opened:
        adapter_versions = [] if as_json and not adapters else adapter_history(opened.read_rare(ADAPTER_EVENTS))
        if adapters:
            if as_json:
                print_json([asdict(adapter) for adapter in adapter_versions])
            else:
                runners_weights_usage.print_adapters(batch_tables.console(), adapter_versions)
            return
        deliveries, total = opened.deliveries_by_version(), opened.count_weights()
        versions = opened.weights(limit=None if as_json else runners_weights_usage.MAX_ROWS)
    if as_json:
        print_json([{**asdict(version), "delivered": deliveries.get(version.version, 0)} for version in versions])
    else:
        runners_weights_usage.print_weights(batch_tables.console(), versions, deliveries, total - len(versions))
        if adapter_versions:
            runners_weights_usage.print_adapters(batch_tables.console(), adapter_versions)


def usage(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show how many experiences were used never, once, or more than once. Exits 1 if one was used more than once.

    A use is a step that the trainer acknowledged, or a take from the queue. If a trainer returned to an older
    checkpoint and uses an experience again, that counts once, because the effect of the first use is gone.

    \b
    Example:
      trinity-es usage
    """
    with open_chosen(log, config) as opened:
        counts = opened.usage()
    if as_json:
        print_json(asdict(counts) | {"more": counts.more})
    else:
        runners_weights_usage.print_usage(batch_tables.console(), counts)
    if counts.twice:
        raise typer.Exit(1)


def leases(log: LogOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the sandboxes and sessions that are not released, with the run that took each and since when.

    An `orphaned` lease belongs to a run that is over: the coordinator retries its release until the provider confirms
    it. Released leases are events: `trinity-es events --type LeaseReleased`.

    \b
    Example:
      trinity-es leases
    """
    with open_chosen(log, config) as opened:
        open_leases = opened.leases()
    if as_json:
        print_json([lease.as_dict() for lease in open_leases])
    else:
        runners_weights_usage.print_leases(batch_tables.console(), open_leases, time.time())

"""The command `leases`: what runs hold open outside of the system."""

from __future__ import annotations

import time

from trinity_es.cli.common import ConfigOption, JsonOption, LogOption, open_chosen, print_json
from trinity_es.cli.render import tables
from trinity_es.cli.render.leases import print_leases

__all__ = ["leases"]


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
        print_leases(tables.console(), found, time.time())

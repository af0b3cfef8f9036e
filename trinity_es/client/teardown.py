"""Shutdown of a system: in order first, then by killing the processes that are left."""

from __future__ import annotations

from contextlib import suppress

from trinity_es.config.config import Config
from trinity_es.events.errors import TrinityError
from trinity_es.system import running_system
from trinity_es.system.leftovers import end_all_leftovers, leftovers

__all__ = ["end_system"]


def end_system(config: Config) -> tuple[int, list[int]]:
    """End the system of this store in order, then kill the processes that are left. Does nothing if none runs.

    Returns the number of killed processes, and the pids of processes that could not be killed.
    """
    from trinity_es.client.rollout_client import connect

    running_system.stop_keeper(config)  # or it would start the system again
    killed_count = 0
    with suppress(TrinityError):  # it does not answer, or ended meanwhile: its processes are killed below
        if running_system.find(config) is not None:
            killed_count = connect(config).shutdown()
    killed_count += end_all_leftovers(config)
    return killed_count, [p.pid for p in leftovers(config)]

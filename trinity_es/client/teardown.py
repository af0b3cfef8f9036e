"""Shutdown of a system: in order first, then by killing the processes that are left."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_es.config.config import Config
from trinity_es.events.errors import TrinityError
from trinity_es.system import running_system
from trinity_es.system.leftovers import end_all_leftovers, leftovers

__all__ = ["Teardown", "end_system"]


@dataclass(slots=True)
class Teardown:
    """Outcome of a system's shutdown."""

    killed: int = 0
    """Number of processes that did not end by themselves."""
    left: list[int] = field(default_factory=list)
    """Pids of processes that could not be killed."""


def end_system(config: Config) -> Teardown:
    """End the system of this store in order, then kill the processes that are left. Does nothing if none runs."""
    from trinity_es.client.rollout_client import connect

    running_system.stop_keeper(config)  # or it would start the system again
    ended = Teardown()
    try:
        if running_system.find(config) is not None:
            ended.killed += connect(config).shutdown()
    except TrinityError:
        pass  # it does not answer, or ended meanwhile: the next line kills its processes
    ended.killed += end_all_leftovers(config)
    ended.left = [p.pid for p in leftovers(config)]
    return ended

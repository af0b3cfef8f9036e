"""In whatever order the processes of a system die, none is left."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.helpers.of_the_day import of_the_day
from tests.helpers.systems import scripted
from trinity_es.system import leftovers, lifecycle, running_system
from trinity_es.testing import wait_until

KILL, TERM = signal.SIGKILL, signal.SIGTERM


ORDERS = [
    [("admin", KILL)],
    [("admin", TERM)],
    [("guardian", KILL)],
    [("guardian", TERM)],
    [("logger", KILL), ("admin", TERM)],
    [("keeper", KILL), ("admin", TERM)],
    [("keeper", TERM), ("guardian", KILL)],
    [("keeper", KILL), ("logger", TERM), ("guardian", KILL)],
    [("admin", signal.SIGSTOP), ("guardian", KILL), ("admin", KILL)],
]
"""The first and three others are played each day; ALL=1 plays them all."""


@pytest.mark.parametrize("order", [*ORDERS[:1], *of_the_day(ORDERS[1:], 3)],
                         ids=lambda order: ", ".join(f"{sig.name[3:].lower()} {who}" for who, sig in order))
def test_nothing_of_a_system_is_left_whoever_dies_first(
    order: list[tuple[str, signal.Signals]], tmp_path: Path
) -> None:
    kept = any(who == "keeper" for who, _ in order)
    config = scripted(tmp_path, system={"keeper": kept})
    admin = lifecycle.start(config)
    family = running_system.processes(admin)
    assert len(family) == 5, "admin, logger, guardian, coordinator, runner"
    pids = {"admin": admin["pid"], "guardian": admin["guardian"], "keeper": running_system.keeper(config)}
    pids["logger"] = next(p.pid for p in family if p.name().startswith("logger"))
    try:
        for who, sig in order:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[who] or 0, sig)
        wait_until(lambda: not leftovers.leftovers(config), "everything to end", timeout=10)
        keeper = pids["keeper"] or 0
        wait_until(lambda: not kept or not psutil.pid_exists(keeper) or running_system.keeper(config) is None,
                   "the keeper to end", timeout=10)
    finally:
        running_system.stop_keeper(config)
        leftovers.end_all_leftovers(config)

"""Many simulated hosts come and go: nothing is lost or doubled, and a task's cost in bytecodes stays the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.simulation.many import Figures, Plan, play

A_TASK = ("submit", "dispatch", "collect", "finalize", "rest")


class Bytecodes:
    """Counts the bytecodes of the product's own functions."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if "trinity_es/" not in frame.f_code.co_filename or "tests/" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._ran

    def _ran(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.count += event == "opcode"
        return self._ran


def counted(plan: Plan) -> Figures:
    codes = Bytecodes()
    with codes.counting():
        return play(plan, clock=lambda: float(codes.count))


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_lost_or_doubled_while_hosts_come_and_go(seed: int) -> None:
    """`play` raises where it is: each task finished once, given to nobody who has it or is lost, every batch whole."""
    found = play(Plan(8, 16, 160, 800, 50, churn=3.0, seconds=30.0, failures=0.05, seed=seed))
    assert found.tasks == 800
    assert set(found.struck) == {"broken", "drained", "lost"}
    events = found.world.account.events
    assert events["HostLost"] > 2
    assert events["HostLeft"] > 2
    assert events["HostJoined"] > 8 + 4
    assert events["TaskFinished"] == 800
    assert events["AttemptFailed"] > 40  # of lost hosts, most of them


def test_what_a_task_costs_does_not_grow_with_hosts_and_runners() -> None:
    """Four times the hosts, runners, and units in flight and waiting."""
    def a_task(found: Figures) -> float:
        return sum(found.world.meter.seconds[phase] for phase in A_TASK) / found.tasks

    small, large = (counted(Plan(2 * n, 8 * n, 40 * n, 100 * n, 20 * n, seconds=20.0)) for n in (1, 4))
    assert a_task(large) < 1.2 * a_task(small)


def test_the_standing_cost_of_a_runner_does_not_grow_with_their_number() -> None:
    """Its heartbeats and what it says of its units."""
    def a_beat(found: Figures) -> float:
        return found.world.meter.seconds["beats"] / found.world.meter.calls["beats"]

    small, large = (counted(Plan(2 * n, 8 * n, 40 * n, 40 * n, 20 * n, seconds=40.0)) for n in (1, 4))
    assert a_beat(large) < 1.2 * a_beat(small)


def test_the_loss_of_a_host_costs_what_it_had() -> None:
    """Not what all others have."""
    def a_loss(found: Figures) -> float:
        assert found.world.account.events["HostLost"] == 1
        return found.world.meter.seconds["loss"]

    def plan(hosts: int) -> Plan:
        return Plan(hosts, 2 * hosts, 40 * hosts, 80 * hosts, 40 * hosts, seconds=60.0, loses_at=30.0)

    small, large = (counted(plan(n)) for n in (2, 8))
    assert a_loss(large) < 1.2 * a_loss(small)

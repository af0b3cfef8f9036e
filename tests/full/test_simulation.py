"""The simulator finds known bugs in few schedules, and none in the code as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation import bugs, doubles, schedule, store
from tests.simulation.invariants import Invariants
from tests.simulation.world import World
from trinity_es.events.store.log import EventLog, Write
from trinity_es.projections.tables.read_models import open_batches, projectors
from trinity_es.projections.tables.runner_history import last_incarnation, runner_states

CLEAN = 300
MOST = {
    "ack_before_append": 20,
    "no_dedup": 100,
    "epoch_not_checked": 300,
    "drain_before_success": 600,
    "dead_runner_idle": 600,
    "takes_forgotten": 600,
}
"""Schedules in which a bug has to be found. The order of sets differs between runs of Python, so the number does."""
SAID = {
    "ack_before_append": ("not in the log",),
    "no_dedup": ("finished twice", "came back from", "and then failed"),
    "epoch_not_checked": ("took the lease", "ConcurrencyError", "wrote before it decided"),
    "drain_before_success": ("not over",),
    "dead_runner_idle": ("recorded lost",),
    "takes_forgotten": ("taken twice", "given experiences twice", "is not the log's"),
}


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    with doubles.installed():
        yield


def test_no_schedule_breaks_a_promise() -> None:
    for seed in range(CLEAN):
        result = schedule.run(schedule.make(seed))
        if result.violation is not None:
            pytest.fail(schedule.told(schedule.shrink(result.schedule)), pytrace=False)


@pytest.mark.parametrize("name", sorted(bugs.BUGS))
def test_a_known_bug_is_found(name: str) -> None:
    with bugs.BUGS[name]():
        found = next(
            (r for seed in range(1000, 1000 + MOST[name])
             if (r := schedule.run(schedule.make(seed))).violation is not None),
            None,
        )
    assert found is not None
    assert any(said in (found.violation or "") for said in SAID[name]), found.violation


def test_a_failing_schedule_is_shrunk_to_a_history() -> None:
    with bugs.ack_before_append():
        many = (s for seed in range(50) if len((s := schedule.make(seed)).faults) > 1)
        failing = next(s for s in many if schedule.run(s).violation)
        small = schedule.shrink(failing)
    assert small.schedule.faults == ()
    assert len(small.schedule.batches) == 1
    assert "BatchSubmitted" in schedule.told(small) or "submit" in schedule.told(small)
    assert "VIOLATION: " in schedule.told(small)


def test_the_same_schedule_is_the_same_history() -> None:
    one, two = (schedule.run(schedule.make(42), tracing=True) for _ in range(2))
    assert one.trace == two.trace
    assert len(one.trace) > 50


def test_the_database_double_answers_as_the_real_one_does(tmp_path: Path) -> None:
    """A simulated log, written into a real one: the same read models."""
    worlds: list[World] = []

    class Kept(Invariants):
        def __init__(self, world: World) -> None:
            super().__init__(world)
            worlds.append(world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "Invariants", Kept)
        for seed in range(12):
            schedule.run(schedule.make(seed))
    for number, world in enumerate(worlds):
        url = f"sqlite:///{tmp_path}/{number}.db"
        with EventLog.open(url, create=True, durability="process", projectors=projectors()) as log:
            for row in world.store.rows:
                write = Write(stream=row.stream, expected_version=row.version - 1, events=[row.event])
                log.append([write], commit_id=f"c{row.position}")
            double = store.LogDouble(world.store, lambda: True)
            assert log.query(last_incarnation) == world.store.last_incarnation()
            with log.engine.connect() as connection:
                assert runner_states(connection) == store.runner_states(double)
                assert open_batches(connection) == store.open_batches(double)

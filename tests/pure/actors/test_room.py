"""The next unit's runner, found by a heap, is the one that a walk over all runners finds."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from trinity_es.actors.coordinator.decisions.batch_decisions import lose_runner
from trinity_es.actors.coordinator.decisions.free_runners import Capacity, Room
from trinity_es.actors.coordinator.units_in_flight import UnitsInFlight
from trinity_es.events import vocabulary as ev
from trinity_es.projections.batch import evolve


def walked(runners: list[Capacity], avoid: str | None = None) -> Capacity | None:
    with_room = [r for r in runners if r.load < r.limit and r.name != avoid]
    return min(with_room, key=lambda r: r.load / r.places, default=None)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_loaded_is_found_as_by_a_walk(seed: int) -> None:
    """Whatever is given, comes back, leaves and comes again in between."""
    chance = Random(seed)
    runners = {
        f"r{i}": Capacity(f"r{i}", 1, 0, places, chance.randint(0, places), places + chance.randint(0, 3))
        for i in range(7) for places in [chance.randint(1, 5)]
    }
    away: dict[str, Capacity] = {}
    room = Room(runners.values())
    for _ in range(400):
        there = [r for n, r in runners.items() if n not in away]
        avoid = chance.choice([None, *runners])
        found, expected = room.least_loaded(avoid), walked(there, avoid)
        assert (found and found.name) == (expected and expected.name)
        what, name = chance.random(), chance.choice(list(runners))
        if what < 0.5 and found is not None:
            room.add_unit(found)
            runners[found.name] = found
        elif what < 0.8:
            load = max(0, runners[name].load - chance.randint(1, 3))
            runners[name] = replace(runners[name], load=load)
            away.pop(name, None)
            room.put(runners[name])
        elif what < 0.9:
            away[name] = runners[name]
            room.drop(name)
        other = any(n != name for n in runners if n not in away)
        assert room.has_other(name) == other


def test_one_that_may_not_have_units_is_passed_over_until_it_is_put_in_again() -> None:
    loading = {"a"}
    a, b = Capacity("a", 1, 0, 4, 0, 4), Capacity("b", 1, 0, 4, 2, 4)
    room = Room([a, b], fits=lambda r: r.name not in loading)
    assert room.find("a") is None
    assert not room.has_other("b")
    assert room.least_loaded() is b
    loading.clear()
    assert room.least_loaded() is b, "it was forgotten"
    room.put(a)
    assert room.least_loaded() is a


def test_the_loss_of_a_runner_looks_at_its_own_units_alone() -> None:
    """And so costs no more where others have 100,000."""
    class Flights(dict[Any, Any]):
        def values(self) -> Any:
            raise AssertionError("all units in flight were looked at")

    submitted = ev.BatchSubmitted(batch_id=1, batch_type="train", repeat_times=[1] * 4, tasks=[], max_attempts=2)
    batch, known = evolve(None, submitted), UnitsInFlight()
    for name, tasks in (("a", (0, 2)), ("b", (1, 3))):
        units = [ev.Unit(task=n, run_id_base=0, runs=1, attempt=1) for n in tasks]
        given = ev.TasksDispatched(runner=name, incarnation=1, units=units, model_version=0)
        batch = evolve(batch, given)
        known.evolve(batch, given)
    batch.flights = Flights(batch.flights)
    had = known.units_of(1, "b", 1)
    assert [e.task for e in lose_runner(batch, "b", 1, "gone", keys=had)] == [1, 3]  # type: ignore[attr-defined]
    assert (known.loads, known.incarnations("b")) == ({("a", 1): 2, ("b", 1): 2}, [1])


def test_what_was_true_once_does_not_pile_up() -> None:
    room = Room([Capacity("a", 1, 0, 4, 0, 4)])
    for load in range(10_000):
        room.put(Capacity("a", 1, 0, 4, load % 4, 4))
    assert len(room._heap) < 100

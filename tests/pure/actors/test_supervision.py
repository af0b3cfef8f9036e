"""Who is to be ended, and when an ended process is started again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trinity_es.actors.guardian.actor import Guardian
from trinity_es.actors.guardian.supervision import (
    CHECK_SECONDS,
    HELLO_SECONDS,
    Child,
    Policy,
    Supervision,
    coordinator_pause,
    count_short_lives,
    counted_ends,
    runner_pause,
)
from trinity_es.actors.runner.actor import Runner

POLICY = Policy()


def test_pauses_double_up_to_the_longest_and_then_the_slot_is_quarantined() -> None:
    patient = Policy(restarts=9)
    assert [runner_pause(patient, n, 0.5) for n in range(1, 11)] == [1, 2, 4, 8, 16, 32, 60, 60, 60, None]


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.8), (0.25, 0.9), (0.999_999, 1.2)])
def test_the_pause_varies_by_a_fifth(chance: float, share: float) -> None:
    assert runner_pause(POLICY, 2, chance) == pytest.approx(2 * share, rel=1e-5)


@pytest.mark.parametrize(("deaths", "now", "served", "left"), [
    ([0.0, 100.0, 500.0], 650.0, 10.0, [100.0, 500.0, 650.0]), ([0.0, 10.0, 20.0], 330.0, 300.0, [330.0]),
], ids=["older than the period", "before a life that was healthy for long"])
def test_ends_that_do_not_count_any_more(deaths: list[float], now: float, served: float, left: list[float]) -> None:
    assert counted_ends(POLICY, deaths, now, served) == left


def test_a_coordinator_that_served_comes_back_at_once_and_one_that_did_not_pauses_but_never_stays_away() -> None:
    assert coordinator_pause(POLICY, count_short_lives(POLICY, 50, served_seconds=5.0), chance=0.5) == 0.0
    assert coordinator_pause(POLICY, count_short_lives(POLICY, 0, served_seconds=0.0), chance=0.5) == 0.0
    assert [coordinator_pause(POLICY, n, chance=0.5) for n in (2, 3, 4, 99)] == [1, 2, 4, 60]


def test_a_coordinator_that_is_killed_young_after_many_killed_in_their_prime_comes_back_at_once() -> None:
    short = 0
    for served in (20.0, 6.0, 30.0, 5.0, 12.0, 40.0, 1.0):
        short = count_short_lives(POLICY, short, served)
    assert coordinator_pause(POLICY, short, chance=0.5) == 0.0
    assert coordinator_pause(POLICY, count_short_lives(POLICY, short, served_seconds=1.0), chance=0.5) == 1.0


# --- who is to be ended ---------------------------------------------------------------------------------------------
def one(name: str = "runner-0", **known: object) -> tuple[Supervision, Child]:
    """A slot whose life began at 0, and says what is known of it."""
    watched = Supervision(POLICY, 0.0)
    child = watched.begin(name, 1, "address", 0.0)
    for key, value in known.items():
        setattr(child, key, value)
    return watched, child


def overdue(watched: Supervision, now: float) -> list[str]:
    """What is told at `now`, of a guardian that looked all the time."""
    watched._checked_at = now - CHECK_SECONDS
    return [reason for _, reason in watched.find_overdue(now)]


READY = {"pid": 7, "state": "ready", "seen": 100.0}
LOADS = {"pid": 7, "state": "started", "seen": 600.1}


@pytest.mark.parametrize(("known", "now", "told"), [
    ({}, HELLO_SECONDS, []), ({}, HELLO_SECONDS + 0.1, ["it did not say hello within 60 s of its start"]),
    (READY, 120.0, []), (READY, 121.0, ["process 7 gave no sign of life for 21 s"]),
    (READY | {"silent": 60.0}, 100.0, []),
    (READY | {"silent": 61.0}, 100.0, ["the engine's loop of process 7 hung for 61 s"]),
    (LOADS, 600.0, []), (LOADS, 600.1, ["its engine was not ready 600 s after its start"]),
    (LOADS | {"state": "ready"}, 600.1, []), (LOADS | {"name": "coordinator", "state": "up"}, 600.1, []),
    *(({"state": state}, 9999.0, []) for state in ("waiting", "quarantined", "down", "retired", "failed")),
])
def test_who_is_not_to_be_waited_for_any_longer(known: dict[str, Any], now: float, told: list[str]) -> None:
    assert overdue(one(**known)[0], now) == told


def test_given_the_guardian_stood_still_when_it_looks_again_then_nobody_is_blamed_for_that_time() -> None:
    watched, child = one(pid=7, state="started", seen=1.0)
    watched.find_overdue(1.0)
    assert watched.find_overdue(1000.0) == []
    assert (child.seen, child.born) == (1000.0, 999.0)
    assert overdue(watched, 1021.0) == ["process 7 gave no sign of life for 21 s"]


# --- what follows an end --------------------------------------------------------------------------------------------
def test_given_a_runner_that_ends_too_often_then_its_slot_is_quarantined_and_the_next_life_knows_the_ends() -> None:
    watched, child = one()
    pauses = []
    for incarnation, now in enumerate((10.0, 20.0, 30.0, 40.0), 2):
        pauses.append(watched.end_life(child, "why", now, 0.5))
        ended, child = child, watched.begin("runner-0", incarnation, "address", now)
    assert pauses == [1.0, 2.0, 4.0, None]
    assert (ended.state, ended.reason, ended.deaths) == ("quarantined", "why", [10.0, 20.0, 30.0, 40.0])
    assert (child.deaths, child.reason, child.is_first, child.state) == (ended.deaths, "why", False, "starting")


def test_given_an_end_that_somebody_wanted_then_the_next_life_begins_at_once_and_nothing_is_counted() -> None:
    watched, child = one()
    assert watched.end_life(child, "asked for", 10.0, 0.5, asked=True) == 0.0
    assert (child.state, child.restart_at, child.deaths) == ("waiting", 10.0, [])


def test_given_a_coordinator_when_it_ends_young_again_and_again_then_it_pauses_and_is_never_quarantined() -> None:
    watched, child = one("coordinator")
    pauses = []
    for now in range(6):
        pauses.append(watched.end_life(child, "why", float(now), 0.5))
        child = watched.begin("coordinator", 0, "address", float(now))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    child.up_at = 10.0
    assert watched.end_life(child, "why", 15.0, 0.5) == 0.0  # it served


def test_an_engine_that_had_served_is_not_said_to_have_not_started() -> None:
    _, child = one()
    assert child.end_reason("no such model") == "its engine did not start: no such model"
    child.up_at = 10.0
    assert child.end_reason("its engine ended: it restarted") == "its engine ended: it restarted"


def test_given_a_system_that_ends_then_no_life_follows() -> None:
    watched, child = one()
    assert watched.end_life(child, "why", 10.0, 0.5, for_good=True) is None
    assert child.state == "down"


def test_a_life_that_can_not_begin_is_ended_at_once_with_its_reason() -> None:
    """Nobody would hear of it for a minute, and a system that ends would wait for it."""
    sent: list[Any] = []
    runner = SimpleNamespace(
        name="runner-0", incarnation=1, guardian="guardian", model="rollout",
        model_config=SimpleNamespace(engine_type="scripted"), send=lambda to, message: sent.append(message))
    Runner.on_crash(runner, OSError(24, "Too many open files"))  # type: ignore[arg-type]
    child, ended = Child("runner-0", 1, "address", born=0.0), list[str]()
    guardian = SimpleNamespace(
        children={"runner-0": child}, stopping=False, now=lambda: 1.0, end_child=lambda child, why: ended.append(why),
        retire_coordinator_after_runners=lambda: None)
    Guardian.on_RunnerStatus(guardian, sent[0], "address")  # type: ignore[arg-type]
    assert ended == ["its engine did not start: OSError: [Errno 24] Too many open files"]
    runner.engine_thread = "there"  # what breaks later is said by what it belongs to
    Runner.on_crash(runner, OSError())  # type: ignore[arg-type]
    assert len(sent) == 1

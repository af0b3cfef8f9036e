"""When an ended process is started again."""

from __future__ import annotations

import pytest

from trinity_es.actors.guardian.supervision import Policy, coordinator_pause, remembered, runner_pause, short_lives

POLICY = Policy()


def test_pauses_double_up_to_the_longest_and_then_the_slot_is_quarantined() -> None:
    patient = Policy(restarts=9)
    assert [runner_pause(patient, n, 0.5) for n in range(1, 11)] == [1, 2, 4, 8, 16, 32, 60, 60, 60, None]


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.8), (0.25, 0.9), (0.999_999, 1.2)])
def test_the_pause_varies_by_a_fifth(chance: float, share: float) -> None:
    assert runner_pause(POLICY, 2, chance) == pytest.approx(2 * share, rel=1e-5)


def test_three_ends_in_ten_minutes_are_followed_by_a_start_and_the_fourth_is_not() -> None:
    deaths: list[float] = []
    pauses = []
    for now in (0.0, 100.0, 200.0, 300.0):
        deaths = remembered(POLICY, deaths, now, served=10.0)
        pauses.append(runner_pause(POLICY, len(deaths), 0.5))
    assert pauses == [1, 2, 4, None]


def test_ends_older_than_the_period_do_not_count() -> None:
    assert remembered(POLICY, [0.0, 100.0, 500.0], 650.0, served=10.0) == [100.0, 500.0, 650.0]


def test_a_life_that_was_healthy_for_long_wipes_the_slate() -> None:
    assert remembered(POLICY, [0.0, 10.0, 20.0], 330.0, served=300.0) == [330.0]


def test_a_coordinator_that_served_comes_back_at_once_and_one_that_did_not_pauses_but_never_stays_away() -> None:
    assert coordinator_pause(POLICY, short_lives(POLICY, 50, served=5.0), chance=0.5) == 0.0
    assert coordinator_pause(POLICY, short_lives(POLICY, 0, served=0.0), chance=0.5) == 0.0
    assert [coordinator_pause(POLICY, n, chance=0.5) for n in (2, 3, 4, 99)] == [1, 2, 4, 60]


def test_a_coordinator_that_is_killed_young_after_many_killed_in_their_prime_comes_back_at_once() -> None:
    short = 0
    for served in (20.0, 6.0, 30.0, 5.0, 12.0, 40.0, 1.0):
        short = short_lives(POLICY, short, served)
    assert coordinator_pause(POLICY, short, chance=0.5) == 0.0
    assert coordinator_pause(POLICY, short_lives(POLICY, short, served=1.0), chance=0.5) == 1.0

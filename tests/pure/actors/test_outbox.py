"""A runner's outcomes are kept until the coordinator acknowledges them, and sent again."""

from __future__ import annotations

import pytest

from trinity_es.actors.messages import UnitOutcome
from trinity_es.actors.runner import outbox
from trinity_es.actors.runner.outbox import RESEND_SECONDS, Outbox, key_of
from trinity_es.events.vocabulary import Unit


def done(task: int, attempt: int = 1) -> UnitOutcome:
    return UnitOutcome(batch_id=1, submission="s", unit=Unit(task=task, run_id_base=0, runs=2, attempt=attempt))


def test_given_two_reports_when_they_are_put_then_each_is_a_group_with_a_number_of_its_own() -> None:
    box = Outbox("runner-0", 7)
    first, second = box.put([done(0)], None, 0.0), box.put([done(1), done(2)], None, 0.0)
    assert (first.name, first.incarnation, first.number, first.outcomes) == ("runner-0", 7, 1, [done(0)])
    assert (second.number, second.outcomes) == (2, [done(1), done(2)])


def test_given_a_group_was_sent_when_it_stays_unacknowledged_then_it_is_due_again_and_again() -> None:
    box = Outbox("runner-0", 1)
    group = box.put([done(0)], None, 10.0)
    assert box.due(10.0 + RESEND_SECONDS) == []
    assert box.due(10.1 + RESEND_SECONDS) == [group]
    assert box.due(10.2 + RESEND_SECONDS) == []  # it was just sent
    assert box.due(10.3 + 2 * RESEND_SECONDS) == [group]


def test_given_groups_on_their_way_when_another_coordinator_comes_then_it_gets_all_in_their_order() -> None:
    box = Outbox("runner-0", 1)
    groups = [box.put([done(task)], None, float(task)) for task in range(3)]
    assert box.due(3.0, resend_all=True) == groups
    assert box.due(1.0 + RESEND_SECONDS) == []  # all of them were sent at 3


def test_given_a_group_is_acknowledged_when_time_goes_by_then_it_is_not_sent_any_more() -> None:
    box = Outbox("runner-0", 1)
    kept = [box.put([done(task), done(task + 10)], None, 0.0) for task in range(2)][1]
    assert box.acknowledge((1,)) == [done(0), done(10)]
    assert box.due(99.0) == [kept]
    assert box.due(99.0, resend_all=True) == [kept]


@pytest.mark.parametrize("numbers", [(1, 1), (2,), ()])
def test_given_an_acknowledgement_comes_twice_or_for_nothing_then_nothing_changes(numbers: tuple[int, ...]) -> None:
    box = Outbox("runner-0", 1)
    box.put([done(0)], None, 0.0)
    box.acknowledge((1,))
    assert box.acknowledge(numbers) == []
    assert box.due(99.0, resend_all=True) == []


def test_given_an_attempt_is_in_the_log_when_it_comes_again_then_it_is_known_and_the_next_attempt_is_not() -> None:
    box = Outbox("runner-0", 1)
    box.put([done(0)], None, 0.0)
    assert not box.has_settled(key_of(done(0)), 1)
    box.acknowledge((1,))
    assert box.has_settled(key_of(done(0)), 1)
    assert not box.has_settled(key_of(done(0)), 2)
    assert not box.has_settled(key_of(done(1)), 1)


def test_given_more_units_than_are_remembered_then_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "REMEMBERED_UNITS", 2)
    box = Outbox("runner-0", 1)
    for task in range(3):
        box.acknowledge((box.put([done(task)], None, 0.0).number,))
    assert [box.has_settled(key_of(done(task)), 1) for task in range(3)] == [False, True, True]

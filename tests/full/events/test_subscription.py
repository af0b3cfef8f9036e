"""A named reader goes on from where it was, and stops where the log is not the one that it has read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import text

from tests.helpers.logs import trained
from trinity_es.events.errors import LogCorrupt, LogRewound
from trinity_es.events.store.follow import Subscription
from trinity_es.events.store.log import EventLog, Write
from trinity_es.events.store.schema import drop_triggers

Open = Callable[..., EventLog]


def write(log: EventLog, *steps: int) -> None:
    version = log.stream_version("a")
    log.append([Write(stream="a", expected_version=version, events=trained(*steps))], commit_id=f"c{version}")


def positions(subscription: Subscription) -> list[int]:
    return [r.position for r in subscription.poll()]


def test_what_was_not_committed_comes_again_and_what_was_does_not(log: EventLog) -> None:
    write(log, 1, 2, 3)
    subscription = Subscription(log, "reader", batch=2)
    assert positions(subscription) == [1, 2]
    assert positions(subscription) == [1, 2]
    subscription.commit(1)
    assert positions(subscription) == [2, 3]
    subscription.commit(3)
    assert positions(subscription) == []
    write(log, 4)
    assert positions(subscription) == [4]


def test_a_new_life_goes_on_from_the_last_commit(log: EventLog, open_log: Open) -> None:
    write(log, 1, 2, 3)
    first = Subscription(log, "reader")
    first.poll()
    first.commit(2)
    again = Subscription(open_log(), "reader")
    assert again.position == 2
    assert positions(again) == [3]
    assert positions(Subscription(log, "another")) == [1, 2, 3]


def test_a_commit_never_goes_back_nor_beyond_what_was_polled(log: EventLog, open_log: Open) -> None:
    write(log, 1, 2, 3)
    slow, fast = Subscription(log, "reader"), Subscription(open_log(), "reader")
    slow.poll()
    fast.poll()
    fast.commit(3)
    slow.commit(1)
    assert Subscription(log, "reader").position == 3
    with pytest.raises(ValueError, match="last poll"):
        slow.commit(9)


def test_following_commits_a_batch_when_the_next_is_asked_for_and_waits_in_between(log: EventLog) -> None:
    write(log, 1, 2, 3)
    subscription, waits, seen = Subscription(log, "reader", batch=2), [], []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert subscription.position == log.head().position
        if len(waits) == 12:
            write(log, 4)

    for batch in subscription.follow(lambda: len(waits) >= 14, wait):
        seen.append([r.position for r in batch])
        assert Subscription(log, "reader").position < batch[-1].position
    assert seen == [[1, 2], [3], [4]]
    assert waits[:3] == [0.01, 0.02, 0.04]
    assert max(waits) == 0.5
    assert waits[12] == 0.01, "after an event it looks again soon"


def test_a_log_restored_from_an_older_copy_is_noticed_by_its_length(log: EventLog) -> None:
    subscription = _read_three(log)
    _change(log, "DELETE FROM es_event WHERE position > 2", "UPDATE es_log_head SET last_position = 2")
    with pytest.raises(LogRewound, match="ends at 2"):
        subscription.poll()


def test_a_restored_log_that_has_grown_again_is_noticed_by_its_hash(log: EventLog) -> None:
    subscription = _read_three(log)
    _change(log, "UPDATE es_event SET hash = data WHERE position = 3")
    with pytest.raises(LogRewound, match="another event"):
        subscription.poll()
    with pytest.raises(LogRewound, match="another event"):
        Subscription(log, "reader").poll()


def test_a_log_of_another_generation_is_noticed(log: EventLog) -> None:
    subscription = _read_three(log)
    _change(log, "UPDATE es_log_head SET generation = 'restored'")
    with pytest.raises(LogRewound, match="restored"):
        subscription.poll()


def test_a_gap_stops_the_reader(log: EventLog) -> None:
    subscription = _read_three(log)
    write(log, 4, 5)
    _change(log, "DELETE FROM es_event WHERE position = 4")
    with pytest.raises(LogCorrupt, match="positions 4 to 4"):
        subscription.poll()


def _read_three(log: EventLog) -> Subscription:
    write(log, 1, 2, 3)
    subscription = Subscription(log, "reader")
    subscription.poll()
    subscription.commit(3)
    return subscription


def _change(log: EventLog, *statements: str) -> None:
    with log.engine.begin() as connection:
        drop_triggers(connection)
        for statement in statements:
            connection.execute(text(statement))

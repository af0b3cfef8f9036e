"""What a runner tells of the runs that wait for something that is no part of the system."""

from __future__ import annotations

from trinity_es.actors.runner_activity import RunActivity


def test_runs_that_wait_for_something_outside_are_counted_and_the_longest_is_told() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    played = RunActivity(clock)
    with played.show("1/0/0", 1, 0) as first, played.show("1/0/1", 1, 0) as second, played.show("1/1/0", 1, 0):
        assert played.waiting_text() == ""
        second["state"] = {"waits_for": "the other server"}
        assert played.waiting_text() == "1 of its runs waits for the other server"
        first["state"] = {"waits_for": "the server"}
        assert played.waiting_text() == "2 of its runs wait for the server"
        first["state"], second["state"] = {"waits_for": ""}, {"waits_for": 7}
        assert played.waiting_text() == "", "one that waits no more, and what is no text"
    assert played.waiting_text() == ""

"""Who is taken in as a host, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trinity_es.actors.coordinator.decisions.hosts import Hello, Refusal, drained, hello, lost
from trinity_es.actors.coordinator.fleet.hosts import far_lives
from trinity_es.events import vocabulary as ev
from trinity_es.projections.hosts import Hosts, evolve_hosts, host_of
from trinity_es.projections.runner import RunnerLife, RunnerState

B = Hello("b", "life 1", "10.0.0.2", 7, {"gpus": 8}, "1.0")


def decide(hosts: Hosts, said: Hello, *, connected: bool = False) -> list[ev.Event] | Refusal:
    """Decide, and fold what was decided."""
    found = hello(hosts, said, build="1.0", connected=connected)
    if isinstance(found, list):
        fold(hosts, found)
    return found


def fold(hosts: Hosts, events: list[ev.Event]) -> list[ev.Event]:
    for event in events:
        assert isinstance(event, ev.HostJoined | ev.HostLost | ev.HostLeft | ev.HostDraining)
        evolve_hosts(hosts, event)
    return events


def test_a_new_host_joins_as_epoch_1() -> None:
    hosts: Hosts = {}
    assert decide(hosts, B) == [
        ev.HostJoined(host="b", epoch=1, life="life 1", address="10.0.0.2", pid=7, places={"gpus": 8})
    ]
    assert hosts["b"].there


def test_the_same_life_is_taken_up_again_and_nothing_recorded() -> None:
    hosts: Hosts = {}
    decide(hosts, B)
    assert decide(hosts, replace(B, address="10.0.0.9"), connected=True) == []
    fold(hosts, drained(hosts, "b", "SIGTERM"))
    assert decide(hosts, B) == []


@pytest.mark.parametrize("end", [ev.HostLost, ev.HostLeft])
def test_a_life_that_is_over_is_refused_for_good_and_the_next_one_is_another_epoch(end: type[ev.HostLost]) -> None:
    hosts: Hosts = {}
    decide(hosts, B)
    fold(hosts, [end(host="b", epoch=1, reason="gone")])
    refusal = decide(hosts, B)
    assert isinstance(refusal, Refusal)
    assert refusal.for_good
    assert "epoch 1 is over (gone)" in refusal.reason
    [joined] = decide(hosts, replace(B, life="life 2"))  # type: ignore[misc]  # a list, as the test asks
    assert joined.epoch == 2


def test_another_life_under_the_name_of_one_that_is_connected_has_to_wait() -> None:
    hosts: Hosts = {}
    decide(hosts, B)
    refusal = decide(hosts, replace(B, life="life 2"), connected=True)
    assert isinstance(refusal, Refusal)
    assert not refusal.for_good
    assert "choose another --name" in refusal.reason
    assert hosts["b"].life == "life 1"


def test_another_life_under_the_name_of_one_that_is_away_takes_its_place() -> None:
    hosts: Hosts = {}
    decide(hosts, B)
    gone, joined = decide(hosts, replace(B, life="life 2"))  # type: ignore[misc]  # a list, as the test asks
    assert gone == ev.HostLost(host="b", epoch=1, reason="it was started anew")
    assert isinstance(joined, ev.HostJoined)
    assert joined.epoch == 2


def test_another_build_is_refused_for_good() -> None:
    refusal = decide({}, replace(B, build="0.9"))
    assert isinstance(refusal, Refusal)
    assert refusal.for_good
    assert "0.9" in refusal.reason
    assert "1.0" in refusal.reason


def test_a_loss_and_a_drain_are_recorded_once_and_only_of_who_is_there() -> None:
    hosts: Hosts = {}
    assert lost(hosts, "b", "x") == drained(hosts, "b", "x") == []
    decide(hosts, B)
    assert len(fold(hosts, drained(hosts, "b", "x"))) == 1
    assert drained(hosts, "b", "x") == []
    assert len(fold(hosts, lost(hosts, "b", "x"))) == 1
    assert lost(hosts, "b", "x") == drained(hosts, "b", "x") == []


def test_what_is_said_of_an_earlier_epoch_changes_nothing() -> None:
    hosts: Hosts = {}
    decide(hosts, B)
    decide(hosts, replace(B, life="life 2"))
    fold(hosts, [ev.HostLost(host="b", epoch=1, reason="late")])
    assert hosts["b"].there


def test_runners_of_hosts_that_are_there_may_live_when_a_coordinator_takes_over() -> None:
    hosts: Hosts = {}
    decide(hosts, B)
    decide(hosts, replace(B, name="c"))
    fold(hosts, lost(hosts, "c", "gone"))

    def life(name: str, state: RunnerState) -> RunnerLife:
        return RunnerLife(name=name, incarnation=3, state=state)

    lives = [life("runner-0", RunnerState.READY), life("runner-0@b", RunnerState.READY),
             life("runner-1@b", RunnerState.LOST), life("runner-0@c", RunnerState.READY)]
    assert far_lives(hosts, {(it.name, it.incarnation): it for it in lives}) == {"runner-0@b": 3}
    assert [host_of(name) for name in ("runner-0", "runner-0@b")] == ["", "b"]

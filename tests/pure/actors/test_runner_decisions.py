"""Runners and weights, given what was folded, when something comes in, then these events: no actor, no database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_es.actors.coordinator.decisions import runner_decisions as runners
from trinity_es.actors.coordinator.decisions import weight_decisions as weights
from trinity_es.actors.messages import RunnerDied, RunnerStatus, WeightsLoadResult
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import SyncError
from trinity_es.projections.runner import Lives, RunnerLife, RunnerState, Weights, evolve_lives, newest_life

NOTHING = Weights()
MEMORY = Weights(3, "/dev/shm/version_3", "memory")
S = RunnerState


def life(state: RunnerState = S.READY, incarnation: int = 2, **more: object) -> RunnerLife:
    return RunnerLife(name="runner-0", incarnation=incarnation, state=state, **more)  # type: ignore[arg-type]


def report(state: str = "ready", incarnation: int = 2, **more: object) -> RunnerStatus:
    return RunnerStatus("runner-0", incarnation, state, 10, "here", "scripted", **more)  # type: ignore[arg-type]


def death(incarnation: int = 2, **more: object) -> RunnerDied:
    return RunnerDied("runner-0", incarnation, "killed", **more)  # type: ignore[arg-type]


def types(events: list[ev.Event]) -> list[str]:
    return [type(event).__name__ for event in events]


# --- what a runner says ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("known", "said", "then"), [
    (None, "started", ["RunnerStarted"]),
    (None, "ready", ["RunnerStarted", "RunnerReady"]),  # a coordinator that takes over finds it serving
    (None, "failed", ["RunnerStarted", "RunnerFailed"]),
    (life(S.STARTED), "started", []),
    (life(S.STARTED), "ready", ["RunnerReady"]),
    (life(S.READY, places=4), "ready", []),  # every few seconds
    (life(S.READY), "failed", ["RunnerFailed"]),
    (life(S.READY), "retired", ["RunnerRetired"]),
    (life(S.LOST, incarnation=1), "started", ["RunnerStarted"]),
    (life(S.READY, incarnation=1), "ready", ["RunnerStarted", "RunnerReady"]),
])
def test_a_report_is_news_where_the_life_or_its_state_is(known: RunnerLife | None, said: str, then: list[str]) -> None:
    assert types(runners.apply_report(known, report(said, places=4, reason="no memory"))) == then


def test_other_places_are_news_of_a_life_that_serves() -> None:
    told = report(places=6, kv_share=0.5, waiting=3)
    [changed] = runners.apply_report(life(S.READY, places=4), told)
    assert changed == ev.ConcurrencyChanged(runner="runner-0", incarnation=2, places=6, kv_share=0.5, waiting=3)
    assert runners.apply_report(life(S.READY, places=6), told) == []
    assert types(runners.apply_report(life(S.STARTED, places=4), told)) == ["RunnerReady"]
    assert folded([("RunnerReady", 1), ("ConcurrencyChanged", 1)]).places == 6


def test_two_systems_that_fought_for_a_log_each_go_on_with_their_own_lives() -> None:
    """The other one's has the higher number; this coordinator's own is the one that speaks, and that ends."""
    lives: Lives = {}
    for event in [*events_of([("RunnerStarted", 5), ("RunnerReady", 5)]), *runners.apply_report(None, report())]:
        evolve_lives(lives, event, NOTHING)
    assert (lives["runner-0", 2].state, lives["runner-0", 5].state) == (S.READY, S.READY)
    assert types(runners.apply_death(lives["runner-0", 2], death())) == ["RunnerLost"]


@pytest.mark.parametrize(("known", "late"), [
    (None, False), (life(incarnation=1), False), (life(S.LOST, incarnation=1), False), (life(S.READY), False),
    (life(S.LOST), True), (life(S.QUARANTINED), True), (life(incarnation=3), True),
])
def test_last_words_of_a_life_whose_end_is_known_are_late(known: RunnerLife | None, late: bool) -> None:
    assert runners.is_late(known, report()) is late


# --- a process that ended -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("known", "told", "then"), [
    (life(S.READY), death(), ["RunnerLost"]),
    (life(S.RETIRED), death(), ["RunnerLost"]),
    (life(S.LOST), death(), []),  # said again to the next coordinator
    (life(S.READY), death(quarantined=True), ["RunnerLost", "RunnerQuarantined"]),
    (life(S.LOST), death(quarantined=True), ["RunnerQuarantined"]),
    (life(S.QUARANTINED), death(quarantined=True), []),
    (life(S.QUARANTINED), death(asked=True), ["RunnerLost"]),  # a person gives the slot another life
    (life(S.READY, incarnation=3), death(), []),  # told late
    (life(S.READY, incarnation=1), death(), ["RunnerLost"]),  # one that never spoke
    (None, death(), ["RunnerLost"]),
])
def test_an_end_is_recorded_once(known: RunnerLife | None, told: RunnerDied, then: list[str]) -> None:
    assert types(runners.apply_death(known, told)) == then


# --- weights --------------------------------------------------------------------------------------------------------
def test_a_publication_is_recorded_once() -> None:
    new = Weights(3, "/disk/3", "checkpoint")
    [event] = weights.publish(NOTHING, new, [])
    assert event == ev.WeightsPublished(version=3, path="/disk/3")
    assert weights.publish(new, new, ["runner-0"]) == []
    assert weights.publish(new, new, ["runner-0"], again=True) == [event]  # its place was lost


def test_what_was_published_from_memory_may_be_published_as_a_checkpoint() -> None:
    assert types(weights.publish(MEMORY, Weights(3, "/disk/3", "checkpoint"), ["runner-0"])) == ["WeightsPublished"]


@pytest.mark.parametrize(("new", "message"), [
    (Weights(2, "/disk/2", "checkpoint"), "version 2 is older than the current one, 3"),
    (Weights(3, "/elsewhere", "memory"), "served already by runner-0, from /dev/shm/version_3"),
])
def test_a_publication_that_would_mix_versions_is_refused(new: Weights, message: str) -> None:
    with pytest.raises(SyncError, match=message):
        weights.publish(MEMORY, new, ["runner-0"])


def test_a_runner_that_has_served_goes_on_with_what_it_had_and_one_that_has_not_fails() -> None:
    result = WeightsLoadResult("runner-0", 2, 3, 0.1, "no such file")
    assert types(weights.apply_load_result(life(was_current=True), result, MEMORY, path_gone=True)) == ["WeightsFailed"]
    failed, ended = weights.apply_load_result(life(), result, MEMORY, path_gone=True)
    assert (type(failed), type(ended)) == (ev.WeightsFailed, ev.RunnerFailed)
    assert "a restart of the machine empties: publish them again" in ended.reason  # type: ignore[attr-defined]
    _, ended = weights.apply_load_result(life(), result, MEMORY, path_gone=False)
    assert ended.reason == "it could not load weights 3: no such file"  # type: ignore[attr-defined]


@pytest.mark.parametrize("served", [True, False])
def test_a_runner_that_tries_again_in_vain_is_no_news(served: bool) -> None:
    tried = life(was_current=served)
    lives: Lives = {(tried.name, tried.incarnation): tried}
    result = WeightsLoadResult(tried.name, tried.incarnation, 3, 0.1, "no such file")
    for event in weights.apply_load_result(tried, result, MEMORY, path_gone=False):
        evolve_lives(lives, event, MEMORY)
    assert tried.refuses(MEMORY) == "no such file"
    assert weights.apply_load_result(tried, result, MEMORY, path_gone=False) == []
    other = replace(result, error="no space")
    assert types(weights.apply_load_result(tried, other, MEMORY, path_gone=False))[0] == "WeightsFailed"
    loaded = ev.WeightsLoaded(runner=tried.name, incarnation=tried.incarnation, version=3, seconds=0.1)
    evolve_lives(lives, loaded, MEMORY)
    assert tried.refuses(MEMORY) == ""


# --- the fold -------------------------------------------------------------------------------------------------------
def events_of(names: list[tuple[str, int]]) -> list[ev.Event]:
    more = {
        "RunnerStarted": {"pid": 1, "host": "here", "engine": "scripted"},
        "RunnerReady": {"places": 4, "model_version": 1, "load_seconds": 0.1},
        "ConcurrencyChanged": {"places": 6, "kv_share": 0.5, "waiting": 0},
        "RunnerQuarantined": {"deaths": 3, "period_seconds": 60.0, "reason": "killed"},
        "RunnerFailed": {"reason": "no memory"}, "RunnerLost": {"reason": "killed"}, "RunnerRetired": {},
        "WeightsLoaded": {"version": 2, "seconds": 0.1}, "WeightsFailed": {"version": 2, "error": "gone"},
    }
    return [getattr(ev, name)(runner="runner-0", incarnation=number, **more[name]) for name, number in names]


def folded(names: list[tuple[str, int]], current: Weights = NOTHING) -> RunnerLife:
    lives: Lives = {}
    for event in events_of(names):
        evolve_lives(lives, event, current)
    return newest_life(lives, "runner-0")


def test_a_life_has_served_when_it_had_what_was_current() -> None:
    up = [("RunnerStarted", 1), ("RunnerReady", 1)]
    assert folded(up).was_current  # before anything was published
    assert not folded(up, Weights(2, "/p", "checkpoint")).was_current
    assert folded([*up, ("WeightsLoaded", 1)], Weights(2, "/p", "checkpoint")).was_current
    assert not folded([*up, ("WeightsFailed", 1)], Weights(2, "/p", "checkpoint")).was_current
    assert not folded([*up, ("RunnerLost", 1), ("RunnerStarted", 2)]).was_current  # another life
    assert folded([*up, *up[:1]]).was_current  # another coordinator


NAMES = ["RunnerStarted", "RunnerReady", "RunnerFailed", "RunnerLost", "RunnerQuarantined", "RunnerRetired",
         "WeightsLoaded", "WeightsFailed", "ConcurrencyChanged"]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 3)), min_size=1, max_size=12))
def test_what_is_told_late_of_an_earlier_life_changes_nothing(names: list[tuple[str, int]]) -> None:
    newest = max(number for _, number in names)
    assert folded(names) == folded([(name, number) for name, number in names if number == newest])

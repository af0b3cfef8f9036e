"""Leases, given what was folded, when a run tells or ends, then these events: no actor, no database."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_es.actors.coordinator.decisions import lease_decisions as decisions
from trinity_es.actors.coordinator.decisions.lease_decisions import GRACE_SECONDS
from trinity_es.actors.lease_providers import MOST_BYTES, recordable_json
from trinity_es.actors.messages import LeaseChange, LeaseReply
from trinity_es.actors.runner.lease_reports import LeaseReports
from trinity_es.actors.runner.outbox import RESEND_SECONDS
from trinity_es.events import vocabulary as ev
from trinity_es.events.errors import LogCorrupt, WorkflowError
from trinity_es.events.secrets import Secret
from trinity_es.events.values import BatchId
from trinity_es.projections.batch import BatchState, fold
from trinity_es.projections.leases import OpenLease, OpenLeases, check_attachment, evolve_leases
from trinity_es.projections.runner import RunnerLife, RunnerState

UNIT = ev.Unit(task=0, run_id_base=0, runs=1, attempt=1)
NOW = 1000.0


def batch(submission: str = "s", unit: ev.Unit = UNIT, incarnation: int = 2) -> BatchState:
    return fold([
        ev.BatchSubmitted(batch_id=7, batch_type="train", repeat_times=[1], submission=submission, max_attempts=9),
        ev.TasksDispatched(runner="runner-0", incarnation=incarnation, units=[unit], model_version=0),
    ])


def failed(state: BatchState) -> BatchState:
    return fold([ev.AttemptFailed(
        task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=2, kind="workflow",
        message="", retry=True,
    )], state)


def life(state: RunnerState = RunnerState.READY) -> RunnerLife:
    return RunnerLife(name="runner-0", incarnation=2, state=state)


def change(what: Any, **more: Any) -> LeaseChange:
    return LeaseChange(lease="es-1", what=what, batch_id=7, submission="s", unit=UNIT, run=0, **more)


def reads_none(batch: BatchState, key: tuple[int, int]) -> bool:
    return False


TAKEN = change("taken", provider="m:C", args={"url": "u"}, ttl=100.0, creation_timeout=60.0)


def folded(*events: ev.Event) -> OpenLeases:
    found: OpenLeases = {}
    for event in events:
        evolve_leases(found, event)
    return found


def taken() -> ev.LeaseTaken:
    [event] = decisions.apply_change({}, TAKEN, "runner-0", 2, "", NOW)
    return event


HELD = ev.LeaseHeld(lease="es-1", handle="box-1")
ORPHANED = ev.LeaseOrphaned(lease="es-1", reason="r")
STATES: dict[str, list[ev.Event]] = {
    "none": [], "taken": [taken()], "held": [taken(), HELD], "orphaned": [taken(), ORPHANED],
    "orphaned and held": [taken(), HELD, ORPHANED],
}


# --- what a run tells -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("state", "told", "then"), [
    ("none", "taken", "LeaseTaken"), ("none", "held", ""), ("none", "renewed", ""), ("none", "released", ""),
    ("none", "left", ""),
    ("taken", "taken", ""),  # it was sent twice
    ("taken", "held", "LeaseHeld"), ("taken", "left", "LeaseOrphaned"), ("taken", "released", "LeaseReleased"),
    ("held", "held", ""), ("held", "renewed", "LeaseRenewed"), ("held", "released", "LeaseReleased"),
    ("held", "left", "LeaseOrphaned"),
    ("orphaned", "held", "LeaseHeld"),  # late, and the handle is of use
    ("orphaned", "renewed", ""), ("orphaned", "left", ""), ("orphaned", "released", "LeaseReleased"),
    ("orphaned and held", "held", ""),
])
def test_what_a_run_tells_is_recorded_once(state: str, told: str, then: str) -> None:
    leases = folded(*STATES[state])
    said = TAKEN if told == "taken" else change(told, handle="box-1", ttl=50.0, reason="r")
    events = decisions.apply_change(leases, said, "runner-0", 2, "", NOW + 5)
    assert [type(e).__name__ for e in events] == ([then] if then else [])
    folded(*STATES[state], *events)  # it follows
    for event in events:
        if isinstance(event, ev.LeaseRenewed):
            assert event.expires == NOW + 55


def test_a_lease_expires_its_time_to_live_after_it_was_taken() -> None:
    event = taken()
    assert (event.expires, event.unit, event.runner, event.incarnation) == (NOW + 100, UNIT, "runner-0", 2)
    assert folded(event)["es-1"].taken_at == NOW


@pytest.mark.parametrize(("state", "of", "why"), [
    (batch(), life(), ""),
    (None, life(), "its batch ended"),
    (batch(submission="another"), life(), "its batch ended"),
    (failed(batch()), life(), "its attempt is over"),
    (batch(unit=ev.Unit(task=0, run_id_base=0, runs=1, attempt=2)), life(), "its attempt is over"),
    (batch(incarnation=3), life(), "its attempt is over"),
    (batch(), None, "its runner is gone"),
    (batch(), life(RunnerState.LOST), "its runner is gone"),
    (batch(), life(RunnerState.RETIRED), "its runner is gone"),
])
def test_a_lease_is_its_attempt_s_and_nobody_else_s(state: BatchState | None, of: RunnerLife | None, why: str) -> None:
    assert decisions.end_of_attempt(state, of, TAKEN) == why
    lives = {} if of is None else {("runner-0", 2): of}
    open_ones: dict[BatchId, BatchState] = {} if state is None else {7: state}
    found = decisions.new_orphan_events(folded(taken(), HELD), open_ones, lives, NOW, NOW, reads_none)
    assert found == ([ev.LeaseOrphaned(lease="es-1", reason=why)] if why else [])
    again = decisions.new_orphan_events(folded(taken(), ORPHANED), open_ones, lives, NOW, NOW, reads_none)
    assert again == [], "said once"
    if why:
        with pytest.raises(WorkflowError, match=why):
            decisions.apply_change({}, TAKEN, "runner-0", 2, why, NOW)


def test_one_that_is_not_renewed_in_time_is_nobody_s() -> None:
    leases, lives = folded(taken(), HELD), {("runner-0", 2): life()}
    assert decisions.new_orphan_events(leases, {7: batch()}, lives, NOW + 99, NOW, reads_none) == []
    [event] = decisions.new_orphan_events(leases, {7: batch()}, lives, NOW + 101, NOW, reads_none)
    assert event == ev.LeaseOrphaned(lease="es-1", reason="it expired: it was not renewed")
    evolve_leases(leases, ev.LeaseRenewed(lease="es-1", expires=NOW + 200))
    assert decisions.new_orphan_events(leases, {7: batch()}, lives, NOW + 101, NOW, reads_none) == []


def test_an_expiry_counts_when_runners_had_time_to_tell_of_a_renewal() -> None:
    """While there was no coordinator, or no log, they could not."""
    assert GRACE_SECONDS > 3 * RESEND_SECONDS
    leases, lives = folded(taken(), HELD), {("runner-0", 2): life()}
    told = NOW + 500
    for now, n in ((told, 0), (told + GRACE_SECONDS - 1, 0), (told + GRACE_SECONDS + 1, 1)):
        assert len(decisions.new_orphan_events(leases, {7: batch()}, lives, now, told, reads_none)) == n
    not_asked_yet = decisions.new_orphan_events(leases, {7: batch()}, lives, NOW + 1000, math.inf, reads_none)
    assert not_asked_yet == []
    batch_is_over = decisions.new_orphan_events(leases, {}, lives, NOW, math.inf, reads_none)
    assert len(batch_is_over) == 1


# --- what the next attempt takes over -----------------------------------------------------------------------------
ATTACHABLE = replace(TAKEN, attachable=True)
LOST = ev.AttemptFailed(task=0, run_id_base=0, failed_runs=[0], attempt=1, runner="runner-0", incarnation=2,
                        kind="runner_lost", message="", retry=True)
KEPT = ev.AttemptKept(task=0, run_id_base=0, runs=1, attempt=1, runner="runner-0", incarnation=2, payload="p", calls=1,
                      open_calls=0, tokens=9, max_tokens=0, steps=0, seconds=1.0, not_kept={}, possibly_delivered=[])
NEXT_UNIT = replace(UNIT, attempt=2)
NEXT = ev.TasksDispatched(runner="runner-0", incarnation=3, units=[NEXT_UNIT], model_version=0)
LIVES = {("runner-0", 2): life(RunnerState.LOST), ("runner-0", 3): replace(life(), incarnation=3)}


def went(*events: ev.Event) -> BatchState:
    return fold(events, batch())


def reads(state: BatchState, key: tuple[int, int]) -> bool:
    return True


def first() -> OpenLeases:
    return folded(*decisions.apply_change({}, ATTACHABLE, "runner-0", 2, "", NOW), HELD)


def second(leases: OpenLeases, state: BatchState, **more: Any) -> ev.Event:
    wanted = replace(ATTACHABLE, lease="es-2", unit=NEXT_UNIT, **more)
    earlier = decisions.find_attachable(leases, state, wanted, reads)
    [event] = decisions.apply_change(leases, wanted, "runner-0", 3, "", NOW, earlier)
    return event


def orphaned(leases: OpenLeases, state: BatchState | None, **more: Any) -> list[str]:
    open_ones: dict[BatchId, BatchState] = {} if state is None else {7: state}
    found = decisions.new_orphan_events(leases, open_ones, LIVES, more.get("now", NOW), NOW, more.get("reads", reads))
    return [e.lease for e in found if isinstance(e, ev.LeaseOrphaned)]


def test_a_lease_of_a_lost_attempt_waits_while_its_run_may_go_on() -> None:
    kept, began_a_step = went(LOST, KEPT), went(LOST, replace(KEPT, possibly_delivered=["pay"]))
    assert orphaned(first(), went(LOST)) == [], "its journal is being read"
    assert orphaned(first(), kept) == orphaned(first(), went(LOST, KEPT, NEXT)) == []
    assert orphaned(first(), went(LOST), reads=reads_none) == ["es-1"], "the journal has nothing"
    assert orphaned(first(), began_a_step) == ["es-1"], "the run starts over"
    assert orphaned(first(), went(replace(LOST, retry=False))) == ["es-1"]
    assert orphaned(first(), went(replace(LOST, kind="workflow"))) == ["es-1"]
    assert orphaned(first(), None) == ["es-1"], "its batch was aborted"
    cut = ev.TaskDropped(tasks=[0], reason="over_rollout", cut=[0])
    assert orphaned(first(), went(LOST, KEPT, cut)) == ["es-1"], "it goes on in another batch"
    next_failed = replace(LOST, attempt=2, incarnation=3, kind="workflow")
    assert orphaned(first(), went(LOST, KEPT, NEXT, next_failed)) == ["es-1"], "the next attempt did not take it"
    assert orphaned(first(), kept, now=NOW + 101) == ["es-1"], "nobody renews it"
    assert orphaned(folded(taken(), HELD), kept) == ["es-1"], "its provider has no attach"
    not_made = folded(*decisions.apply_change({}, ATTACHABLE, "runner-0", 2, "", NOW))
    assert orphaned(not_made, kept) == ["es-1"]


def test_the_next_attempt_takes_over_what_it_asks_for_and_the_old_lease_ends_when_it_has_it() -> None:
    leases, state = first(), went(LOST, KEPT, NEXT)
    event = second(leases, state)
    assert (event.attaches, event.unit.attempt, event.incarnation) == ("es-1", 2, 3)
    evolve_leases(leases, event)
    check_attachment(leases, event)
    assert orphaned(leases, state) == []
    held = replace(ATTACHABLE, lease="es-2", what="held", unit=NEXT_UNIT, handle="box-1")
    events = decisions.apply_change(leases, held, "runner-0", 3, "", NOW)
    assert events == [ev.LeaseHeld(lease="es-2", handle="box-1"), ev.LeaseReleased(lease="es-1", by="successor")]
    for each in events:
        evolve_leases(leases, each)
    assert [*leases] == ["es-2"]
    assert orphaned(leases, went(LOST, KEPT, NEXT, replace(LOST, attempt=2, incarnation=3))) == [], "once more"


@pytest.mark.parametrize("more", [{"number": 1}, {"args": {"url": "v"}}, {"provider": "m:D"}, {"run": 1},
                                  {"attachable": False}])
def test_a_lease_that_differs_is_a_new_one(more: dict[str, Any]) -> None:
    event = second(first(), went(LOST, KEPT, NEXT), **more)
    assert event.attaches == ""


def test_none_is_taken_over_twice_or_by_a_run_that_starts_over() -> None:
    state, leases = went(LOST, KEPT, NEXT), first()
    evolve_leases(leases, second(leases, state))
    third = replace(ATTACHABLE, lease="es-3", unit=NEXT_UNIT)
    assert decisions.find_attachable(leases, state, third, reads) is None
    assert decisions.find_attachable(first(), went(LOST, NEXT), third, reads) is None, "it has no journal"


@pytest.mark.parametrize("how", ["attach failed", "batch aborted", "runner lost", "expired"])
def test_a_lease_that_can_not_be_taken_over_is_released_with_its_successor(how: str) -> None:
    """Either may have the resource."""
    leases, state = first(), went(LOST, KEPT, NEXT)
    evolve_leases(leases, second(leases, state))
    if how == "attach failed":
        left = replace(ATTACHABLE, lease="es-2", what="left", unit=NEXT_UNIT, reason="r")
        events = decisions.apply_change(leases, left, "runner-0", 3, "", NOW)
        for event in events:
            evolve_leases(leases, event)
        assert [lease.state for lease in leases.values()] == ["orphaned", "orphaned"]
        return
    then = {"batch aborted": None, "expired": state}.get(how, went(LOST, KEPT, NEXT, replace(LOST, attempt=2)))
    assert sorted(orphaned(leases, then, now=NOW + 101 * (how == "expired"))) == ["es-1", "es-2"]


def test_a_takeover_that_no_lease_allows_is_no_log_of_ours() -> None:
    state = went(LOST, KEPT, NEXT)
    event = second(first(), state)
    for leases in (folded(taken()), folded(taken(), HELD, ORPHANED), {}):
        with pytest.raises(LogCorrupt, match="which is not held"):
            check_attachment({**leases, "es-2": OpenLease(taken=taken())}, event)


# --- what is released when ------------------------------------------------------------------------------------------
def test_those_due_longest_are_next_and_none_has_more_beside_it_than_it_may() -> None:
    leases = [replace(lease, taken=replace(lease.taken, lease=key, provider=provider)) for key, provider in (
        ("a", "m:C"), ("b", "m:C"), ("c", "m:C"), ("d", "m:C"), ("e", "m:D"), ("f", "m:E"),
    ) for lease in folded(taken(), HELD, ORPHANED).values()]
    at = {"a": NOW, "b": NOW - 2, "c": NOW - 1, "d": NOW + 1, "e": NOW, "f": NOW}

    def keys(most: dict[str, int], now: float = NOW) -> dict[str, list[str]]:
        found = decisions.find_due(leases, at, most, {"m:E"}, now)
        return {provider: [lease.taken.lease for lease in group] for provider, group in found.items()}

    assert keys({}) == {"m:C": ["b", "c", "a"], "m:D": ["e"]}
    assert keys({}, NOW + 1)["m:C"] == ["b", "c", "a", "d"]
    assert keys({"b": 1})["m:C"] == ["b"]
    assert keys({"b": 2})["m:C"] == ["b", "c"]
    assert keys({"c": 1})["m:C"] == ["b", "a"], "it is next"
    assert keys({"a": 2})["m:C"] == ["b", "c"]
    assert decisions.find_due(folded(taken(), HELD).values(), at, {}, set(), NOW) == {}, "it has an owner"


# --- what came of releasing -----------------------------------------------------------------------------------------
def test_a_creation_that_nobody_heard_the_end_of_is_looked_for_again_when_it_is_over() -> None:
    """What was asked for may still be made after nothing was found."""
    unknown, known = folded(taken(), ORPHANED)["es-1"], folded(taken(), HELD, ORPHANED)["es-1"]
    done: list[ev.Event] = [ev.LeaseReleased(lease="es-1", by="coordinator")]
    assert decisions.apply_release(unknown, unknown, NOW + 59, "", 0) == []
    assert decisions.apply_release(unknown, unknown, NOW + 60, "", 0) == done
    assert decisions.apply_release(known, known, NOW + 1, "", 0) == done
    assert decisions.apply_release(known, unknown, NOW + 1, "", 0) == [], "the provider was given no handle"
    assert decisions.apply_release(None, unknown, NOW, "", 0) == [], "its owner was faster"


def test_failures_are_recorded_ever_more_rarely_and_when_they_change() -> None:
    leases, recorded = folded(taken(), HELD, ORPHANED), []
    for tries in range(1, 70):
        error = "refused" if tries != 40 else "away"
        for event in decisions.apply_release(leases["es-1"], leases["es-1"], NOW, error, tries):
            evolve_leases(leases, event)
            recorded.append(tries)
    assert recorded == [1, 2, 4, 8, 16, 32, 40, 41, 64]


@pytest.mark.parametrize("events", [
    [HELD], [taken(), taken()], [taken(), HELD, HELD], [taken(), ORPHANED, ORPHANED],
    [taken(), ev.LeaseReleased(lease="es-1", by="coordinator")],  # it had an owner
    [taken(), ev.LeaseReleaseFailed(lease="es-1", error="e", tries=1)],
    [taken(), ORPHANED, ev.LeaseRenewed(lease="es-1", expires=1.0)],
    [taken(), ev.LeaseReleased(lease="es-1", by="owner"), ORPHANED],
])
def test_what_can_not_follow_is_no_log_of_ours(events: list[ev.Event]) -> None:
    with pytest.raises(LogCorrupt, match="es-1"):
        folded(*events)


# --- on the way -----------------------------------------------------------------------------------------------------
def test_who_takes_waits_until_it_is_in_the_log_and_others_do_not() -> None:
    reports, waits, goes_on = LeaseReports("runner-0", 2), Future[None](), Future[None]()
    reports.put(TAKEN, waits)
    reports.put(change("held", handle="box-1"), goes_on)
    [group] = reports.next_groups(None, 0.0)
    assert [c.what for c in group.changes] == ["taken", "held"]
    assert (waits.done(), goes_on.done()) == (False, True)
    assert reports.next_groups(None, 0.0) == []
    reports.acknowledge(LeaseReply(2, group.number, {}))
    assert waits.done()
    assert waits.exception() is None
    reports.acknowledge(LeaseReply(2, group.number, {}))  # twice


def test_one_that_may_not_be_taken_is_an_error_where_it_was_asked_for() -> None:
    reports, waits = LeaseReports("runner-0", 2), Future[None]()
    reports.put(TAKEN, waits)
    [group] = reports.next_groups(None, 0.0)
    reports.acknowledge(LeaseReply(2, group.number, {"es-1": "its batch ended"}))
    with pytest.raises(WorkflowError, match="its batch ended"):
        waits.result(0)


def test_one_that_is_left_before_it_was_in_the_log_is_wanted_no_more() -> None:
    """Nothing was made of it: what is sent again would only take it once more."""
    reports, waits = LeaseReports("runner-0", 2), Future[None]()
    reports.put(TAKEN, waits)
    reports.put(change("held", handle="box-1"), Future())
    reports.next_groups(None, 0.0)
    reports.put(change("left", reason="r"), Future())
    with pytest.raises(WorkflowError, match="was given up"):
        waits.result(0)
    reports.next_groups(None, 0.0)
    assert [[c.what for c in group.changes] for group in reports.due(0.0, resend_all=True)] == [["held"], ["left"]]
    reports.acknowledge(LeaseReply(2, 1, {}))
    assert [group.number for group in reports.due(0.0, resend_all=True)] == [2]


def test_what_can_not_be_grouped_takes_nothing_with_it() -> None:
    reports = LeaseReports("runner-0", 2)
    reports.put(TAKEN, Future())
    reports.put(change("held", handle=object()), Future())
    with pytest.raises(TypeError):
        reports.next_groups(None, 0.0)
    assert [c.what for c in reports._unsent] == ["taken", "held"]


@given(st.lists(st.sampled_from(["put", "send", "lose", "ack", "wait", "anew"]), max_size=40))
def test_nothing_that_was_told_is_lost(steps: list[str]) -> None:
    reports, now, told, arrived = LeaseReports("runner-0", 2), 0.0, 0, list[str]()
    seen: set[int] = set()

    def arrive(groups: list[Any]) -> None:
        for group in groups:
            if group.number not in seen:
                seen.add(group.number)
                arrived.extend(c.reason for c in group.changes)

    for step in [*steps, "send", "wait", "anew"]:
        now += RESEND_SECONDS + 1 if step == "wait" else 0.1
        if step == "put":
            reports.put(change("left", reason=str(told)), Future())
            told += 1
        elif step in ("send", "lose"):
            groups = reports.next_groups(None, now)
            arrive(groups if step == "send" else [])
        elif step == "ack":
            for number in list(seen):
                reports.acknowledge(LeaseReply(2, number, {}))
        elif step in ("wait", "anew"):
            arrive(reports.due(now, resend_all=step == "anew"))
    assert sorted(arrived, key=int) == [str(i) for i in range(told)]


# --- what may be recorded -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("value", "part"), [
    ({"x": object()}, "must be plain JSON"),
    ({"x": float("nan")}, "only finite numbers"),
    ("x" * (MOST_BYTES + 1), "the maximum is 8,192"),
    ({"api_key": "abcdefgh"}, "looks like a secret"),
    ({"x": "sk-" + "a" * 24}, "looks like a secret"),
    ({"x": Secret("quiet")}, "looks like a secret"),
    ("postgresql://me:hunter22@host/db", "looks like a secret"),
])
def test_what_can_not_or_must_not_be_recorded_is_refused(value: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        recordable_json("it", value)


def test_what_can_be_recorded_is_plain() -> None:
    assert recordable_json("it", {"url": "http://host:1", "n": (1, 2)}) == {"url": "http://host:1", "n": [1, 2]}
    assert recordable_json("it", "box-1") == "box-1"
    assert recordable_json("it", None) is None

"""A5: whatever is in them, messages stay under 256 KiB, arrive as they were sent, and to whom."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.decided import unit
from trinity_es.actors import message_sizes
from trinity_es.actors.base import BaseActor
from trinity_es.actors.coordinator.actor import Coordinator
from trinity_es.actors.coordinator.fleet import dispatcher
from trinity_es.actors.messages import (
    CancelUnits,
    Endpoints,
    OutcomeReport,
    Retire,
    RunUnits,
    UnitAssignment,
    UnitOutcome,
)
from trinity_es.actors.requests import LIMIT, Parcel, Request, pack, unpack
from trinity_es.actors.runner.actor import Runner
from trinity_es.events.errors import DataError
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads
from trinity_es.events.vocabulary import PayloadRef, RunResult, Unit

MOST = 256 * 1024


@pytest.fixture
def payloads(tmp_path: Path) -> PayloadStore:
    return open_payloads(f"sqlite:///{tmp_path / 'log.sqlite'}")


@settings(max_examples=40)
@given(st.lists(st.integers(0, LIMIT), max_size=40))
def test_work_is_split_into_messages_that_are_small_enough_and_nothing_is_lost(sizes: list[int]) -> None:
    items = [UnitAssignment(7, "s" * 32, unit(i), b"x" * size) for i, size in enumerate(sizes)]
    groups = dispatcher.group_assignments(items)
    assert [item for group in groups for item in group] == items
    assert all(len(pickle.dumps(RunUnits(1, group, 5))) < MOST for group in groups)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 100), max_size=300))
def test_outcomes_are_split_into_messages_that_are_small_enough_and_nothing_is_lost(counts: list[int]) -> None:
    found = [
        UnitOutcome(
            batch_id=7, submission="s" * 32, unit=unit(i),
            results=[RunResult(run=0, metrics={f"metric/{n}": n / 7 for n in range(count)})],
        )
        for i, count in enumerate(counts)
    ]
    groups = message_sizes.split_by_size(found, message_sizes.outcome_size)
    assert [o for group in groups for o in group] == found
    assert all(len(pickle.dumps(OutcomeReport("runner-0", 1, 5, group))) < MOST for group in groups)


def test_what_is_large_travels_through_the_payload_store(payloads: PayloadStore) -> None:
    small, large = {"a": 1}, {"text": "x" * 500_000}
    assert pack(small, payloads) == Parcel(b'{"a":1}')
    parcel = pack(large, payloads)
    assert parcel.inline is None
    assert len(pickle.dumps(parcel)) < 1000
    assert unpack(parcel, payloads) == large
    assert unpack(pack(small, payloads), payloads) == small


def test_what_is_no_json_is_refused(payloads: PayloadStore) -> None:
    with pytest.raises(DataError, match="can't be sent"):
        pack({"x": object()}, payloads)


UNIT = Unit(task=3, run_id_base=8, runs=4, attempt=2)
OUTCOME = UnitOutcome(
    batch_id="b", submission="s", unit=UNIT, results=[RunResult(run=8, metrics={"reward": 1.0}, response_tokens=5)],
    failures=[(9, "workflow", "boom")], payload=PayloadRef(digest="d" * 64, first=0, count=1), seconds=0.5,
)


@pytest.mark.parametrize("value", [UNIT, OUTCOME, UnitAssignment(7, "s", UNIT, b"{}", None, True, 2.0)])
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_value_is_the_same_after_it_was_pickled(value: object, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(value, protocol))
    assert again == value
    assert type(again) is type(value)
    assert copy.deepcopy(value) == value


def test_it_is_still_frozen() -> None:
    again = pickle.loads(pickle.dumps(UNIT))
    with pytest.raises(FrozenInstanceError):
        again.task = 4


def test_a_pickle_of_another_number_of_fields_is_refused() -> None:
    """Of another build, say: no value is left half made."""
    with pytest.raises(ValueError, match="zip"):
        UNIT.__setstate__((1, 2))  # type: ignore[attr-defined]  # it is given by the decorator


REPORT, CANCEL = OutcomeReport("runner-0", 1, 1, []), CancelUnits(1, 7, "s", [])


@pytest.mark.parametrize(("message", "closed"), [
    (REPORT, False), (Request("r" * 32, "status", {}), True), (Endpoints({}), True), (Retire(), True),
])
def test_promise_6_a_coordinator_whose_live_state_is_closed_takes_nothing_that_changes_it(
    message: Any, closed: bool
) -> None:
    for running in (True, False):
        assert Coordinator.accepts(SimpleNamespace(running=running), message) == (running or closed)


def test_what_was_looked_up_meanwhile_is_not_done_by_a_coordinator_that_is_closed_by_then() -> None:
    held: list[Callable[[], None]] = []
    done: list[str] = []
    actor = SimpleNamespace(running=True, mark_checks=SimpleNamespace(admit=lambda _, by, act: held.append(act)))
    for by in ("one", "two"):
        Coordinator.admit(actor, REPORT, by, lambda by=by: done.append(by))
    held[0]()
    actor.running = False
    held[1]()
    assert done == ["one"]


def test_a_runner_takes_nothing_that_is_meant_for_another_life() -> None:
    for life, takes in ((1, True), (2, False)):
        runner = SimpleNamespace(incarnation=life)
        assert (Runner.accepts(runner, CANCEL), Runner.accepts(runner, Endpoints({}))) == (takes, True)
    assert Runner.accepts(SimpleNamespace(), CANCEL), "the message by which it begins"


@pytest.mark.parametrize("takes", [True, False])
def test_the_handler_of_a_message_that_is_not_taken_is_not_called(takes: bool) -> None:
    taken: list[Any] = []
    actor = SimpleNamespace(accepts=lambda _: takes, on_OutcomeReport=lambda message, _: taken.append(message))
    BaseActor._handle(actor, REPORT, None)
    assert taken == [REPORT] * takes

"""A5: whatever is in them, messages stay under 256 KiB."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.decided import unit
from trinity_es.actors import message_sizes
from trinity_es.actors.coordinator.fleet import dispatcher
from trinity_es.actors.messages import OutcomeReport, RunUnits, UnitAssignment, UnitOutcome
from trinity_es.actors.requests import LIMIT, Parcel, pack, unpack
from trinity_es.events.errors import DataError
from trinity_es.events.store.payloads.payloads import PayloadStore, open_payloads
from trinity_es.events.vocabulary import RunResult

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

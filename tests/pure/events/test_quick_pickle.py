"""What travels in great numbers is the same after its journey."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest

from trinity_es.actors.messages import UnitAssignment, UnitOutcome
from trinity_es.events.vocabulary import PayloadRef, RunResult, Unit

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

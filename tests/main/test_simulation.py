"""A short look for a schedule that breaks a promise; tests/full looks for longer, and for known bugs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation import doubles, schedule


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    with doubles.installed():
        yield


def test_no_schedule_breaks_a_promise() -> None:
    for seed in range(5000, 5060):
        result = schedule.run(schedule.make(seed))
        if result.violation is not None:
            pytest.fail(schedule.told(schedule.shrink(result.schedule)), pytrace=False)

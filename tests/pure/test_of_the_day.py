"""What takes turns is played within days, and what became dearer is told whatever the machine's speed."""

from __future__ import annotations

from tests.durations import dearer
from tests.helpers.of_the_day import of_the_day


def test_each_case_has_its_day() -> None:
    for size in range(1, 8):
        cases = [f"case {n}" for n in range(size)]
        for count in range(1, size + 1):
            days = [of_the_day(cases, count, day=day, everything=False) for day in range(1000, 1000 + size)]
            assert all(len(chosen) == count for chosen in days)
            assert {case for chosen in days for case in chosen} == set(cases)
        assert of_the_day(cases, everything=True) == cases


def test_a_dearer_test_is_told_on_a_machine_half_as_fast_and_no_other() -> None:
    committed = {"a": 10.0, "b": 20.0, "c": 30.0}
    slow = {test: [1.0, 2 * cpu] for test, cpu in committed.items()}
    assert dearer(slow, committed) == []
    [line] = dearer({**slow, "a": [1.0, 90.0]}, committed)
    assert line.startswith("a: 90.0 CPU s, 10.0 committed")
    assert dearer(slow, {}) == []

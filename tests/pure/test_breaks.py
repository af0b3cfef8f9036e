"""The list of breaks (tests/breaks.py) still fits the code, the tests and the promises. It plays none of them.

What takes turns is played within days, and what became dearer is told whatever the machine's speed.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.breaks import BREAKS, ROOT, TO_COME, Break, broken
from tests.durations import dearer
from tests.helpers.of_the_day import of_the_day


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the tests of a file: `name` or `Class::name`."""
    names = set()
    for node in ast.parse((ROOT / "tests" / file).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {f"{prefix}{n.name}" for n in inner if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(names)


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: f"{one.promise}: {one.does}")
def test_a_break_changes_one_place_of_its_file_and_its_test_exists(one: Break) -> None:
    compile(broken(one), one.file, "exec")  # a file that is no Python would turn any test red
    assert one.new != one.old
    file, _, name = one.test.partition("::")
    assert name.partition("[")[0] in names_in(file)


def test_each_promise_has_a_break_or_is_to_come() -> None:
    rows = re.findall(r"^\| (\d+) \| \*\*.*\|(.*)\|$", (ROOT / "docs/PROMISES.md").read_text(), re.M)
    assert rows
    assert {one.promise for one in BREAKS} | TO_COME.keys() == {int(number) for number, _ in rows}
    assert TO_COME.keys() == {int(number) for number, limits in rows if limits.strip() == "to come"}


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

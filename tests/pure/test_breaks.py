"""The list of breaks (tests/breaks.py) still fits the code, the tests and the promises. It plays none of them."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.breaks import BREAKS, ROOT, TO_COME, Break, broken


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

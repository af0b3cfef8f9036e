"""C1: every row of what is owed has a test on the real actor system that is named after it."""

from __future__ import annotations

import ast

import pytest

from tests import parity


def test_c1_a_row_has_a_test_on_the_real_actor_system() -> None:
    for row in parity.rows():
        assert row.tests, f"P{row.number}: no test is named test_p{row.number}_..."
        assert not row.skipped, f"P{row.number}: a test of it is skipped"
        assert row.state == "done", f"P{row.number}: none of its tests is on the real system: {', '.join(row.tests)}"


def test_c1_the_rows_are_p1_to_p38_and_m0_to_m18() -> None:
    numbers = [row.number for row in parity.rows()]
    assert numbers == sorted(numbers)
    assert set(range(1, 39)) <= set(numbers) <= set(range(1, 39 + 19))


def test_c1_the_page_is_what_the_tests_say() -> None:
    page = (parity.ROOT / "docs" / "PARITY.md").read_text()
    assert page == parity.markdown(), "docs/PARITY.md is old: make docs"


@pytest.mark.parametrize(("source", "skipped"), [
    ("@pytest.mark.skip\ndef f(): ...", True), ("@pytest.mark.skip(reason='x')\ndef f(): ...", True),
    ("@pytest.mark.xfail(strict=True)\ndef f(): ...", True), ("@pytest.mark.skipif(True)\ndef f(): ...", False),
    ("@pytest.mark.vllm\nasync def f(): ...", False),
])
def test_c1_a_row_whose_test_is_skipped_is_not_done(source: str, skipped: bool) -> None:
    [node] = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert parity._is_skipped(node) is skipped
    row = parity.Row(1, "x", {"tests/full/system/test_x.py": ["test_p1_x"]}, skipped=int(skipped))
    assert (row.state == "done") is not skipped


@pytest.mark.parametrize(("source", "skipped"), [
    ("pytestmark = pytest.mark.skip", True), ("pytestmark = [pytest.mark.vllm, pytest.mark.skip('x')]", True),
    ("pytestmark = [pytest.mark.vllm, pytest.mark.timeout(9)]", False),
])
def test_c1_a_module_that_is_skipped_shows_nothing(source: str, skipped: bool) -> None:
    assert parity._all_skipped(ast.parse(source)) is skipped


def test_c1_a_row_with_unit_tests_alone_is_not_done() -> None:
    assert parity.Row(1, "x", {"tests/pure/values/test_values.py": ["test_p1_x"]}).state == "open"

"""Which GPUs an engine gets."""

from __future__ import annotations

import pytest

from actors.gpus import chosen, placed, visible


def test_engines_take_gpus_in_line() -> None:
    places = placed([("runner-0", 2), ("runner-1", 2), ("judge-0", 1), ("judge-1", 1)])
    assert places == {"runner-0": 0, "runner-1": 2, "judge-0": 4, "judge-1": 5}
    names = [str(i) for i in range(6)]
    counts = {"runner-0": 2, "runner-1": 2, "judge-0": 1, "judge-1": 1}
    assert [chosen(names, places[n], counts[n]) for n in places] == ["0,1", "2,3", "4", "5"]


def test_with_fewer_gpus_than_engines_they_share() -> None:
    assert [chosen(["3", "5"], first, 1) for first in range(3)] == ["3", "5", "3"]
    assert chosen(["0", "1", "2"], 2, 2) == "2,0"


@pytest.mark.parametrize(("names", "count"), [([], 1), (["0"], 2)])
def test_where_there_are_none_or_too_few_nothing_is_changed(names: list[str], count: int) -> None:
    assert chosen(names, 0, count) is None


def test_what_the_user_allowed_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " 4, GPU-abc ")
    assert visible() == ["4", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible() == []

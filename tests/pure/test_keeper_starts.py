"""The keeper and the processes that make its starts."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_es.actors.guardian.supervision import Policy
from trinity_es.system import keeper

SYSTEM: dict[str, Any] = {"admin": {"pid": 1}, "memory": "/nowhere"}


def test_a_start_that_was_killed_is_made_again_until_one_says_that_no_system_is_needed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([(0, SYSTEM), (-9, None), (1, None), (0, None)])
    asked: list[Any] = []
    monkeypatch.setattr(keeper, "_wait_for_end", lambda system, remember: "it is gone")
    monkeypatch.setattr(keeper, "_run_start", lambda request: (asked.append(request), next(ends))[1])
    monkeypatch.setattr(keeper.time, "sleep", lambda seconds: asked.append(seconds))
    keeper._restart_while_needed({}, SYSTEM, {"pid": 2}, Policy())
    pause = keeper.AGAIN_SECONDS
    assert [a if isinstance(a, float) else a["cause"] for a in asked] == [
        "it is gone", "it is gone", pause, "it is gone", pause, "it is gone"]
    assert next(ends, None) is None

"""What packages that reasoning-gym imports warn of while they are compiled says nothing to who uses a taskset."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from trinity_es.tasksets import reasoning_gym


def test_a_syntax_warning_of_what_reasoning_gym_imports_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoning_gym.py").write_text('NEVER = 1 is "a"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reasoning_gym._require_package().NEVER is False
    del sys.modules["reasoning_gym"]

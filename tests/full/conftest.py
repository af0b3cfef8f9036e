"""What many tests of this folder begin with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test writes a log of its own: there is none yet."""
    return tmp_path / "log.sqlite"

"""Where things are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
GOLDEN = ROOT / "tests" / "golden"
"""Logs and schemas of earlier releases; what commands and pages say."""

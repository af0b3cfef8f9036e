"""Folders of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Root of the repository."""
GOLDEN = ROOT / "tests" / "golden"
"""Logs and schemas of earlier releases, and expected output of commands and pages."""

"""Findings of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; its fields are the keys of `doctor --json`."""

    what: str
    verdict: Literal["ok", "note", "missing", "wrong"]
    told: str
    way_out: str = ""

    @property
    def is_wrong(self) -> bool:
        """Return True if a run, or a host, cannot work with it."""
        return self.verdict in ("missing", "wrong")

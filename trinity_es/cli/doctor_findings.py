"""Findings of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; its fields are the keys of `doctor --json`."""

    what: str
    """Name of the thing that was checked."""
    verdict: Literal["ok", "note", "missing", "wrong"]
    told: str
    """What was found, for people."""
    way_out: str = ""
    """What to do about it; empty if nothing is wrong."""

    @property
    def is_wrong(self) -> bool:
        """True if a run, or a host that joins one, can't work with it."""
        return self.verdict in ("missing", "wrong")

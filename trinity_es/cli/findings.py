"""What `doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    verdict: Literal["ok", "note", "missing", "wrong"]
    told: str
    way_out: str = ""

    @property
    def is_wrong(self) -> bool:
        """It keeps a run, or a host, from working."""
        return self.verdict in ("missing", "wrong")

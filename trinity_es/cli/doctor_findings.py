"""The result type of the checks of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; its fields are the keys of `doctor --json`."""

    what: str
    """Subject of the check, such as `database`."""
    verdict: Literal["ok", "note", "missing", "wrong"]
    told: str
    """Result in words, for the user."""
    way_out: str = ""
    """What the user can do about a problem; empty if nothing is wrong."""

    @property
    def is_wrong(self) -> bool:
        """True if the problem keeps a run, or a joining host, from working."""
        return self.verdict in ("missing", "wrong")

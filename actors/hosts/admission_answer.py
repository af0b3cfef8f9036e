"""The head's answer to a host that wants to join, or wants files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Admission", "Items"]

Items = list[tuple[str, Any]]
"""Messages, each with the name of its receiver or sender."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Epochs of the host and of the coordinator, or the reason why the host is refused."""

    epoch: int = 0
    coordinator_epoch: int = 0
    refused: str = ""
    """Reason why the host is refused; empty: it is admitted."""
    for_good: bool = False
    """True if a refused host would be refused again, so it need not ask again."""
    folder: str = ""
    """The host gets the files of this folder of the head, and does not join."""

"""What the head answers a host that wants to take part, or wants files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Admission", "Items"]

Items = list[tuple[str, Any]]
"""Messages, each with the name of a process: to whom, or from whom."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The host's epoch and the coordinator's, or why it is not taken."""

    epoch: int = 0
    coordinator_epoch: int = 0
    refused: str = ""
    for_good: bool = False
    folder: str = ""
    """It does not join: it gets the files of this folder of the head's."""

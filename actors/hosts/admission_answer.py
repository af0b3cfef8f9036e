"""The head's answer to a host that wants to join, or to get a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Admission", "Items"]

Items = list[tuple[str, Any]]
"""Messages, each with the name of its receiver (from the head) or sender (from a host)."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The head's decision: the epochs of an admitted host, or the reason why the host is refused."""

    epoch: int = 0
    coordinator_epoch: int = 0
    refused: str = ""
    """Reason why the host is refused; empty if it is admitted."""
    for_good: bool = False
    """True if the head would refuse the host every time, so that it need not ask again."""
    folder: str = ""
    """The head's folder whose files the host gets, if it asked for a folder and not to join."""

"""How what is too big for one message is cut: into groups, and texts to their ends. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from trinity_es.actors.messages import LIMIT

__all__ = ["grouped", "shortened"]

ERROR_LENGTH = 4000
"""Maximum characters of an error's text that are kept in the log."""

_T = TypeVar("_T")


def grouped(items: Iterable[_T], size: Callable[[_T], int]) -> list[list[_T]]:
    """Split into groups below the limit of a message; at least one, perhaps empty. `size`: bytes of JSON of an item."""
    groups: list[list[_T]] = [[]]
    total = 0
    for item in items:
        own = size(item)
        if total + own > LIMIT and groups[-1]:
            groups.append([])
            total = 0
        total += own
        groups[-1].append(item)
    return groups


def shortened(message: str) -> str:
    """Return an error's text as the log can hold it: not too long, and UTF-8, which a file's name in it need not be."""
    return message[:ERROR_LENGTH].encode(errors="replace").decode()


# --- client <-> guardian, coordinator -------------------------------------------------------------------------------

"""How many connections a process keeps open to who has not shown the key yet."""

from __future__ import annotations

from trinity_es.events.processes import open_files

__all__ = ["MAX_STRANGERS", "most_strangers"]

MAX_STRANGERS = 256
"""Maximum number of such connections: of more, the oldest is dropped."""


def most_strangers() -> int:
    """Return how many this process may have: few enough that they don't take its files."""
    return min(MAX_STRANGERS, max(8, open_files() // 8))

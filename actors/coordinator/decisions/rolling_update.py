"""Rolling updates: choice of the engines that load new weights now, so that enough others go on answering. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EngineStatus", "next_to_load"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Ready runner in a rolling update."""

    name: str
    current: bool
    """True if it has the new version."""
    loading: bool
    failed: bool = False
    """True if it could not load that version; it tries again when it announces itself."""


def next_to_load(runners: Sequence[EngineStatus], keep: int, *, all_known: bool = True) -> list[str]:
    """Return the runners to take out now so that `keep` go on serving; if there are no more, they load one by one.

    While not `all_known`, others may be loading, so `keep` of the known runners have to stay.

    >>> a, b, c = (EngineStatus(name, False, False) for name in "abc")
    >>> next_to_load([a, b, c], keep=1)
    ['a', 'b']
    >>> next_to_load([a], keep=1)
    ['a']
    """
    loading = sum(r.loading for r in runners)
    room = len(runners) - loading - keep
    if room <= 0 and not loading and all_known:
        room = 1  # else no runner would ever load
    waiting = [r.name for r in runners if not (r.current or r.loading or r.failed)]
    return waiting[: max(0, room)]

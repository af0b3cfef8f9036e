"""Choice of the engines that load new weights next in a rolling update, while enough others go on answering. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EngineStatus", "next_to_load"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Ready runner in a rolling update."""

    name: str
    has_version: bool
    """True if the runner has the new version."""
    is_loading: bool
    has_failed: bool = False
    """True if the runner could not load that version. It tries again after its next status report."""


def next_to_load(runners: Sequence[EngineStatus], keep: int, *, all_reported: bool = True) -> list[str]:
    """Return the runners that load now, so that at least `keep` others serve. With too few runners they load singly.

    If not `all_reported`, runners that are not in the list may be loading, so `keep` of the listed ones always stay.

    >>> a, b, c = (EngineStatus(name, False, False) for name in "abc")
    >>> next_to_load([a, b, c], keep=1)
    ['a', 'b']
    >>> next_to_load([a], keep=1)
    ['a']
    """
    loading_count = sum(r.is_loading for r in runners)
    spare_count = len(runners) - loading_count - keep
    if spare_count <= 0 and not loading_count and all_reported:
        spare_count = 1  # else no runner would ever load
    waiting = [r.name for r in runners if not (r.has_version or r.is_loading or r.has_failed)]
    return waiting[: max(0, spare_count)]
